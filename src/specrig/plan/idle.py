"""Fields that nobody would read, given the rest of the declaration: a setting that does nothing is one that somebody believes in."""

from collections.abc import Iterator

from specrig.plan.declare import show
from specrig.plan.refusals import finding
from specrig.plan.resolve import Host, Service
from specrig.plan.types import DriverClaim, Finding, ServiceDecl

_INSTALLS = ("reboot", "mok")
_REPOSITORY = ("repository_url", "repository_key_url", "repository_key_sha256")


def _unused(path: str, value: object, why: str, reader: str = "") -> Finding:
    fix = f"leave {path.rpartition('.')[2]} out" + (f", or {reader}" if reader else "")
    return finding("FIELD_UNUSED", f"{path} is {show(value)}, and {why}", fix)


def host_fields(host: Host, _services: list[Service]) -> Iterator[Finding]:
    """Of the host's variables."""
    driver = host.decl.rig_driver or DriverClaim()
    ignored = {"none": (*_INSTALLS, *_REPOSITORY), "distro": _REPOSITORY, "nvidia": ()}[driver.source]
    for name in ignored:
        value = getattr(driver, name)
        if value != DriverClaim.model_fields[name].default:
            why = f"source is {driver.source}: " + (
                "specrig installs no driver" if name in _INSTALLS else "NVIDIA's repository is not asked"
            )
            reader = "source: distro or nvidia" if name in _INSTALLS else "source: nvidia"
            yield _unused(f"rig_driver.{name}", value, why, reader)
    if host.decl.rig_docker_data_root_existing == "leave" and host.decl.rig_docker_data_root is None:
        why = "rig_docker_data_root is not set: Docker's data stay where they are"
        yield _unused("rig_docker_data_root_existing", "leave", why, "rig_docker_data_root: the directory")


def service_fields(s: Service) -> Iterator[Finding]:
    """Of a service. The switch `rig_speculation` makes no field idle: it is to be turned back."""
    decl = s.decl
    drafts = s.method != "none" and s.k > 0
    if decl.min_acceptance is not None:
        if not drafts:
            yield _unused("min_acceptance", decl.min_acceptance, "nothing is drafted", "a method and k")
        elif s.speaking.metrics["kind"] not in ("counters", "gauge"):
            why = f"{s.engine.title} does not say how many drafted tokens it accepted"
            yield _unused("min_acceptance", decl.min_acceptance, why)
    if s.draft is None or s.method in ("none", "ngram"):
        for name in ("vocab", "draft_tensor_parallel"):
            if name in s.speaking.fields and getattr(decl, name) != ServiceDecl.model_fields[name].default:
                yield _unused(name, getattr(decl, name), f"method {s.method} has no draft model")
    if decl.gpu_memory_utilization is not None and not s.cuda and "gpu_memory_utilization" in s.speaking.fields:
        yield _unused("gpu_memory_utilization", decl.gpu_memory_utilization, f"device is {decl.device}")
    if decl.p2p == "off" and s.tp < 2 and "p2p" in s.speaking.fields:
        yield _unused("p2p", decl.p2p, "tensor_parallel is 1: one card talks to no other")
