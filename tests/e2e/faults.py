"""docs/evidence/faults.md from the tests: a row for each whose docstring is one; seconds as the last run on the page measured them."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Mapping
from pathlib import Path

from specrig.runner import ROOT

PAGE = ROOT / "docs/evidence/faults.md"
TESTS = [ROOT / "tests/e2e" / name for name in ("test_demo.py", "test_faults.py", "test_upgrade.py")]
HEAD = """# What a rig lives through

Written by the tests in `tests/e2e` (`SPECRIG_EVIDENCE=1 ./rig test e2e`; those of upgrades: `nightly`), each row by one of them, on the
demo's host: a container with systemd, Docker and the real vLLM on a CPU. "s" is from the fault until a completion came back (of a start that
always fails: until it gave up; of an upgrade: for how long nothing answered), in the last run that passed, with whatever else the machine
did: read it as an order of magnitude. Empty: not measured.

| fault | what must hold | s | test |
|---|---|---|---|
"""
TAIL = """
Elsewhere:

| fault | where |
|---|---|
| one of two rigs behind a gateway dies under load | `tests/e2e/test_gateway.py` |
| stopped: no container and no process is left | `tests/e2e/test_demo.py` |
| the wall clock jumps a day back and forth | `tests/unit/host/test_service.py`; a lab's host has the machine's clock, not its own to set |
| VRAM held by others, or just being given back; a driver that comes late | `tests/unit/host/test_gate.py`, on an H200's recorded `nvidia-smi` |
| an engine that is busy, not hung | `tests/unit/host/test_service.py` |
"""


def rows() -> dict[str, tuple[str, str, str]]:
    """{test: (fault, what must hold, remark)} from the docstrings."""
    found = {}
    for node in (node for file in TESTS for node in ast.parse(file.read_text()).body):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            text = inspect.cleandoc(ast.get_docstring(node) or "")
            row, _, remark = text.partition("\n\n")
            fault, bar, holds = " ".join(row.split()).partition(" | ")
            if bar:
                found[node.name] = (fault, holds.rstrip("."), " ".join(remark.split()))
    return found


def measured(page: Path = PAGE) -> dict[str, float]:
    """The seconds on the page."""
    text = page.read_text() if page.exists() else ""
    return {name: float(s) for s, name in re.findall(r"\| (\d+) \| `(test_\w+)` \|$", text, re.MULTILINE)}


def render(seconds: Mapping[str, float]) -> str:
    """The page."""
    lines = []
    for name, (fault, holds, remark) in rows().items():
        took = f"{seconds[name]:.0f}" if name in seconds else ""
        lines.append(f"| {fault} | {holds}.{' ' + remark if remark else ''} | {took} | `{name}` |")
    return HEAD + "\n".join(lines) + "\n" + TAIL


def write(seconds: Mapping[str, float]) -> None:
    """Write the page: new seconds over those that are on it."""
    PAGE.write_text(render({**measured(), **seconds}))
