"""What a person at the terminal reads: one line per event, refusals with cause and next command."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import Self


@dataclass
class CannotRun(Exception):
    """A command could not do its work at all (exit code 2): what happened, and what to do next."""

    cause: str
    fix: str
    code: str = "CANNOT_RUN"

    def as_json(self) -> dict[str, str]:
        """As it stands in a verb's document."""
        return {"code": self.code, "cause": self.cause, "fix": self.fix}

    @classmethod
    def all_in(cls, text: str) -> list[Self]:
        """Those that `text` consists of, each as `str` gave it; none when there is anything else."""
        form = r"([A-Z][A-Z0-9_]+): (.+)\n  next: (.+)"
        if not re.fullmatch(rf"{form}(?:\n{form})*", text):
            return []
        return [cls(cause, fix, code) for code, cause, fix in re.findall(form, text)]

    def __str__(self) -> str:
        return f"{self.code}: {self.cause}\n  next: {self.fix}"


def say(text: str) -> None:
    """Print one line now, also when the output is piped."""
    print(text, flush=True)


def complain(text: str) -> None:
    """Print one line to standard error."""
    print(text, file=sys.stderr, flush=True)


def confirm(question: str, *, yes: bool) -> bool:
    """Ask before a change to the person's machine; `yes` answers for them, no terminal and no answer mean no."""
    if yes:
        return True
    if not sys.stdin.isatty():
        return False
    try:
        return input(f"{question} [y/N] ").strip().lower() in {"y", "yes"}
    except EOFError:
        return False
