"""How many drafted tokens an engine accepted, from its own words. Pure: text in, numbers out.

A plan's `metrics` says where: {"kind": …, "path": …, names}. Kinds:

| kind | text | names |
|---|---|---|
| counters | Prometheus text at `path` | `drafts` (may be absent), `drafted`, `accepted`: counters since the start |
| gauge | Prometheus text at `path` | `acceptance`: accepted / drafted, as the engine last said |
| response | a completion's own JSON | `drafted`, `accepted`: dotted paths in it; of this request alone |
| length | JSON at `path` | `mean_length`: a key anywhere in it; 1 + accepted / drafts since the start |
| none | - | the engine says nothing |
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

_SAMPLE = re.compile(r"^([A-Za-z_:][A-Za-z0-9_:]*)(?:\{.*\})? +([-+.\w]+)(?: \d+)?$")  # a label may hold any character


class Acceptance(NamedTuple):
    """What is known; None is unknown. Counts are tokens, `drafts` are rounds of drafting."""

    drafts: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    rate: float | None = None  # accepted / drafted
    mean_length: float | None = None  # 1 + accepted / drafts

    def since(self, before: Acceptance) -> Acceptance:
        """What came between two readings of counters; None of all when the engine was started anew between them."""
        if self.drafted is None or self.accepted is None or before.drafted is None or before.accepted is None:
            return Acceptance()
        known = self.drafts is not None and before.drafts is not None
        drafts = (self.drafts or 0) - (before.drafts or 0) if known else None
        drafted, accepted = self.drafted - before.drafted, self.accepted - before.accepted
        return Acceptance() if min(drafts or 0, drafted, accepted) < 0 else _of(drafts, drafted, accepted)


def read(text: str, metrics: Mapping[str, str]) -> Acceptance:
    """The acceptance in `text`, which came from where `metrics` says. Text of another form gives unknowns."""
    kind = metrics.get("kind", "none")
    if kind == "counters":
        found = samples(text)
        drafts, drafted, accepted = (found.get(metrics.get(name, "")) for name in ("drafts", "drafted", "accepted"))
        return _of(*(None if value is None else int(value) for value in (drafts, drafted, accepted)))
    if kind == "gauge":
        return Acceptance(rate=samples(text).get(metrics["acceptance"]))
    try:
        document = json.loads(text)
    except ValueError:
        return Acceptance()
    if kind == "response":
        drafted, accepted = (_at(document, metrics[name]) for name in ("drafted", "accepted"))
        return _of(None, int(drafted), int(accepted)) if drafted is not None and accepted is not None else Acceptance()
    if kind == "length":
        said = [value for value in _under(document, metrics["mean_length"]) if isinstance(value, (int, float))]
        return Acceptance(mean_length=said[0] if said else None)
    return Acceptance()


def samples(text: str) -> dict[str, float]:
    """Prometheus samples by name, summed over their labels."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line.strip())
        if match:
            try:
                found[match[1]] = found.get(match[1], 0.0) + float(match[2])
            except ValueError:
                continue
    return found


def _of(drafts: int | None, drafted: int | None, accepted: int | None) -> Acceptance:
    if drafted is None or accepted is None:
        return Acceptance(drafts, drafted, accepted)
    length = None if not drafts else 1 + accepted / drafts
    return Acceptance(drafts, drafted, accepted, accepted / drafted if drafted else None, length)


def _at(document: Any, path: str) -> Any:
    for key in path.split("."):
        document = document.get(key) if isinstance(document, dict) else None
    return document


def _under(document: Any, key: str) -> Iterator[Any]:
    """Every value of `key`, however deep."""
    if isinstance(document, dict):
        if key in document:
            yield document[key]
        for value in document.values():
            yield from _under(value, key)
    elif isinstance(document, list):
        for value in document:
            yield from _under(value, key)
