"""Power limits against the lab's stand-in for nvidia-smi, a process that keeps, refuses and loses limits as the real one does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specrig.host import fans, tuning
from specrig.host.errors import HostError
from specrig.host.machine import Answer, Machine
from specrig.lab import cards as fake
from specrig.lab import nvidia_smi

FIRST, SECOND = (f"GPU-00000000-0000-0000-0000-00000000000{n}" for n in (1, 2))
LINK = "etc/systemd/system/"


class Rig(Machine):
    """Two cards of a catalog, a loaded driver, and the stand-in; systemctl makes and removes links as systemd does."""

    def __init__(self, root: Path, cards: list[str]) -> None:
        super().__init__(root, self._tool)
        for name, data in fake.functions(cards).items():
            self._put(f"sys/bus/pci/devices/{name}", data.decode("latin-1"))
        self._put("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Release\n")
        self._put("nvidia-smi", nvidia_smi.script())
        (root / LINK).mkdir(parents=True)
        self.asked: list[tuple[str, ...]] = []
        self.smi("--persistence-mode=1")

    def _put(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def are(self, **setup: Any) -> None:
        """What the cards are like."""
        self._put("etc/stand-in-nvidia.json", json.dumps(setup))

    def smi(self, *words: str) -> subprocess.CompletedProcess[str]:
        """The stand-in itself."""
        environment = {**os.environ, "SPECRIG_STAND_IN_ROOT": str(self.root)}
        command = [sys.executable, str(self.root / "nvidia-smi"), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    def limits(self) -> list[float]:
        """The limits that the cards have, in W."""
        told = self.smi("--query-gpu=power.limit", "--format=csv,noheader,nounits").stdout
        return [float(line) for line in told.splitlines()]

    def state(self) -> dict[str, Any]:
        """What the stand-in keeps."""
        found: dict[str, Any] = json.loads((self.root / "run/stand-in-nvidia/state.json").read_text())
        return found

    def _tool(self, *command: str) -> Answer | None:
        self.asked.append(command)
        if command[0] == "systemctl":
            for name in command[2:]:
                link = self.root / LINK / name
                if command[1] == "mask":
                    link.symlink_to("/dev/null")
                else:
                    link.unlink()
            return Answer(0, "", "")
        done = self.smi(*command[1:])
        return Answer(done.returncode, done.stdout, done.stderr)

    def changes(self) -> list[tuple[str, ...]]:
        """Calls that changed something."""
        words = ("power-limit=", "lock-gpu", "reset-gpu", "mask")
        return [call for call in self.asked if any(word in " ".join(call) for word in words)]


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path, ["rtx_3090", "rtx_3090"])


def job(*cards: dict[str, Any], mask: bool = False, state: str = "present") -> str:
    return json.dumps({"state": state, "cards": cards, "mask_sleep": mask})


def run(rig: Rig, text: str, **options: Any) -> dict[str, Any]:
    return tuning.tuning(text, m=rig, sleep=lambda _seconds: None, **options)


def refused(rig: Rig, text: str, **options: Any) -> HostError:
    with pytest.raises(HostError) as ended:
        run(rig, text, **options)
    return ended.value


def test_one_limit_for_all_cards_and_nothing_to_do_the_second_time(rig: Rig) -> None:
    text = job({"gpu": "all", "watts": 250})
    assert run(rig, text, check=True)["changed"] and rig.limits() == [350, 350]
    first = run(rig, text)
    assert first["changed"] and rig.limits() == [250, 250]
    assert [(c["limit_w"], c["default_w"], c["how"]) for c in first["cards"]] == [(250.0, 350.0, "limit")] * 2
    rig.asked.clear()
    assert not run(rig, text)["changed"] and not run(rig, text, check=True)["changed"] and not rig.changes()


def test_each_card_its_own_by_uuid_and_per_cent(rig: Rig) -> None:
    run(rig, job({"gpu": "all", "watts": 300}, {"gpu": SECOND, "percent": 80}))
    assert rig.limits() == [300, 280]


def test_a_limit_that_the_card_does_not_take_touches_no_card(rig: Rig) -> None:
    error = refused(rig, job({"gpu": 0, "watts": 200}, {"gpu": 1, "watts": 360}))
    assert (
        error.code == "TUNING_RANGE"
        and "360 W is asked of GeForce RTX 3090" in error.cause
        and "100 to 350 W" in error.cause
    )
    assert rig.limits() == [350, 350]


def test_a_card_that_is_not_there(rig: Rig) -> None:
    error = refused(rig, job({"gpu": "GPU-gone", "watts": 200}))
    assert error.code == "TUNING_NO_CARD" and FIRST in error.cause and not rig.changes()


def test_a_lost_limit_is_seen_and_set_again(rig: Rig) -> None:
    """The daemon was restarted: for a moment nobody held the driver's state."""
    text = job({"gpu": "all", "watts": 250})
    run(rig, text)
    rig.smi("--persistence-mode=0")
    rig.smi("--persistence-mode=1")
    assert rig.limits() == [350, 350]
    assert run(rig, text, check=True)["changed"]
    run(rig, text)
    assert rig.limits() == [250, 250]


def test_without_persistence_it_says_so(rig: Rig) -> None:
    rig.smi("--persistence-mode=0")
    error = refused(rig, job({"gpu": 0, "watts": 250}))
    # The tool says "was set", the next question shows that it was not.
    assert error.code == "TUNING_REFUSED" and "at 350.0 W" in error.cause and "was set to 250.00 W" in error.cause
    rig.smi("--persistence-mode=1")
    run(rig, job({"gpu": 0, "watts": 250}))
    state = rig.state()
    state["persistence"] = False
    rig._put("run/stand-in-nvidia/state.json", json.dumps(state))
    assert refused(rig, job({"gpu": 0, "watts": 250})).code == "TUNING_PERSISTENCE"
    assert run(rig, job({"gpu": 0, "watts": 250}), check=True)["changed"]


def test_a_card_that_takes_no_limit_gets_its_clocks_locked(rig: Rig) -> None:
    rig.are(no_power_limit=["0000:01:00.0"])
    text = job({"gpu": "all", "watts": 250, "clocks_mhz": [210, 1500]})
    assert [c["how"] for c in run(rig, text)["cards"]] == ["clocks", "limit"]
    assert rig.state()["clocks"] == {"0000:01:00.0": [210, 1500]} and rig.limits() == [350, 250]
    rig.asked.clear()
    assert not run(rig, text)["changed"] and not rig.changes()
    # Clocks cannot be read back: the unit sets them again whenever it starts.
    rig.smi("--persistence-mode=0")
    rig.smi("--persistence-mode=1")
    run(rig, text, again=True)
    assert rig.state()["clocks"] == {"0000:01:00.0": [210, 1500]}


def test_a_card_that_takes_neither_is_told_and_is_no_failure(rig: Rig) -> None:
    rig.are(no_power_limit=["0000:01:00.0"], no_clock_lock=["0000:01:00.0"])
    text = job({"gpu": "all", "watts": 250, "clocks_mhz": [210, 1500]})
    cards = run(rig, text)["cards"]
    assert cards[0]["how"] == "unsupported" and "not supported for GPU: 00000000:01:00.0" in cards[0]["said"]
    assert rig.limits() == [350, 250] and not run(rig, text, check=True)["changed"]


def test_absent_puts_back_what_was_set_and_nothing_else(rig: Rig) -> None:
    rig.are(no_power_limit=["0000:02:00.0"])
    rig.smi("--id=1", "--lock-gpu-clocks=300,600")
    run(rig, job({"gpu": 0, "watts": 250}))
    run(rig, job(state="absent"))
    assert rig.limits() == [350, 350] and rig.state()["clocks"] == {"0000:02:00.0": [300, 600]}  # a person's own
    run(rig, job({"gpu": 1, "watts": 250, "clocks_mhz": [210, 900]}))
    assert rig.state()["clocks"] == {"0000:02:00.0": [210, 900]}
    assert run(rig, job(state="absent"), check=True)["changed"]
    run(rig, job(state="absent"))
    assert rig.state()["clocks"] == {} and not run(rig, job(state="absent"))["changed"]


def test_a_card_that_is_no_longer_named_goes_back(rig: Rig) -> None:
    run(rig, job({"gpu": "all", "watts": 250}))
    assert run(rig, job({"gpu": 0, "watts": 250}))["changed"] and rig.limits() == [250, 350]


def test_sleep_is_masked_and_only_ours_is_unmasked(rig: Rig) -> None:
    (rig.root / LINK / "suspend.target").symlink_to("/dev/null")  # a person's own
    assert run(rig, job(mask=True), check=True)["sleep_targets"] == [
        "sleep.target",
        "hibernate.target",
        "hybrid-sleep.target",
    ]
    assert run(rig, job(mask=True))["changed"] and not run(rig, job(mask=True))["changed"]
    assert {link.name for link in (rig.root / LINK).iterdir()} == set(tuning.SLEEP_TARGETS)
    run(rig, job(state="absent"))
    assert [link.name for link in (rig.root / LINK).iterdir()] == ["suspend.target"]
    assert not run(rig, job(state="absent"))["changed"]


def test_without_a_driver(rig: Rig) -> None:
    (rig.root / "proc/driver/nvidia/version").unlink()
    text = job({"gpu": "all", "watts": 250})
    assert run(rig, text, check=True)["changed"]
    error = refused(rig, text)
    assert error.code == "TUNING_NO_DRIVER" and "couldn't communicate" in error.cause and error.status == 2
    assert not run(rig, job(state="absent"))["changed"]


def test_it_waits_for_the_driver(rig: Rig) -> None:
    version = rig.root / "proc/driver/nvidia/version"
    text = version.read_text()
    version.unlink()

    def loaded(_seconds: float) -> None:
        version.write_text(text)

    tuning.tuning(job({"gpu": "all", "watts": 250}), wait_s=60, m=rig, sleep=loaded)
    assert rig.limits() == [250, 250]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"cards": [{"gpu": 0}]}',
        '{"cards": [{"watts": 1}]}',
        '{"cards": [{"gpu": 0, "watts": 1, "clocks_mhz": [1]}]}',
    ],
)
def test_a_job_that_cannot_be_read(rig: Rig, text: str) -> None:
    assert refused(rig, text).code == "TUNING_JOB"


class FanLibrary:
    """STAND-IN for what is asked about fans; says what it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refuse: bool = False) -> None:
        self.looked: list[Any] = []
        self.refuse, self.ours = refuse, [FIRST]
        monkeypatch.setattr(fans, "look", self._look)
        monkeypatch.setattr(fans, "give_back", self._give_back)

    def _look(self, wanted: Any) -> list[dict[str, Any]]:
        self.looked.append(wanted)
        if self.refuse:
            raise HostError("FANS_NONE", "no fan", "none")
        return [{"index": 0}]

    def _give_back(self, _m: Machine, only_look: bool) -> list[str]:
        found = self.ours
        self.ours = self.ours if only_look else []
        return found


FANS = [{"gpu": 0, "curve": [[40, 30], [75, 80], [83, 100]]}]


def with_fans(*cards: dict[str, Any]) -> str:
    return json.dumps({**json.loads(job(*cards)), "fans": FANS})


def test_fans_that_cannot_follow_are_told_before_a_limit_is_set(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    library = FanLibrary(monkeypatch, refuse=True)
    text = with_fans({"gpu": "all", "watts": 250})
    assert refused(rig, text).code == refused(rig, text, check=True).code == "FANS_NONE" and rig.limits() == [350, 350]
    # At boot the limits do not hang on it.
    run(rig, text, again=True)
    assert rig.limits() == [250, 250] and library.looked == [FANS, FANS]
    library.refuse = False
    assert run(rig, text)["fans"] == [{"index": 0}] and not run(rig, text)["changed"]
    bad = json.dumps({"fans": [{"gpu": 0, "curve": [[40, 30], [80, 60]]}]})
    assert refused(rig, bad).code == "FANS_CURVE"


def test_fans_that_no_curve_is_for_any_more_are_given_back_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    library = FanLibrary(monkeypatch)
    run(rig, with_fans())
    assert library.ours == [FIRST]
    assert run(rig, job(), check=True)["changed"] and library.ours == [FIRST]
    monkeypatch.setattr(fans, "watched", lambda _m: True)  # the process that follows them gives back as it ends
    assert not run(rig, job())["changed"] and library.ours == [FIRST]
    monkeypatch.undo()
    library = FanLibrary(monkeypatch)
    assert run(rig, job(state="absent"))["changed"] and not run(rig, job(state="absent"))["changed"]


def test_watts_are_saved_only_where_they_were_measured(rig: Rig) -> None:
    text = job({"gpu": "all", "watts": 250})
    run(rig, text)
    rig.are(draw_w=340, busy=99)
    cards = tuning.measure(text, 2, m=rig, sleep=lambda _s: None)["cards"]
    assert [(c["at_default_w"], c["at_limit_w"], c["saved_w"]) for c in cards] == [(340.0, 250.0, 90.0)] * 2
    rig.are(draw_w=200, busy=100)  # the load never met the limit: nothing is saved, and nothing is said to be
    assert [c["saved_w"] for c in tuning.measure(text, 2, m=rig, sleep=lambda _s: None)["cards"]] == [0.0, 0.0]
    rig.are(draw_w=340, busy=20)
    cards = tuning.measure(text, 2, m=rig, sleep=lambda _s: None)["cards"]
    assert cards[0]["saved_w"] is None and "busy less than" in cards[0]["why"]
    assert rig.limits() == [250, 250]


def test_an_interrupted_measurement_leaves_the_planned_limit(rig: Rig) -> None:
    text = job({"gpu": "all", "watts": 250})
    run(rig, text)

    def interrupted(_seconds: float) -> None:
        assert rig.limits() == [350, 350]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tuning.measure(text, 2, m=rig, sleep=interrupted)
    assert rig.limits() == [250, 250]
