"""The code table: every refusal and warning, with its reason, its fix and a declaration that provokes it.

The table is data (catalog/codes.yml); the examples are planned in a test, so they stay true.
"""

import difflib
import textwrap
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from specrig.plan.catalog import read
from specrig.plan.types import Finding


@dataclass(frozen=True, slots=True)
class Code:
    """One code. `example`: {declaration, lock?, facts?} that provokes it; with `rigs` {name: declaration} it is a gateway's."""

    code: str
    level: Literal["refusal", "warning"]
    title: str
    why: str
    fix: str
    example: dict[str, Any] | None


CODES: dict[str, Code] = {
    code: Code(code, row.get("level", "refusal"), row["title"], row["why"], row["fix"], row.get("example"))
    for code, row in read("catalog/codes.yml")["codes"].items()
}


def finding(code: str, cause: str, fix: str = "") -> Finding:
    """A finding of a known code; `fix` defaults to the code's own. Raises KeyError on an unlisted code."""
    return Finding(code, cause, fix or CODES[code].fix)


def example_text(code: Code) -> str:
    """The provoking declaration as YAML, empty when there is none."""
    if code.example is None:
        return ""
    return yaml.safe_dump(code.example["declaration"], sort_keys=False, default_flow_style=False, allow_unicode=True)


def explain(code: str) -> str:
    """What a code means, why it exists, what to do. Raises KeyError, naming the nearest code, when there is none."""
    entry = CODES.get(code.upper())
    if entry is None:
        near = difflib.get_close_matches(code.upper(), CODES, 1)
        raise KeyError(f"no code {code}" + (f"; nearest: {near[0]}" if near else ""))
    lines = [f"{entry.code} ({entry.level}): {entry.title}", ""]
    lines += textwrap.wrap(entry.why, 100)
    lines += ["", *textwrap.wrap(f"Fix: {entry.fix}", 100)]
    if entry.example is not None:
        lines += ["", "Provoked by:", textwrap.indent(example_text(entry).rstrip(), "  ")]
    return "\n".join(lines)
