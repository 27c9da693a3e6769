"""Each service is up because it completes, listens only where it was told, and gives its key to nobody."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import pytest

from tests.host.conftest import HOST_PROGRAM, as_root, output

Service = dict[str, Any]


def container(service: Service) -> str:
    """Name of the service's container."""
    return str(service["unit"]).removesuffix(".service")


def key_file(service: Service) -> str:
    """File of the service's API key."""
    return f"/etc/specrig/services/{container(service).removeprefix('specrig-')}/api-key"


def published(host: Any, service: Service) -> tuple[str, int]:
    """Address and port that the service is published on."""
    ports = json.loads(
        output(host, "docker", "inspect", "--format", "{{json .HostConfig.PortBindings}}", container(service))
    )
    binding = next(iter(ports.values()))[0]
    return binding["HostIp"], int(binding["HostPort"])


def status_of(host: Any, service: Service, path: str, key: str | None = None) -> int:
    """HTTP status of a request from the rig itself; the key goes in by a file, not by an argument."""
    address, port = published(host, service)
    script = (
        "import sys,urllib.request,urllib.error\n"
        "url,key=sys.argv[1],sys.argv[2]\n"
        "key=open(key).read().strip() if key.startswith('/') else key\n"
        "r=urllib.request.Request(url,headers={'Authorization':'Bearer '+key} if key else {})\n"
        "try: print(urllib.request.urlopen(r,timeout=30).status)\n"
        "except urllib.error.HTTPError as e: print(e.code)\n"
    )
    return int(output(host, "python3", "-c", script, f"http://{address}:{port}{path}", key or ""))


def test_there_are_services(services: list[Service]) -> None:
    assert services, "no specrig service found"


def test_nothing_runs_that_is_planned_no_more(host: Any, services: list[Service]) -> None:
    plan = host.file("/etc/specrig/plan.json")
    planned = [s["unit"] for s in json.loads(plan.content_string)["services"]] if plan.exists else []
    assert not [s["unit"] for s in services if plan.exists and s["ours"] and s["unit"] not in planned]


def test_active_enabled_and_completing(host: Any, services: list[Service]) -> None:
    for service in services:
        assert output(host, "systemctl", "is-active", service["unit"]).strip() == "active"
        assert output(host, "systemctl", "is-enabled", service["unit"]).strip() == "enabled"
        address, port = published(host, service)
        served = json.loads(
            output(
                host,
                "sh",
                "-c",
                f'curl -fsS -H "Authorization: Bearer $(cat {key_file(service)})" http://{address}:{port}/v1/models',
            )
        )["data"][0]["id"]
        ready = [
            "ready",
            "--url",
            f"http://{address}:{port}",
            "--model",
            served,
            "--key-file",
            key_file(service),
            "--timeout",
            "60",
        ]
        output(host, HOST_PROGRAM, *ready)


def test_says_where_it_is(host: Any, services: list[Service]) -> None:
    """The phase, to systemd and in the rig's own document; how long the start took is kept for the next one."""
    for service in services:
        shown = output(host, "systemctl", "show", "--property=StatusText", "--value", service["unit"]).strip()
        assert shown.startswith("ready") and service["progress"]["phase"] == "ready", shown
        name = container(service).removeprefix("specrig-")
        kept = json.loads(output(host, "cat", f"/var/lib/specrig/services/{name}/start.json"))
        assert kept["seconds"] > 0 and kept["phases"]


def test_runs_with_what_is_on_the_disk(services: list[Service]) -> None:
    """A play that was interrupted between writing and restarting is seen here, and put right by the next `up`."""
    assert not [service["unit"] for service in services if service["stale"]]


def test_one_supervisor(host: Any, services: list[Service]) -> None:
    """systemd restarts the service; Docker must not try as well."""
    for service in services:
        policy = output(
            host, "docker", "inspect", "--format", "{{.HostConfig.RestartPolicy.Name}}", container(service)
        ).strip()
        assert policy == "no"


def test_unit_has_few_rights(host: Any, services: list[Service]) -> None:
    """systemd's own judgement of the unit: 0 is fenced in, 10 is free to do all."""
    diagnosis = "specrig-diagnosis@{}.service"
    names = [container(service).removeprefix("specrig-") for service in services]
    for unit in [*(service["unit"] for service in services), *(diagnosis.format(name) for name in names)]:
        said = output(host, "systemd-analyze", "security", "--no-pager", unit)
        [level] = re.findall(r"Overall exposure level for \S+: (\d+\.\d)", said)
        assert float(level) <= 4.0, said


def test_container_has_few_rights(host: Any, services: list[Service]) -> None:
    """Asked of the kernel where it can be: what the engine's processes may do, not only what Docker was told."""
    for service in services:
        found = json.loads(output(host, "docker", "inspect", container(service)))[0]
        settings, pid = found["HostConfig"], found["State"]["Pid"]
        assert settings["ReadonlyRootfs"] and not settings["Privileged"]
        if "pids" in output(host, "cat", "/sys/fs/cgroup/cgroup.controllers").split():
            assert settings["PidsLimit"] > 0
        assert (settings["NetworkMode"], settings["PidMode"]) in (("default", ""), ("bridge", ""))
        assert settings["IpcMode"] in ("private", "shareable")
        assert not settings["Devices"] or all("nvidia" in device["PathOnHost"] for device in settings["Devices"])
        children = output(host, "docker", "top", container(service), "-o", "pid").split()[1:]
        assert str(pid) in children and len(children) > 1
        for one in children:
            status = dict(line.split(":", 1) for line in output(host, "cat", f"/proc/{one}/status").splitlines())
            uids = set(status["Uid"].split())
            assert len(uids) == 1 and int(*uids) >= 60000, f"process {one} is user {uids}"
            assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0 and status["NoNewPrivs"].strip() == "1"
        refused = as_root(host, "docker", "exec", container(service), "sh", "-c", ": > /usr/local/mine")
        assert refused.rc != 0 and "Read-only file system" in refused.stderr


def test_models_are_mounted_read_only(host: Any, services: list[Service]) -> None:
    for service in services:
        mounts = json.loads(output(host, "docker", "inspect", "--format", "{{json .Mounts}}", container(service)))
        models = [m for m in mounts if m["Destination"].startswith("/models/")]
        assert models and not any(m["RW"] for m in models)


@pytest.fixture
def keyed(host: Any, services: list[Service]) -> list[Service]:
    """The services whose engine takes a key; the plan warns of the others."""
    plan = host.file("/etc/specrig/plan.json")
    planned = json.loads(plan.content_string)["services"] if plan.exists else []
    keyless = [service["unit"] for service in planned if not service["key_env"]]
    return [service for service in services if service["unit"] not in keyless]


def test_key_is_required(host: Any, keyed: list[Service]) -> None:
    for service in keyed:
        assert status_of(host, service, "/v1/completions") == 401
        assert status_of(host, service, "/v1/completions", "wrong") == 401
        assert status_of(host, service, "/v1/models", key_file(service)) == 200


def test_only_health_is_open(host: Any, keyed: list[Service]) -> None:
    """What an engine serves beside its API tells how much it is used and by what: nobody reads that without the key, on loopback either."""
    for service in keyed:
        assert status_of(host, service, "/health") == 200
        for path in ("/metrics", "/metrics/", "/version", "/health/../metrics"):
            assert status_of(host, service, path) == 401, path
            assert status_of(host, service, path, "wrong") == 401, path
        assert status_of(host, service, "/metrics", key_file(service)) == 200


def test_key_is_nowhere_else(host: Any, services: list[Service]) -> None:
    for service in services:
        key = output(host, "cat", key_file(service)).strip()
        assert len(key) >= 16
        mode = output(host, "stat", "--format=%a %U %G", key_file(service)).split()
        assert mode == ["640", "root", "root"]
        assert output(host, "getent", "group", "root").strip() in ("root:x:0:", "root:x:0:root"), "who else is in it?"
        places = {
            "argv": "cat /proc/[0-9]*/cmdline | tr '\\0' ' '",
            "journal": "journalctl --no-pager --output=cat",
            "docker inspect": f"docker inspect {container(service)}",
            "unit": f"systemctl cat {service['unit']}; systemctl show {service['unit']}",
            "world-readable files": "find /etc /run /var/log /var/lib/specrig /usr/local /tmp -xdev -type f -perm /004 -size -4M -exec cat {} +",
        }
        for place, command in places.items():
            # The key reaches grep by a file; the search itself must not put it into an argument.
            found = as_root(
                host,
                "sh",
                "-c",
                f"{{ {command}; }} 2>/dev/null | grep --text --count --fixed-strings --file={shlex.quote(key_file(service))}",
            )
            assert found.stdout.strip() == "0", f"the key of {service['unit']} is in: {place}"


def test_loopback_unless_told_otherwise(host: Any, services: list[Service]) -> None:
    plan = host.file("/etc/specrig/plan.json")
    planned = (
        {s["unit"]: s["ports"][0]["bind"] for s in json.loads(plan.content_string)["services"]} if plan.exists else {}
    )
    for service in services:
        assert published(host, service)[0] == planned.get(service["unit"], "127.0.0.1")


def test_what_runs_was_proven_and_speculates_as_planned(host: Any, services: list[Service]) -> None:
    """The unit on the disk is the proven one; its counters moved when speculation is on, and stood still when it is off."""
    for service in services:
        home = f"/var/lib/specrig/services/{container(service).removeprefix('specrig-')}/proven"
        record = json.loads(output(host, "cat", f"{home}/record.json"))
        assert output(host, "cat", f"{home}/files/etc/systemd/system/{service['unit']}") == output(
            host, "cat", f"/etc/systemd/system/{service['unit']}"
        ), "the unit on the disk has not been proven"
        speculation = record["speculation"]
        assert not speculation["short"], speculation["cause"]
        if speculation["measured"]:
            assert (speculation["drafted"] != 0) == speculation["on"], speculation
