"""Whether a process runs with what is on the disk."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from specrig.host import units


def running(seconds_ago: float, state: str = "active") -> dict[str, str]:
    return {"ActiveState": state, "ExecMainStartTimestampMonotonic": str(int((time.monotonic() - seconds_ago) * 1e6))}


@pytest.mark.parametrize(
    ("started", "written", "state", "older"),
    [(60, 30, "active", True), (30, 60, "active", False), (60, 30, "activating", True), (60, 30, "inactive", False)],
)
def test_older_than_its_files(tmp_path: Path, started: float, written: float, state: str, older: bool) -> None:
    unit, key = tmp_path / "unit", tmp_path / "key"
    for path, age in ((unit, 3600), (key, written)):
        path.write_text("")
        os.utime(path, (time.time() - age, time.time() - age))
    assert units.older_than(running(started, state), [str(unit), str(key)]) is older


def test_a_process_that_was_never_started_and_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert not units.older_than({"ActiveState": "active", "ExecMainStartTimestampMonotonic": "0"}, [__file__])
    assert not units.older_than(running(60), [str(tmp_path / "none")])
