"""`./rig bench staging` measures what it says, on a small model."""

from __future__ import annotations

from pathlib import Path

import pytest

from specrig.bench.staging import measure, staging
from specrig.console import CannotRun


def test_a_small_model(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    result = staging(tmp_path / "s", 4_000_000, 2, 1, False)
    assert (
        min(result["ours"]["wall_s"], result["ours_again"]["wall_s"]) > 0
    )  # which is shorter: so small, the machine says
    assert result["speed_against_copy"] > 0 and "hf" not in result
    assert sorted(p.name for p in (tmp_path / "s").iterdir()) == ["hub", "job.json", "specrig-host", "sums"]


def test_a_run_that_fails_is_no_measurement() -> None:
    with pytest.raises(CannotRun, match="ended with 3"):
        measure(["sh", "-c", "exit 3"])
