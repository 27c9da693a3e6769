"""Long work is never silent, and says amounts that a person can read."""

from __future__ import annotations

import io
import time

import pytest

from specrig.lab import progress
from specrig.lab.progress import Progress, clock, human


@pytest.mark.parametrize(
    ("amount", "text"),
    [(0, "0 B"), (999, "999 B"), (1536, "1.54 kB"), (999_600, "1 MB"), (1_380_000_000, "1.38 GB"), (5e15, "5e+03 TB")],
)
def test_human(amount: float, text: str) -> None:
    assert human(amount) == text


def test_clock() -> None:
    assert clock(75.9) == "1:15"


def test_amount_has_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    out = io.StringIO()
    say = Progress("pull", out, every=0)
    say.phase("layers")
    say.update(10_000_000, 100_000_000)  # there before: not part of the rate
    now[0] = 10.0
    say.update(60_000_000, 100_000_000)
    assert out.getvalue().splitlines()[-1] == "[pull] layers: 60 MB of 100 MB, 5 MB/s, 0:08 left"


def test_things_are_counted_without_a_rate() -> None:
    out = io.StringIO()
    say = Progress("hosts", out, every=0)
    say.phase("booting")
    say.update(3, 16, "hosts up")
    assert out.getvalue().splitlines()[-1].startswith("[hosts] booting: 3 of 16 hosts up")


def test_restraint_between_two_lines() -> None:
    out = io.StringIO()
    say = Progress("x", out, every=60)
    say.phase("p")
    for n in range(100):
        say.update(n)
        say.detail("line")
    assert out.getvalue() == "[x] p\n"


def test_heartbeat_when_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "HEARTBEAT_S", 0.2)
    monkeypatch.setattr(progress, "BEAT_S", 0.05)
    out = io.StringIO()
    with Progress("build", out, every=60) as say:
        say.phase("committing")
        time.sleep(0.3)
    assert "[build] committing … 0:00 so far" in out.getvalue()
