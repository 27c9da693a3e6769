"""Starts one of several services that share their cards and cannot run side by side; the others stop and stay off at boot."""

from __future__ import annotations

import contextlib
import json
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
    """Make `name` the one that runs, now and at boot. Returns {changed, unit, stopped: [unit], seconds}.

    When it does not come up, what ran before is started again. Raises CHOOSE_UNKNOWN, CHOOSE_BACK, or what `start` raises.
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
    running = [u for u, state in states.items() if state["ActiveState"] in ("active", "activating", "reloading")]
    enabled = [u for u, state in states.items() if state.get("UnitFileState") == "enabled"]
    done = own["ActiveState"] == "active" and own.get("UnitFileState") == "enabled" and not running and not enabled
    if done or check:
        return {"changed": not done, "unit": unit, "stopped": running, "seconds": 0.0}
    progress.update("switching", message=f"{', '.join(running) or 'nothing'} stops, {unit} starts")
    _enable(unit, enabled)
    try:
        result = _start(name, progress, timeout)
    except HostError as error:
        # Back to what ran: a switch that fails must not leave the cards without a service.
        units.run("systemctl", "stop", unit, timeout=300)
        if not enabled and not running:
            raise
        before = running or enabled
        _enable(before[0], [unit])
        try:
            _start(before[0][len("specrig-") : -len(".service")], progress, timeout)
        except HostError as second:
            raise HostError(
                "CHOOSE_BACK", f"{error.cause}; and {before[0]} did not come back: {second.cause}", second.fix,
                lines=error.lines,
            ) from error  # fmt: skip
        raise HostError(error.code, f"{error.cause}; {before[0]} runs again", error.fix, lines=error.lines) from error
    return {"changed": True, "unit": unit, "stopped": running, "seconds": result["seconds"]}


def _start(name: str, progress: Progress, timeout: float) -> dict[str, Any]:
    """Start it, and prove it as an `up` does, by the entry of the applied plan; just start it where there is none."""
    with contextlib.suppress(OSError, ValueError, KeyError, StopIteration):
        services = json.loads(PLAN.read_text())["services"]
        entry = next(service for service in services if service["name"] == name)
        return switch.switch(switch.Service(entry), progress)
    return start.start(UNIT.format(name), progress, timeout=timeout)


def _enable(unit: str, others: list[str]) -> None:
    """Enabled is `unit`, and none of `others`."""
    if others:
        units.run("systemctl", "disable", *others, timeout=60)
    done = units.run("systemctl", "enable", unit, timeout=60)
    if done.returncode != 0:
        raise HostError(
            "START_REFUSED", f"systemctl enable {unit}: {done.stderr.strip()[:300]}", f"systemctl status {unit}"
        )
