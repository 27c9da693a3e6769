"""Writes src/specrig/plan/dialects/<engine>_options.yml from the real parsers: `python -m tests.contract.write_options`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

from tests.contract.parsers import OTHERS, VERSIONS, engine_of, flags

FOLDER = Path(__file__).parents[2] / "src" / "specrig" / "plan" / "dialects"
RELEASES = {"vllm": VERSIONS} | {
    engine: tuple(release for release in OTHERS if engine_of(release) == engine)
    for engine in sorted({engine_of(release) for release in OTHERS})
}
NAMES = {"vllm": "vLLM", "aphrodite": "Aphrodite", "sglang": "SGLang"}
HEAD = """\
# Every option that {engine}'s own parser knows, in the versions that were asked. Generated; do not edit:
# {command}
# "A..B" is from version A to version B of `asked`, both included.
"""


def text(engine: str) -> str:
    """The file's content."""
    known = {release.rpartition("@")[2]: set(flags(release)) for release in RELEASES[engine]}
    return written(NAMES[engine], "python -m tests.contract.write_options", known)


def written(engine: str, command: str, known: Mapping[str, set[str]]) -> str:
    """The file of an engine whose versions, in order, know these options."""
    lines = [HEAD.format(engine=engine, command=command), f"asked: [{', '.join(known)}]\n", "options:\n"]
    for option in sorted(set().union(*known.values())):
        runs = [
            [version for version, _ in run]
            for has, run in groupby(((v, option in known[v]) for v in known), key=lambda pair: pair[1])
            if has
        ]
        spans = ", ".join(f"{run[0]}..{run[-1]}" for run in runs)
        lines.append(f'  "{option}": [{spans}]\n')
    return "".join(lines)


def file(engine: str) -> Path:
    """Where it lies."""
    return FOLDER / f"{engine}_options.yml"


if __name__ == "__main__":
    for name in RELEASES:
        file(name).write_text(text(name), encoding="utf-8")
    sys.exit(0)
