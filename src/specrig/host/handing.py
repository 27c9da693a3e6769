"""Memory, cards and ports that move from one service to another: who holds what another one starts with by the same plan.

It would wait for them in vain: so the one that gives them up stops before, and starts after.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Entry = Mapping[str, Any]


def _ports(entry: Entry) -> set[int]:
    return {int(port["port"]) for port in entry.get("ports") or []}


def handed_over(old: Entry, new: Entry, was: Entry, wants: Entry) -> list[str]:
    """What a service gives up on the way from `old` to `new`, and another takes on the way from `was` to `wants`.

    All are services of a plan; `was` is empty where the other one is new.
    """
    before, after, has, needs = (dict(entry.get("free_vram") or {}) for entry in (old, new, was, wants))
    cards = [
        card
        for card, mib in sorted(needs.items())
        if mib > has.get(card, 0) and before.get(card, 0) > after.get(card, 0)
    ]
    ports = sorted((_ports(old) - _ports(new)) & (_ports(wants) - _ports(was)))
    return [*(f"memory of card {card}" for card in cards), *(f"port {port}" for port in ports)]
