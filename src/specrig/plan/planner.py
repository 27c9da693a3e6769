"""The plan: declaration + lock + facts -> one fully resolved document per host, or refusals."""

from collections.abc import Mapping
from typing import Any

from specrig.plan import versions
from specrig.plan.catalog import Catalog, Gpu, catalog
from specrig.plan.declare import host_declaration, host_facts, parse, profile_of, service_declarations, show
from specrig.plan.refusals import CODES, finding
from specrig.plan.resolve import CPU_KV_GIB, Host, HostCard, Lock, Model, Service, resolve
from specrig.plan.rules import HOST_RULES, SERVICE_RULES
from specrig.plan.types import Facts, Finding, GpuClaim, HostDecl, HostPlan, ServicePlan
from specrig.plan.vram import MIB, kv_bytes_per_token

HUB_ENDPOINT = "https://huggingface.co"
TARGET_PATH, DRAFT_PATH = "/models/target", "/models/draft"
DRAIN_S = 20  # how long the engine may finish running requests after SIGTERM, where the version can
NGRAM = {"ngram_max": 4, "ngram_min": 2}  # prompt lookup window: short enough to hit, long enough to mean something


def plan_host(
    host: str,
    declaration: Mapping[str, Any],
    lock: Mapping[str, Any] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> HostPlan:
    """The plan of one host. Pure; bad input of any type becomes refusals, never an exception."""
    return _plan(host, declaration, Lock(lock), facts)


def plan_hosts(
    declarations: Mapping[str, Mapping[str, Any]],
    lock: Mapping[str, Any] | None = None,
    facts: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, HostPlan]:
    """One plan per host, by name; the lock is read once. `facts` is by host name too."""
    shared = Lock(lock)
    return {name: _plan(name, decl, shared, (facts or {}).get(name)) for name, decl in declarations.items()}


def _plan(name: Any, declaration: Any, lock: Lock, raw_facts: Any) -> HostPlan:
    known = catalog()
    decl, found = host_declaration(declaration)
    facts, more = host_facts(raw_facts)
    profile, faults = profile_of(decl, known)
    found = [*found, *more, *faults, *lock.findings]
    claims, faults = _claims(decl, profile.gpus if profile else [])
    found += faults
    cards, faults = _cards(claims, facts, known)
    found += faults
    driver = facts.driver_version or (decl.rig_driver.version if decl.rig_driver else None)
    branch = int(driver.split(".")[0]) if driver else decl.rig_driver.branch if decl.rig_driver else None
    host = Host(str(name) if isinstance(name, str) else show(name), decl, cards, driver, branch, facts, known)
    services: list[Service] = []
    if not (decl.rig_profile is not None and profile is None and not decl.rig_services):
        declared, faults = service_declarations(decl, profile)
        found += faults
        for item in declared:
            service, faults = resolve(item, host, lock)
            found += faults
            services += [service] if service else []
    for service in services:
        found += [_named(service, f) for rule in SERVICE_RULES for f in rule(service)]
    found += [f for rule in HOST_RULES for f in rule(host, services)]
    found = list(dict.fromkeys(found))
    return HostPlan(
        host=_host_json(host),
        services=tuple(_render(host, service) for service in services),
        models=tuple(_models(host, services)),
        driver=_driver(host, services),
        refusals=tuple(f for f in found if CODES[f.code].level == "refusal"),
        warnings=tuple(f for f in found if CODES[f.code].level == "warning"),
    )


def _named(service: Service, found: Finding) -> Finding:
    return Finding(found.code, f"{service.name}: {found.cause}", found.fix)


def _claims(decl: HostDecl, defaults: list[dict[str, Any]]) -> tuple[list[GpuClaim], list[Finding]]:
    if decl.rig_gpus is not None:
        return decl.rig_gpus, []
    parsed = [parse(GpuClaim, item, "profile.gpus") for item in defaults]
    return [claim for claim, _ in parsed if claim], [f for _, found in parsed for f in found]


def _gpu_named(name: str, known: Catalog) -> str | None:
    """The catalog's key for a card as the driver names it; the longest match wins ("RTX 4070 Ti" over "RTX 4070")."""
    upper = name.upper()
    hits = [(len(m), key) for key, gpu in known.gpus.items() for m in gpu.match if m.upper() in upper]
    return max(hits)[1] if hits else None


def _cards(claims: list[GpuClaim], facts: Facts, known: Catalog) -> tuple[tuple[HostCard, ...], list[Finding]]:
    found: list[Finding] = []
    claimed: list[tuple[str, Gpu, GpuClaim]] = []
    for claim in claims:
        gpu = known.gpus.get(claim.name)
        if gpu is None:
            fix = f"rig_gpus: one of {', '.join(known.gpus)}, or add the card to catalog/gpus.yml"
            found.append(finding("GPU_UNKNOWN", f"rig_gpus names {show(claim.name)}, which the catalog does not have", fix))
        else:
            claimed += [(claim.name, gpu, claim)] * claim.count
    if facts.gpus is None or found:
        return tuple(
            HostCard(i, key, gpu, gpu.vram_mib, claim.display, claim.nvlink) for i, (key, gpu, claim) in enumerate(claimed)
        ), found
    seen = [_gpu_named(fact.name, known) for fact in facts.gpus]
    unknown = [fact.name for fact, key in zip(facts.gpus, seen, strict=True) if key is None]
    if unknown:
        fix = "add the card to catalog/gpus.yml"
        return (), [finding("GPU_UNKNOWN", f"the host has a {show(unknown[0])}, which the catalog does not have", fix)]
    names = [key for key in seen if key is not None]
    if claims and sorted(names) != sorted(key for key, _, _ in claimed):
        cause = f"declared: {_count([k for k, _, _ in claimed])}; the host has: {_count(names)}"
        return (), [finding("GPU_CLAIM_MISMATCH", cause)]
    by_name = {claim.name: claim for claim in claims}
    cards = []
    for i, (key, fact) in enumerate(zip(names, facts.gpus, strict=True)):
        claim = by_name.get(key, GpuClaim(name=key))
        total = fact.memory_total_mib or known.gpus[key].vram_mib
        cards.append(HostCard(i, key, known.gpus[key], total, claim.display, claim.nvlink, fact.uuid))
    return tuple(cards), []


def _count(names: list[str]) -> str:
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "none"


def _host_json(host: Host) -> dict[str, Any]:
    return {
        "name": host.name,
        "profile": host.decl.rig_profile,
        "models_root": host.decl.rig_models_root,
        "hub_endpoint": host.decl.rig_hub_endpoint or HUB_ENDPOINT,
        "docker_daemon_options": host.decl.rig_docker_daemon_options,
        "speculation": host.decl.rig_speculation,
        "gpus": [
            {"index": card.index, "name": card.key, "title": card.gpu.title, "uuid": card.uuid, "vram_mib": card.total_mib}
            for card in host.cards
        ],
    }


def _values(service: Service) -> dict[str, Any]:
    """What the dialect's tables may name."""
    decl, method = service.decl, service.method if service.speculates else "none"
    draft = method in ("draft_model", "pard", "eagle3")
    several = service.tp > 1
    values: dict[str, Any] = {
        "always": True,
        "quiet": True,
        "target_path": TARGET_PATH,
        "served_name": decl.served_name or decl.name,
        "host": "0.0.0.0",  # noqa: S104  # inside the container; the host side publishes on `bind`
        "port": service.engine.container_port,
        "max_model_len": decl.max_model_len,
        "max_num_seqs": decl.max_num_seqs,
        "gpu_memory_utilization": f"{decl.gpu_memory_utilization:g}" if service.cuda else None,
        "tensor_parallel": service.tp if several else None,
        "executor": "mp" if several else None,
        "no_custom_all_reduce": several and not service.bridged,
        "no_p2p": several and service.host.facts.p2p in (None, "none") and not service.bridged,
        "eager": service.eager,
        "reasoning_parser": service.target.reasoning_parser,
        "reasoning_parser_switch": service.target.reasoning_parser is not None,
        "drain_s": DRAIN_S,
    }
    if method == "none":
        return values
    return values | {
        "k": service.k,
        "spec_method": "draft_model" if method == "pard" else method,
        "spec_model": DRAFT_PATH if draft else None,
        "spec_model_legacy": DRAFT_PATH if draft else "[ngram]",
        "draft_tensor_parallel": service.draft_tp if draft and (several or decl.draft_tensor_parallel) else None,
        "parallel_drafting": method == "pard",
        "heterogeneous_vocab": service.vocab == "heterogeneous",
        "runner_v1": service.cuda and method in ("draft_model", "pard"),
        **(NGRAM if method == "ngram" else {}),
    }


def _mount(artefact: Mapping[str, Any], inside: str) -> dict[str, Any]:
    return {"artefact": artefact["id"], "path": artefact["path"], "path_in_container": inside}


def _render(host: Host, service: Service) -> ServicePlan:
    decl, values = service.decl, _values(service)
    graphs = service.cuda and not service.eager
    root = host.decl.rig_models_root
    models = [_mount(_artefact(root, service.target), TARGET_PATH)]
    if service.uses_draft and service.draft is not None:
        pad = service.target.config.vocab_size if service.padded else None
        models.append(_mount(_artefact(root, service.draft, pad), DRAFT_PATH))
    return ServicePlan(
        name=decl.name,
        engine=decl.engine,
        version=service.version,
        image=service.image,
        device=decl.device,
        entrypoint=list(service.speaking.entrypoint),
        argv=service.speaking.argv(values) + decl.extra_args,
        env={**service.speaking.env(values), **decl.env},
        ports=[{"bind": decl.bind, "port": decl.port, "container_port": service.engine.container_port}],
        unit=f"specrig-{decl.name}.service",
        models=models,
        # Tensor-parallel workers exchange through /dev/shm; it is a limit, not a reservation.
        shm_size_mb=10240 if service.tp > 1 else 1024,
        gpus=list(service.gpus),
        served_name=values["served_name"],
        health_path=service.engine.health_path,
        k=service.k if service.speculates else 0,
        method=service.method if service.speculates else "none",
        # Loading is disk-bound; capturing graphs and compiling comes on top (70-90 s cold on an H200).
        start_timeout_s=900 + (service.target.weights >> 20) // 100 + (600 if graphs else 0),
        stop_timeout_s=DRAIN_S + 40,
        vram=_memory(service),
        pair={},
        notes=list(decl.notes),
    )


def _memory(service: Service) -> dict[str, Any]:
    if service.ledger is not None:
        return service.ledger.as_json()
    if service.cuda:
        return {}
    space = service.decl.env.get("VLLM_CPU_KVCACHE_SPACE", "")
    gib = int(space) if space.isascii() and space.isdigit() and len(space) < 5 else CPU_KV_GIB
    per_token = kv_bytes_per_token(service.target.config, 1)
    if service.uses_draft and service.draft is not None:
        per_token += kv_bytes_per_token(service.draft.config, 1)
    return {"device": "cpu", "kv_mib": gib * 1024, "kv_bytes_per_token": per_token, "kv_tokens": gib * 1024 * MIB // per_token}


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
    return {
        "branch": branch,
        "have": host.driver or (str(host.driver_branch) if host.driver_branch else None),
        "min_version": need.min_driver,
        "cuda": cuda,
        "reason": f"{service.decl.engine} {service.version} carries CUDA {cuda}, which needs driver {need.min_driver} or newer",
    }
