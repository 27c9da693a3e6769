"""Power limits of the cards, and sleep: set as planned, read back, and taken back again; whether their fans can follow a curve.

Input, as the plan has it: {state: present|absent, cards: [{gpu: "all"|index|UUID, watts | percent, clocks_mhz: [low, high]|null}],
fans: [{gpu, curve: [[°C, %], …]}], mask_sleep}. A later entry beats an earlier one; percent is of the card's own default
limit. A limit outside of what the card itself reports is refused before any card is touched. Where the card takes no limit at
all, the clock lock is tried if there is one; a card that takes neither is reported, and is no failure.
Curves are only looked at, and refused before anything is set; fan-curve, a process that stays, follows them. Where none is
declared any more, fans that such a process took and left are given back.
Output: {ok, changed, cards: [{index, uuid, name, default_w, wanted_w, limit_w, how, said}], fans: [see fan-curve],
sleep_targets: [changed ones]}; how is limit, clocks, unsupported or default.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from specrig.host import fans, machine
from specrig.host.errors import COULD_NOT_RUN, HostError
from specrig.host.machine import Machine

SLEEP_TARGETS = ("sleep.target", "suspend.target", "hibernate.target", "hybrid-sleep.target")
# What we set, by UUID. A limit does not outlive the driver in memory, so neither does this.
REMEMBERED = "run/specrig/gpu-tuning.json"
# Which sleep targets we masked: those are the ones to unmask.
MASKED = "var/lib/specrig/sleep-targets.json"
TRIES, PAUSE_S = 3, 2.0
SAME_W = 0.5
# How nvidia-smi says that this card takes no limit; with the first it ends with status 0 ("Treating as warning").
NOT_TAKEN = re.compile(r"not supported|insufficient permissions|not permitted|no permission", re.IGNORECASE)
# Below this share of busy time a difference in power is one of the load, not of the limit.
BUSY_PERCENT, SETTLE_S = 80, 5.0

Sleep = Callable[[float], None]


def parse(text: str) -> dict[str, Any]:
    """The job. Raises HostError TUNING_JOB."""
    try:
        job = json.loads(text)
        cards = [{"watts": None, "percent": None, "clocks_mhz": None, **card} for card in job.get("cards") or []]
        for card in cards:
            clocks = card["clocks_mhz"]
            name = card["gpu"]
            if (card["watts"] is None) == (card["percent"] is None) or (clocks is not None and len(clocks) != 2):
                raise ValueError(f"card {name!r} needs watts or percent, and two clocks if any")
        return {
            "state": job.get("state", "present"),
            "cards": cards,
            "fans": fans.entries(job),
            "mask_sleep": bool(job.get("mask_sleep")),
        }
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise HostError(
            "TUNING_JOB", f"cannot read the job: {error}", "see specrig-host gpu-tuning --help", COULD_NOT_RUN
        ) from None


def _read(path: Path) -> Any:
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_text())
    return {}


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value, sort_keys=True))
    part.replace(path)


def targets(job: Mapping[str, Any], gpus: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """{uuid: {wanted_w, clocks_mhz}}; wanted_w is None where percent is asked and the card has no default.

    Raises HostError TUNING_NO_CARD, TUNING_RANGE.
    """
    found: dict[str, dict[str, Any]] = {}
    for entry in job["cards"] if job["state"] == "present" else ():
        named = [g for i, g in enumerate(gpus) if entry["gpu"] in ("all", i, g["uuid"])]
        if not named:
            there = ", ".join(f"{i} {g['uuid']}" for i, g in enumerate(gpus)) or "none"
            raise HostError("TUNING_NO_CARD", f"no card {entry['gpu']}; there are: {there}", "correct rig_gpu_tuning")
        for gpu in named:
            power, watts = gpu["power_w"], entry["watts"]
            if watts is None and power["default"]:
                watts = round(power["default"] * entry["percent"] / 100)
            found[gpu["uuid"]] = {"wanted_w": watts, "clocks_mhz": entry["clocks_mhz"]}
    for gpu in gpus:
        watts = found.get(gpu["uuid"], {}).get("wanted_w")
        low, high = gpu["power_w"]["min"], gpu["power_w"]["max"]
        if watts is not None and low is not None and high is not None and not low <= watts <= high:
            cause = f"{watts} W is asked of {gpu['name']} ({gpu['uuid']}), which takes {low:g} to {high:g} W"
            raise HostError("TUNING_RANGE", cause, f"power_limit: a value from {low:g} to {high:g}")
    return found


def _cards(m: Machine, wait_s: float, sleep: Sleep) -> tuple[list[dict[str, Any]] | None, str]:
    """The cards, as soon as the driver tells of them."""
    deadline = time.monotonic() + wait_s
    while True:
        gpus, error = machine.gpus(m)
        if gpus or time.monotonic() >= deadline:
            return gpus, error
        sleep(PAUSE_S)


def _limit(m: Machine, uuid: str) -> float | None:
    gpus, _ = machine.gpus(m)
    return next((gpu["power_w"]["current"] for gpu in gpus or [] if gpu["uuid"] == uuid), None)


def _is(limit: float | None, watts: float | None) -> bool:
    return limit is not None and watts is not None and abs(limit - watts) < SAME_W


def _smi(m: Machine, uuid: str, *words: str) -> tuple[bool, str]:
    said = m.run("nvidia-smi", f"--id={uuid}", *words)
    text = " ".join(f"{said.out} {said.err}".split()) if said else "nvidia-smi is not here"
    return said is not None and said.rc == 0, text


def _set(m: Machine, gpu: Mapping[str, Any], target: Mapping[str, Any], sleep: Sleep) -> tuple[str, str]:
    """Set the limit, or the clocks instead: (how, the tool's words). Raises HostError TUNING_REFUSED."""
    uuid, watts, words = gpu["uuid"], target["wanted_w"], "the card reports no default limit to take a part of"
    for attempt in range(TRIES if watts is not None else 0):
        if attempt:
            sleep(PAUSE_S)
        _, words = _smi(m, uuid, f"--power-limit={watts}")
        if _is(_limit(m, uuid), watts):  # its own word is not enough: it ends with 0 also when it did nothing
            return "limit", words
        if NOT_TAKEN.search(words):
            break
    else:
        if watts is not None:
            limit = _limit(m, uuid)
            cause = f"{gpu['name']} ({uuid}) is at {limit} W after {TRIES} tries to set {watts} W; nvidia-smi: {words[:300]}"
            raise HostError(
                "TUNING_REFUSED", cause, "journalctl --dmesg --grep NVRM; is another program setting limits?"
            )
    if target["clocks_mhz"]:
        low, high = target["clocks_mhz"]
        fine, more = _smi(m, uuid, f"--lock-gpu-clocks={low},{high}")
        if fine and not NOT_TAKEN.search(more):
            return "clocks", more
        words = f"{words} {more}"
    return "unsupported", words[:300]


def _restore(m: Machine, gpu: Mapping[str, Any], was: Mapping[str, Any]) -> None:
    """The card as it was before us."""
    if was.get("how") == "clocks":
        _smi(m, gpu["uuid"], "--reset-gpu-clocks")
    if was.get("how") == "limit" and gpu["power_w"]["default"] is not None:
        _smi(m, gpu["uuid"], f"--power-limit={gpu['power_w']['default']:g}")


def _known(was: Mapping[str, Any], target: Mapping[str, Any]) -> bool:
    """Whether this card has answered this wish before, in a way that cannot be read back."""
    return was.get("how") in ("clocks", "unsupported") and {**target, "how": was["how"]} == dict(was)


def sleep_targets(m: Machine, mask: bool, check: bool) -> list[str]:
    """Mask the sleep targets, or unmask those that we masked; those that were (would be) changed."""

    def masked(name: str) -> bool:
        link = m.path(f"etc/systemd/system/{name}")
        return link.is_symlink() and str(link.readlink()) == "/dev/null"

    record = m.path(MASKED)
    ours = list(_read(record) or [])
    todo = [n for n in SLEEP_TARGETS if not masked(n)] if mask else [n for n in ours if masked(n)]
    if check:
        return todo
    if mask and todo:
        _write(record, sorted({*ours, *todo}))  # before: an interrupted run must not forget what it masked
    if todo:
        said = m.run("systemctl", "mask" if mask else "unmask", *todo)
        if said is None or said.rc:
            words = " ".join(said.err.split())[-300:] if said else "systemctl is not here"
            raise HostError("HOST_SYSTEMD", f"systemctl cannot change {', '.join(todo)}: {words}", "systemctl --failed")
    if not mask:
        record.unlink(missing_ok=True)
    return todo


def tuning(
    text: str,
    check: bool = False,
    again: bool = False,
    wait_s: float = 0.0,
    m: Machine | None = None,
    sleep: Sleep = time.sleep,
) -> dict[str, Any]:
    """Carry the job out. `again`, at boot, also sets what cannot be read back (clocks); `wait_s` for the driver to come up."""
    m, job = m or Machine(), parse(text)
    present = job["state"] == "present"
    remembered: dict[str, dict[str, Any]] = _read(m.path(REMEMBERED))
    slept = sleep_targets(m, present and job["mask_sleep"], check=True)
    gpus, error = _cards(m, wait_s, sleep) if job["cards"] or job["fans"] or remembered else ([], "")
    if gpus is None:
        if check:
            return {"changed": True, "cards": [], "fans": [], "sleep_targets": slept, "note": error}
        if present:
            raise HostError(
                "TUNING_NO_DRIVER", f"nvidia-smi: {error}", "systemctl status nvidia-persistenced", COULD_NOT_RUN
            )
        gpus = []
    wanted = targets(job, gpus)
    fanned = fans.look(job["fans"]) if job["fans"] and not again else []  # limits at boot do not hang on fans
    given = [] if job["fans"] or fans.watched(m) else fans.give_back(m, check)
    left = [gpu for gpu in gpus if gpu["uuid"] in remembered and gpu["uuid"] not in wanted]
    due = [
        gpu
        for gpu in gpus
        if gpu["uuid"] in wanted
        and not _is(gpu["power_w"]["current"], wanted[gpu["uuid"]]["wanted_w"])
        and (again or not _known(remembered.get(gpu["uuid"], {}), wanted[gpu["uuid"]]))
    ]
    loose = [gpu for gpu in gpus if gpu["uuid"] in wanted and not gpu["persistence"]]
    if check:
        cards = [_row(i, gpu, wanted, remembered) for i, gpu in enumerate(gpus)]
        return {
            "changed": bool(left or due or loose or slept or given),
            "cards": cards,
            "fans": fanned,
            "sleep_targets": slept,
        }
    slept = sleep_targets(m, present and job["mask_sleep"], check=False)
    said: dict[str, str] = {}
    for gpu in left:
        _restore(m, gpu, remembered.pop(gpu["uuid"]))
        _write(m.path(REMEMBERED), remembered)
    for gpu in gpus:
        target = wanted.get(gpu["uuid"])
        if target is None:
            continue
        how = "limit" if _is(gpu["power_w"]["current"], target["wanted_w"]) else ""
        if gpu in due:
            how, said[gpu["uuid"]] = _set(m, gpu, target, sleep)
        if how and remembered.get(gpu["uuid"]) != {**target, "how": how}:
            if remembered.get(gpu["uuid"], {}).get("how") == "clocks" and how != "clocks":
                _smi(m, gpu["uuid"], "--reset-gpu-clocks")
            remembered[gpu["uuid"]] = {**target, "how": how}
            _write(m.path(REMEMBERED), remembered)
    if not remembered:
        m.path(REMEMBERED).unlink(missing_ok=True)
    gpus = _persistent(m, wanted, wait_s, sleep) if wanted else machine.gpus(m)[0] or []
    cards = [{**_row(i, gpu, wanted, remembered), "said": said.get(gpu["uuid"], "")} for i, gpu in enumerate(gpus)]
    return {"changed": bool(left or due or slept or given), "cards": cards, "fans": fanned, "sleep_targets": slept}


def _row(
    index: int, gpu: Mapping[str, Any], wanted: Mapping[str, Any], remembered: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "index": index,
        "uuid": gpu["uuid"],
        "name": gpu["name"],
        "default_w": gpu["power_w"]["default"],
        "wanted_w": wanted.get(gpu["uuid"], {}).get("wanted_w"),
        "limit_w": gpu["power_w"]["current"],
        "how": remembered.get(gpu["uuid"], {}).get("how", "default"),
    }


def _persistent(m: Machine, wanted: Mapping[str, Any], wait_s: float, sleep: Sleep) -> list[dict[str, Any]]:
    """The cards once persistence mode is on for those that have a limit. Raises HostError TUNING_PERSISTENCE."""
    deadline = time.monotonic() + wait_s
    while True:
        gpus, error = machine.gpus(m)
        off = [gpu for gpu in gpus or [] if gpu["uuid"] in wanted and not gpu["persistence"]]
        if gpus and not off:
            return gpus
        if time.monotonic() >= deadline:
            which = ", ".join(gpu["uuid"] for gpu in off) or error
            cause = f"persistence mode is off, so limits go when the last program ends: {which}"
            raise HostError("TUNING_PERSISTENCE", cause, "sudo systemctl enable --now nvidia-persistenced")
        sleep(PAUSE_S)


def _samples(m: Machine, seconds: float, sleep: Sleep) -> dict[str, tuple[float, float]]:
    """{uuid: (mean W, mean percent busy)} of about one sample a second."""
    rows: dict[str, list[tuple[float, float]]] = {}
    for _ in range(max(1, round(seconds))):
        said = m.run("nvidia-smi", "--query-gpu=uuid,power.draw,utilization.gpu", "--format=csv,noheader,nounits")
        for line in said.out.splitlines() if said else []:
            with contextlib.suppress(ValueError):
                uuid, watts, busy = (word.strip() for word in line.split(","))
                rows.setdefault(uuid, []).append((float(watts), float(busy)))
        sleep(1.0)
    return {uuid: (fmean(w for w, _ in seen), fmean(b for _, b in seen)) for uuid, seen in rows.items()}


def measure(text: str, seconds: float, m: Machine | None = None, sleep: Sleep = time.sleep) -> dict[str, Any]:
    """Watts that the limits save under the load of the moment: measured at the default limit, then at the planned one.

    {changed: false, cards: [{uuid, limit_w, default_w, at_default_w, at_limit_w, busy_percent: [,], saved_w, why}]};
    saved_w is null, and `why` says it, when a card was not busy in both. The planned limits are back at the end.
    """
    m, job = m or Machine(), parse(text)
    gpus, error = machine.gpus(m)
    if gpus is None:
        raise HostError(
            "TUNING_NO_DRIVER", f"nvidia-smi: {error}", "systemctl status nvidia-persistenced", COULD_NOT_RUN
        )
    limits = {uuid: t["wanted_w"] for uuid, t in targets(job, gpus).items()}
    tuned = [
        gpu for gpu in gpus if gpu["power_w"]["default"] and _is(gpu["power_w"]["current"], limits.get(gpu["uuid"]))
    ]
    try:
        for gpu in tuned:
            _smi(m, gpu["uuid"], f"--power-limit={gpu['power_w']['default']:g}")
        sleep(SETTLE_S)
        before = _samples(m, seconds, sleep)
    finally:
        for gpu in tuned:
            _smi(m, gpu["uuid"], f"--power-limit={limits[gpu['uuid']]}")
    sleep(SETTLE_S)
    after = _samples(m, seconds, sleep)
    rows = []
    for gpu in tuned:
        (high, busy), (low, still) = before.get(gpu["uuid"], (0.0, 0.0)), after.get(gpu["uuid"], (0.0, 0.0))
        loaded = min(busy, still) >= BUSY_PERCENT
        rows.append(
            {
                "uuid": gpu["uuid"],
                "limit_w": limits[gpu["uuid"]],
                "default_w": gpu["power_w"]["default"],
                "at_default_w": round(high, 1),
                "at_limit_w": round(low, 1),
                "busy_percent": [round(busy), round(still)],
                "saved_w": round(high - low, 1) if loaded else None,
                "why": "" if loaded else f"the card was busy less than {BUSY_PERCENT} % of the time",
            }
        )
    off = [gpu["uuid"] for gpu in tuned if not _is(_limit(m, gpu["uuid"]), limits[gpu["uuid"]])]
    if off:
        raise HostError(
            "TUNING_REFUSED",
            f"the limit did not come back on {', '.join(off)}",
            "sudo systemctl restart specrig-gpu-tuning",
        )
    return {"changed": False, "cards": rows}
