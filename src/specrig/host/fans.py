"""Fans at a curve for as long as somebody watches, and the card's own control on every way out.

Input: the job of gpu-tuning, of which `fans` counts: [{gpu: "all"|index|UUID, curve: [[°C, %], …]}]; a later entry beats an
earlier one. Which cards were taken is written down before the first is, so that what comes after a kill -9 can give them back.
`--check` changes nothing: {changed: false, fans: [{index, uuid, name, fans, takes_percent: [,], temperature_c, slowdown_c, manual,
asked_percent, curve}]}. `--automatic` gives back what was taken: {changed, given_back: [uuid]}.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specrig.host.curve import BEYOND_C, Follower, fault
from specrig.host.errors import COULD_NOT_RUN, HostError
from specrig.host.machine import Machine
from specrig.host.nvml import REFUSALS, Card, Nvml, NvmlError
from specrig.host.progress import write_json
from specrig.host.service import notify

EVERY_S = 2.0
# UUIDs of the cards whose fans we have; systemd makes the directory and leaves it.
TAKEN = "run/specrig/gpu-fans/taken.json"
UNIT = "specrig-gpu-fans.service"
# A reading beyond these is none.
PLAUSIBLE_C = range(1, 126)
# Looks in a row at which something else had set the fans.
MISSES, SAME_PERCENT = 3, 2


def entries(job: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a job says of fans; nothing where its state is absent. Raises HostError FANS_CURVE."""
    try:
        wanted = (job.get("fans") or []) if job.get("state", "present") == "present" else []
        found = [{"gpu": entry["gpu"], "curve": entry["curve"]} for entry in wanted]
    except (TypeError, KeyError):
        raise HostError(
            "FANS_CURVE", "an entry of fans has gpu and curve", "see rig_gpu_tuning", COULD_NOT_RUN
        ) from None
    for entry in found:
        if why := fault(entry["curve"]):
            raise HostError("FANS_CURVE", f"card {entry['gpu']}: {why}", "correct fan_curve", COULD_NOT_RUN)
    return found


@contextlib.contextmanager
def asking(whom: object = "the driver") -> Iterator[None]:
    """Calls of the library; what it does not answer well becomes HostError FANS_REFUSED (for good) or FANS_LOST."""
    try:
        yield
    except NvmlError as error:
        if error.result in REFUSALS:
            fix = "as root? else: no fan_curve for this card"
            raise HostError("FANS_REFUSED", f"{whom}: {error}", fix, COULD_NOT_RUN) from None
        raise HostError("FANS_LOST", f"{whom}: {error}", "journalctl --dmesg --grep NVRM") from None


@dataclass
class Fans:
    """One card's fans, and what was last done with them."""

    card: Card
    count: int
    curve: list[list[int]]
    bounds: tuple[int, int]
    slowdown_c: int | None
    follower: Follower
    celsius: int = 0
    percent: int | None = None  # None: the card's own control
    misses: int = 0

    def __str__(self) -> str:
        how = "automatic" if self.percent is None else f"{self.percent} %"
        hot = f", too hot for its curve (from {self.follower.hot_c} °C)" if self.follower.hot else ""
        return f"card {self.card.index} {self.celsius} °C {how}{hot}"


def chosen(nvml: Nvml, wanted: Sequence[Mapping[str, Any]]) -> list[Fans]:
    """The fans of the cards that are named. Raises HostError."""
    with asking():
        cards = nvml.cards()
    curves: dict[str, list[list[int]]] = {}
    for entry in wanted:
        named = [card.uuid for card in cards if entry["gpu"] in ("all", card.index, card.uuid)]
        if not named:
            there = ", ".join(f"{card.index} {card.uuid}" for card in cards) or "none"
            cause = f"no card {entry['gpu']}; there are: {there}"
            raise HostError("TUNING_NO_CARD", cause, "correct rig_gpu_tuning", COULD_NOT_RUN)
        curves.update(dict.fromkeys(named, entry["curve"]))
    found = []
    for card in cards:
        if card.uuid not in curves:
            continue
        curve = curves[card.uuid]
        with asking(card):
            count = nvml.fans(card)
        if not count:
            fix = "no fan_curve for this card; name those that have fans under cards:"
            raise HostError("FANS_NONE", f"{card} has no fan that software may set", fix, COULD_NOT_RUN)
        with asking(card):
            bounds, slowdown = nvml.bounds(card), nvml.slowdown_c(card)
        if slowdown is not None and curve[-1][0] >= slowdown:
            cause = f"{card} slows down at {slowdown} °C, and its curve comes to 100 % at {curve[-1][0]} °C"
            raise HostError("FANS_CURVE", cause, f"fan_curve: 100 % below {slowdown} °C", COULD_NOT_RUN)
        hot = min(curve[-1][0] + BEYOND_C, slowdown or 1000)
        found.append(Fans(card, count, curve, bounds, slowdown, Follower(curve, hot, *bounds)))
    return found


def _row(nvml: Nvml, fans: Fans) -> dict[str, Any]:
    numbers = range(fans.count)
    return {
        "index": fans.card.index,
        "uuid": fans.card.uuid,
        "name": fans.card.name,
        "fans": fans.count,
        "takes_percent": list(fans.bounds),
        "temperature_c": nvml.celsius(fans.card),
        "slowdown_c": fans.slowdown_c,
        "manual": any(nvml.manual(fans.card, fan) for fan in numbers),
        "asked_percent": [nvml.target(fans.card, fan) for fan in numbers],
        "curve": fans.curve,
    }


def look(wanted: Sequence[Mapping[str, Any]], nvml: Nvml | None = None) -> list[dict[str, Any]]:
    """Each card that has a curve, as it is now; changes nothing. Raises HostError."""
    nvml = nvml or Nvml()
    try:
        every = chosen(nvml, wanted)
        with asking():
            return [_row(nvml, fans) for fans in every]
    finally:
        nvml.close()


def entries_of(text: str) -> list[dict[str, Any]]:
    """The entries in a job's text. Raises HostError FANS_CURVE."""
    try:
        return entries(json.loads(text))
    except (ValueError, AttributeError) as error:
        raise HostError("FANS_CURVE", f"cannot read the job: {error}", "see gpu-tuning", COULD_NOT_RUN) from None


def check(text: str) -> dict[str, Any]:
    """What `--check` prints."""
    return {"changed": False, "fans": look(entries_of(text))}


def taken(m: Machine) -> list[str]:
    """UUIDs of the cards whose fans are, or may be, ours."""
    with contextlib.suppress(OSError, ValueError):
        return list(json.loads(m.path(TAKEN).read_text()))
    return []


def _lock(m: Machine) -> int | None:
    """A handle that says: somebody watches. None while somebody else does. Raises OSError where there is no record."""
    handle = os.open(m.path(TAKEN).parent, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def watched(m: Machine) -> bool:
    """Whether a process follows curves now, and will give back by itself."""
    try:
        handle = _lock(m)
    except OSError:
        return False
    if handle is not None:
        os.close(handle)
    return handle is None


def _release(nvml: Nvml, cards: Sequence[Card]) -> None:
    """Give the fans of `cards` back, every one of them. Raises HostError FANS_STUCK for those that could not be."""
    failed = []
    for card in cards:
        try:
            for fan in range(nvml.fans(card)):
                words = ""
                try:
                    nvml.automatic(card, fan)
                except NvmlError as error:
                    words = f": {error}"
                if nvml.manual(card, fan):  # what it is like counts, not what was answered
                    failed.append(f"{card}, fan {fan} is still at a speed that was set{words}")
        except NvmlError as error:
            failed.append(f"{card}: {error}")
    if failed:
        raise HostError("FANS_STUCK", "; ".join(failed), "reboot: a driver that starts has the fans on automatic")


def give_back(m: Machine, only_look: bool = False, nvml: Nvml | None = None) -> list[str]:
    """Give back what the record says was taken, and forget it; the UUIDs. Raises HostError."""
    ours = taken(m)
    if not ours and not only_look:
        _forget(m)
    if not ours or only_look:
        return ours
    nvml = nvml or Nvml()
    try:
        with asking():
            cards = [card for card in nvml.cards() if card.uuid in ours]
        _settle(m, nvml, cards)
    finally:
        nvml.close()
    return ours


def _forget(m: Machine) -> None:
    record = m.path(TAKEN)
    with contextlib.suppress(OSError):
        record.unlink()
    with contextlib.suppress(OSError):  # the unit may not, and need not
        record.parent.rmdir()


def _settle(m: Machine, nvml: Nvml, cards: Sequence[Card]) -> None:
    """Automatic, then nothing is ours. Raises HostError FANS_STUCK."""
    _release(nvml, cards)
    _forget(m)


def tick(nvml: Nvml, fans: Fans) -> None:
    """Look at the card and do what its curve says. Raises HostError FANS_LOST, FANS_REFUSED, FANS_STUCK."""
    card, numbers = fans.card, range(fans.count)
    with asking(card):
        fans.celsius = nvml.celsius(card)
        if fans.celsius not in PLAUSIBLE_C:
            raise HostError("FANS_LOST", f"{card} says it is at {fans.celsius} °C", "journalctl --dmesg --grep NVRM")
        before, fans.percent = fans.percent, fans.follower.wants(fans.celsius)
        if fans.percent is None:
            if before is not None:
                _release(nvml, [card])
            return
        # Read back what was asked for the last time: fans are lost to another program, or to a driver that started again.
        kept = before is None or all(
            nvml.manual(card, fan) and abs(nvml.target(card, fan) - before) <= SAME_PERCENT for fan in numbers
        )
        fans.misses = 0 if kept else fans.misses + 1
        if fans.misses >= MISSES:
            cause = f"{card} did not keep {before} %, {MISSES} times in a row"
            raise HostError("FANS_REFUSED", cause, "does another program set its fans?", COULD_NOT_RUN)
        if fans.percent != before or not kept:
            for fan in numbers:
                nvml.set(card, fan, fans.percent)


def until_told(seconds: float) -> bool:
    """Wait; whether systemd or a person says that it is enough. Both signals are blocked, so that no call is cut in two."""
    return signal.sigtimedwait({signal.SIGTERM, signal.SIGINT}, seconds) is not None


def _say(every: Sequence[Fans], said: str) -> str:
    """Tell systemd that we live and where we are; the journal, when a fan changed hands."""
    text = "; ".join(str(fans) for fans in every)
    notify("READY=1", f"STATUS={text}", "WATCHDOG=1")
    hands = ", ".join(f"{f.card.index} {f.percent is None} {f.follower.hot}" for f in every)
    if hands != said:
        print(text, file=sys.stderr, flush=True)
    return hands


def follow(
    text: str,
    m: Machine | None = None,
    nvml: Nvml | None = None,
    wait: Callable[[float], bool] = until_told,
) -> dict[str, Any]:
    """Be the unit's main process: {changed: true} when told to end; HostError otherwise. Automatic either way.

    An error with the status 2 is one that the next start would meet again; systemd leaves it at that.
    """
    m = m or Machine()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    wanted = entries_of(text)
    if not wanted:
        raise HostError("FANS_CURVE", "no card has a curve", "rig_gpu_tuning: fan_curve", COULD_NOT_RUN)
    nvml = nvml or Nvml()
    cards: list[Card] = []
    lock = None
    try:
        every = chosen(nvml, wanted)
        m.path(TAKEN).parent.mkdir(parents=True, exist_ok=True)
        lock = _lock(m)
        if lock is None:
            raise HostError("FANS_REFUSED", "another process sets the fans", f"systemctl status {UNIT}", COULD_NOT_RUN)
        left = taken(m)  # by a run that was killed; a card may have lost its curve since
        ours = sorted({*left, *(fans.card.uuid for fans in every)})
        write_json(m.path(TAKEN), ours, 0o644)
        with asking():
            cards, said = [card for card in nvml.cards() if card.uuid in ours], ""
        with contextlib.suppress(HostError):  # fans that are stuck are better watched than not
            _release(nvml, [card for card in cards if card.uuid in left])
        while True:
            for fans in every:
                tick(nvml, fans)
            said = _say(every, said)
            if wait(EVERY_S):
                return {"changed": True}
    finally:
        if (ended := sys.exc_info()[1]) is not None:
            notify(f"STATUS=automatic: {ended}")
        try:
            if cards:
                _settle(m, nvml, cards)
        except HostError as stuck:
            cause = f"{stuck.cause}; it ended because of {ended}" if ended else stuck.cause
            raise HostError(stuck.code, cause, stuck.fix) from None
        finally:
            nvml.close()
            if lock is not None:
                os.close(lock)
