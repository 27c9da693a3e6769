"""Every rule the plan is judged by: small functions that yield findings, and the two lists that are run."""

from collections.abc import Callable, Iterator

from specrig.plan.refusals import finding
from specrig.plan.resolve import Host, Service
from specrig.plan.types import Finding

ServiceRule = Callable[[Service], Iterator[Finding]]
HostRule = Callable[[Host, list[Service]], Iterator[Finding]]


def models_are_locked(s: Service) -> Iterator[Finding]:
    """Nothing can be staged without a revision."""
    for model in [s.target, *([s.draft] if s.uses_draft and s.draft else [])]:
        if model.locked is None:
            yield finding("MODEL_UNLOCKED", f"{model.ref.repo} is not locked", f"./rig models lock {model.ref.repo}")


SERVICE_RULES: list[ServiceRule] = [models_are_locked]
HOST_RULES: list[HostRule] = []
