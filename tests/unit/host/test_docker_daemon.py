"""A restart of Docker against a systemctl that plays along, and where its data is, on a directory. Molecule does both with real ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from specrig.host import docker_api, docker_daemon, start
from specrig.host.errors import HostError
from specrig.host.machine import Machine

from .test_pull import Recorder

# A machine in a directory: `calls` is what was asked of it, `bad` names words of daemon.json that dockerd does not start with.
SYSTEMCTL = """#!{python}
import pathlib, sys
here = pathlib.Path(__file__).parent
argv = sys.argv[1:]
down = here / "down"
if argv[0] == "show":
    if "--property=RequiredBy" in argv:
        print("specrig-chat.service specrig-idle.service other.service")
        sys.exit(0)
    for unit in argv[3:]:
        active = unit != "specrig-idle.service" and not (here / (unit + ".stopped")).exists()
        state = "active" if active else "inactive"
        print(f"Id={unit}\\nLoadState=loaded\\nActiveState={state}\\nSubState=running\\nUnitFileState=enabled\\n")
    sys.exit(0)
with (here / "calls").open("a") as out: print(*argv, file=out)
if argv[0] == "stop":
    for unit in argv[1:]: (here / (unit + ".stopped")).touch()
if argv[0] == "start":
    for unit in argv[2:]: (here / (unit + ".stopped")).unlink(missing_ok=True)
if argv[:2] == ["restart", "docker.service"]:
    config = here / "daemon.json"
    sys.exit(1 if config.exists() and "bad" in config.read_text() else 0)
"""
DOCKERD = """#!{python}
import sys
print("--validate") if "--help" in sys.argv else sys.exit("bad key" if "broken" in open(sys.argv[-1]).read() else 0)
"""
JOURNALCTL = """#!/bin/sh
echo '{"MESSAGE": "level=info msg=hello"}'
echo '{"MESSAGE": "failed to start daemon: invalid bip"}'
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in (("systemctl", SYSTEMCTL), ("dockerd", DOCKERD), ("journalctl", JOURNALCTL)):
        (tmp_path / name).write_text(text.replace("{python}", sys.executable))
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(start, "SETTLE_S", 0.0)
    monkeypatch.setattr(start, "POLL_S", 0.0)
    monkeypatch.setattr(docker_api, "get", lambda *_, **__: (200, "OK"))
    return tmp_path


def calls(machine: Path) -> list[str]:
    return [c for c in (machine / "calls").read_text().splitlines() if not c.startswith("reset-failed")]


def test_services_stop_before_docker_and_run_after_it(machine: Path) -> None:
    done = docker_daemon.restart(Recorder(), config=machine / "daemon.json")
    assert done["changed"] and done["services"] == ["specrig-chat.service"]
    assert calls(machine) == [
        "stop specrig-chat.service",
        "restart docker.service",
        "start --no-block specrig-chat.service",
    ]


def test_a_file_that_docker_does_not_start_with_goes_aside_and_the_older_one_comes_back(machine: Path) -> None:
    config, backup = machine / "daemon.json", machine / "daemon.json.20261201T000000.specrig~"
    config.write_text('{"bip": "bad"}')
    backup.write_text('{"a":1.0}')
    with pytest.raises(HostError) as found:
        docker_daemon.restart(Recorder(), written=True, backup=backup, config=config)
    assert found.value.code == "DOCKER_RESTART" and "specrig-chat.service back" in found.value.cause
    assert found.value.lines == ["failed to start daemon: invalid bip"]
    assert config.read_text() == '{"a":1.0}'
    assert (machine / "daemon.json.refused.specrig~").read_text() == '{"bip": "bad"}'
    assert calls(machine)[-3:] == [
        "restart docker.service",
        "restart docker.service",
        "start --no-block specrig-chat.service",
    ]


def test_without_an_older_file_it_is_set_aside(machine: Path) -> None:
    config = machine / "daemon.json"
    config.write_text('{"bip": "bad"}')
    with pytest.raises(HostError, match="there was none before"):
        docker_daemon.restart(Recorder(), written=True, config=config)
    assert not config.exists() and (machine / "daemon.json.refused.specrig~").exists()


def test_somebody_elses_file_that_is_refused_stops_nothing(machine: Path) -> None:
    config = machine / "daemon.json"
    config.write_text('{"broken": 1}')
    with pytest.raises(HostError, match="nothing was stopped") as found:
        docker_daemon.restart(Recorder(), config=config)
    assert "bad key" in found.value.fix and not (machine / "calls").exists()


def test_somebody_elses_file_is_left_alone_when_docker_does_not_start_with_it(machine: Path) -> None:
    config = machine / "daemon.json"
    config.write_text('{"bip": "bad"}')
    with pytest.raises(HostError, match="left alone") as found:
        docker_daemon.restart(Recorder(), config=config)
    assert config.read_text() == '{"bip": "bad"}' and "specrig-chat.service" in found.value.fix


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    def nobody(*_: Any, **__: Any) -> Any:
        raise HostError("DOCKER_UNREACHABLE", "no answer", "")

    monkeypatch.setattr(docker_api, "get", nobody)
    (tmp_path / "var/lib/docker/image/overlay2/imagedb/content/sha256").mkdir(parents=True)
    (tmp_path / "var/lib/docker/volumes").mkdir()
    (tmp_path / "var/lib/docker/volumes/metadata.db").touch()
    return Machine(tmp_path)


def config_of(rig: Machine, **settings: str) -> Path:
    path = rig.path("etc/docker/daemon.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(settings))
    return Path("/etc/docker/daemon.json")


def test_an_empty_data_root_may_be_left(rig: Machine) -> None:
    assert docker_daemon.data_root("/mnt/nvme/docker", False, rig)["moves"] is True


def test_a_data_root_with_content_is_not_left_in_silence(rig: Machine) -> None:
    rig.path("var/lib/docker/image/overlay2/imagedb/content/sha256/aa").touch()
    rig.path("var/lib/docker/volumes/mine/_data").mkdir(parents=True)
    with pytest.raises(HostError) as found:
        docker_daemon.data_root("/mnt/nvme/docker", False, rig)
    assert found.value.code == "DOCKER_DATA_ROOT" and "1 images, 1 volumes" in found.value.cause
    assert docker_daemon.data_root("/mnt/nvme/docker", True, rig)["moves"] is True


def test_a_data_root_that_somebody_has_copied_may_be_used(rig: Machine) -> None:
    for root in ("var/lib/docker", "mnt/nvme/docker"):
        rig.path(f"{root}/containers/c1").mkdir(parents=True)
    assert docker_daemon.data_root("/mnt/nvme/docker", False, rig)["moves"] is True


def test_the_data_root_in_use_is_read_from_the_settings_and_through_links(rig: Machine) -> None:
    config = config_of(rig, **{"data-root": "/mnt/nvme/docker"})
    rig.path("mnt/nvme/docker/containers/c1").mkdir(parents=True)
    assert docker_daemon.data_root("/mnt/nvme/docker", False, rig, config)["moves"] is False
    rig.path("srv").symlink_to(rig.path("mnt/nvme"))
    assert docker_daemon.data_root("/srv/docker", False, rig, config)["moves"] is False
    with pytest.raises(HostError, match="1 containers"):
        docker_daemon.data_root("/elsewhere/docker", False, rig, config)
