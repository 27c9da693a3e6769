"""The plan: declaration + lock + facts -> one fully resolved document per host, or refusals."""

import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from specrig.plan import compat, exposure, versions
from specrig.plan.catalog import CATALOG, Catalog, Gpu, catalog, gpu_named
from specrig.plan.command import DRAFT_PATH, DRAIN_S, FILES_PATH, TARGET_PATH, values
from specrig.plan.declare import (
    host_declaration,
    host_facts,
    nearest_word,
    parse,
    profile_of,
    service_declarations,
    show,
)
from specrig.plan.pairing import pair_json
from specrig.plan.refusals import CODES, finding
from specrig.plan.resolve import (
    Host,
    HostCard,
    Lock,
    Model,
    Service,
    cpu_cache,
    excludes,
    image_row,
    models_to_ask,
    resolve,
)
from specrig.plan.rules import HOST_RULES, SERVICE_RULES
from specrig.plan.tuning import tuning_job
from specrig.plan.types import DriverClaim, Facts, Finding, GpuClaim, HostDecl, HostPlan, ModelRef, ServicePlan
from specrig.plan.webui import plan_webui, published

ADD_CARD = f"add the card to {CATALOG}/gpus.yml"
HUB_ENDPOINT = "https://huggingface.co"
# Who the engine is: a number that no person and no dynamic user of systemd has, in group 0, which owns its key and its cache.
ENGINE_USER = "61000:0"
# Tokens a second that a busy engine makes at the least.
SLOWEST = {"cuda": 10, "cpu": 2}


def plan_host(
    host: str,
    declaration: Mapping[str, Any],
    lock: Mapping[str, Any] | None = None,
    facts: Mapping[str, Any] | None = None,
    gateway: bool = False,
) -> HostPlan:
    """The plan of one host. Pure; bad input of any type becomes refusals, never an exception. `gateway`: it is one, too."""
    return _plan(host, declaration, Lock(lock), facts, gateway)


def plan_hosts(
    declarations: Mapping[str, Mapping[str, Any]],
    lock: Mapping[str, Any] | None = None,
    facts: Mapping[str, Mapping[str, Any]] | None = None,
    gateways: Collection[str] = (),
) -> dict[str, HostPlan]:
    """One plan per host, by name; the lock is read once. `facts` is by host name too; `gateways`: hosts that are one."""
    shared, told = Lock(lock), facts or {}
    return {name: _plan(name, decl, shared, told.get(name), name in gateways) for name, decl in declarations.items()}


def _plan(name: Any, declaration: Any, lock: Lock, raw_facts: Any, gateway: bool) -> HostPlan:
    known = catalog()
    decl, found, unread = host_declaration(declaration)
    facts, more = host_facts(raw_facts)
    profile, faults = profile_of(decl, known)
    found = [*found, *more, *faults, *lock.findings]
    claims, faults = _claims(decl, profile.gpus if profile else [])
    found += faults
    cards, faults = _cards(claims, facts, known)
    found += faults
    driver, branch = _driver_of(decl, facts)
    label = str(name) if isinstance(name, str) else show(name)
    clear = not unread & {"rig_gpus", "rig_profile"}
    clear = clear and all(f.code not in ("GPU_UNKNOWN", "GPU_CLAIM_MISMATCH", "FACTS_INVALID") for f in found)
    host = Host(label, decl, cards, clear, driver, branch, facts, known, unread)
    services: list[Service] = []
    unknown: list[ModelRef] = []
    if not (decl.rig_profile is not None and profile is None and not decl.rig_services):
        declared, faults = service_declarations(decl, profile)
        found += [f for f in faults if f.code != "NOTHING_DECLARED" or not found]
        for item in declared:
            service, faults = resolve(item, host, lock)
            found += faults
            services += [service] if service else []
            unknown += [] if service else models_to_ask(item, host, lock)
    shown = []
    for service in services:
        own = [_named(service, f) for rule in SERVICE_RULES for f in rule(service)]
        found += own
        shown.append(_masked(service) if exposure.leaks(own) else service)
    found += [f for rule in HOST_RULES for f in rule(host, services)]
    webui, webui_images, faults = plan_webui(host, services, lock, gateway)
    found = list(dict.fromkeys([*found, *faults]))
    return HostPlan(
        host=_host_json(host, services, webui),
        services=tuple(_render(host, service, shown) for service in shown),
        models=(*_models(host, services), *map(_to_lock, unknown)),
        images=(*_images(services), *webui_images),
        driver=_driver(host, services),
        refusals=tuple(f for f in found if CODES[f.code].level == "refusal"),
        warnings=tuple(f for f in found if CODES[f.code].level == "warning"),
    )


def _driver_of(decl: HostDecl, facts: Facts) -> tuple[str | None, int | None]:
    """Exact version and branch: what is declared (it shall become so) beats what is there."""
    wanted = decl.rig_driver
    version = wanted.version if wanted else None
    branch = wanted.branch if wanted else None
    have = facts.driver_version
    if wanted is None or (version is None and have is not None and branch == int(have.split(".")[0])):
        version = have
    return version, int(version.split(".")[0]) if version and branch is None else branch


def _masked(service: Service) -> Service:
    """A service that is refused for a secret, as its plan is shown."""
    decl = service.decl
    own = {"extra_args": exposure.masked_args(decl.extra_args), "env": exposure.masked_env(decl.env)}
    return replace(service, decl=decl.model_copy(update=own))


def _named(service: Service, found: Finding) -> Finding:
    return Finding(found.code, f"{service.name}: {found.cause}", found.fix)


def _claims(decl: HostDecl, defaults: list[dict[str, Any]]) -> tuple[list[GpuClaim], list[Finding]]:
    if decl.rig_gpus is not None:
        return decl.rig_gpus, []
    parsed = [parse(GpuClaim, item, "profile.gpus") for item in defaults]
    return [claim for claim, _ in parsed if claim], [f for _, found in parsed for f in found]


def _cards(claims: list[GpuClaim], facts: Facts, known: Catalog) -> tuple[tuple[HostCard, ...], list[Finding]]:
    found: list[Finding] = []
    claimed: list[tuple[str, Gpu, GpuClaim]] = []
    for claim in claims:
        gpu = known.gpus.get(claim.name)
        if gpu is None:
            family = _letters(claim.name)  # an rtx_5080 is never what a gtx_1080 was meant to be
            near = nearest_word(claim.name.lower(), [key for key in known.gpus if family in ("", _letters(key))])
            fix = f"rig_gpus: one of {', '.join(known.gpus)}, or {ADD_CARD}"
            cause = f"rig_gpus names {show(claim.name)}, which the catalog does not have{near}"
            found.append(finding("GPU_UNKNOWN", cause, fix))
        else:
            claimed += [(claim.name, gpu, claim)] * claim.count
    if facts.gpus is None or found:
        return tuple(
            HostCard(i, key, gpu, gpu.vram_mib, claim.display, claim.nvlink)
            for i, (key, gpu, claim) in enumerate(claimed)
        ), found
    seen = [gpu_named(fact.name) for fact in facts.gpus]
    unknown = [fact.name for fact, key in zip(facts.gpus, seen, strict=True) if key is None]
    if unknown:
        cause = f"the host has a {show(unknown[0])}, which the catalog does not have"
        return (), [finding("GPU_UNKNOWN", cause, ADD_CARD)]
    names = [key for key in seen if key is not None]
    if claims and sorted(names) != sorted(key for key, _, _ in claimed):
        cause = f"declared: {_count([k for k, _, _ in claimed])}; the host has: {_count(names)}"
        return (), [finding("GPU_CLAIM_MISMATCH", cause)]
    by_name = {claim.name: claim for claim in claims}
    cards = []
    for i, (key, fact) in enumerate(zip(names, facts.gpus, strict=True)):
        claim = by_name.get(key, GpuClaim(name=key))
        total = fact.memory_total_mib or known.gpus[key].vram_mib
        cards.append(HostCard(i, key, known.gpus[key], total, claim.display, claim.nvlink, fact.uuid, fact.power_w))
    return tuple(cards), []


def _letters(card: str) -> str:
    """How a card's name begins: rtx of rtx_4090."""
    return re.split(r"[^a-z]", card.lower(), maxsplit=1)[0]


def _count(names: list[str]) -> str:
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "none"


def _host_json(host: Host, services: list[Service], webui: Mapping[str, Any] | None) -> dict[str, Any]:
    return {
        "name": host.name,
        "profile": host.decl.rig_profile,
        "models_root": host.decl.rig_models_root,
        "hub_endpoint": "" if host.decl.rig_models_offline else host.decl.rig_hub_endpoint or HUB_ENDPOINT,
        "hub_limit": host.decl.rig_hub_limit or 0,
        "models_bundle": host.decl.rig_models_bundle or "",
        "models_share": host.decl.rig_models_share or "",
        "images_archive": host.decl.rig_images_archive or "",
        "docker_daemon_options": host.decl.rig_docker_daemon_options,
        "docker_data_root": host.decl.rig_docker_data_root or "",
        "docker_data_root_existing": host.decl.rig_docker_data_root_existing,
        "firewall": {"allow": host.decl.rig_allow_from, "ports": [*exposure.published(services), *published(webui)]},
        "container_toolkit": toolkit.model_dump() if (toolkit := host.decl.rig_container_toolkit) else None,
        "gpu_tuning": tuning_job(host),
        "webui": webui,
        "preflight_ignore": host.decl.rig_preflight_ignore,
        "speculation": host.decl.rig_speculation,
        "gpus": [
            {
                "index": card.index,
                "name": card.key,
                "title": card.gpu.title,
                "uuid": card.uuid,
                "vram_mib": card.total_mib,
                "pci_ids": card.gpu.pci_ids,
                "bar1_mib": card.gpu.bar1_mib,
                "nvlink": card.nvlink,
            }
            for card in host.cards
        ],
    }


def _mount(artefact: Mapping[str, Any], inside: str, model: Model) -> dict[str, Any]:
    mount = {"artefact": artefact["id"], "path": artefact["path"], "path_in_container": inside}
    return mount | ({"file": model.file} if model.file else {})


def _patience(service: Service) -> int:
    """How long a probe may wait behind others' answers where no counter tells a busy engine from a hung one: the longest answer, made slowly."""
    decl = service.decl
    return 0 if service.speaking.progress else max(decl.probe.timeout_s, decl.max_model_len // SLOWEST[decl.device])


def _render(host: Host, service: Service, services: list[Service]) -> ServicePlan:
    decl, said = service.decl, values(service)
    graphs = service.cuda and not service.eager
    root = host.decl.rig_models_root
    models = [_mount(_artefact(root, service.target), TARGET_PATH, service.target)]
    if service.uses_draft and service.draft is not None:
        pad = service.target.config.vocab_size if service.padded else None
        models.append(_mount(_artefact(root, service.draft, pad), DRAFT_PATH, service.draft))
    return ServicePlan(
        name=decl.name,
        engine=decl.engine,
        version=service.version,
        image=service.image,
        device=decl.device,
        entrypoint=list(service.speaking.entrypoint),
        argv=service.speaking.argv(said) + decl.extra_args,
        env={**service.speaking.env(said), **decl.env},
        ports=[{"bind": decl.bind, "port": decl.port, "container_port": service.engine.container_port}],
        unit=_unit(service),
        models=models,
        user=ENGINE_USER,
        # Tensor-parallel workers exchange through /dev/shm, without peer access also the tensors; a limit, no reservation.
        shm_size_mb=(10240 if service.p2p == "off" else 4096) if service.tp > 1 else 1024,
        gpus=list(service.gpus),
        served_name=said["served_name"],
        key_env=service.engine.key_env,
        health_path=service.engine.health_path,
        completion_path=service.engine.completion_path,
        metrics_path=service.engine.metrics_path,
        metrics=dict(service.speaking.metrics),
        progress=list(service.speaking.progress),
        files=[
            {
                "path": f"/etc/specrig/services/{decl.name}/{name}",
                "path_in_container": f"{FILES_PATH}/{name}",
                "content": content,
            }
            for name, content in service.speaking.files(said).items()
        ],
        k=service.k if service.speculates else 0,
        method=service.method if service.speculates else "none",
        # Loading is disk-bound; capturing graphs and compiling comes on top (70-90 s cold on an H200).
        min_acceptance=decl.min_acceptance,
        start_timeout_s=decl.start_timeout_s or 900 + (service.target.weights >> 20) // 100 + (600 if graphs else 0),
        stop_timeout_s=DRAIN_S + 40,
        free_vram=_free_vram(service),
        conflicts=[_unit(other) for other in services if excludes(service, other)],
        probe=decl.probe.model_dump() | {"patience_s": _patience(service)},
        restarts=decl.restarts,
        refused_words=list(service.speaking.refused_words),
        cache_key=_cache_key(service, models),
        vram=_memory(service),
        pair=pair_json(service),
        notes=list(decl.notes),
        p2p=service.p2p,
    )


def _unit(service: Service) -> str:
    return f"specrig-{service.name}.service"


def _free_vram(service: Service) -> dict[str, int]:
    """What the engine takes of each card: it looks at its start whether that much is free, and ends when it is not."""
    if service.ledger is None:
        return {}
    return {str(gpu): card.budget_mib for gpu, card in zip(service.gpus, service.ledger.cards, strict=False)}


def _cache_key(service: Service, models: list[dict[str, Any]]) -> str:
    """Engines key their compile cache by the target only: with another draft they load the wrong graphs and die."""
    parts = [service.image, ENGINE_USER, service.method, *(model["artefact"] for model in models)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _memory(service: Service) -> dict[str, Any]:
    if service.ledger is not None:
        return service.ledger.as_json()
    return {} if service.cuda or service.decl.engine != "vllm" else cpu_cache(service)


def artefact_id(model: Model, pad: int | None = None) -> str:
    """Names an artefact within a plan: "<repo>@<revision>", with "-pad<N>" for a padded copy."""
    return f"{model.ref.repo}@{model.revision or 'unlocked'}" + (f"-pad{pad}" if pad else "")


def _artefact(root: str, model: Model, pad: int | None = None) -> dict[str, Any]:
    revision = model.revision
    if revision and pad:
        revision = f"{revision}-pad{pad}"
    organisation, name = model.ref.repo.split("/", 1)
    files = model.locked.files if model.locked and not pad else []
    return {
        "id": artefact_id(model, pad),
        "repo": model.ref.repo,
        "revision": revision,
        "files": [f.model_dump(exclude_none=True) for f in files],
        "path": f"{root}/{organisation}--{name}/{revision}" if revision else None,
        "derive": {"kind": "pad_vocab", "source": artefact_id(model), "vocab_size": pad} if pad else None,
    }


def _models(host: Host, services: list[Service]) -> list[dict[str, Any]]:
    root, out = host.decl.rig_models_root, {}
    for service in services:
        wanted: list[dict[str, Any]] = [_artefact(root, service.target)]
        if service.uses_draft and service.draft is not None:
            wanted.append(_artefact(root, service.draft))
            if service.padded:
                wanted.append(_artefact(root, service.draft, service.target.config.vocab_size))
        out.update({item["id"]: item for item in wanted})
    return list(out.values())


def _to_lock(ref: ModelRef) -> dict[str, Any]:
    """A model of a service that is not resolved, as `./rig models lock` needs it: of a plan that is refused, so nobody else reads it."""
    return {
        "id": f"{ref.repo}@{ref.revision or 'unlocked'}",
        "repo": ref.repo,
        "revision": ref.revision,
        "file": ref.file,
        "files": [],
        "path": None,
        "derive": None,
    }


def _images(services: list[Service]) -> list[dict[str, Any]]:
    """Images to be on the host, each once."""
    return list({s.image: image_row(s.image, s.declared_image, s.locked_image) for s in services}.values())


def _driver(host: Host, services: list[Service]) -> dict[str, Any]:
    """The driver the services need, what the host has, and the branch to install; empty without cards."""
    on_cards = [service for service in services if service.cuda]
    if not on_cards:
        return {}
    needs = [(host.catalog.drivers.cuda[s.engine.image_of(s.version).cuda], s) for s in on_cards]
    need, service = max(needs, key=lambda pair: versions.key(pair[0].min_driver))
    card_branch = max((card.gpu.min_driver for card in host.cards), default=0)
    branch = host.driver_branch or max(need.branch, card_branch)
    cuda = service.engine.image_of(service.version).cuda
    wanted = host.decl.rig_driver or DriverClaim()
    return {
        "source": wanted.source,
        "branch": branch,
        "version": host.driver,
        "module": compat.driver_module(host, branch),
        "reboot": wanted.reboot,
        "mok": wanted.mok,
        "repository_url": wanted.repository_url or "",
        "repository_key_url": wanted.repository_key_url or "",
        "repository_key_sha256": wanted.repository_key_sha256 or "",
        "installed": host.facts.driver_version,
        "min_version": need.min_driver,
        "cuda": cuda,
        "reason": f"{service.decl.engine} {service.version} carries CUDA {cuda}: driver {need.min_driver} or newer",
    }
