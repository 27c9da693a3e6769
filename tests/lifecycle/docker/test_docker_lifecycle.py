"""Docker is stopped, restarted and reinstalled, and systemd reads its units again, while a service runs. Only for hosts to break.

The service is a stand-in under the real unit; Docker, systemd, apt and the kernel's device control are real.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.host.conftest import as_root, output

UNIT = "specrig-stand-in.service"
ROOT = Path(__file__).parents[3]
DEVICE = "/dev/fuse"
# How a hook grants a device behind systemd's back: it changes the container's cgroup program itself. To grant everything is the simplest change.
GRANT = """
import ctypes, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
def bpf(command, data):
    buffer = ctypes.create_string_buffer(data, 128)
    done = libc.syscall(321, command, ctypes.byref(buffer), 128)  # bpf(2) on x86-64
    if done < 0: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return done, buffer.raw
group = os.open(sys.argv[1], os.O_RDONLY)
ids = (ctypes.c_uint32 * 16)()
_, said = bpf(16, struct.pack("IIIIQI", group, 6, 0, 0, ctypes.addressof(ids), 16))  # BPF_PROG_QUERY, BPF_CGROUP_DEVICE
for one in ids[: struct.unpack_from("I", said, 24)[0]]:
    program, _ = bpf(13, struct.pack("I", one))  # BPF_PROG_GET_FD_BY_ID
    bpf(9, struct.pack("III", group, program, 6))  # BPF_PROG_DETACH
"""


def completes(host: Any, within: float = 40) -> None:
    """The service is ready and answers a completion, at the latest after `within` seconds."""
    deadline = time.monotonic() + within
    ask = ["curl", "-s", "-f", "-m", "5", "--data", "{}", "http://127.0.0.1:8000/v1/completions"]
    while True:
        done = as_root(host, *ask)
        if done.rc == 0 and as_root(host, "systemctl", "is-active", UNIT).rc == 0:
            assert json.loads(done.stdout)["usage"]["completion_tokens"] == 1
            return
        if time.monotonic() > deadline:
            pytest.fail(output(host, "journalctl", "-u", UNIT, "-u", "docker", "-n", "40", "--no-pager"), pytrace=False)
        time.sleep(1)


def docker(host: Any, *command: str) -> None:
    """Something that restarts Docker. Its unit allows three starts a minute; a test is busier than a machine's owner."""
    as_root(host, "systemctl", "reset-failed", "docker.service", "docker.socket")
    output(host, *command)


def started(host: Any, unit: str) -> int:
    """When a unit's process was started, in microseconds of the machine's clock."""
    return int(output(host, "systemctl", "show", "--property=ExecMainStartTimestampMonotonic", "--value", unit))


@pytest.mark.parametrize(
    "commands",
    [
        [["systemctl", "stop", "docker.socket", "docker.service"], ["systemctl", "start", "docker.service"]],
        [["systemctl", "restart", "docker.service"]],
        [["apt-get", "install", "--reinstall", "--yes", "docker.io"]],
    ],
    ids=["stop-and-start", "restart", "reinstall"],
)
def test_the_service_comes_back_with_docker(host: Any, commands: list[list[str]]) -> None:
    completes(host)
    for command in commands:
        docker(host, *command)
    completes(host)
    # Debian 12's package does not restart Docker when it is reinstalled; where it is restarted, the service was as well.
    assert started(host, UNIT) > started(host, "docker.service")
    assert output(host, "docker", "ps", "-q", "--filter", "name=specrig-stand-in").strip()


def test_a_stop_of_docker_lets_the_engine_finish(host: Any) -> None:
    completes(host)
    call = ["curl", "-s", "-f", "--data", '{"seconds": 4}', "http://127.0.0.1:8000/v1/completions"]
    output(host, "systemd-run", "--unit=answer", "--property=RemainAfterExit=yes", *call)
    time.sleep(1)
    docker(host, "systemctl", "restart", "docker.service")
    assert output(host, "systemctl", "show", "--property=Result", "--value", "answer").strip() == "success"
    assert "stand-in" in output(host, "journalctl", "-u", "answer", "-o", "cat", "--no-pager")
    output(host, "systemctl", "stop", "answer")
    as_root(host, "systemctl", "reset-failed", "answer")
    completes(host)


def test_daemon_json_keeps_every_byte_of_the_person_and_has_limits(host: Any) -> None:
    theirs = yaml.safe_load((ROOT / "molecule/docker_lifecycle/vars/service.yml").read_text())["daemon_json"]
    there = host.file("/etc/docker/daemon.json").content_string
    assert there.startswith(theirs.rstrip("}\n"))
    added = {key: value for key, value in json.loads(there).items() if key not in json.loads(theirs)}
    assert added == {"log-driver": "local", "log-opts": {"max-size": "20m", "max-file": "5"}}
    assert output(host, "docker", "info", "--format", "{{.LoggingDriver}}").strip() == "local"


@pytest.fixture
def device(host: Any) -> str:
    """A device that Docker grants to nobody by itself, as a card's."""
    if not host.file(DEVICE).exists:
        pytest.skip(f"this machine has no {DEVICE} to pass through")
    return DEVICE


@pytest.fixture
def container(host: Any) -> Iterator[str]:
    yield "probe"
    as_root(host, "docker", "rm", "-f", "probe")


def opens(host: Any, path: str) -> bool:
    """Whether the container may open the device for reading and writing."""
    return bool(as_root(host, "docker", "exec", "probe", "sh", "-c", f"exec 3<>{path}").rc == 0)


def run(host: Any, *options: str) -> None:
    """The container, with nothing to do."""
    command = ["docker", "run", "-d", "--name", "probe", *options, "specrig-stand-in:0.32.0"]
    output(host, *command, "python3", "-c", "import time; time.sleep(600)")


def reload(host: Any) -> None:
    """What roles, package scripts and unattended upgrades do all the time."""
    output(host, "systemctl", "daemon-reload")


def test_a_device_that_docker_passed_through_stays_when_systemd_reloads(host: Any, device: str, container: str) -> None:
    run(host, "--device", device)
    assert opens(host, device)
    reload(host)
    assert opens(host, device)


def test_a_device_named_by_cdi_stays_when_systemd_reloads(host: Any, device: str, container: str) -> None:
    if int(output(host, "docker", "version", "--format", "{{.Server.Version}}").split(".")[0]) < 26:
        pytest.skip("Docker 20.10 has no CDI")
    spec = {
        "cdiVersion": "0.5.0",
        "kind": "stand-in.example/card",
        "devices": [{"name": "0", "containerEdits": {"deviceNodes": [{"path": device}]}}],
    }
    output(host, "sh", "-c", f"mkdir -p /run/cdi; echo '{json.dumps(spec)}' > /run/cdi/stand-in.json")
    if '"cdi": true' not in host.file("/etc/docker/daemon.json").content_string:
        pytest.fail("features.cdi is not set: the scenario sets it where Docker has it")
    run(host, "--device", "stand-in.example/card=0")
    assert opens(host, device)
    reload(host)
    assert opens(host, device)


def test_a_device_granted_behind_systemds_back_is_lost_when_it_reloads(host: Any, device: str, container: str) -> None:
    """The counter-test: why cards are named to Docker, and not put in by a hook."""
    run(host, "--cap-add", "MKNOD")
    number = "*".join(output(host, "stat", "--format", "%t %T", device).split())
    make = "import os, sys; os.mknod(sys.argv[1], 0o20666, os.makedev(*(int(n, 16) for n in sys.argv[2].split('*'))))"
    output(host, "docker", "exec", "probe", "python3", "-c", make, device, number)
    assert not opens(host, device), "the kernel controls devices here"
    pid = output(host, "docker", "inspect", "--format", "{{.State.Pid}}", "probe").strip()
    group = output(host, "cat", f"/proc/{pid}/cgroup").partition("0::")[2].strip()
    output(host, "python3", "-c", GRANT, f"/sys/fs/cgroup{group}")
    assert opens(host, device), "the hook's grant works, until"
    reload(host)
    scope = group.rpartition("/")[2]
    if opens(host, device):  # systemd 257 writes a group's program again only when it has to do something with the unit
        output(host, "systemctl", "set-property", "--runtime", scope, "TasksMax=1000")
    assert not opens(host, device)
