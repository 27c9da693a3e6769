"""The one way a verb fails: a stable code, the cause with its figures, and the next thing to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

FELL_SHORT = 1
COULD_NOT_RUN = 2


class HostError(Exception):
    """A verb fell short (`status` 1) or could not run (`status` 2)."""

    def __init__(self, code: str, cause: str, fix: str, status: int = FELL_SHORT, lines: Sequence[str] = ()) -> None:
        super().__init__(f"{code}: {cause}")
        self.code = code
        self.cause = cause
        self.fix = fix
        self.status = status
        self.lines = list(lines)

    def as_json(self) -> dict[str, Any]:
        """`{code, cause, fix}`, as every verb prints it under `error`; with `lines` where a log says more."""
        base: dict[str, Any] = {"code": self.code, "cause": self.cause, "fix": self.fix}
        return {**base, "lines": self.lines} if self.lines else base
