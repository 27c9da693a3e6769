"""Progress documents and the line a person reads."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from specrig.host import progress
from specrig.host.progress import Progress, amount, clock, line


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1500, "2 kB"),
        (3.1e6, "3.1 MB"),
        (210e6, "210 MB"),
        (9.9e9, "9.9 GB"),
        (2e12, "2.0 TB"),
    ],
)
def test_amounts(count: float, text: str) -> None:
    assert amount(count) == text


def test_clock() -> None:
    assert (clock(32), clock(3723)) == ("0:32", "1:02:03")


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (
            {"phase": "download", "done": 3.1e9, "total": 9.9e9, "rate": 210e6, "eta_s": 32},
            "download 3.1/9.9 GB · 210 MB/s · ETA 0:32",
        ),
        ({"phase": "download", "done": 5e6, "total": 9.9e9}, "download 5.0 MB/9.9 GB"),
        ({"phase": "compiling", "done": None, "elapsed_s": 75, "message": "m"}, "compiling · 1:15 · m"),
    ],
)
def test_lines(state: dict[str, object], text: str) -> None:
    assert line(state) == text


def test_the_rate_falls_when_nothing_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])  # type: ignore[attr-defined]
    one = Progress(quiet=True)
    for second in range(5):
        now[0] = 100.0 + second
        one.update("download", second * 100, 1000)
    state = one.snapshot()
    assert (state["rate"], state["eta_s"], state["total"]) == (100, 6, 1000)
    now[0] = 140.0
    assert one.snapshot()["rate"] == 10


def test_the_file_is_written_while_the_work_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "BEAT_S", 0.05)
    path = tmp_path / "job.json"
    with Progress(path) as one:
        one.update("verify")
        first = json.loads(path.read_text())
        time.sleep(0.3)  # `at` counts tenths
        second = json.loads(path.read_text())
    assert first["phase"] == "verify" and second["at"] > first["at"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert set(first) == {"phase", "done", "total", "unit", "rate", "eta_s", "elapsed_s", "message", "at"}
