"""docs/evidence/faults.md says what the tests say, and nothing else."""

from __future__ import annotations

from tests.e2e import faults


def test_every_fault_is_on_the_page_as_its_test_says_it() -> None:
    assert faults.PAGE.read_text() == faults.render(faults.measured()), "run: SPECRIG_EVIDENCE=1 ./rig test e2e"
