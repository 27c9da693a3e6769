"""Power limits and fan curves: what is asked must be something that the card can do and that cools it; and the job of the host."""

from collections.abc import Iterator
from typing import Any

from specrig.host.curve import fault
from specrig.plan.declare import show
from specrig.plan.refusals import finding
from specrig.plan.resolve import Host, HostCard, Service
from specrig.plan.types import CardTuning, Finding, GpuTuningDecl


def _entries(decl: GpuTuningDecl) -> Iterator[tuple[str, CardTuning]]:
    """Each limit or curve with its path in the declaration; that of all cards first."""
    every = CardTuning(gpu="all", power_w=decl.power_w, power_percent=decl.power_percent, fan_curve=decl.fan_curve)
    if every != CardTuning(gpu="all"):
        yield "rig_gpu_tuning", every
    for index, card in enumerate(decl.cards):
        yield f"rig_gpu_tuning.cards[{index}]", card


def _named(host: Host, gpu: int | str) -> list[HostCard]:
    """The cards that an entry may mean: a UUID is known only once the host has told it."""
    if gpu == "all" or (isinstance(gpu, str) and all(card.uuid is None for card in host.cards)):
        return list(host.cards)
    return [card for card in host.cards if gpu in (card.index, card.uuid)]


def limits_are_possible(host: Host, _services: list[Service]) -> Iterator[Finding]:
    """A limit outside of the card's own range is refused here; the host checks again what the card itself reports."""
    decl = host.decl.rig_gpu_tuning
    if decl is None or decl.state == "absent" or not host.cards_clear:
        return
    if decl.clock_lock is not None and decl.clock_lock.min_mhz > decl.clock_lock.max_mhz:
        cause = f"clock_lock goes from {decl.clock_lock.min_mhz} to {decl.clock_lock.max_mhz} MHz"
        yield finding("GPU_TUNING_CONTRADICTION", cause, "min_mhz below max_mhz")
    if decl.clock_lock is not None and not list(_limits(decl)):
        yield finding("GPU_TUNING_CONTRADICTION", "clock_lock is set, and no power limit that it could stand in for")
    # One card may be named by its index and by its UUID.
    meant = [(card.gpu, [c.index for c in _named(host, card.gpu)]) for card in decl.cards]
    said = [numbers[0] if len(numbers) == 1 else gpu for gpu, numbers in meant]
    for twice in {number: None for number in said if said.count(number) > 1}:
        cause = f"rig_gpu_tuning.cards names {show(twice)} twice"
        yield finding("GPU_TUNING_CONTRADICTION", cause, "each card once")
    for path, entry in _entries(decl):
        if entry.power_w is not None and entry.power_percent is not None:
            yield finding("GPU_TUNING_CONTRADICTION", f"{path} has both power_w and power_percent")
            continue
        if entry.power_w is None and entry.power_percent is None and entry.fan_curve is None:
            cause = f"{path} has neither power_w nor power_percent, and no fan_curve"
            yield finding("GPU_TUNING_CONTRADICTION", cause)
            continue
        if entry.fan_curve is not None and (why := fault(entry.fan_curve)):
            yield finding("GPU_FAN_CURVE", f"{path}.fan_curve: {why}")
        cards = _named(host, entry.gpu)
        if not cards:
            known = f"the host has {len(host.cards)} card(s)"
            yield finding("GPU_TUNING_CARD", f"{path} names {show(entry.gpu)}; {known}")
        if entry.power_w is None and entry.power_percent is None:
            continue
        # A UUID that nobody has told yet may be any of the cards: refused only when none of them could do it.
        bad = [found for card in cards if (found := _beyond(path, entry, card))]
        if bad and (len(bad) == len(cards) or entry.gpu == "all"):
            yield bad[0]


def _limits(decl: GpuTuningDecl) -> list[CardTuning]:
    return [entry for _, entry in _entries(decl) if entry.power_w is not None or entry.power_percent is not None]


def _beyond(path: str, entry: CardTuning, card: HostCard) -> Finding | None:
    least, default, most = card.watts
    watts = entry.power_w if entry.power_w is not None else default * (entry.power_percent or 0) / 100
    if least <= watts <= most:
        return None
    asked = f"{watts:g} W" + ("" if entry.power_w is not None else f" ({entry.power_percent} % of {default:g} W)")
    cause = f"{path} asks {asked} of {card.gpu.title}, which takes {least:g} to {most:g} W"
    return finding("GPU_POWER_LIMIT", cause, f"power_w: a value from {least:g} to {most:g}")


def tuning_job(host: Host) -> dict[str, Any] | None:
    """What `specrig-host gpu-tuning` is given; None where nothing is declared."""
    decl = host.decl.rig_gpu_tuning
    if decl is None:
        return None
    lock = decl.clock_lock
    cards = [
        {
            "gpu": entry.gpu,
            "watts": entry.power_w,
            "percent": entry.power_percent,
            "clocks_mhz": [lock.min_mhz, lock.max_mhz] if lock else None,
        }
        for entry in _limits(decl)
    ]
    fans = [{"gpu": entry.gpu, "curve": entry.fan_curve} for _, entry in _entries(decl) if entry.fan_curve is not None]
    return {"state": decl.state, "cards": cards, "fans": fans, "mask_sleep": decl.mask_sleep}
