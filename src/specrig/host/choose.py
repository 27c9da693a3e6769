"""Starts one of several services that share their cards and cannot run side by side; the others stop and stay off at boot."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from specrig.host import start, switch, units
from specrig.host.errors import COULD_NOT_RUN, HostError
from specrig.host.progress import Progress
from specrig.host.status import OWN, PLAN

UNIT = "specrig-{}.service"


def _known() -> list[str]:
    """Names of the services whose units are installed."""
    listed = units.run("systemctl", "list-unit-files", "--no-legend", "--no-pager", "specrig-*.service").stdout
    names = [line.split()[0] for line in listed.splitlines() if line.strip()]
    return sorted(n[len("specrig-") : -len(".service")] for n in names if n not in OWN and "@" not in n)


def choose(name: str, progress: Progress, timeout: float = 1800, check: bool = False) -> dict[str, Any]:
    """Make `name` the one that runs, now and at boot, and with it what was off for the ones that stop and can run beside it.

    Returns {changed, unit, stopped: [unit], beside: [unit], seconds}. When it does not come up, all that ran before is started again.
    Raises CHOOSE_UNKNOWN, CHOOSE_BACK, or what `start` raises.
    """
    unit = UNIT.format(name)
    if name not in _known():
        raise HostError(
            "CHOOSE_UNKNOWN", f"no service {name!r:.80} on this host; there are: {', '.join(_known()) or 'none'}",
            "name one of them, or ./rig up", COULD_NOT_RUN,
        )  # fmt: skip
    start.reload_if_needed(unit)
    own = units.show(unit)[0]
    others = start.alternates(own)
    states = {one["Id"]: one for one in units.show(*others)} if others else {}
    running = [u for u, state in states.items() if state["ActiveState"] in start.RUNNING]
    enabled = [u for u, state in states.items() if state.get("UnitFileState") == "enabled"]
    beside = _beside(unit, others)
    done = _on(own) and not running and not enabled and not beside
    result = {"changed": not done, "unit": unit, "stopped": running, "beside": beside, "seconds": 0.0}
    if done or check:
        return result
    progress.update(
        "switching", message=f"{', '.join(running) or 'nothing'} stops, {', '.join([unit, *beside])} starts"
    )
    try:
        _enable([unit], enabled)
        seconds = _start(unit, progress, timeout)["seconds"]
    except HostError as error:
        raise _back(unit, enabled, running, error, progress, timeout) from error
    for other in beside:
        try:
            _start(other, progress, timeout)
        except HostError as error:
            cause = f"{unit} runs, and {other}, which runs beside it, does not: {error.cause}"
            raise HostError(error.code, cause, error.fix, error.status, error.lines) from error
    return {**result, "seconds": seconds}


def _back(
    unit: str, enabled: list[str], running: list[str], error: HostError, progress: Progress, timeout: float
) -> HostError:
    """Back to what ran, all of it: a switch that fails must not leave the cards without a service. Returns what has to be told."""
    units.run("systemctl", "stop", unit, timeout=300)
    before = running or enabled
    if not before:
        return error
    _enable(enabled or running, [unit])
    lost = []
    for other in before:
        try:
            _start(other, progress, timeout)
        except HostError as second:
            lost.append((other, second))
    if lost:
        told = "; ".join(f"{other} did not come back: {second.cause}" for other, second in lost)
        return HostError("CHOOSE_BACK", f"{error.cause}; and {told}", lost[0][1].fix, lines=error.lines)
    again = f"{', '.join(before)} {'runs' if len(before) == 1 else 'run'} again"
    return HostError(error.code, f"{error.cause}; {again}", error.fix, lines=error.lines)


def _on(state: Mapping[str, str]) -> bool:
    """It runs, now and at boot."""
    return state["ActiveState"] == "active" and state.get("UnitFileState") == "enabled"


def _planned() -> list[dict[str, Any]]:
    """The services of the applied plan, in its order; none where there is no such plan."""
    try:
        return [dict(service) for service in json.loads(PLAN.read_text())["services"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _beside(unit: str, others: list[str]) -> list[str]:
    """Planned services that are off, cannot run beside one of `others`, and can beside `unit` and all that stays on; the first declared first."""
    services = _planned()
    states = {one["Id"]: one for one in units.show(*(s["unit"] for s in services))} if services else {}
    on = {u for u, state in states.items() if state.get("UnitFileState") == "enabled"} - set(others) | {unit}
    found = []
    for service in services:
        name, conflicts = str(service["unit"]), set(service.get("conflicts") or [])
        if name != unit and conflicts & set(others) and not conflicts & on and not _on(states[name]):
            on.add(name)
            found.append(name)
    return found


def _start(unit: str, progress: Progress, timeout: float) -> dict[str, Any]:
    """Start it, and prove it as an `up` does, by the entry of the applied plan; just start it where there is none."""
    entry = next((service for service in _planned() if service["unit"] == unit), None)
    if entry is None:
        return start.start(unit, progress, timeout=timeout)
    return switch.switch(switch.Service(entry), progress)


def _enable(wanted: list[str], others: list[str]) -> None:
    """Enabled are `wanted`, and none of `others`."""
    if others:
        units.run("systemctl", "disable", *others, timeout=60)
    done = units.run("systemctl", "enable", *wanted, timeout=60)
    if done.returncode != 0:
        raise HostError(
            "START_REFUSED",
            f"systemctl enable {' '.join(wanted)}: {done.stderr.strip()[:300]}",
            f"systemctl status {wanted[0]}",
        )
