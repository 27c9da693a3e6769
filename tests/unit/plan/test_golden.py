"""The command lines are what a reviewer has read. After an intended change: python -m tests.unit.plan.golden"""

import pytest

from tests.unit.plan.golden import FOLDER, cases, text

CASES = dict(cases())


@pytest.mark.parametrize("name", CASES)
def test_command_line(name: str) -> None:
    assert (FOLDER / f"{name}.txt").read_text("utf-8") == text(CASES[name])


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(CASES)
