"""Switching between services that share their cards, on a systemctl that keeps the states of three units."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from specrig.host import choose, start, switch
from specrig.host.errors import HostError

from .test_pull import Recorder

A, B, C, D, ALONE = (f"specrig-{name}.service" for name in ("a", "b", "c", "d", "alone"))
SYSTEMCTL = """#!{python}
import json, pathlib, sys
here = pathlib.Path(__file__).parent
units = json.loads((here / "units").read_text())
verb, *words = sys.argv[1:]
names = [w for w in words if w.endswith(".service")]
with (here / "calls").open("a") as out:
    if verb not in ("show", "list-unit-files", "reset-failed"): print(verb, *names, file=out)
if verb == "list-unit-files":
    for name in units: print(name, "enabled", "enabled")
    print("specrig-scrub.service static -"); print("specrig-diagnosis@.service static -")
for name in names if verb != "list-unit-files" else []:
    unit = units.get(name, {"LoadState": "not-found", "ActiveState": "inactive"})
    if verb == "show": print("Id=" + name, *["%s=%s" % item for item in unit.items()], "", sep="\\n")
    if verb in ("enable", "disable"): unit["UnitFileState"] = verb + "d"
    if verb == "stop": unit["ActiveState"] = "inactive"
    if verb in ("start", "restart"):
        unit["ActiveState"] = "failed" if unit.get("bad") else "active"
        for other in unit["Conflicts"].split(): units[other]["ActiveState"] = "inactive"
(here / "units").write_text(json.dumps(units))
"""


def unit(active: bool, conflicts: str = "", **more: Any) -> dict[str, Any]:
    state = {"ActiveState": "active" if active else "inactive", "UnitFileState": "enabled" if active else "disabled"}
    return {"LoadState": "loaded", "SubState": "x", "NRestarts": "0", "Conflicts": conflicts, **state, **more}


class Rig:
    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def put(self, **units: dict[str, Any]) -> None:
        (self.directory / "units").write_text(json.dumps({f"specrig-{name}.service": u for name, u in units.items()}))

    def plan(self, **conflicts: list[str]) -> None:
        """The applied plan: services without a setting but with whom each cannot run; starting is not proving here."""
        services = [{"name": n, "unit": f"specrig-{n}.service", "conflicts": c} for n, c in conflicts.items()]
        (self.directory / "plan.json").write_text(json.dumps({"services": services}))

    def units(self) -> dict[str, tuple[str, str]]:
        found = json.loads((self.directory / "units").read_text())
        return {name: (one["ActiveState"], one["UnitFileState"]) for name, one in found.items()}

    def calls(self) -> list[str]:
        path = self.directory / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(start, "POLL_S", 0.0)
    monkeypatch.setattr(start, "SETTLE_S", 0.0)
    monkeypatch.setattr(choose, "PLAN", tmp_path / "plan.json")
    monkeypatch.setattr(switch, "Service", lambda entry: entry["unit"])
    monkeypatch.setattr(switch, "switch", lambda unit, progress: start.start(unit, progress, enable=True))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "systemctl").write_text(SYSTEMCTL.replace("{python}", sys.executable))
    (tmp_path / "journalctl").write_text("#!/bin/sh\n")
    for name in ("systemctl", "journalctl"):
        (tmp_path / name).chmod(0o755)
    one = Rig(tmp_path)
    one.put(a=unit(True, B), b=unit(False, A), alone=unit(True))
    return one


ON, OFF = ("active", "enabled"), ("inactive", "disabled")


def test_one_starts_the_other_stops_also_at_boot(rig: Rig) -> None:
    result = choose.choose("b", Recorder())
    assert result["changed"] and result["stopped"] == [A]
    assert rig.units() == {A: OFF, B: ON, ALONE: ON}
    assert not choose.choose("b", Recorder())["changed"]


def test_check_changes_nothing(rig: Rig) -> None:
    assert choose.choose("b", Recorder(), check=True) == {
        "changed": True, "unit": B, "stopped": [A], "beside": [], "seconds": 0.0,
    }  # fmt: skip
    assert rig.calls() == []


@pytest.mark.parametrize("name", ["c", "", "scrub", "diagnosis@", "a b", "../a", "a.service"])
def test_an_unknown_name_is_refused_and_nothing_stops(rig: Rig, name: str) -> None:
    with pytest.raises(HostError) as caught:
        choose.choose(name, Recorder())
    assert caught.value.code == "CHOOSE_UNKNOWN" and "a, alone, b" in caught.value.cause
    assert rig.calls() == []


def test_what_does_not_come_up_is_switched_back(rig: Rig) -> None:
    rig.put(a=unit(True, B), b=unit(False, A, bad=True))
    with pytest.raises(HostError) as caught:
        choose.choose("b", Recorder())
    assert caught.value.code == "START_FAILED" and caught.value.cause.endswith(f"{A} runs again")
    assert rig.units() == {A: ON, B: OFF}


def test_a_rig_that_comes_back_with_neither_says_so(rig: Rig) -> None:
    rig.put(a=unit(True, B, bad=True), b=unit(False, A, bad=True))
    with pytest.raises(HostError) as caught:
        choose.choose("b", Recorder())
    assert caught.value.code == "CHOOSE_BACK" and A in caught.value.cause


def test_a_converge_leaves_the_choice_alone(rig: Rig) -> None:
    rig.put(a=unit(False, B), b=unit(True, A))
    for check in (True, False):
        found = start.start(A, Recorder(), enable=True, check=check)
        assert found["changed"] is False and found["state"] == "alternate"
    assert start.start(B, Recorder(), enable=True)["state"] == "active"
    assert rig.calls() == []


def test_a_first_converge_chooses_the_first(rig: Rig) -> None:
    rig.put(a=unit(False, B), b=unit(False, A))
    assert start.start(A, Recorder(), enable=True)["changed"]
    assert start.start(B, Recorder(), enable=True)["state"] == "alternate"
    assert rig.units() == {A: ON, B: OFF}


@pytest.fixture
def shared(rig: Rig) -> Rig:
    """a and b run side by side; c takes the cards of both; d takes b's."""
    rig.put(a=unit(True, C), b=unit(True, f"{C} {D}"), c=unit(False, f"{A} {B} {D}"), d=unit(False, f"{B} {C}"))
    rig.plan(a=[C], b=[C, D], c=[A, B, D], d=[B, C])
    return rig


def test_all_that_stopped_run_again_when_the_other_does_not_come_up(shared: Rig) -> None:
    shared.put(a=unit(True, C), b=unit(True, C), c=unit(False, f"{A} {B}", bad=True))
    with pytest.raises(HostError) as caught:
        choose.choose("c", Recorder())
    assert caught.value.code == "START_FAILED" and caught.value.cause.endswith(f"{A}, {B} run again")
    assert shared.units() == {A: ON, B: ON, C: OFF}


def test_the_way_back_brings_the_ones_beside_it_too(shared: Rig) -> None:
    choose.choose("c", Recorder())
    assert shared.units() == {A: OFF, B: OFF, C: ON, D: OFF}
    assert choose.choose("a", Recorder(), check=True)["beside"] == [B]
    assert choose.choose("a", Recorder())["beside"] == [B]
    assert shared.units() == {A: ON, B: ON, C: OFF, D: OFF}
    assert choose.choose("a", Recorder())["changed"] is False


def test_a_choice_among_the_ones_beside_it_stays(shared: Rig) -> None:
    choose.choose("d", Recorder())
    assert shared.units() == {A: ON, B: OFF, C: OFF, D: ON}
    assert choose.choose("a", Recorder())["changed"] is False


def test_one_beside_it_that_does_not_come_up_is_told_and_takes_nothing_down(shared: Rig) -> None:
    shared.put(a=unit(False, C), b=unit(False, C, bad=True), c=unit(True, f"{A} {B}"))
    shared.plan(a=[C], b=[C], c=[A, B])
    with pytest.raises(HostError) as caught:
        choose.choose("a", Recorder())
    assert f"{A} runs, and {B}" in caught.value.cause and shared.units()[A] == ON
