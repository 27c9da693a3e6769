"""Writes src/specrig/plan/dialects/vllm_options.yml from the real parsers: `python -m tests.contract.write_options`."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

from tests.contract.parsers import VERSIONS, flags

FILE = Path(__file__).parents[2] / "src" / "specrig" / "plan" / "dialects" / "vllm_options.yml"
HEAD = """\
# Every option that vLLM's own parser knows, in the versions that were asked. Generated; do not edit:
# python -m tests.contract.write_options
# "A..B" is from version A to version B of `asked`, both included.
"""


def text() -> str:
    """The file's content."""
    known = {version: set(flags(version)) for version in VERSIONS}
    lines = [HEAD, f"asked: [{', '.join(VERSIONS)}]\n", "options:\n"]
    for option in sorted(set().union(*known.values())):
        runs = [
            [version for version, _ in run]
            for has, run in groupby(((v, option in known[v]) for v in VERSIONS), key=lambda pair: pair[1])
            if has
        ]
        spans = ", ".join(f"{run[0]}..{run[-1]}" for run in runs)
        lines.append(f'  "{option}": [{spans}]\n')
    return "".join(lines)


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
    sys.exit(0)
