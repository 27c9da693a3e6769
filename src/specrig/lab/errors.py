"""The lab's refusals."""

from __future__ import annotations

from specrig.console import CannotRun


class LabError(CannotRun):
    """Something the lab needs is not there: a stable `code`, one line of `cause`, and what to do (`fix`)."""

    def __init__(self, code: str, cause: str, fix: str) -> None:
        super().__init__(cause, fix, code)
