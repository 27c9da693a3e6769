"""Writes docs/evidence/llama-cpp.md from the figures of the last `./rig test engines`: `python -m tests.engines.report`."""

from __future__ import annotations

import json
import os
import sys
from statistics import median
from typing import Any

from specrig import runner
from specrig.lab import llamaimage
from tests.engines.conftest import FIGURES
from tests.engines.test_llama_cpp import PROMPT, TOKENS

PAGE = runner.ROOT / "docs" / "evidence" / "llama-cpp.md"


def page(found: dict[str, Any]) -> str:
    """The page."""
    plain, draft = found["plain"], found["draft"]
    counted = draft["counted"]
    same = set(plain["texts"]) == set(draft["texts"]) and len(set(draft["texts"])) == 1
    text = "identical" if same else "DIFFERENT"
    rows = [
        ("decode, t/s by its own timings; median", told(plain["tps"]), told(draft["tps"])),
        ("drafted / accepted, counters at `/metrics`", pair(plain["counted"]), pair(counted)),
        (
            "drafted / accepted, sum of each answer's `timings`",
            "none",
            f"{total(draft, 'drafted')} / {total(draft, 'accepted')}",
        ),
        ("α = accepted / drafted", "", f"{counted['rate']:.2f}"),
        ("mean acceptance length = 1 + accepted / drafts", "", f"{counted['mean_length']:.2f}"),
    ]
    table = "\n".join(f"| {what} | {one} | {other} |" for what, one, other in rows)
    return f"""# llama.cpp's server under the unit

Written by `python -m tests.engines.report` from the figures of `./rig test engines`; do not edit.

`{llamaimage.SDIST}` (build {llamaimage.VERSION}), compiled in a container of Debian 12 for x86-64-v3, no GPU. A lab host of Debian 13
with the real playbook; the lab's tiny pair as GGUF files (float32), one thread; {os.cpu_count()} processors, shared with other work.
The models show the mechanism, not what a card or a real pair does.

| | plain | draft, K={found["k"]} |
|---|---|---|
{table}

- Prompt `{PROMPT.strip()}`, {TOKENS} tokens, temperature 0, {len(plain["tps"])} times each. Text with and without the draft: {text}.
- Vocabularies: 1,024 and 1,152 rows. This build takes a difference of 128; GGUF files are not padded.
- After `kill -9` of the engine the unit was active again, which takes a completion, after {found["back_after_kill_s"]} s.
- Seen before, by hand: with bfloat16 files the text differed between plain and draft. One row and several are multiplied by different
  code, which rounds differently, and a tiny model has near ties. That is why the lab's files are float32.
- Its parser took every command line that the plan writes for it, and none of those that the plan refuses.
- Not run: a GPU, `--split-mode`, a real model.
"""


def pair(counted: dict[str, Any]) -> str:
    """Drafted and accepted tokens."""
    return f"{counted['drafted']} / {counted['accepted']}"


def told(rates: list[float]) -> str:
    """Each rate, and the median."""
    return f"{', '.join(f'{rate:g}' for rate in rates)}; {median(rates):g}"


def total(run: dict[str, Any], name: str) -> int:
    """Sum over a run's answers."""
    return sum(int(one[name]) for one in run["responses"])


if __name__ == "__main__":
    PAGE.write_text(page(json.loads(FIGURES.read_text())), encoding="utf-8")
    sys.exit(0)
