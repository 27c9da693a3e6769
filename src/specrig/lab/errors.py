"""The lab's refusals: a stable code, one line of cause, and what to do next."""

from __future__ import annotations


class LabError(Exception):
    """Something the lab needs is not there. `code` is stable; `fix` is a command or a setting."""

    def __init__(self, code: str, cause: str, fix: str) -> None:
        super().__init__(f"{code}: {cause}\n  Next: {fix}")
        self.code, self.cause, self.fix = code, cause, fix
