"""Lets a service run with what is on the disk now, and proves it; or goes back to what was proven before.

The unit that is written is new until it has answered, and has speculated as it should. A new one that fails is taken back: the
proven files are put in their place again and the old service is started. How long nothing answered is measured and told.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrig.host import diagnosis, handing, images, proof, proven, pull, retire, start, units
from specrig.host.errors import COULD_NOT_RUN, HostError
from specrig.host.progress import Progress
from specrig.host.proven import Home, read_files
from specrig.host.status import PLAN

SERVICES = Path("/etc/specrig/services")


class Service:
    """One service of a plan, as it is on this host."""

    def __init__(self, entry: Mapping[str, Any]) -> None:
        try:
            self.entry = dict(entry)
            self.name, self.unit = str(entry["name"]), str(entry["unit"])
            self.timeout = float(entry["start_timeout_s"])
            self.image = str(entry["image"])
            self.paths = [proven.UNITS / self.unit, *(Path(f["path"]) for f in entry.get("files") or [])]
        except (KeyError, TypeError, ValueError) as error:
            raise HostError("SWITCH_JOB", f"the job is no service: {error!r}", "./rig up", COULD_NOT_RUN) from error
        if "/" in self.name or self.name in ("", ".", ".."):
            raise HostError("SWITCH_JOB", f"{self.name!r} is no service's name", "./rig up", COULD_NOT_RUN)
        self.key = SERVICES / self.name / "api-key"
        self.home = Home(self.name)

    @property
    def key_file(self) -> Path | None:
        """The key, where the service has one."""
        return self.key if self.key.exists() else None

    def start(self, progress: Progress, restart: bool = False, check: bool = False) -> dict[str, Any]:
        """Start, or restart where it runs with older files."""
        after = start.read_once(self.unit, (str(path) for path in self.paths[1:]))
        return start.start(self.unit, progress, restart, self.timeout, check, True, after)

    def record(
        self, started: Mapping[str, Any], speculation: Mapping[str, Any], downtime: float | None
    ) -> dict[str, Any]:
        """What is written down of a generation that has proved itself."""
        image = (images.found(self.image) or ("", {}))[1]
        return {
            "service": self.entry,
            "image": self.image,
            "image_id": image.get("Id"),
            "seconds": started.get("seconds"),
            "downtime_s": downtime,
            "speculation": dict(speculation),
        }


@dataclass(frozen=True)
class Giver:
    """A service that runs by its proven `record` and stops because its new files leave `what` to another one."""

    service: Service
    record: Mapping[str, Any]
    what: list[str]


def job(text: str) -> tuple[Service, list[Service]]:
    """The service of a job document {"service": the plan's entry, "planned": those of all}, and all of them."""
    try:
        document = json.loads(text)
        return Service(document["service"]), [Service(entry) for entry in document.get("planned") or []]
    except (ValueError, KeyError, TypeError) as error:
        raise HostError("SWITCH_JOB", f"cannot read the job: {error!r}", "./rig up", COULD_NOT_RUN) from error


def switch(
    service: Service,
    progress: Progress,
    check: bool = False,
    planned: Sequence[Service] = (),
    down_since: float | None = None,
) -> dict[str, Any]:
    """Have `service` run with the files that are there, and prove it.

    Those of `planned` that run and, by their new files, leave memory or a port to it stop before and are switched after it; they run
    by their proven files again when it fails. `down_since`: when it was stopped itself, for such a one.

    Returns {changed, unit, state, seconds, downtime_s, speculation, warnings}. Raises HostError START_* where nothing was proven
    before; UPGRADE_UNDONE when the proven one runs again, UPGRADE_STUCK when it does not.
    """
    due = service.start(progress, check=True)
    if due["state"] == "alternate":  # another one that shares its cards was chosen: nothing to start, nothing to prove
        return {**due, "downtime_s": None, "speculation": {}, "warnings": [], "told": [f"{service.name} is not chosen"]}
    content = read_files(service.paths)
    old = service.home.get("proven")
    same = old is not None and old["id"] == proven.identity(content)
    if not due["changed"] and old is not None and same and old.get("service") == service.entry:
        told = {**_told(service, due, old.get("speculation") or {}, None), "told": []}
        if check:  # what runs is what is wanted again: the setback is to be forgotten, and nothing is without a run
            return {**told, "changed": service.home.setback() is not None}
        service.home.remember_setback(None)
        return {**told, "changed": False}
    if check:
        return {"changed": True, "unit": service.unit, "state": due["state"]}
    warnings = way_back(old, progress) if old is not None and not same else []
    givers = _givers(service, (old or {}).get("service") or {}, planned, progress) if due["changed"] else []
    was_up = due["state"] == "active" or down_since is not None
    begin = down_since or time.monotonic()
    down: float | None = None
    stopped = time.monotonic()
    try:
        for giver in givers:
            progress.update("making room", message=f"{giver.service.unit} stops: {', '.join(giver.what)}")
            units.run("systemctl", "stop", giver.service.unit, timeout=retire.STOP_S)
        started = service.start(progress)
        down = round(time.monotonic() - begin, 1) if was_up and started["seconds"] else None
        speculation = proof.prove(service.entry, service.key_file, progress)
        bound = speculation["bound"] is not None and speculation["on"]
        if speculation["short"] and bound and old is not None and not same:
            raise HostError(
                "PROOF_SHORT", f"{service.name}: {speculation['cause']}", "a lower min_acceptance, another draft"
            )
    except HostError as error:
        if (old is None or same) and not givers:
            raise
        failure = error if old is None or same else undo(service, old, error, begin, was_up, progress)
        raise _given_back(service, givers, failure, progress) from error
    service.home.keep(content, service.record(started, speculation, down))
    service.home.remember_setback(None)
    answer = _told(service, started, speculation, down)
    warnings, lines = [*warnings, *answer["warnings"]], answer["told"]
    for giver in givers:
        try:
            more = switch(giver.service, progress, planned=planned, down_since=stopped)
        except HostError as error:
            cause = f"{service.unit} runs by its new files. {error.cause}"
            raise HostError(error.code, cause, error.fix, error.status, error.lines) from error
        warnings, lines = [*warnings, *more["warnings"]], [*lines, *more["told"]]
    return {**answer, "changed": True, "warnings": warnings, "told": lines}


def _givers(service: Service, was: Mapping[str, Any], planned: Sequence[Service], progress: Progress) -> list[Giver]:
    """Who of `planned` holds what `service` is about to take over, and is to be restarted without it anyway."""
    found = []
    for other in planned:
        record = other.home.get("proven")
        if record is None or other.unit in (service.unit, *(service.entry.get("conflicts") or [])):
            continue
        what = handing.handed_over(record["service"], other.entry, was, service.entry)
        due = other.start(progress, check=True) if what else {"changed": False}
        if due["changed"] and due["state"] in start.RUNNING:
            found.append(Giver(other, record, what))
    return found


def _given_back(service: Service, givers: Sequence[Giver], failure: HostError, progress: Progress) -> HostError:
    """Have those that stopped for `service` run by their proven files again, after `failure`; return what has to be told."""
    if givers and failure.code not in ("UPGRADE_UNDONE", "UPGRADE_STUCK"):
        # It has nothing to go back to, and would go on trying to get what it was to take over.
        units.run("systemctl", "stop", service.unit, timeout=retire.STOP_S)
    cause, lines = failure.cause, failure.lines
    for giver in givers:
        progress.update("going back to the proven one", message=giver.service.unit)
        proven.restore(giver.service.home.files(str(giver.record["id"])))
        how = "runs by its proven files again"
        try:
            Service(giver.record["service"]).start(progress, restart=True)
        except HostError as error:
            how = f"did not come back ({error.code}: {error.cause})"
            lines = [*lines, *error.lines]
        cause += f". {giver.service.unit} had stopped for it ({', '.join(giver.what)}) and {how}"
    return HostError(failure.code, cause, failure.fix, failure.status, lines)


def tried(service: Service) -> str:
    """Names a plan of a service: its settings and the very image."""
    image = (images.found(service.image) or ("", {}))[1]
    return hashlib.sha256(json.dumps([service.entry, image.get("Id")], sort_keys=True).encode()).hexdigest()


def held(service: Service, retry: bool = False) -> bool:
    """Whether this very plan was tried and taken back. Without `retry` raises HostError UPGRADE_HELD: it would cost the same again."""
    setback = service.home.setback() or {}
    if not setback.get("tried") or setback["tried"] != tried(service):
        return False
    if retry:
        return True
    seen = setback.get("diagnosis")
    raise HostError(
        "UPGRADE_HELD",
        f"{service.unit}: this plan was tried {_when(setback)} and taken back ({setback['code']}: {setback['cause']}). Nothing was changed:"
        " the proven one goes on running, and the host is not at its plan",
        "change what failed (image, version, settings); or ./rig up --retry"
        + (f"; why: sudo less {seen}" if seen else ""),
    )


def way_back(old: Mapping[str, Any], progress: Progress) -> list[str]:
    """Have the proven image here before anything is stopped; a warning where it cannot be had any more."""
    try:
        pull.pull(str(old["image"]), progress, archive=images.planned_archive())
    except HostError as error:
        return [f"there will be no way back to {old['image']}: {error.code}: {error.cause}"]
    return []


def _state(unit: str) -> str:
    return units.show(unit)[0].get("ActiveState", "")


def words(speculation: Mapping[str, Any]) -> str:
    """The acceptance as people say it."""
    if not speculation.get("on"):
        return "no speculation" + (
            "" if speculation.get("drafted") is None else f", {speculation['drafted']} drafted tokens"
        )
    parts = []
    if (rate := speculation.get("acceptance")) is not None:
        parts.append(f"α {rate:.2f}")
    if (drafted := speculation.get("drafted")) is not None:
        parts.append(f"{speculation.get('accepted')} of {drafted} drafted tokens accepted")
    if (length := speculation.get("mean_length")) is not None:
        parts.append(f"mean acceptance length {length:.2f}")
    return ", ".join(parts) or "acceptance unknown: the engine does not say"


def _told(
    service: Service, started: Mapping[str, Any], speculation: Mapping[str, Any], down: float | None
) -> dict[str, Any]:
    pause = "" if down is None else f"; nothing answered for {down:.0f} s"
    line = f"{service.name} is ready after {started['seconds']:.0f} s{pause}; {words(speculation)}"
    warnings = [f"{service.name}: {speculation['cause']}"] if speculation.get("short") else []
    return {**started, "downtime_s": down, "speculation": dict(speculation), "warnings": warnings, "told": [line]}


def undo(
    service: Service, old: Mapping[str, Any], error: HostError, begin: float, was_up: bool, progress: Progress
) -> HostError:
    """Go back to the proven generation after `error`; return what has to be told."""
    progress.update("going back to the proven one", message=error.code)
    before = Service(old["service"])
    back = f"{before.image}, proven {_when(old)}"
    proven.restore(service.home.files(str(old["id"])))
    setback = {"code": error.code, "cause": error.cause, "from": old["image"], "to": service.image, "by": "upgrade"}
    service.home.remember_setback(setback)
    try:
        before.start(progress, restart=True)
    except HostError as again:
        return HostError(
            "UPGRADE_STUCK",
            f"{service.unit}: the new one failed ({error.code}: {error.cause}), and the proven one ({back}) does not start"
            f" either ({again.code}: {again.cause})",
            f"journalctl -u {service.unit} -n 200",
            lines=[*error.lines, *again.lines],
        )
    down = time.monotonic() - begin
    seen = [file for file in diagnosis.files(service.name) if file.stat().st_mtime >= time.time() - down]
    # By it the next `up` knows this plan again, and leaves it; see `held`.
    setback |= {"downtime_s": round(down, 1), "tried": tried(service), "diagnosis": str(seen[0]) if seen else None}
    service.home.remember_setback(setback)
    told = f"nothing answered for {down:.0f} s at most" if was_up else "it did not run before"
    return HostError(
        "UPGRADE_UNDONE",
        f"{service.unit}: the new one failed ({error.code}: {error.cause}). The proven one runs again ({back}); {told}",
        "correct the cause and declare it, then ./rig up; or ./rig up --retry. Until then the rig serves what it did before",
        lines=error.lines,
    )


def _when(record: Mapping[str, Any]) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(record.get("at") or 0))


# -- by hand -------------------------------------------------------------------------------------------------------


def chosen(name: str | None) -> Home:
    """The service to go back with: the one named, or the only one that has a record."""
    every = list(proven.homes())
    found = [home for home in every if name in (None, home.path.name)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(home.path.name for home in every) or "none"
    if name is None and every:
        raise HostError("ROLLBACK_WHICH", f"several services have a record: {names}", "./rig rollback HOST SERVICE")
    raise HostError(
        "ROLLBACK_NOTHING", f"{name or 'no service'} has never been proven here (proven: {names})", "./rig up"
    )


def rollback(name: str | None, progress: Progress, check: bool = False) -> dict[str, Any]:
    """Go back to what was proven before what is there now; a second time goes forward again.

    A service that shares its cards and is not chosen is not started: only what it will run changes.

    Returns {changed, service, from, to, downtime_s, stay, …}. Raises HostError ROLLBACK_*, PULL_*, START_*.
    """
    home = chosen(name)
    now, previous = home.get("proven"), home.get("previous")
    if now is None:
        raise HostError("ROLLBACK_NOTHING", f"{home.path.name} has never been proven here", "./rig up")
    current = Service(now["service"])
    there = read_files(current.paths)
    # What lies there and was never proven is left for what was.
    target = now if proven.identity(there) != now["id"] else previous
    if target is None:
        raise HostError(
            "ROLLBACK_NOTHING",
            f"{home.path.name} has one proven generation ({now['image']}, {_when(now)}) and none before it",
            "./rig status",
        )
    wanted = Service(target["service"])
    if lost := [m["path"] for m in target["service"].get("models") or [] if not Path(m["path"]).is_dir()]:
        raise HostError(
            "ROLLBACK_MODELS",
            f"{home.path.name}: {', '.join(lost)} is not on this host any more",
            "declare that revision in the inventory: ./rig up stages it",
        )
    answer = {"service": home.path.name, "from": now["image"], "to": target["image"], "proven_at": target.get("at")}
    if check:
        return {"changed": True, **answer}
    pull.pull(wanted.image, progress, archive=images.planned_archive())
    was_up = _state(wanted.unit) == "active"
    begin = time.monotonic()
    proven.restore(home.files(str(target["id"])))
    try:
        started = wanted.start(progress, restart=True)
        down = round(time.monotonic() - begin, 1) if was_up else None
        chosen_not = (
            started["state"] == "alternate"
        )  # it waits for its turn, and another may have its port: nothing to ask
        speculation = (
            dict(target.get("speculation") or {})
            if chosen_not
            else proof.prove(wanted.entry, wanted.key_file, progress)
        )
    except HostError as error:
        proven.restore(there)
        now_runs, lines = "what ran before runs again", error.lines
        try:
            current.start(progress, restart=True)
        except HostError as again:
            now_runs = f"what ran before does not start either ({again.code}: {again.cause})"
            lines = [*lines, *again.lines]
        raise HostError(
            "ROLLBACK_FAILED",
            f"{home.path.name}: {target['image']} did not come up ({error.code}: {error.cause}); {now_runs}",
            f"journalctl -u {wanted.unit} -n 200",
            lines=lines,
        ) from error
    record = {key: value for key, value in target.items() if key != "id"}
    home.keep(home.files(str(target["id"])), record if chosen_not else wanted.record(started, speculation, down))
    home.remember_setback(
        {"code": "BY_HAND", "cause": "./rig rollback", "from": now["image"], "to": target["image"], "by": "hand"}
    )
    _amend_plan(wanted.entry)
    return {
        "changed": True,
        **answer,
        "downtime_s": down,
        "speculation": speculation,
        "alternate": chosen_not,
        "stay": stay(target["service"], now["service"]),
    }


# Fields of a declaration that are the plan's own words; what else differs follows from them.
_SAME = ("version", "k", "method")


def stay(target: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """What to declare for the service so that the next plan is this one: the fields that can be told from the two plans."""
    wanted = {field: target[field] for field in _SAME if target.get(field) != now.get(field)}
    if target.get("image") != now.get("image"):
        wanted["image"] = target["image"]
    return wanted


def _amend_plan(entry: Mapping[str, Any], plan_file: Path = PLAN) -> None:
    """The applied plan names what runs: then `status`, `verify` and `gc` speak of that, and of the difference to the inventory."""
    try:
        plan = json.loads(plan_file.read_text())
        services = plan["services"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    plan["services"] = [dict(entry) if s.get("name") == entry["name"] else s for s in services]
    plan["plan_hash"] = f"rolled back: {entry['name']}"
    proven.write(plan_file, (json.dumps(plan, indent=4, sort_keys=True) + "\n").encode())
