"""The unit and the Caddyfile with hostile values, read back by the real parsers: systemd starts each unit, Caddy adapts each file.

The unit is the real template's. What it would start is replaced, from outside, by a stand-in that writes down its command line; docker.service
is a stand-in that does nothing. On both hosts: systemd 252 and 257, Caddy of each Debian.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import types
from typing import Any

import pytest

from specrig.lab import Lab, hosts
from specrig.plan import plan_gateway, plan_host
from specrig.runner import ROOT
from tests.hostile import HOSTILE
from tests.unit.plan.tiny import tiny, tiny_lock

LAB = os.environ.get("SPECRIG_MOLECULE_LAB", "molecule")
HOST = {host.name: host for host in Lab(LAB).hosts()}
PROGRAM = "/usr/local/lib/specrig/specrig-host"
# On the host, as root: write the units, let systemd read them, start each, and say which command line and which properties came out.
DRIVER = r"""
import json, os, pathlib, re, subprocess, sys
PROGRAM = "/usr/local/lib/specrig/specrig-host"
(units, volatile), folder = json.load(sys.stdin), pathlib.Path("/run/systemd/system")
recorder = pathlib.Path("/run/specrig-recorder")
recorder.write_text("#!/usr/bin/python3\nimport json, os, sys\n"
    "open(os.environ['RUNTIME_DIRECTORY'] + '/argv.json', 'w').write(json.dumps([os.fsencode(a).hex() for a in sys.argv]))\n")
recorder.chmod(0o755)
docker = folder / "docker.service"
made = [recorder, docker]
docker.write_text("[Unit]\nDescription=stand-in, no Docker\n[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/bin/true\n")
dropin = ("[Service]\nType=oneshot\nRestart=no\nWatchdogSec=0\nExecStartPre=\nExecStartPost=\nExecStopPost=\nRuntimeDirectoryPreserve=yes\n"
    f"BindReadOnlyPaths={recorder}:{PROGRAM}\n")
for name, text in units.items():
    path = folder / f"specrig-{name}.service"
    path.write_text(text)
    extra = folder / f"specrig-{name}.service.d"
    extra.mkdir(exist_ok=True)
    (extra / "stand-in.conf").write_text(dropin)
    made += [path, extra / "stand-in.conf", extra]
out = {}
try:
    subprocess.run(["systemctl", "daemon-reload"], check=True)
    # Not ExecStart: systemctl prints it with its line breaks, and the command line itself is written down by the stand-in.
    every = subprocess.run(["systemctl", "show", "specrig-usual.service"], capture_output=True, text=True).stdout.splitlines()
    names = ",".join(line.partition("=")[0] for line in every if not re.search(volatile, line))
    for name in units:
        unit = f"specrig-{name}.service"
        done = subprocess.run(["systemctl", "start", unit], capture_output=True, text=True)
        record = pathlib.Path(f"/run/specrig/services/{name}/argv.json")
        shown = subprocess.run(["systemctl", "show", "--property", names, unit], capture_output=True, text=True, errors="replace").stdout
        log = subprocess.run(["systemctl", "status", "--no-pager", unit], capture_output=True, text=True, errors="replace").stdout
        argv = json.loads(record.read_text()) if record.exists() else None
        out[name] = {"rc": done.returncode, "says": done.stderr + log, "argv": argv, "show": shown}
finally:
    for path in made:
        path.rmdir() if path.is_dir() else path.unlink()
    subprocess.run(["systemctl", "daemon-reload"], check=True)
print(json.dumps(out))
"""
# What differs between any two units and two starts.
VOLATILE = re.compile(
    r"Timestamp|PID|^(ExecStart(Ex)?|InvocationID|Id|Names|FragmentPath|DropInPaths|SyslogIdentifier|ControlGroup\w*|CPU\w*|Memory\w*|IO\w*|IP\w*|"
    r"Tasks\w*|RuntimeDirectory|StateDirectory|OnFailure|Description|Result|ExecMain\w*|ActiveState|SubState|NeedDaemonReload|Effective\w*|NRestarts)="
)


def hosts_command(name: str, *command: str) -> list[str]:
    return hosts.ssh_command(HOST[name], ["sudo", *command])


def asked(name: str, script: str, document: Any) -> Any:
    """Run a Python script on a host as root with `document` on its standard input; what it prints, as JSON."""
    subprocess.run(
        hosts_command(name, "tee", "/run/specrig-driver.py"), input=script, text=True, check=True, capture_output=True
    )
    done = subprocess.run(
        hosts_command(name, "python3", "/run/specrig-driver.py"),
        input=json.dumps(document),
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def action() -> Any:
    """managed_files as Ansible makes it, without a connection: it renders the real templates."""
    from ansible.parsing.dataloader import DataLoader
    from ansible.plugins.loader import filter_loader
    from ansible.template import Templar

    from specrig.ansible.action.managed_files import ActionModule

    filter_loader.add_directory(str(ROOT / "src/specrig/ansible/filter"))
    loader = DataLoader()
    task = types.SimpleNamespace(async_val=0, environment=[])
    templar = Templar(loader=loader)
    return ActionModule(
        task=task, connection=None, play_context=None, loader=loader, templar=templar, shared_loader_obj=None
    )


def service(name: str, **over: Any) -> dict[str, Any]:
    planned: dict[str, Any] = plan_host("alpha", tiny(), tiny_lock()).as_json()["services"][0]
    return {**planned, "name": name, "unit": f"specrig-{name}.service", **over}


def hostile(name: str, value: str) -> dict[str, Any]:
    """A service with `value` wherever text is quoted, past the plan's refusals."""
    usual = service(name)
    return {
        **usual,
        "argv": [*usual["argv"], value, "--last", value],
        "env": {**usual["env"], "A": value},
        "image": f"image:{value}",
        "models": [{**usual["models"][0], "path": f"/srv/{value}"}],
        "files": [{"path": f"/etc/{value}", "path_in_container": "/config/x", "content": ""}],
        "served_name": f"name/{value}",
    }


def rendered(action: Any, one: dict[str, Any]) -> str:
    # The description and no other directive shows a name unquoted; the plan lets only plain names through.
    shown = {**one, "served_name": one["served_name"]}
    text = action._render(
        "etc/systemd/system/specrig-service.service.j2", {"vars": {"service": shown, "gpu_access": "runtime"}}, {}
    )
    return re.sub(r"^Description=.*?(?=^Wants=)", "Description=x\n", text, count=1, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", HOST)
def test_systemd_starts_what_was_meant_and_nothing_else_changes(action: Any, name: str) -> None:
    values = {f"hostile-{number:02}": value for number, value in enumerate(HOSTILE.values())}
    units = {"usual": rendered(action, hostile("usual", "plain"))} | {
        n: rendered(action, hostile(n, v)) for n, v in values.items()
    }
    found = asked(name, DRIVER, [units, VOLATILE.pattern])
    usual = [bytes.fromhex(word).decode() for word in found["usual"]["argv"]]
    assert usual.count("plain") == 2 and "/srv/plain:/models/target:ro" in usual and "A=plain" in usual

    def properties(one: str) -> list[str]:
        # systemd lists sets of units in any order.
        kept = [line.replace(one, "NAME") for line in found[one]["show"].splitlines()]
        return sorted(
            key + "=" + " ".join(sorted(value.split())) for key, _, value in (line.partition("=") for line in kept)
        )

    for one, value in values.items():
        assert found[one]["rc"] == 0, (value[:60], found[one]["says"][-800:])
        argv = [bytes.fromhex(word).decode() for word in found[one]["argv"]]
        put = (
            "plain",
            "A=plain",
            "image:plain",
            "/srv/plain:/models/target:ro",
            "/etc/plain:/config/x:ro",
            "name/plain",
        )
        meant = [word.replace("plain", value) if word in put else word.replace("usual", one) for word in usual]
        assert argv == meant, value[:60]
        assert properties(one) == properties("usual"), value[:60]


ADAPT = r"""
import json, pathlib, subprocess, sys
out = {}
for name, text in json.load(sys.stdin).items():
    path = pathlib.Path("/run/specrig-hostile.caddy")
    path.write_text(text)
    done = subprocess.run(["caddy", "adapt", "--adapter", "caddyfile", "--config", str(path)], capture_output=True, text=True)
    out[name] = json.loads(done.stdout) if done.returncode == 0 else done.stderr
print(json.dumps(out))
"""
LISTENS: dict[str, dict[str, Any]] = {
    "usual": {},
    "ipv6": {"bind": "::1", "port": 9000},
    "everywhere": {"bind": "0.0.0.0"},
    "name": {"server_name": "a-b.xn--nxasmq6b.example.org", "bind": "192.0.2.1"},
    "acme": {
        "server_name": "llm.example.org",
        "tls": "acme",
        "bind": "192.0.2.1",
        "email": "a.b+c-d_e@mail.example.org",
    },
    "upper": {"server_name": "LLM.Example.org", "bind": "::"},
}


@pytest.mark.parametrize("name", HOST)
def test_caddy_reads_what_the_plan_lets_through_as_it_was_meant(action: Any, name: str) -> None:
    texts, plans = {}, {}
    for key, declared in LISTENS.items():
        host = {"rig_profile": "cpu_demo", "rig_gateway": declared}
        plan = plan_gateway("alpha", host, {"alpha": host})
        assert plan.ok, plan.refusals
        plans[key] = plan.listen
        texts[key] = action._render(
            "etc/specrig/gateway/Caddyfile.j2", {"vars": {"gateway_listen": dict(plan.listen)}}, {}
        )
    found = asked(name, ADAPT, texts)
    assert {key for key, value in found.items() if isinstance(value, str)} == set(), found
    for key, config in found.items():
        listen = plans[key]
        [server] = config["apps"]["http"]["servers"].values()
        where = f"[{listen['bind']}]" if ":" in listen["bind"] else listen["bind"]
        assert server["listen"] == [f"{where}:{listen['port']}"]
        said = json.dumps(config)
        hosts_named = re.findall(r'"host": \["([^"]*)"\]', said)
        assert [h.lower() for h in hosts_named] == ([listen["server_name"].lower()] if listen["tls"] else [])
        assert ('"module": "internal"' in said) == (listen["tls"] == "internal")
        assert (f'"email": "{listen["email"]}"' in said) == bool(listen["email"])
        assert said.count('"handler": "reverse_proxy"') == 1 and said.count('"path": ["/v1/*"]') == 1
        assert config["admin"] == {"listen": "unix//run/specrig-gateway/admin.sock"}
