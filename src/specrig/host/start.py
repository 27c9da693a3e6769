"""Starts a unit and stays with it until it is active, saying what the engine does; or says why it did not come up."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from typing import Any

from specrig.host import turns, units
from specrig.host.errors import COULD_NOT_RUN, HostError
from specrig.host.progress import Progress

POLL_S = 0.5
TAIL = 30
# What a process wrote last may reach the journal after systemd has seen it end.
SETTLE_S = 0.3
# Failed tries that make a start failed: one may be bad luck (a card not free yet), two are a cause.
TRIES = 2
RUNNING = ("active", "activating", "reloading")
_UNIT = re.compile(r"[A-Za-z0-9:_.@-]{1,200}\.(service|timer|socket|target)")


def _state(unit: str) -> dict[str, str]:
    found = units.show(unit)[0]
    if found.get("LoadState") == "not-found":
        raise HostError("START_NO_UNIT", f"{unit} is not installed on this host", "./rig up", COULD_NOT_RUN)
    if found.get("LoadState") not in ("loaded", None):
        raise HostError(
            "START_BAD_UNIT", f"{unit} is {found.get('LoadState')}", f"systemd-analyze verify {unit}", COULD_NOT_RUN
        )
    return found


def _failed(unit: str, cause: str, lines: list[units.Line], invocation: str, code: str = "START_FAILED") -> HostError:
    """The error, with the last lines of this start and of no earlier one."""
    ours = [line.text for line in lines if not invocation or line.invocation in ("", invocation)][-TAIL:]
    return HostError(code, f"{unit} {cause}", f"journalctl -u {unit} -n 200", lines=ours)


def alternates(properties: dict[str, str]) -> list[str]:
    """The specrig services that cannot run beside this one: those that its unit conflicts with."""
    return [u for u in properties.get("Conflicts", "").split() if re.fullmatch(r"specrig-[a-z0-9-]+\.service", u)]


def read_once(unit: str, own: Iterable[str] = ()) -> list[str]:
    """Files that a service reads at its start and never again: unit, key, what the container runs before the engine, configuration of its own."""
    name = unit.removeprefix("specrig-").removesuffix(".service")
    wrappers = (f"/usr/local/lib/specrig/{file}" for file in ("with-api-key", "specrig_guard.py"))
    return [f"/etc/systemd/system/{unit}", f"/etc/specrig/services/{name}/api-key", *wrappers, *own]


def reload_if_needed(unit: str) -> None:
    """Make systemd read its units again, only when it says that `unit` is new or has changed.

    A needless daemon-reload can take a card away from containers that already run.
    """
    found = units.show(unit)[0]
    if found.get("LoadState") == "not-found" or found.get("NeedDaemonReload") == "yes":
        units.run("systemctl", "daemon-reload", timeout=120)


def start(
    unit: str,
    progress: Progress,
    restart: bool = False,
    timeout: float = 1800,
    check: bool = False,
    enable: bool = False,
    after: Sequence[str] = (),
) -> dict[str, Any]:
    """`systemctl start|restart` and follow it. Returns {changed, unit, state, seconds}; raises HostError START_*.

    A unit that runs since before one of the files `after` was written is restarted. `enable` also makes it start at boot.
    With `check` nothing is done: changed says whether something would be.
    """
    if not _UNIT.fullmatch(unit):
        raise HostError(
            "START_NO_UNIT",
            f"{unit!r:.200} is not a unit's name",
            "name a unit, such as specrig-chat.service",
            COULD_NOT_RUN,
        )
    if check and units.show(unit)[0].get("LoadState") == "not-found":
        return {"changed": True, "unit": unit, "state": "not-found", "seconds": 0.0}
    if not check:
        reload_if_needed(unit)
    before = _state(unit)
    restart = restart or units.older_than(before, after)
    # A unit without [Install] is "static": there is nothing to enable, now or at the next run.
    others = alternates(before) if enable else []
    idle = before["ActiveState"] not in RUNNING and before.get("UnitFileState") != "enabled"
    if others and idle and any(other.get("UnitFileState") == "enabled" for other in units.show(*others)):
        # Another service has the cards, by the plan's order or by `./rig switch`; that stays so.
        return {"changed": False, "unit": unit, "state": "alternate", "seconds": 0.0}
    enable = enable and before.get("UnitFileState") in ("disabled", "enabled-runtime", "linked", "linked-runtime")
    if enable and not check:
        done = units.run("systemctl", "enable", unit)
        if done.returncode != 0:
            raise HostError(
                "START_REFUSED", f"systemctl enable {unit}: {done.stderr.strip()[:300]}", f"systemctl status {unit}"
            )
    if before["ActiveState"] == "active" and not restart:
        return {"changed": enable, "unit": unit, "state": "active", "seconds": 0.0}
    if check:
        return {"changed": True, "unit": unit, "state": before["ActiveState"], "seconds": 0.0}
    begin, clock = time.time(), time.monotonic()
    units.run(
        "systemctl", "reset-failed", unit
    )  # a person's (or a play's) start is a new try: clear the restart budget
    verb = "restart" if restart else "start"
    done = units.run("systemctl", verb, "--no-block", unit)
    if done.returncode != 0:
        raise HostError(
            "START_REFUSED",
            f"systemctl {verb} {unit}: {done.stderr.strip()[:300]}",
            f"systemctl status {unit}",
            COULD_NOT_RUN,
        )
    lines: list[units.Line] = []
    phase, cursor, restarts, waited, last = "starting", "", 0, 0.0, clock
    base = int(before.get("NRestarts") or 0)
    while True:
        now = _state(unit)  # before the journal: the lines that explain a state are older than it
        seconds = round(time.monotonic() - clock, 1)
        invocation, active, sub = now.get("InvocationID", ""), now["ActiveState"], now["SubState"]
        if active == "failed":
            time.sleep(SETTLE_S)
        fresh = units.journal(unit, begin, cursor)
        cursor = fresh[-1].cursor if fresh else cursor
        lines = (lines + fresh)[-2000:]
        phase, _, detail = (now.get("StatusText") or phase).partition(", ")
        tick = time.monotonic()
        waited, last = waited + (tick - last if turns.waits(phase) else 0.0), tick
        idle = now.get("Job", "0") in ("", "0")
        progress.update(phase, message=detail or f"{active}/{sub}")
        if active == "active" and idle:
            return {"changed": True, "unit": unit, "state": active, "seconds": seconds, "restarts": restarts}
        if active == "failed":
            how = f"{now.get('Result')}, exit status {now.get('ExecMainStatus')}"
            cause = f"failed ({how}) after {seconds:.0f} s in phase '{phase}'"
            raise _failed(unit, cause, lines, invocation)
        if active == "inactive" and idle and seconds > 2:
            raise _failed(
                unit,
                f"ended without an error or was not started (condition: {now.get('ConditionResult')})",
                lines,
                invocation,
            )
        # systemd counts a new try when it begins; a unit that waits for one has failed once more than that.
        count = int(now.get("NRestarts") or 0)
        base = min(base, count)
        failures = count - base + sub.startswith("auto-restart")
        if failures > restarts:
            restarts = failures
            if failures >= TRIES:
                cause = f"failed {failures} times in a row ({now.get('Result')}), {seconds:.0f} s after the first start"
                raise _failed(unit, cause, lines, "", "START_LOOP")
        if seconds - waited > timeout:
            raise _failed(
                unit,
                f"is still {active}/{sub} after {timeout:.0f} s, in phase '{phase}'",
                lines,
                invocation,
                "START_TIMEOUT",
            )
        time.sleep(POLL_S)
