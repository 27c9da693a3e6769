"""The web interface: it runs, where it listens, what it may do, and that its keys are nowhere else. Changes nothing."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.host.conftest import as_root, output

UNIT = "specrig-webui.service"
CONTAINER = "specrig-webui"
KEYS = ("/run/specrig-webui/env/OPENAI_API_KEYS", "/run/specrig-webui/env/WEBUI_SECRET_KEY")


@pytest.fixture(scope="module")
def inspected(host: Any) -> Any:
    """What Docker says of the container."""
    return json.loads(output(host, "docker", "inspect", CONTAINER))[0]


@pytest.fixture(scope="module")
def env(inspected: Any) -> dict[str, str]:
    """Its variables, as Docker knows them."""
    return dict(line.split("=", 1) for line in inspected["Config"]["Env"])


@pytest.fixture(scope="module")
def url(env: dict[str, str]) -> str:
    """How it is reached on its own host."""
    here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(env["HOST"], env["HOST"])
    return f"http://{f'[{here}]' if ':' in here else here}:{env['PORT']}"


@pytest.fixture(scope="module")
def keys(host: Any) -> list[str]:
    """Every secret that it is handed."""
    return [key for file in KEYS for key in output(host, "cat", file).strip().split(";") if key != "none"]


def test_runs_now_and_at_boot_and_answers(host: Any, url: str) -> None:
    assert output(host, "systemctl", "is-active", UNIT).strip() == "active"
    assert output(host, "systemctl", "is-enabled", UNIT).strip() == "enabled"
    assert json.loads(output(host, "curl", "--silent", "--fail", "--max-time", "10", f"{url}/health"))["status"] is True


def test_its_endpoints_take_its_keys(host: Any, env: dict[str, str]) -> None:
    """Asked from within, as it asks: with its names, its authorities and its keys."""
    script = (
        "import json,os,urllib.request as u\n"
        "key=open('/run/specrig/env/OPENAI_API_KEYS').read().split(';')\n"
        "for url,key in zip(os.environ['OPENAI_API_BASE_URLS'].split(';'),key):\n"
        " print(json.load(u.urlopen(u.Request(url+'/models',None,{'Authorization':'Bearer '+key}),timeout=20))['data'][0]['id'])\n"
    )
    said = output(host, "docker", "exec", CONTAINER, "python3", "-c", script)
    assert len(said.split()) == len(env["OPENAI_API_BASE_URLS"].split(";"))


def test_unit_has_few_rights(host: Any) -> None:
    said = output(host, "systemd-analyze", "security", "--no-pager", UNIT)
    [level] = re.findall(r"Overall exposure level for \S+: (\d+\.\d)", said)
    assert float(level) <= 4.0, said


def test_container_has_few_rights(host: Any, inspected: Any) -> None:
    """Asked of the kernel: what its processes may do."""
    settings = inspected["HostConfig"]
    assert settings["ReadonlyRootfs"] and not settings["Privileged"] and not settings["Devices"]
    assert settings["RestartPolicy"]["Name"] == "no"
    writable = {mount["Destination"] for mount in inspected["Mounts"] if mount["RW"]}
    assert len(writable) == 1, "only its data"
    for one in output(host, "docker", "top", CONTAINER, "-o", "pid").split()[1:]:
        status = dict(line.split(":", 1) for line in output(host, "cat", f"/proc/{one}/status").splitlines())
        assert len(set(status["Uid"].split())) == 1 and int(status["Uid"].split()[0]) >= 60000
        assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0 and status["NoNewPrivs"].strip() == "1"


def test_listens_only_where_it_was_told(host: Any, env: dict[str, str]) -> None:
    """Off loopback only with rules that say who may come."""
    lines = output(host, "ss", "-Hltn", f"sport = :{env['PORT']}").split("\n")
    listening = {line.split()[3].rpartition(":")[0].strip("[]") for line in lines if line}
    assert listening == {env["HOST"]}
    if not (env["HOST"].startswith("127.") or env["HOST"] == "::1"):
        rules = host.file("/etc/specrig/firewall/ip6tables" if ":" in env["HOST"] else "/etc/specrig/firewall/iptables")
        assert f"--dport {env['PORT']} " in rules.content_string
        assert as_root(host, "/usr/local/lib/specrig/firewall", "--check").rc == 0


def test_keys_are_nowhere_else(host: Any, keys: list[str], inspected: Any) -> None:
    assert len(keys) >= 2 and all(len(key) >= 16 for key in keys)
    found = {
        "docker inspect": json.dumps(inspected),
        "command lines": output(host, "ps", "-eww", "-o", "args"),
        "unit": output(host, "systemctl", "cat", UNIT) + output(host, "systemctl", "show", UNIT),
        "journal": output(host, "journalctl", "--no-pager", f"--unit={UNIT}"),
    }
    for where, text in found.items():
        assert not [key for key in keys if key in text], f"a key is in {where}"


def test_secrets_and_data_are_roots_only(host: Any) -> None:
    said = output(
        host, "stat", "--format", "%n %U:%G %a", *KEYS, "/run/specrig-webui", "/etc/specrig/webui/session-key"
    )
    assert said.split("\n")[:4] == [
        f"{KEYS[0]} root:root 640",
        f"{KEYS[1]} root:root 640",
        "/run/specrig-webui root:root 750",
        "/etc/specrig/webui/session-key root:root 600",
    ]
    assert output(host, "stat", "--format", "%G %a", "/var/lib/specrig-webui").split() == ["root", "770"]


def test_nothing_is_downloaded_and_nobody_signs_up_unasked(env: dict[str, str]) -> None:
    """What the plan decides stands in its environment; a person may overrule what is downloaded, not who may come."""
    assert (env["ENABLE_PERSISTENT_CONFIG"], env["ENABLE_OLLAMA_API"]) == ("false", "false")
    assert {"OFFLINE_MODE", "ENABLE_SIGNUP", "ANONYMIZED_TELEMETRY"} <= set(env)
