"""Memory, cards and ports that move between services in one run; systemd, the cards and the engines are played."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specrig.host import docker_api, handing, proof, proven, pull, start, switch, units
from specrig.host.errors import HostError

from .test_pull import Recorder
from .test_switch import GOOD, died, fails

TOTAL = 100


def entry(name: str, port: int = 0, **cards: int) -> dict[str, Any]:
    """A service of a plan; `cards`: the share of each, `c0=45`."""
    return {
        "name": name, "unit": f"specrig-{name}.service", "image": "engine:1", "start_timeout_s": 60,
        "ports": [{"port": port}] if port else [], "free_vram": {card[1:]: share for card, share in cards.items()},
    }  # fmt: skip


class Rig:
    """Two cards, and units that start where what their file wants is free."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.units, self.running, self.bad, self.calls = folder / "units", dict[str, str](), set[str](), list[str]()
        self.units.mkdir()
        monkeypatch.setattr(proven, "ROOT", folder / "services")
        monkeypatch.setattr(proven, "UNITS", self.units)
        monkeypatch.setattr(switch, "SERVICES", folder / "etc")
        monkeypatch.setattr(start, "start", self.start)
        monkeypatch.setattr(units, "run", self.run)
        monkeypatch.setattr(proof, "prove", lambda *_: GOOD)
        monkeypatch.setattr(pull, "pull", lambda *_, **__: {})
        monkeypatch.setattr(docker_api, "inspect_image", lambda _: {"Id": "id"})

    def run(self, tool: str, verb: str, unit: str, timeout: float) -> None:
        assert (tool, verb) == ("systemctl", "stop")
        self.calls.append(f"stop {unit[8:-8]}")
        self.running.pop(unit, None)

    def start(
        self, unit: str, progress: Any, restart: bool, timeout: float, check: bool, enable: bool, after: list[str]
    ) -> dict[str, Any]:
        text = (self.units / unit).read_text()
        answer = {"unit": unit, "state": "active" if unit in self.running else "inactive", "seconds": 0.0}
        if check or (self.running.get(unit) == text and not restart):
            return {**answer, "changed": self.running.get(unit) != text}
        self.calls.append(f"start {unit[8:-8]}")
        self.running.pop(unit, None)
        wants, others = json.loads(text), [json.loads(other) for other in self.running.values()]
        for card, share in wants["free_vram"].items():
            if sum(other["free_vram"].get(card, 0) for other in others) + share > TOTAL:
                raise died(f"waiting for VRAM: card {card}")
        if any(port in other["ports"] for other in others for port in wants["ports"]):
            raise died("the port is taken")
        if text in self.bad:
            raise died("bad flag")
        self.running[unit] = text
        return {**answer, "changed": True, "state": "active", "seconds": 2.0}

    def up(self, *entries: dict[str, Any]) -> list[str]:
        """What a play does: write all units, then switch one after the other to the first failure."""
        self.calls.clear()
        for one in entries:
            (self.units / one["unit"]).write_text(json.dumps(one))
        told = []
        for one in entries:
            told += switch.switch(*self.job(one, entries))["told"]
        return told

    def job(self, one: dict[str, Any], entries: tuple[dict[str, Any], ...]) -> tuple[Any, ...]:
        service, planned = switch.job(json.dumps({"service": one, "planned": entries}))
        return service, Recorder(), False, planned

    def runs(self, *entries: dict[str, Any]) -> bool:
        return {unit: json.loads(text) for unit, text in self.running.items()} == {e["unit"]: e for e in entries}


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(tmp_path, monkeypatch)


MOVES = {
    "a share": ([entry("a", c0=45), entry("b", c0=45)], [entry("a", c0=60), entry("b", c0=30)]),
    "cards": ([entry("a", c0=90), entry("b", c1=90)], [entry("a", c1=90), entry("b", c0=90)]),
    "ports": ([entry("a", 8000), entry("b", 8001)], [entry("a", 8001), entry("b", 8000)]),
    "a place for a third": ([entry("b", c0=90)], [entry("a", c0=60), entry("b", c0=30)]),
    "round": (
        [entry("a", 1), entry("b", 2), entry("c", 3)],
        [entry("a", 2), entry("b", 3), entry("c", 1)],
    ),
}


@pytest.mark.parametrize("move", MOVES)
def test_what_moves_between_services_arrives(rig: Rig, move: str) -> None:
    before, after = MOVES[move]
    rig.up(*before)
    told = rig.up(*after)
    assert rig.runs(*after) and len(told) == len(after)
    assert rig.calls[0] == "stop b" and len([call for call in rig.calls if call.startswith("start")]) == len(after)
    assert not rig.up(*after) and rig.calls == []


@pytest.mark.parametrize("move", MOVES)
def test_what_stopped_for_one_that_fails_runs_again(rig: Rig, move: str) -> None:
    before, after = MOVES[move]
    rig.up(*before)
    rig.bad.add(json.dumps(after[0]))
    error = fails("START_FAILED" if move == "a place for a third" else "UPGRADE_UNDONE", rig.up, *after)
    assert rig.runs(*before) and "bad flag" in error.cause
    assert "specrig-b.service had stopped for it" in error.cause and "runs by its proven files again" in error.cause


def test_when_only_the_other_one_fails_the_first_goes_on(rig: Rig) -> None:
    before, after = MOVES["a share"]
    rig.up(*before)
    rig.bad.add(json.dumps(after[1]))
    error = fails("UPGRADE_STUCK", rig.up, *after)
    assert rig.runs(after[0]) and "specrig-a.service runs by its new files" in error.cause


def test_nobody_stops_for_what_is_free_or_not_given_up(rig: Rig) -> None:
    rig.up(entry("a", c0=45), entry("b", c0=45))
    rig.up(entry("a", c0=30), entry("b", c0=60))  # the one that gives comes first anyway
    assert rig.calls == ["start a", "start b"]
    with pytest.raises(HostError):
        rig.up(entry("a", c0=60), entry("b", c0=60))
    assert "stop b" not in rig.calls


def test_what_moves_is_named() -> None:
    old, new = entry("b", 8000, c0=45, c1=45), entry("b", 8001, c0=30, c1=45)
    assert handing.handed_over(old, new, {}, entry("a", 8000, c0=60, c1=40)) == ["memory of card 0", "port 8000"]
    assert handing.handed_over(old, new, entry("a", 8000, c0=60), entry("a", 8000, c0=60)) == []
