"""Services that the plan has no more, on real files; systemctl is played by a script that keeps no state but its calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specrig.host import arguments, images, proven, retire
from specrig.host.errors import HostError

from .test_pull import Recorder

UNIT = """# Managed by specrig
[Service]
ExecStartPre=-/usr/bin/docker rm --force specrig-{name}
ExecStart=/usr/local/lib/specrig/specrig-host run-service --name {name} --url http://127.0.0.1:8000 \\
  --model x
"""
SYSTEMCTL = """#!/bin/sh
echo "$*" >> "$(dirname "$0")/calls"
[ ! -e "$(dirname "$0")/refuses-$1" ] || { echo "no $1" >&2; exit 1; }
"""


class Host:
    def __init__(self, folder: Path) -> None:
        self.folder, self.units = folder, folder / "units"
        self.units.mkdir()
        for name in ("old", "chat"):
            self.unit(name).write_text(UNIT.format(name=name))
            proven.Home(name).keep({self.unit(name): b"x"}, {"service": {"name": name}, "image": f"{name}:1"})

    def unit(self, name: str) -> Path:
        return self.units / f"specrig-{name}.service"

    def retire(self, *stay: str, check: bool = False) -> dict[str, Any]:
        return retire.retire(json.dumps({"services": stay}), Recorder(), check)

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setattr(proven, "ROOT", tmp_path / "services")
    monkeypatch.setattr(proven, "UNITS", tmp_path / "units")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "systemctl").write_text(SYSTEMCTL)
    (tmp_path / "systemctl").chmod(0o755)
    return Host(tmp_path)


def test_what_is_planned_no_more_is_stopped_disabled_and_removed(host: Host) -> None:
    done = host.retire("chat")
    assert done["changed"] and done["retired"] == ["old"]
    assert "old is not in the plan any more" in done["told"][0] and "/etc/specrig/services/old" in done["told"][0]
    old = "specrig-old.service"
    assert host.calls == [f"stop {old}", f"disable --no-reload {old}", f"reset-failed {old}", "daemon-reload"]
    assert not host.unit("old").exists() and host.unit("chat").exists()
    assert [record["image"] for record in proven.records()] == ["chat:1"], "its image and models are used no more"
    assert host.retire("chat") == {"changed": False, "retired": [], "told": [], "diff": []}


def test_check_says_what_would_go_and_does_nothing(host: Host) -> None:
    done = host.retire("chat", check=True)
    assert done["changed"] and done["diff"][0]["before"] == UNIT.format(name="old") and done["diff"][0]["after"] == ""
    assert host.calls == [] and host.unit("old").exists()


def test_an_interrupted_run_is_finished_by_the_next(host: Host) -> None:
    (host.folder / "refuses-disable").touch()
    with pytest.raises(HostError, match="RETIRE_FAILED") as caught:
        host.retire("chat")
    assert "no disable" in caught.value.cause and host.unit("old").exists()
    (host.folder / "refuses-disable").unlink()
    assert host.retire("chat")["retired"] == ["old"] and not host.unit("old").exists()


def test_other_units_of_ours_and_of_a_person_are_left_alone(host: Host) -> None:
    others = {
        "gateway-relay": "[Service]\nExecStart=/usr/local/lib/specrig/specrig-host relay\n",
        "webui": "[Service]\nExecStart=/usr/bin/docker run webui\n",
        "mine": "# like specrig-host run-service --name mine\n[Service]\nExecStart=/bin/true\n",
        "copy": UNIT.format(name="chat"),
        "diagnosis@": "[Service]\nExecStart=/usr/local/lib/specrig/specrig-host diagnose %i\n",
    }
    for name, text in others.items():
        host.unit(name).write_text(text)
    drop_in = host.units / "specrig-old.service.d" / "override.conf"
    drop_in.parent.mkdir()
    drop_in.write_text("[Service]\n")
    assert host.retire("chat")["retired"] == ["old"]
    assert all(host.unit(name).exists() for name in others) and drop_in.exists()


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"services": []}', '{"services": 3}'])
def test_a_job_without_services_removes_nothing(host: Host, text: str) -> None:
    with pytest.raises(HostError, match="RETIRE_JOB"):
        retire.retire(text, Recorder())
    assert host.unit("old").exists() and host.unit("chat").exists()


def test_a_new_services_arguments_are_asked_about_before_an_old_one_stops_for_it(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "found", lambda image: None)
    new = {"name": "new", "engine": "vllm", "image": "e:1", "entrypoint": ["vllm", "serve"], "argv": [], "env": {}}

    def asks() -> bool:
        return bool(arguments.arguments(json.dumps({"services": [new]}), Recorder(), check=True)["changed"])

    assert asks()
    host.retire("new")
    assert not asks(), "a first start on a rig where nothing runs is its own check"
