"""How two cards talk to each other: NVLink, peer access over PCIe, or through the host's memory."""

from collections.abc import Iterator

from specrig.plan.refusals import finding
from specrig.plan.resolve import Host, HostCard, Service, linked
from specrig.plan.types import Facts, Finding


def _why_not(facts: Facts, cards: tuple[HostCard, ...]) -> str:
    """Why these cards have no NVLink between them; empty when they may have one."""
    lacking = [card for card in cards if not card.gpu.nvlink]
    if lacking:
        return f"{lacking[0].gpu.title} has no NVLink connector"
    if len(cards) < 2:
        return f"there is {len(cards)} card"
    if linked(facts, cards) is False:
        return f"the host's cards are joined by {facts.p2p or ', '.join(facts.links.values())}"
    return ""


def bridges_are_there(host: Host, _services: list[Service]) -> Iterator[Finding]:
    """A bridge that is claimed must be possible, and must not be contradicted by the host."""
    cards = tuple(card for card in host.cards if card.nvlink)
    if cards and (why := _why_not(host.facts, cards)):
        yield finding("NVLINK_ABSENT", f"rig_gpus says nvlink: true; {why}")


def cards_can_talk(s: Service) -> Iterator[Finding]:
    """What `p2p` asks for must be there, and what it uses must be straight."""
    if s.decl.p2p == "nvlink":
        why = f"tensor_parallel is {s.tp}" if s.tp < 2 or not s.cuda else _why_not(s.host.facts, s.cards)
        if why and (s.host.cards_clear or s.tp < 2):
            yield finding("NVLINK_ABSENT", f"p2p is nvlink; {why}", "p2p: auto")
    if s.p2p == "pcie":
        bridges, iommu = s.host.facts.acs_redirect, s.host.facts.iommu
        ways = [f"ACS redirects at {', '.join(bridges)}"] if bridges else []
        ways += ["the IOMMU translates"] if iommu.on and not iommu.passthrough else []
        if ways:
            yield finding("P2P_REDIRECTED", f"the cards talk over PCIe, and {' and '.join(ways)}")
