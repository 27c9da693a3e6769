"""The fan curve as a process of its own against a stand-in for libnvidia-ml.so.1: a C library that keeps what is set, and can refuse.

The real library is asked by hand where there is a card (docs/evidence); no card with fans was ever at hand.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specrig.host import fans as under_test
from specrig.host.errors import HostError
from specrig.host.machine import Machine
from specrig.host.nvml import Card, Nvml, NvmlError
from specrig.lab import nvml as stand_in

from .program import PYTHON

CURVE = [[40, 30], [60, 50], [75, 80], [83, 100]]
FIRST, SECOND = (f"GPU-00000000-0000-0000-0000-00000000000{n}" for n in (1, 2))


def job(*entries: dict[str, Any], **more: Any) -> str:
    return json.dumps({"state": "present", "fans": entries or [{"gpu": "all", "curve": CURVE}], **more})


class FakeNvml(Nvml):
    """Two cards with two fans each, in memory. `broken` {method: NVML result}."""

    def __init__(self) -> None:
        self.degrees, self.broken = {0: 61, 1: 45}, dict[str, int]()
        self.speeds: dict[tuple[int, int], int] = {}  # what software has set; none: automatic
        self.count, self.slowdown, self.keeps, self.calls, self.open = {0: 2, 1: 2}, 0, True, 0, True

    def _call(self, name: str, *arguments: Any) -> None:
        if name in self.broken:
            raise NvmlError(name, self.broken[name], "broken")

    def cards(self) -> list[Card]:
        return [Card(n, uuid, "RTX", n) for n, uuid in enumerate((FIRST, SECOND))]

    def fans(self, card: Card) -> int:
        return self.count[card.index]

    def bounds(self, card: Card) -> tuple[int, int]:
        return 30, 100

    def celsius(self, card: Card) -> int:
        self._call("celsius")
        return self.degrees[card.index]

    def slowdown_c(self, card: Card) -> int | None:
        return self.slowdown or None

    def target(self, card: Card, fan: int) -> int:
        return self.speeds.get((card.index, fan), 0)

    def manual(self, card: Card, fan: int) -> bool:
        return (card.index, fan) in self.speeds

    def set(self, card: Card, fan: int, percent: int) -> None:
        self._call("set")
        self.calls += 1
        if self.keeps:
            self.speeds[card.index, fan] = percent

    def automatic(self, card: Card, fan: int) -> None:
        self._call("automatic")
        self.speeds.pop((card.index, fan), None)

    def close(self) -> None:
        self.open = False


@pytest.fixture
def blocked() -> Iterator[None]:
    """The loop blocks two signals in its process, which is the tests' own here."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


Steps = list[Callable[[FakeNvml], object]]


def loop(tmp_path: Path, steps: Steps, nvml: FakeNvml, text: str = "") -> dict[str, Any]:
    """The loop, with `steps` between its looks; after the last one it is told to end."""
    rest = list(steps)

    def wait(_seconds: float) -> bool:
        if rest:
            rest.pop(0)(nvml)
        return not rest

    return under_test.follow(text or job(), Machine(tmp_path), nvml, wait)


def ended(tmp_path: Path, steps: Steps, nvml: FakeNvml, text: str = "") -> HostError:
    with pytest.raises(HostError) as found:
        loop(tmp_path, [*steps, lambda _n: None], nvml, text)
    assert not nvml.speeds and not nvml.open and not under_test.taken(Machine(tmp_path))
    return found.value


@pytest.mark.usefixtures("blocked")
class TestLoop:
    """One process, a made-up driver."""

    def test_each_card_follows_its_own_temperature_and_all_are_given_back(self, tmp_path: Path) -> None:
        nvml, seen = FakeNvml(), list[dict[tuple[int, int], int]]()

        def hotter(n: FakeNvml) -> None:
            seen.append(dict(n.speeds))
            assert under_test.taken(Machine(tmp_path)) == [FIRST, SECOND]
            n.degrees = {0: 75, 1: 39}

        def again(n: FakeNvml) -> None:
            seen.append(dict(n.speeds))
            n.degrees = {0: 75, 1: 36}

        assert loop(tmp_path, [hotter, again, lambda n: seen.append(dict(n.speeds))], nvml)["changed"]
        assert [set(s.items()) for s in seen] == [
            {((0, 0), 52), ((0, 1), 52), ((1, 0), 35), ((1, 1), 35)},
            {((0, 0), 80), ((0, 1), 80), ((1, 0), 32), ((1, 1), 32)},
            {((0, 0), 80), ((0, 1), 80)},  # below its first point the second card has its fans itself
        ]
        assert not nvml.speeds and not under_test.taken(Machine(tmp_path))

    def test_nothing_is_set_while_nothing_changes(self, tmp_path: Path) -> None:
        nvml = FakeNvml()
        loop(tmp_path, [lambda _n: None] * 5, nvml)
        assert nvml.calls == 4

    def test_too_hot_for_its_curve(self, tmp_path: Path) -> None:
        nvml, seen = FakeNvml(), list[bool]()
        steps: Steps = [lambda n: n.degrees.update({0: 88}), lambda n: seen.append((0, 0) in n.speeds)]
        loop(tmp_path, steps, nvml)
        assert seen == [False]
        nvml.slowdown = 85  # the card's own word comes first
        steps = [lambda n: n.degrees.update({0: 85}), lambda n: seen.append((0, 0) in n.speeds)]
        loop(tmp_path, steps, nvml)
        assert seen == [False, False]

    @pytest.mark.parametrize("celsius", [0, 126, 4_294_967_295])
    def test_a_temperature_that_is_none(self, tmp_path: Path, celsius: int) -> None:
        error = ended(tmp_path, [lambda n: n.degrees.update({1: celsius})], FakeNvml())
        assert error.code == "FANS_LOST" and error.status == 1 and str(celsius) in error.cause

    def test_a_lost_card_may_come_back_and_a_refusal_does_not(self, tmp_path: Path) -> None:
        error = ended(tmp_path, [lambda n: n.broken.update(celsius=15)], FakeNvml())
        assert (error.code, error.status) == ("FANS_LOST", 1)
        nvml = FakeNvml()
        nvml.broken = {"set": 4}
        error = ended(tmp_path, [], nvml)
        assert (error.code, error.status) == ("FANS_REFUSED", 2) and FIRST in error.cause

    def test_fans_that_something_else_takes_are_taken_again_but_not_for_ever(self, tmp_path: Path) -> None:
        nvml, seen = FakeNvml(), list[int | None]()
        loop(tmp_path, [lambda n: n.speeds.clear(), lambda n: seen.append(n.speeds.get((0, 0)))], nvml)
        assert seen == [52]
        nvml.keeps = False
        error = ended(tmp_path, [lambda _n: None] * 5, nvml)
        assert (error.code, error.status) == ("FANS_REFUSED", 2) and "did not keep 52 %, 3 times" in error.cause

    def test_a_defect_of_ours_gives_them_back_too(self, tmp_path: Path) -> None:
        nvml = FakeNvml()

        def trip(_n: FakeNvml) -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            loop(tmp_path, [trip], nvml)
        assert not nvml.speeds

    def test_fans_that_cannot_be_given_back_stay_written_down(self, tmp_path: Path) -> None:
        nvml = FakeNvml()
        with pytest.raises(HostError) as found:
            loop(tmp_path, [lambda n: n.broken.update(automatic=999), lambda _n: None], nvml)
        assert found.value.code == "FANS_STUCK" and FIRST in found.value.cause and SECOND in found.value.cause
        assert found.value.status == 1  # started again it sees to them at least
        assert under_test.taken(Machine(tmp_path)) == [FIRST, SECOND]
        nvml.broken.clear()
        assert under_test.give_back(Machine(tmp_path), nvml=nvml) == [FIRST, SECOND]
        assert not nvml.speeds and not under_test.give_back(Machine(tmp_path), nvml=nvml)

    def test_one_watches_and_whoever_else_would_is_told(self, tmp_path: Path) -> None:
        nvml, other = FakeNvml(), FakeNvml()

        def second(_n: FakeNvml) -> None:
            assert under_test.watched(Machine(tmp_path))
            with pytest.raises(HostError, match="another process sets the fans") as found:
                loop(tmp_path, [], other)
            assert found.value.status == 2 and not other.calls and under_test.taken(Machine(tmp_path))

        loop(tmp_path, [second, lambda n: n.speeds[0, 0]], nvml)
        assert not nvml.speeds and not under_test.watched(Machine(tmp_path))

    def test_what_a_killed_run_left_is_given_back_first(self, tmp_path: Path) -> None:
        nvml = FakeNvml()
        nvml.speeds = {(0, 0): 90, (1, 0): 90, (1, 1): 90}
        record = tmp_path / under_test.TAKEN
        record.parent.mkdir(parents=True)
        record.write_text(json.dumps([FIRST, SECOND]))
        nvml.degrees[0] = 30  # below its first point

        def seen(n: FakeNvml) -> None:
            assert not n.speeds and under_test.taken(Machine(tmp_path)) == [FIRST, SECOND]

        loop(tmp_path, [seen], nvml, job({"gpu": 0, "curve": CURVE}))
        assert not under_test.taken(Machine(tmp_path))

    def test_what_is_refused_before_a_fan_is_touched(self, tmp_path: Path) -> None:
        nvml = FakeNvml()
        nvml.count[1] = 0
        error = ended(tmp_path, [], nvml)
        assert (error.code, error.status) == ("FANS_NONE", 2) and f"RTX ({SECOND}) has no fan" in error.cause
        assert not nvml.calls
        assert loop(tmp_path, [], nvml, job({"gpu": 0, "curve": CURVE})) == {"changed": True}
        assert ended(tmp_path, [], FakeNvml(), job({"gpu": 2, "curve": CURVE})).code == "TUNING_NO_CARD"
        cold = FakeNvml()
        cold.slowdown = 83
        error = ended(tmp_path, [], cold)
        assert error.code == "FANS_CURVE" and "slows down at 83 °C" in error.cause


@pytest.mark.parametrize(
    "text", ["", "[]", '{"fans": [{"gpu": 0}]}', '{"fans": 7}', '{"fans": [{"gpu": 0, "curve": [[40, 30], [80, 90]]}]}']
)
def test_a_job_that_is_none(text: str) -> None:
    with pytest.raises(HostError) as found:
        under_test.entries_of(text)
    assert (found.value.code, found.value.status) == ("FANS_CURVE", 2)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stand_in.build(tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1")


class Rig:
    """A directory that is the stand-in's /, and the program before it."""

    def __init__(self, root: Path, library: Path) -> None:
        self.root = root
        self._environment = {
            **os.environ, "LD_LIBRARY_PATH": str(library.parent), "SPECRIG_STAND_IN_ROOT": str(root),
        }  # fmt: skip
        (root / "dev/shm").mkdir(parents=True)
        for number, uuid in enumerate((FIRST, SECOND)):
            self.are(number, uuid=uuid, name="GeForce RTX 3090 STAND-IN", fans=2, temperature=50)

    def are(self, number: int, **setup: Any) -> None:
        folder = self.root / f"etc/stand-in-nvml/{number}"
        folder.mkdir(parents=True, exist_ok=True)
        for key, value in setup.items():
            (folder / f"{key}.new").write_text(f"{value}\n")
            (folder / f"{key}.new").replace(folder / key)

    def fans(self) -> list[str]:
        """What each fan was told last, those of the first card first."""
        folder = self.root / "dev/shm/stand-in-nvml"
        return [path.read_text().strip() for path in sorted(folder.glob("*"))]

    def start(self, *argv: str, text: str = "", **environment: str) -> subprocess.Popen[str]:
        # The record lies below /run: a root of its own, so that a test needs no rights.
        code = (
            "import sys; from pathlib import Path; from specrig.host import cli, machine;"
            "machine.Machine.__init__.__defaults__ = (Path(sys.argv.pop(1)), machine.tool); sys.exit(cli.main(sys.argv[1:]))"
        )
        running = subprocess.Popen(
            [PYTHON, "-c", code, str(self.root), "fan-curve", *argv],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**self._environment, **environment},
        )  # fmt: skip
        assert running.stdin
        running.stdin.write(text)
        running.stdin.close()
        running.stdin = None
        return running

    def run(self, *argv: str, text: str = "") -> tuple[int, dict[str, Any]]:
        running = self.start(*argv, text=text)
        out, _ = running.communicate(timeout=30)
        return running.returncode, json.loads(out.splitlines()[-1])


@pytest.fixture
def rig(tmp_path: Path, library: Path) -> Rig:
    return Rig(tmp_path, library)


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 15
    while not true():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.05)


def test_the_library_is_asked_and_nothing_is_changed(rig: Rig) -> None:
    rig.are(0, slowdown=95)
    code, document = rig.run("--check", "-", text=job())
    assert code == 0 and not document["changed"] and not rig.fans()
    assert document["fans"][0] == {
        "index": 0, "uuid": FIRST, "name": "GeForce RTX 3090 STAND-IN", "fans": 2, "takes_percent": [30, 100],
        "temperature_c": 50, "slowdown_c": 95, "manual": False, "asked_percent": [0, 0], "curve": CURVE,
    }  # fmt: skip
    assert document["fans"][1]["slowdown_c"] is None


def test_a_card_without_fans_is_told_in_words(rig: Rig) -> None:
    rig.are(1, fans=0)
    code, document = rig.run("--check", "-", text=job())
    assert code == 2 and document["error"]["code"] == "FANS_NONE"
    assert document["error"]["cause"] == f"GeForce RTX 3090 STAND-IN ({SECOND}) has no fan that software may set"


def test_without_a_driver_it_says_so(tmp_path: Path, library: Path) -> None:
    bare = Rig(tmp_path, tmp_path / "none")
    code, document = bare.run("--check", "-", text=job())
    assert (
        code == 1 and document["error"]["code"] == "FANS_DRIVER" and "libnvidia-ml.so.1" in document["error"]["cause"]
    )


@pytest.mark.parametrize("way", [signal.SIGTERM, signal.SIGINT])
def test_it_follows_the_temperature_tells_systemd_and_ends_on_automatic(rig: Rig, way: signal.Signals) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.bind(str(rig.root / "notify"))
        running = rig.start("-", text=job(), NOTIFY_SOCKET=str(rig.root / "notify"))
        until(lambda: rig.fans() == ["manual 40"] * 4)
        ear.settimeout(10)
        said = ear.recv(1000).decode().splitlines()
        assert said == ["READY=1", "STATUS=card 0 50 °C 40 %; card 1 50 °C 40 %", "WATCHDOG=1"]
        rig.are(0, temperature=75)
        until(lambda: rig.fans() == ["manual 80"] * 2 + ["manual 40"] * 2)
        running.send_signal(way)
        out, err = running.communicate(timeout=10)
    assert running.returncode == 0, err
    assert rig.fans() == ["auto 0"] * 4 and json.loads(out)["ok"]


def test_after_a_kill_the_next_command_gives_them_back(rig: Rig) -> None:
    running = rig.start("-", text=job())
    until(lambda: rig.fans() == ["manual 40"] * 4)
    running.kill()
    running.communicate()
    assert rig.fans() == ["manual 40"] * 4
    code, document = rig.run("--automatic")
    assert code == 0 and document["given_back"] == [FIRST, SECOND] and rig.fans() == ["auto 0"] * 4
    assert rig.run("--automatic") == (0, {"ok": True, "changed": False, "given_back": []})


def test_a_card_that_stops_answering(rig: Rig) -> None:
    running = rig.start("-", text=job())
    until(lambda: rig.fans() == ["manual 40"] * 4)
    rig.are(1, error=15)
    out, _ = running.communicate(timeout=15)
    error = json.loads(out.splitlines()[-1])["error"]
    assert running.returncode == 1 and error["code"] == "FANS_LOST" and "GPU is lost (15)" in error["cause"]
    assert rig.fans() == ["auto 0"] * 4


def test_a_card_that_refuses_is_left_alone_for_good(rig: Rig) -> None:
    rig.are(1, refuse=3)
    running = rig.start("-", text=job({"gpu": SECOND, "curve": CURVE}))
    out, _ = running.communicate(timeout=15)
    error = json.loads(out.splitlines()[-1])["error"]
    assert running.returncode == 2 and error["code"] == "FANS_REFUSED" and "Not Supported (3)" in error["cause"]
    assert not rig.fans()
