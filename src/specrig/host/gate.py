"""Waits until the cards have room: memory that another process holds, or is just giving back, ends an engine's start."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from specrig.host import docker_api, machine
from specrig.host.errors import HostError

POLL_S = 1.0
# Free memory is stable when this many readings in a row differ by no more than this many MiB.
STABLE, JITTER_MIB = 3, 64
GATE_S = 300.0
_CONTAINER = re.compile(r"(?:docker[-/])([0-9a-f]{64})")
_UNIT = re.compile(r"([^/]+\.(?:service|scope))(?:/|$)")


def owner(pid: int, m: machine.Machine) -> str:
    """What a process belongs to: a container's name, a unit, or nothing that can be named."""
    cgroup = m.text(f"proc/{pid}/cgroup")
    if match := _CONTAINER.search(cgroup):
        try:
            found = docker_api.inspect_container(match[1])
        except HostError:
            found = None
        return f"container {str((found or {}).get('Name') or match[1][:12]).lstrip('/')}"
    units = _UNIT.findall(cgroup.splitlines()[-1] if cgroup else "")
    return str(units[-1]) if units else ""


def holders(card: Mapping[str, Any], m: machine.Machine) -> str:
    """Who holds a card's memory, the largest first: `python3 (process 4711, ollama.service, 18.0 GiB)`."""
    named = []
    for one in sorted(card["holders"], key=lambda h: -(h["mib"] or 0))[:3]:
        parts = [f"process {one['pid']}", owner(one["pid"], m), _gib(one["mib"]) if one["mib"] else ""]
        named.append(f"{one['name'].rpartition('/')[2] or '?'} ({', '.join(part for part in parts if part)})")
    return ", ".join(named) or "no process that nvidia-smi names"


def _gib(mib: int) -> str:
    return f"{mib / 1024:.1f} GiB"


def lacking(needs: Mapping[str, int], m: machine.Machine, past: dict[str, deque[int]]) -> str:
    """Why the cards are not ready yet, or an empty text. `needs`: MiB by index or UUID; `past` keeps the readings."""
    cards, cause = machine.gpus(m)
    if cards is None:
        return f"waiting for the driver: {cause}"
    by_name = {str(index): card for index, card in enumerate(cards)} | {card["uuid"]: card for card in cards}
    waits = []
    for name, mib in needs.items():
        card = by_name.get(name)
        if card is None or card["memory_free_mib"] is None:
            waits.append(f"waiting for card {name}: the driver knows {len(cards)} cards, and not this one")
            continue
        free = int(card["memory_free_mib"])
        readings = past.setdefault(name, deque(maxlen=STABLE))
        readings.append(free)
        if free < mib:
            waits.append(
                f"waiting for VRAM: card {name} has {_gib(free)} free, {_gib(mib)} are needed; held by {holders(card, m)}"
            )
        elif len(readings) < STABLE or max(readings) - min(readings) > JITTER_MIB:
            waits.append(f"waiting for VRAM: what is free on card {name} is still changing")
    return "; ".join(waits)


def wait(
    needs: Mapping[str, int],
    pause: Callable[[float], bool],
    say: Callable[[str], None],
    clock: Callable[[], float],
    m: machine.Machine | None = None,
    timeout: float = GATE_S,
) -> str:
    """Wait until each card has its MiB free and stable; "" when so, else what was lacking at the end of `timeout`.

    `pause(seconds)` sleeps and returns True to be interrupted (then the answer is empty as well).
    """
    past: dict[str, deque[int]] = {}
    begin, m = clock(), m or machine.Machine()
    while why := lacking(needs, m, past):
        say(why)
        if clock() - begin > timeout:
            return why
        if pause(POLL_S):
            break
    return ""
