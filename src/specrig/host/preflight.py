"""Looks at a machine before anything is done to it: facts, and findings against what is wanted. Changes nothing.

Input, all of it optional and as the plan has it: {cards: [{title, pci_ids, bar1_mib}], driver: {source, min_version},
models_root, models: [{path, files: [{size}]}], services: [{unit, ports: [{port}]}], time: the controller's, epoch s}.
Output: {ok, changed: false, facts, findings: [{code, level, cause, fix}]}; ok is false when a refusal is among them.
`facts` has what the plan reads under the plan's names: gpus and driver_version.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from specrig.host import docker_api, machine, retire
from specrig.host.errors import COULD_NOT_RUN, HostError
from specrig.host.findings import judge
from specrig.host.machine import Machine

KEYS = {"cards", "driver", "models_root", "models", "services", "time"}


def parse(text: str) -> dict[str, Any]:
    """The input document. Raises HostError PREFLIGHT_INPUT."""
    try:
        wanted = json.loads(text or "{}")
    except ValueError as error:
        raise _refuse(f"it is not JSON: {error}") from None
    if not isinstance(wanted, dict):
        raise _refuse("it is not an object")
    if unknown := sorted(set(wanted) - KEYS):
        raise _refuse(f"it has an unknown key {unknown[0]!r}")
    return wanted


def _refuse(cause: str) -> HostError:
    return HostError(
        "PREFLIGHT_INPUT", f"the input cannot be used: {cause}", "see `specrig-host preflight --help`", COULD_NOT_RUN
    )


def gather(m: Machine, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """All facts of the machine."""
    driver = machine.driver(m)
    gpus, error = machine.gpus(m)
    containers, specs = _containers(m, wanted), machine.cdi(m)
    for gpu in gpus or []:
        for holder in gpu["holders"]:
            group = m.text(f"proc/{holder['pid']}/cgroup")
            holder["ours"] = any(str(found["Id"]) in group for found in containers.values())
    return {
        "os": machine.system(m),
        "kernel": machine.kernel(m),
        "secure_boot": machine.secure_boot(m),
        "driver": driver,
        "driver_version": driver["loaded"],
        "cards": machine.cards(m),
        "gpus": gpus,
        "gpus_error": error,
        "links": machine.links(m) if len(gpus or []) > 1 else {},
        "peers": machine.peers(m) if len(gpus or []) > 1 else {},
        "cdi": {"specs": specs, "stale": machine.stale(m, specs, driver["loaded"], gpus)},
        "iommu": machine.iommu(m),
        "acs_redirect": machine.acs(m),
        "models_root": _models(m, wanted),
        "ports": _ports(m, wanted, containers),
        "apt": machine.apt(m),
        "clock": machine.clock(m, wanted.get("time")),
    }


def _containers(m: Machine, wanted: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Running containers of the services, and of those that `up` will take off: {unit: what Docker says of it}."""
    found = {}
    planned = [str(service["unit"]) for service in wanted.get("services") or []]
    names = [unit[len("specrig-") : -len(".service")] for unit in planned]
    leaving = retire.unplanned(names, m.path("etc/systemd/system")) if planned else {}
    for unit in [*planned, *(path.name for path in leaving.values())]:
        with contextlib.suppress(HostError):  # no Docker yet: then nothing of ours runs
            there = docker_api.inspect_container(unit[: -len(".service")] if unit.endswith(".service") else unit)
            if there and (there.get("State") or {}).get("Running"):
                found[unit] = there
    return found


def _published(container: Mapping[str, Any]) -> set[int]:
    """Ports of the host that lead to a container."""
    bindings = (container.get("HostConfig") or {}).get("PortBindings") or {}
    return {int(one["HostPort"]) for several in bindings.values() for one in several or [] if one.get("HostPort")}


def _ports(m: Machine, wanted: Mapping[str, Any], containers: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    services = wanted.get("services") or []
    planned = [service["unit"] for service in services]

    def gives_way(service: Mapping[str, Any]) -> set[int]:
        """Ports of ours that are free when the service starts: of units that are planned no more, and of those it runs instead of."""
        away = [unit for unit in containers if unit not in planned or unit in (service.get("conflicts") or [])]
        return {port for unit in away for port in _published(containers[unit])}

    taken = machine.listeners(m) if services else {}
    return [
        {
            "unit": service["unit"],
            "port": port["port"],
            "taken": port["port"] in taken,
            "holders": taken.get(port["port"], []),
            # Docker listens for our container; nobody else can while it runs.
            "ours": service["unit"] in containers or port["port"] in gives_way(service),
        }
        for service in services
        for port in service.get("ports") or []
    ]


def _models(m: Machine, wanted: Mapping[str, Any]) -> dict[str, Any] | None:
    root = wanted.get("models_root")
    if not root:
        return None
    absent = [model for model in wanted.get("models") or [] if model.get("path") and not m.path(model["path"]).exists()]
    missing = sum(int(file["size"]) for model in absent for file in model.get("files") or [])
    return {**machine.disk(m, str(root)), "missing_bytes": missing}


def cdi_check(m: Machine | None = None) -> dict[str, Any]:
    """Whether the cards' list for containers is that of now: {changed: it must be written again, loaded, specs, stale}."""
    m = m or Machine()
    loaded, specs = machine.driver(m)["loaded"], machine.cdi(m)
    why = machine.stale(m, specs, loaded, machine.gpus(m)[0])
    return {"changed": bool(why), "loaded": loaded is not None, "specs": specs, "stale": why}


def preflight(text: str, m: Machine | None = None) -> dict[str, Any]:
    """Facts and findings of this machine (or of a recorded one)."""
    wanted = parse(text)
    facts = gather(m or Machine(), wanted)
    findings = judge(facts, wanted)
    return {
        "ok": all(one["level"] != "refusal" for one in findings),
        "changed": False,
        "facts": facts,
        "findings": findings,
    }
