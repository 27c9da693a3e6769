"""Upgrade and rollback on real files; systemd, Docker and the engine are played."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from specrig.host import arguments, diagnosis, docker_api, firewall, keep, proof, proven, pull, start, switch
from specrig.host.acceptance import Acceptance
from specrig.host.errors import HostError

from .test_pull import Recorder

ASKED: dict[str, Any] = {"engine": "ollama", "entrypoint": ["ollama"], "argv": [], "env": {}}  # has no parser to ask
GOOD = {
    "on": True,
    "drafted": 100,
    "accepted": 60,
    "acceptance": 0.6,
    "mean_length": 3.0,
    "bound": None,
    "short": False,
    "cause": "",
}


class Machine:
    """A host with one service. What the unit file says decides how a start ends."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.running, self.calls, self.reads = folder, "", list[str](), list[str]()
        self.guarded = list[str]()  # what the unit said when the rules of published ports were loaded
        self.alternate = False  # another service that shares its cards is chosen
        self.bad: dict[str, HostError] = {}  # unit text -> how its start fails
        self.alpha: dict[str, float] = {}  # unit text -> acceptance
        self.images = {"engine:1", "engine:2", "engine:3"}
        self.units, self.plan = folder / "units", folder / "plan.json"
        self.units.mkdir()
        monkeypatch.setattr(proven, "ROOT", folder / "services")
        monkeypatch.setattr(proven, "UNITS", self.units)
        monkeypatch.setattr(switch, "SERVICES", folder / "etc")
        monkeypatch.setattr(switch._amend_plan, "__defaults__", (self.plan,))
        monkeypatch.setattr(start, "start", self.start)
        monkeypatch.setattr(proof, "prove", self.prove)
        monkeypatch.setattr(pull, "pull", self.pull)
        monkeypatch.setattr(firewall, "follow", lambda: self.guarded.append(self.unit.read_text()))
        monkeypatch.setattr(docker_api, "inspect_image", lambda image: {"Id": f"id of {image}"})
        monkeypatch.setattr(switch, "_state", lambda unit: "active" if self.running else "inactive")

    @property
    def unit(self) -> Path:
        return self.units / "specrig-chat.service"

    def service(self, number: int, **more: Any) -> dict[str, Any]:
        models = self.folder / f"model-{number}"
        models.mkdir(exist_ok=True)
        return {
            "name": "chat", "unit": "specrig-chat.service", "image": f"engine:{number}", "version": f"{number}", "k": 3,
            "method": "draft_model", "start_timeout_s": 60, "models": [{"path": str(models)}], "files": [], **more,
        }  # fmt: skip

    def up(self, number: int, **more: Any) -> dict[str, Any]:
        """What a play does: write the unit, then switch."""
        text = f"unit {number}"
        if not self.unit.exists() or self.unit.read_text() != text:
            self.unit.write_text(text)
        return self.switch(number, **more)

    def switch(self, number: int, check: bool = False, **more: Any) -> dict[str, Any]:
        return switch.switch(switch.Service(self.service(number, **more)), Recorder(), check)

    def start(
        self, unit: str, progress: Any, restart: bool, timeout: float, check: bool, enable: bool, after: list[str]
    ) -> dict[str, Any]:
        text = self.unit.read_text() if self.unit.exists() else ""
        answer = {"unit": unit, "state": "active" if self.running else "inactive", "seconds": 0.0}
        if self.alternate:
            return {**answer, "changed": False, "state": "alternate"}
        if self.running == text and not restart:
            return {**answer, "changed": False}
        if check:
            return {**answer, "changed": True}
        self.calls.append(text)
        self.reads = after
        self.running = ""
        if error := self.bad.get(text):
            raise error
        self.running = text
        return {**answer, "changed": True, "state": "active", "seconds": 2.0}

    def prove(self, service: Any, key: Path | None, progress: Any) -> dict[str, Any]:
        assert self.running, "who answers there is another service"
        found = Acceptance(50, 100, int(100 * (rate := self.alpha.get(self.running, 0.6))), rate, 1 + 2 * rate)
        return proof.judge(service, found)

    def pull(self, image: str, progress: Any, archive: Path | None = None) -> dict[str, Any]:
        if image not in self.images:
            raise HostError("PULL_NOT_FOUND", f"no {image}", "")
        return {"changed": False}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def fails(code: str, action: Any, *args: Any, **more: Any) -> HostError:
    with pytest.raises(HostError) as caught:
        action(*args, **more)
    assert caught.value.code == code, caught.value
    return caught.value


def died(text: str = "it died") -> HostError:
    return HostError("START_FAILED", text, "journalctl", lines=["the engine's last words"])


def test_a_first_start_is_proven_and_the_next_run_changes_nothing(machine: Machine) -> None:
    done = machine.up(1)
    assert done["changed"] and done["speculation"]["acceptance"] == 0.6
    assert "α 0.60" in done["told"][0] and done["warnings"] == []
    assert "/usr/local/lib/specrig/specrig_guard.py" in machine.reads, "a new guard restarts it"
    record = proven.Home("chat").get("proven")
    assert record and (record["image"], record["image_id"]) == ("engine:1", "id of engine:1")
    assert machine.up(1) | {"told": 0} == machine.switch(1, check=True) | {"told": 0}
    assert machine.up(1)["changed"] is False and machine.calls == ["unit 1"]


def test_a_first_start_that_fails_is_told_as_it_is(machine: Machine) -> None:
    machine.bad["unit 1"] = died()
    fails("START_FAILED", machine.up, 1)
    assert proven.Home("chat").get("proven") is None and machine.unit.read_text() == "unit 1"


def test_an_upgrade_keeps_the_one_before(machine: Machine) -> None:
    machine.up(1)
    done = machine.up(2)
    assert done["downtime_s"] is not None and "nothing answered for" in done["told"][0]
    home = proven.Home("chat")
    now, previous = home.get("proven"), home.get("previous")
    assert now and previous and (now["image"], previous["image"]) == ("engine:2", "engine:1")
    machine.up(3)
    assert [r["image"] for r in proven.records()] == ["engine:3", "engine:2"]
    assert len(list((home.path / "generations").iterdir())) == 2


def test_an_upgrade_that_does_not_start_is_undone(machine: Machine) -> None:
    machine.up(1)
    machine.bad["unit 2"] = died("exit status 1")
    error = fails("UPGRADE_UNDONE", machine.up, 2)
    assert "exit status 1" in error.cause and "engine:1" in error.cause and "nothing answered for" in error.cause
    assert error.lines == ["the engine's last words"]
    assert machine.running == machine.unit.read_text() == "unit 1"
    setback = proven.summary("chat")["setback"]
    assert (setback["to"], setback["code"], setback["by"]) == ("engine:2", "START_FAILED", "upgrade")
    assert setback["downtime_s"] >= 0
    assert machine.up(1)["changed"] is False
    assert proven.summary("chat")["setback"] is None, "what runs is what is wanted: there is no setback any more"


def held(machine: Machine, number: int, check: bool = False, retry: bool = False, **more: Any) -> bool:
    """What a play asks before it writes anything: whether the same was tried before, or a refusal."""
    job = {"services": [{**machine.service(number, **more), **ASKED}], "retry": retry}
    return bool(arguments.arguments(json.dumps(job), Recorder(), check)["changed"])


def test_what_was_taken_back_is_not_tried_again_by_itself(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.up(1, **ASKED)
    machine.bad["unit 2"] = died("exit status 1")
    diagnosed, older = machine.folder / "chat-now.txt", machine.folder / "chat-old.txt"
    monkeypatch.setattr(diagnosis, "files", lambda name: [diagnosed, older])
    diagnosed.touch()
    older.touch()
    os.utime(older, (0, 0))
    os.utime(diagnosed, (time.time() + 60, time.time() + 60))  # written while the new one failed
    fails("UPGRADE_UNDONE", machine.up, 2, **ASKED)
    for check in (True, False):
        error = fails("UPGRADE_HELD", held, machine, 2, check)
        assert "START_FAILED: " in error.cause and "exit status 1" in error.cause and "not at its plan" in error.cause
        assert (
            "--retry" in error.fix and str(diagnosed) in error.fix and str(older) not in error.fix and error.status == 1
        )
    assert machine.running == machine.unit.read_text() == "unit 1"
    held(machine, 1), held(machine, 2, k=4), held(machine, 3)  # another plan is another try
    fails("UPGRADE_HELD", held, machine, 2)


def test_a_setback_is_forgotten_once_the_plan_is_the_proven_one_again(machine: Machine) -> None:
    machine.up(1)
    machine.bad["unit 2"] = died()
    fails("UPGRADE_UNDONE", machine.up, 2)
    assert proven.summary("chat")["setback"]
    assert machine.switch(1, check=True)["changed"], "else the quick look would end the job before it forgets"
    assert machine.up(1)["changed"] is False and machine.running == "unit 1"
    assert proven.summary("chat")["setback"] is None and not machine.switch(1, check=True)["changed"]


def test_another_image_behind_the_same_name_is_another_try(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.up(1, **ASKED)
    machine.bad["unit 2"] = died()
    fails("UPGRADE_UNDONE", machine.up, 2, **ASKED)
    monkeypatch.setattr(docker_api, "inspect_image", lambda image: {"Id": "pulled again"})
    held(machine, 2)


def test_it_is_tried_again_on_purpose_also_after_an_interruption(machine: Machine) -> None:
    machine.up(1, **ASKED)
    machine.bad["unit 2"] = died()
    fails("UPGRADE_UNDONE", machine.up, 2, **ASKED)
    assert held(machine, 2, check=True, retry=True), "there is something to do"
    fails("UPGRADE_HELD", held, machine, 2)
    assert held(machine, 2, retry=True)
    held(machine, 2)  # the run with --retry was interrupted: the next one goes on
    fails("UPGRADE_UNDONE", machine.up, 2, **ASKED)
    fails("UPGRADE_HELD", held, machine, 2)
    del machine.bad["unit 2"]
    held(machine, 2, retry=True)
    machine.up(2, **ASKED)
    held(machine, 2)


def test_what_never_came_back_holds_nothing(machine: Machine) -> None:
    """Nothing runs that could be lost: each `up` may try."""
    machine.up(1, **ASKED)
    machine.bad = {"unit 1": died("no card"), "unit 2": died("bad flag")}
    fails("UPGRADE_STUCK", machine.up, 2, **ASKED)
    held(machine, 2)


def test_a_service_that_was_down_anyway_is_not_said_to_have_been_interrupted(machine: Machine) -> None:
    machine.up(1)
    machine.running = ""
    machine.bad["unit 2"] = died()
    assert "it did not run before" in fails("UPGRADE_UNDONE", machine.up, 2).cause


def test_the_ports_of_what_is_put_back_are_guarded_before_it_starts(machine: Machine) -> None:
    machine.up(1)
    machine.bad["unit 2"] = died()
    fails("UPGRADE_UNDONE", machine.up, 2)
    assert machine.guarded == ["unit 1"]


def test_when_neither_starts_both_reasons_are_told(machine: Machine) -> None:
    machine.up(1)
    machine.bad = {"unit 1": died("no card"), "unit 2": died("bad flag")}
    error = fails("UPGRADE_STUCK", machine.up, 2)
    assert "no card" in error.cause and "bad flag" in error.cause
    assert machine.unit.read_text() == "unit 1", "the proven files stay in place"


def test_the_same_files_that_fail_are_no_upgrade(machine: Machine) -> None:
    """A proven service that does not come up again (a card fell out) has nothing to go back to."""
    machine.up(1)
    machine.running = ""
    machine.bad["unit 1"] = died()
    fails("START_FAILED", machine.up, 1)


def test_low_acceptance_undoes_an_upgrade_only_where_a_bound_is_declared(machine: Machine) -> None:
    machine.alpha = {"unit 2": 0.1}
    machine.up(1)
    assert "0.10 of the drafted tokens" in fails("UPGRADE_UNDONE", machine.up, 2, min_acceptance=0.3).cause
    assert machine.running == "unit 1"
    assert machine.up(2)["warnings"] == []


def test_no_drafted_token_is_a_warning_not_a_setback(machine: Machine) -> None:
    machine.alpha = {"unit 2": 0.0}
    machine.up(1)
    done = machine.up(2)
    assert machine.running == "unit 2" and "none of 100 drafted tokens was accepted" in done["warnings"][0]
    assert proven.summary("chat")["speculation"]["short"] is True


def test_a_changed_bound_is_judged_again_without_a_restart(machine: Machine) -> None:
    machine.up(1)
    done = machine.switch(1, min_acceptance=0.7)
    assert done["changed"] and "less than min_acceptance 0.7" in done["warnings"][0]
    assert machine.calls == ["unit 1"], "the same files are no upgrade: nothing is taken back"


def test_interrupted_after_writing_before_restarting(machine: Machine) -> None:
    machine.up(1)
    machine.unit.write_text("unit 2")  # and then the power went
    assert machine.switch(2, check=True)["changed"] is True
    machine.switch(2)
    assert machine.running == "unit 2"


def test_interrupted_after_restarting_before_proving(machine: Machine) -> None:
    machine.up(1)
    machine.unit.write_text("unit 2")
    machine.running = "unit 2"
    done = machine.switch(2)
    assert done["changed"] and machine.calls == ["unit 1"], "proven without another restart"
    assert [r["image"] for r in proven.records()] == ["engine:2", "engine:1"]


def test_a_way_back_that_cannot_be_had_is_told_before(machine: Machine) -> None:
    machine.up(1)
    machine.images.discard("engine:1")
    assert "no way back to engine:1" in machine.up(2)["warnings"][0]


def test_files_of_the_engine_go_back_with_the_unit(machine: Machine, tmp_path: Path) -> None:
    config = tmp_path / "engine.yml"
    config.write_text("draft: a")
    files = [{"path": str(config)}]
    machine.up(1, files=files)
    config.write_text("draft: b")
    machine.bad["unit 2"] = died()
    fails("UPGRADE_UNDONE", machine.up, 2, files=files)
    assert config.read_text() == "draft: a"


def test_rollback_goes_back_and_says_how_to_stay(machine: Machine) -> None:
    machine.up(1)
    machine.up(2)
    machine.plan.write_text(json.dumps({"plan_hash": "x", "services": [machine.service(2)], "models": []}))
    check = switch.rollback(None, Recorder(), check=True)
    assert (check["from"], check["to"], machine.running) == ("engine:2", "engine:1", "unit 2")
    done = switch.rollback("chat", Recorder())
    assert machine.running == machine.unit.read_text() == "unit 1"
    assert done["stay"] == {"version": "1", "image": "engine:1"} and done["downtime_s"] is not None
    assert proven.summary("chat")["setback"]["by"] == "hand"
    plan = json.loads(machine.plan.read_text())
    assert plan["services"][0]["image"] == "engine:1" and plan["plan_hash"] != "x"
    assert switch.rollback("chat", Recorder())["to"] == "engine:2", "a second time goes forward again"


def test_rollback_of_a_service_that_is_not_chosen_starts_nothing(machine: Machine) -> None:
    machine.up(1)
    machine.up(2)
    first = (proven.Home("chat").get("previous") or {})["at"]
    machine.alternate, machine.running = True, ""
    calls = list(machine.calls)
    done = switch.rollback("chat", Recorder())
    assert done["changed"] and done["alternate"] and done["downtime_s"] is None
    assert machine.calls == calls and machine.unit.read_text() == "unit 1"
    now, previous = proven.Home("chat").get("proven"), proven.Home("chat").get("previous")
    assert now and previous and (now["image"], now["at"], previous["image"]) == ("engine:1", first, "engine:2")
    assert now["speculation"]["acceptance"] == 0.6, "what was proven then"
    machine.alternate = False
    assert machine.switch(1)["changed"] and machine.running == "unit 1", "chosen later, that is what runs"


def test_rollback_of_what_was_never_proven_takes_the_proven_one(machine: Machine) -> None:
    machine.up(1)
    machine.up(2)
    machine.unit.write_text("unit 3")
    assert switch.rollback("chat", Recorder())["to"] == "engine:2"


def test_rollback_that_fails_leaves_what_ran(machine: Machine) -> None:
    machine.up(1)
    machine.up(2)
    machine.bad["unit 1"] = died()
    fails("ROLLBACK_FAILED", switch.rollback, "chat", Recorder())
    assert machine.running == machine.unit.read_text() == "unit 2"


def test_rollback_refuses_before_it_stops_anything(machine: Machine) -> None:
    fails("ROLLBACK_NOTHING", switch.rollback, None, Recorder())
    machine.up(1)
    fails("ROLLBACK_NOTHING", switch.rollback, "chat", Recorder())
    fails("ROLLBACK_NOTHING", switch.rollback, "other", Recorder())
    machine.up(2)
    (machine.folder / "model-1").rmdir()
    assert "model-1" in fails("ROLLBACK_MODELS", switch.rollback, "chat", Recorder()).cause
    (machine.folder / "model-1").mkdir()
    machine.images.discard("engine:1")
    fails("PULL_NOT_FOUND", switch.rollback, "chat", Recorder())
    assert machine.running == "unit 2"


def test_several_services_must_be_told_apart(machine: Machine) -> None:
    machine.up(1)
    proven.Home("other").keep({machine.unit: b"x"}, {"service": {}, "image": "i"})
    assert "chat, other" in fails("ROLLBACK_WHICH", switch.rollback, None, Recorder()).cause


def test_models_of_proven_generations_are_in_use(machine: Machine, tmp_path: Path) -> None:
    machine.up(1)
    machine.up(2)
    plan = tmp_path / "empty.json"
    plan.write_text(json.dumps({"models": []}))
    used = keep.in_use(tmp_path, plan, machine.units)
    assert used is not None and {tmp_path / "model-1", tmp_path / "model-2"} <= used


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"service": 3}',
        '{"service": {"name": "../x", "unit": "u", "start_timeout_s": 1, "image": "i"}}',
    ],
)
def test_a_job_that_is_no_service_is_refused(text: str) -> None:
    fails("SWITCH_JOB", switch.job, text)


def test_a_crash_between_the_two_links_loses_nothing(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.up(1)
    home = proven.Home("chat")
    monkeypatch.setattr(
        proven.Home,
        "_link",
        lambda self, name, generation, real=proven.Home._link: name == "previous" and real(self, name, generation),
    )
    machine.up(2)
    assert home.get("proven")["image"] == home.get("previous")["image"] == "engine:1"  # type: ignore[index]
    monkeypatch.undo()


def test_a_rollback_after_which_neither_starts_tells_both_causes(machine: Machine) -> None:
    machine.up(1)
    machine.up(2)
    machine.bad = {"unit 1": died("bad flag"), "unit 2": died("no card")}
    error = fails("ROLLBACK_FAILED", switch.rollback, "chat", Recorder())
    assert "bad flag" in error.cause and "does not start either (START_FAILED: no card)" in error.cause
    assert len(error.lines) == 2 and machine.unit.read_text() == "unit 2"
