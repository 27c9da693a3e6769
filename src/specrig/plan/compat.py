"""Versions, methods, images, drivers and cards: what runs on what."""

import re
from collections.abc import Iterable, Iterator

from specrig.plan import versions
from specrig.plan.catalog import CATALOG
from specrig.plan.declare import show
from specrig.plan.dialects import dialect, methods, nearest
from specrig.plan.refusals import finding
from specrig.plan.resolve import Host, Model, Service, pick_version
from specrig.plan.types import MAX_K_UNMEASURED, Finding, ServiceDecl

_IMAGE = re.compile(
    r"(?P<name>[a-z0-9][a-z0-9._-]*(?::\d{1,5})?(?:/[a-z0-9][a-z0-9._-]*)*)(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?"
    r"(?:@sha256:(?P<digest>[0-9a-f]{64}))?\Z",
    re.ASCII,
)
_TAG_VERSION = re.compile(r"v?(\d+\.\d+\.\d+(?:\.post\d+|\.\d+)?)(?![\d.])")
# What the catalog must call a draft for a method to take it. A PARD model also drafts one token at a time.
DRAFT_KINDS = {"draft_model": ("causal", "pard"), "pard": ("pard",), "eagle3": ("eagle3",)}
MOVING_TAGS = ("latest", "nightly", "main", "stable", "edge", "dev")
# Speculation spends idle arithmetic; a full batch has none. 4090: 1.72x at batch 1, nothing at 16 (vLLM PR #13849).
MAX_SEQS_SPECULATING, WARN_SEQS_SPECULATING = 16, 8


def image_is_pinned(s: Service) -> Iterator[Finding]:
    """A tag that moves makes a rebuild another machine."""
    if s.cuda is False and s.decl.image is None and not s.engine.image_cpu and "cpu" in s.engine.devices:
        yield finding("IMAGE_NOT_FOR_CPU", f"device is cpu, and the official image {s.image} is a CUDA build")
    if fault := image_fault(s.image, s.engine.image.format(version=s.version)):
        yield fault
        return
    match = _IMAGE.match(s.image)
    named = _TAG_VERSION.match(match["tag"] or "") if match else None
    if named and versions.parse(named[1]) != versions.key(s.version):
        fix = f"version: {named[1]}, or another image"
        yield finding("IMAGE_VERSION_MISMATCH", f"image {show(s.image)} says {named[1]}, version says {s.version}", fix)


def image_fault(image: str, instead: str) -> Finding | None:
    """Why `image` can not be run, whatever is in it; `instead` is one that can."""
    match = _IMAGE.match(image)
    if match is None:
        return finding("IMAGE_INVALID", f"image is {show(image)}, not name:tag or name:tag@sha256:<64 hex>")
    tag, digest = match["tag"], match["digest"]
    if (tag is None and digest is None) or tag in MOVING_TAGS:
        cause = f"image is {show(image)}, which moves" + ("" if tag else " (no tag means latest)")
        return finding("IMAGE_LATEST", cause, f"image: {instead}")
    return None


def image_is_locked(s: Service) -> Iterator[Finding]:
    """A tag can be given to another image, or be taken away; a digest stays."""
    yield from unlocked(s.image)


def unlocked(image: str) -> Iterator[Finding]:
    """The warning for an image that only a tag names."""
    match = _IMAGE.match(image)
    if match and match["tag"] and match["tag"] not in MOVING_TAGS and not match["digest"]:
        yield finding("IMAGE_UNLOCKED", f"{image} is a tag without a digest")


def method_exists(s: Service) -> Iterator[Finding]:
    """Speculation methods come and go between versions, and not every engine has each."""
    has = methods(s.decl.engine)
    if s.method not in has:
        cause = f"{s.engine.title} has no method {s.method}; it has {', '.join(has)}"
        yield finding(
            "METHOD_NOT_IN_ENGINE", cause, "method: none" if has == ["none"] else f"method: one of {', '.join(has)}"
        )
    elif s.speculates and not s.method_works:
        near = nearest(s.decl.engine, s.engine.versions, s.version, s.method)
        cause = f"{s.decl.engine} {s.version} has no method {s.method}; nearest that have it: {' and '.join(near)}"
        others = [*near[:-1], s.engine.versions[-1]]
        yield finding("METHOD_VERSION_WINDOW", cause, f"version: {near[-1]} (or {', '.join(others)})")


# Fields that not every engine has a word for (dialects/*.yml: fields).
ENGINE_FIELDS = ("tensor_parallel", "draft_tensor_parallel", "gpu_memory_utilization", "eager", "vocab", "p2p")


def engine_has_the_words(s: Service) -> Iterator[Finding]:
    """What an engine can not be told is refused, not left out."""
    for name in ENGINE_FIELDS:
        value = getattr(s.decl, name)
        if name in s.speaking.fields or value == ServiceDecl.model_fields[name].default:
            continue
        fix = f"leave {name} out"
        if name == "tensor_parallel":
            fix += f"; with gpus: {show_list(range(int(value)))} it spreads the layers over the cards"
        yield finding("ENGINE_FIELD", f"{name} is {show(value)}; {s.engine.title} has no such setting", fix)


def words(values: Iterable[object]) -> str:
    """1, 2 or 4."""
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}" if most else last


def show_list(numbers: Iterable[int]) -> str:
    """[0, 1] as YAML has it."""
    return f"[{', '.join(map(str, numbers))}]"


def engine_fits_device(s: Service) -> Iterator[Finding]:
    """Not every engine runs on a processor alone."""
    if s.decl.device not in s.engine.devices:
        able = ", ".join(name for name, engine in s.host.catalog.engines.items() if s.decl.device in engine.devices)
        cause = f"device is {s.decl.device}; {s.engine.title} runs on {' or '.join(s.engine.devices)} only"
        yield finding("ENGINE_DEVICE", cause, f"device: {s.engine.devices[0]}, or engine: one of {able}")


def engine_reads_the_files(s: Service) -> Iterator[Finding]:
    """An engine reads its own formats: GGUF or safetensors, and in them some quantisations."""
    formats = s.speaking.formats
    for model in (s.target, *([s.draft] if s.draft else [])):
        kind = "gguf" if model.format == "gguf" else str(model.config.quantization or "none")
        takes = formats.get(model.format, [])
        if "any" in takes or kind in takes:
            continue
        reads = " and ".join(
            name if "any" in kinds else f"{name} ({', '.join(kinds)})"
            for name, kinds in formats.items()
            if name != "source"
        )
        cause = f"{model.ref.repo} holds {model.format}" + (f" ({kind})" if model.format != "gguf" else "")
        able = [
            n
            for n in s.host.catalog.engines
            if model.format in dialect(n, s.host.catalog.engines[n].versions[-1]).formats
        ]
        yield finding(
            "MODEL_FORMAT",
            f"{cause}; {s.engine.title} reads {reads}",
            f"a model in that form, or engine: one of {', '.join(able)}",
        )


def engine_is_proven(s: Service) -> Iterator[Finding]:
    """An engine that nobody here has run says so."""
    if s.engine.not_run:
        yield finding("ENGINE_NOT_RUN", f"{s.engine.title}: {s.engine.evidence}")


def k_is_sound(s: Service) -> Iterator[Finding]:
    """K, the method and the draft must say the same thing."""
    k, method, draft = s.decl.k, s.method, s.draft
    if k == 0 and (draft is not None or method != "none"):
        what = f"draft {draft.ref.repo}" if draft else f"method {method}"
        yield finding("K_ZERO_WITH_DRAFT", f"k is 0, yet {what} is declared")
    if k and method == "none":
        yield finding("K_WITHOUT_METHOD", f"k is {k}, yet the method is none")
    if k and k > MAX_K_UNMEASURED and not s.decl.k_measured_reason:
        yield finding("K_UNMEASURED", f"k is {k}, above {MAX_K_UNMEASURED}, without k_measured_reason")
    if method in ("draft_model", "pard", "eagle3") and draft is None:
        yield finding("DRAFT_MISSING", f"method {method} needs a draft")
    if method in ("ngram", "none") and draft is not None:
        yield finding("DRAFT_UNUSED", f"draft {draft.ref.repo} is declared, yet method {method} uses none")
    kinds = DRAFT_KINDS.get(method, ())
    if draft is not None and kinds and draft.ref.repo in s.host.catalog.models and draft.kind not in kinds:
        wanted = " or ".join(kinds)
        yield finding("DRAFT_KIND", f"{draft.ref.repo} is a {draft.kind} model; method {method} takes a {wanted} one")


def concurrency_is_low(s: Service) -> Iterator[Finding]:
    """Speculation under high concurrency is slower than none."""
    if not s.speculates or s.decl.max_num_seqs <= WARN_SEQS_SPECULATING:
        return
    seqs = s.decl.max_num_seqs
    if seqs > MAX_SEQS_SPECULATING:
        cause = f"max_num_seqs is {seqs} with speculation on; above {MAX_SEQS_SPECULATING} it costs throughput"
        yield finding(
            "SPEC_HIGH_CONCURRENCY", cause, f"max_num_seqs: {WARN_SEQS_SPECULATING}, or rig_speculation: false"
        )
    else:
        yield finding(
            "SPEC_CONCURRENCY", f"max_num_seqs is {seqs}; speculation gains little above {WARN_SEQS_SPECULATING}"
        )


def cards_serve(s: Service) -> Iterator[Finding]:
    """The service's cards must exist, be as many as TP, and be built for."""
    have, tp = len(s.host.cards), s.tp
    if not s.cuda:
        if s.decl.gpus:
            yield finding("GPUS_ON_CPU", f"device is cpu, yet gpus lists {len(s.decl.gpus)}")
        if tp > 1:
            yield finding("TP_ON_CPU", f"device is cpu, yet tensor_parallel is {tp}")
        return
    if not s.host.cards_clear:
        return
    if have == 0:
        yield finding("DEVICE_NEEDS_GPU", "device is cuda, yet the host declares no card")
        return
    if tp > have:
        yield finding(
            "TP_EXCEEDS_GPUS",
            f"tensor_parallel is {tp}, the host has {have} card(s)",
            f"tensor_parallel: {max(_possible_tp(s))}",
        )
        return
    if len(set(s.gpus)) < len(s.gpus):
        yield finding("GPU_LISTED_TWICE", "gpus lists a card twice")
    elif len(s.cards) < len(s.gpus):
        yield finding(
            "GPU_INDEX_UNKNOWN", f"gpus names {len(s.gpus)} card(s), {len(s.cards)} of them exist (0 to {have - 1})"
        )
    elif len(s.gpus) != tp and "tensor_parallel" in s.speaking.fields:
        yield finding(
            "GPUS_TP_MISMATCH",
            f"gpus lists {len(s.gpus)} card(s), tensor_parallel is {tp}",
            f"tensor_parallel: {len(s.gpus)}",
        )
    if len({card.key for card in s.cards}) > 1:
        yield finding("TP_MIXED_CARDS", f"tensor parallel over {' and '.join(dict.fromkeys(c.key for c in s.cards))}")
    image = s.engine.image_of(s.version)
    for card in {card.key: card for card in s.cards}.values():
        compute = versions.key(card.gpu.compute)
        if compute < versions.key(image.min_compute):
            cause = f"{card.gpu.title} is compute {card.gpu.compute}, {s.version}'s image starts at {image.min_compute}"
            yield finding("GPU_TOO_OLD", cause)
        if compute > versions.key(image.max_compute):
            cause = f"{card.gpu.title} is compute {card.gpu.compute}, {s.version}'s image ends at {image.max_compute}"
            yield finding("GPU_TOO_NEW", cause, f"version: {pick_version(s.decl, s.method, s.host, s.cards, s.engine)}")


def _divides(model: Model, tp: int) -> bool:
    """Do the model's attention heads split evenly over so many cards?"""
    heads, kv = model.config.num_attention_heads, model.config.num_key_value_heads
    return not (heads % tp or (kv % tp and tp % kv))


def _split_models(s: Service) -> list[Model]:
    return [s.target, *([s.draft] if s.uses_draft and s.draft and s.draft_tp > 1 else [])]


def _possible_tp(s: Service) -> list[int]:
    """What tensor_parallel can be: it divides the heads, and the host has as many cards."""
    cards = range(1, 1 + (len(s.host.cards) or 1 if s.host.cards_clear else 16))
    return [tp for tp in cards if all(_divides(model, tp) for model in _split_models(s))]


def parallel_divides(s: Service) -> Iterator[Finding]:
    """Tensor parallelism splits attention heads evenly, and drafts have rules of their own."""
    tp, asked = s.tp, s.decl.draft_tensor_parallel
    for model in _split_models(s):
        if not _divides(model, tp):
            heads, kv = model.config.num_attention_heads, model.config.num_key_value_heads
            cause = f"tensor_parallel {tp} does not divide {model.ref.repo}'s {heads} heads ({kv} of KV)"
            yield finding("TP_DOES_NOT_DIVIDE", cause, f"tensor_parallel: {words(_possible_tp(s))}")
    if not s.uses_draft or asked is None:
        return
    rule = s.speaking.traits["draft_tp"]
    if rule == "target" and asked != tp:
        cause = f"draft_tensor_parallel is {asked}, tensor_parallel is {tp}; {s.version} takes only equal ones"
        yield finding("DRAFT_TP", cause, "leave draft_tensor_parallel out")
    if rule == "one_or_target" and asked not in (1, tp):
        cause = f"draft_tensor_parallel is {asked}; {s.version} takes 1 or tensor_parallel ({tp})"
        yield finding("DRAFT_TP", cause, "draft_tensor_parallel: 1")


def driver_runs_image(s: Service) -> Iterator[Finding]:
    """The host's driver must be as new as the image's CUDA; GeForce cards have no way around it."""
    branch = s.host.driver_branch
    if not s.cuda or s.host.driver_key is None or branch is None:
        return
    if any(branch < card.gpu.min_driver for card in s.cards):
        return  # the card itself needs a newer one; driver_is_consistent says so
    image = s.engine.image_of(s.version)
    need, have = s.host.catalog.drivers.cuda[image.cuda], s.host.driver or s.host.driver_branch
    if s.host.driver_key < versions.key(need.min_driver):
        cause = f"driver {have} is older than {need.min_driver}, which CUDA {image.cuda} in {s.version}'s image needs"
        runs = pick_version(s.decl, s.method, s.host, s.cards, s.engine)
        fix = _newer_driver(s.host, need.branch)
        if runs != s.version and not s.decl.image:
            image_of = s.engine.image_of(runs)
            if s.host.driver_key >= versions.key(s.host.catalog.drivers.cuda[image_of.cuda].min_driver):
                old = s.engine.security_floor and versions.key(runs) < versions.key(s.engine.security_floor)
                fix += f", or version: {runs}" + (", which has known holes" if old else "")
        forward = s.cards and all(card.gpu.family != "geforce" for card in s.cards)
        yield finding("DRIVER_COMPAT" if forward else "DRIVER_TOO_OLD", cause, fix)
    elif s.decl.version == "auto" and s.version != s.engine.versions[-1]:
        cause = f"driver {have} holds the engine at {s.version}; the newest is {s.engine.versions[-1]}"
        yield finding("ENGINE_HELD_BACK", cause, _newer_driver(s.host, s.host.catalog.drivers.branches[-1]))


def _newer_driver(host: Host, branch: int) -> str:
    """How to come to a branch, from where the driver comes from now."""
    source = host.decl.rig_driver.source if host.decl.rig_driver else "none"
    if source == "distro":  # Debian's archive has one old branch
        return f"rig_driver: {{source: nvidia, branch: {branch}, …}} (docs/driver.md), where the distribution has no {branch}"
    return f"rig_driver: {{{'source: nvidia, ' if source == 'nvidia' else ''}branch: {branch}}}"


def driver_is_consistent(host: Host, _services: list[Service]) -> Iterator[Finding]:
    """Branch and version must agree, and the card must know the driver."""
    wanted = host.decl.rig_driver
    if wanted and wanted.branch and wanted.version and int(wanted.version.split(".")[0]) != wanted.branch:
        yield finding("DRIVER_CONTRADICTION", f"rig_driver says branch {wanted.branch} and version {wanted.version}")
    if host.driver_branch is not None:
        for card in {card.key: card for card in host.cards}.values():
            if host.driver_branch < card.gpu.min_driver:
                cause = f"{card.gpu.title} needs driver {card.gpu.min_driver}, the host's is {host.driver_branch}"
                fix = _newer_driver(host, max(580, card.gpu.min_driver))
                yield finding("DRIVER_TOO_OLD_FOR_CARD", cause, fix)


def driver_module(host: Host, branch: int) -> str:
    """Flavour of the kernel module: as declared, else by card and branch."""
    wanted = host.decl.rig_driver.module if host.decl.rig_driver else "auto"
    if wanted != "auto":
        return wanted
    flavours, computes = host.catalog.drivers.modules, [versions.key(card.gpu.compute) for card in host.cards]
    if any(compute >= versions.key(flavours.open_only_from) for compute in computes):
        return "open"
    if any(compute < versions.key(flavours.open_from) for compute in computes):
        return "proprietary"
    return "open" if branch >= flavours.auto_open_from_branch else "proprietary"


def driver_module_runs_card(host: Host, _services: list[Service]) -> Iterator[Finding]:
    """Older cards have no processor for the open module, and newer ones take no other."""
    wanted, flavours = host.decl.rig_driver, host.catalog.drivers.modules
    if wanted is None:
        return
    cards = {card.key: card.gpu for card in host.cards}.values()
    old = [gpu for gpu in cards if versions.key(gpu.compute) < versions.key(flavours.open_from)]
    new = [gpu for gpu in cards if versions.key(gpu.compute) >= versions.key(flavours.open_only_from)]
    if old and new:
        cause = f"{old[0].title} needs the proprietary module, {new[0].title} the open one; a host has one"
        yield finding("DRIVER_MODULE", cause, "put the cards into two machines")
    elif old and wanted.module == "open":
        cause = (
            f"module is open, {old[0].title} has compute capability {old[0].compute}; open needs {flavours.open_from}"
        )
        yield finding("DRIVER_MODULE", cause, "rig_driver: {module: proprietary}, or auto")
    elif new and wanted.module == "proprietary":
        cause = f"module is proprietary, {new[0].title} has compute capability {new[0].compute} and runs on the open one only"
        yield finding("DRIVER_MODULE", cause, "rig_driver: {module: open}, or auto")


def driver_source_is_whole(host: Host, _services: list[Service]) -> Iterator[Finding]:
    """NVIDIA's repository needs an address, a key and its checksum, and a branch that it names as the role knows it."""
    wanted = host.decl.rig_driver
    if wanted is None or wanted.source != "nvidia":
        return
    needed = ("repository_url", "repository_key_url", "repository_key_sha256")
    if lacking := [name for name in needed if getattr(wanted, name) is None]:
        yield finding("DRIVER_REPOSITORY", f"rig_driver has source nvidia and no {', '.join(lacking)}")
    branches = host.catalog.drivers.nvidia_branches
    if host.driver_branch is not None and host.driver_branch not in branches:
        known = ", ".join(str(branch) for branch in branches)
        cause = f"source is nvidia, branch is {host.driver_branch}; known by its package names are {known}"
        yield finding(
            "DRIVER_REPOSITORY", cause, f"rig_driver: {{source: nvidia, branch: {branches[-1]}}}, or source: distro"
        )


def driver_branch_is_known(host: Host, _services: list[Service]) -> Iterator[Finding]:
    """What a distribution is to install must be a branch that one is known to have."""
    wanted, known = host.decl.rig_driver, host.catalog.drivers.branches
    if wanted is None or wanted.source != "distro" or host.driver_branch is None or host.driver_branch in known:
        return
    cause = f"source is distro, branch is {host.driver_branch}; known are {', '.join(map(str, known))}"
    fix = f"rig_driver: {{branch: {words(known)}}}, or add the branch to {CATALOG}/drivers.yml"
    yield finding("DRIVER_BRANCH_UNKNOWN", cause, fix)


def version_is_safe(s: Service) -> Iterator[Finding]:
    """Old versions carry published weaknesses."""
    floor = s.engine.security_floor
    at = versions.key(s.version)
    if not floor or at >= versions.key(floor) or not s.cuda:  # the CPU build is the lab's own, behind loopback
        return
    hit = [a for a in s.engine.advisories if versions.key(a.since) <= at < versions.key(a.fixed)]
    names = ", ".join(a.id for a in sorted(hit, key=lambda a: versions.key(a.fixed), reverse=True)[:3])
    more = f" and {len(hit) - 3} more" if len(hit) > 3 else ""
    cause, fix = f"{s.version} is below {floor}: {names}{more}", f"version: {floor}, and keep bind on loopback"
    need = s.host.catalog.drivers.cuda[s.engine.image_of(floor).cuda]
    if s.host.driver_key is not None and s.host.driver_key < versions.key(need.min_driver):
        have = s.host.driver or s.host.driver_branch
        cause += f"; driver {have} runs none without known holes: {floor} needs {need.min_driver}"
        fix = f"{_newer_driver(s.host, need.branch)}, and version: {floor}; until then keep bind on loopback"
    yield finding("SECURITY_FLOOR", cause, fix)


def draft_keeps_graphs(s: Service) -> Iterator[Finding]:
    """Some versions run a draft model without CUDA graphs whatever the flags say."""
    draft_model = s.uses_draft and s.method in ("draft_model", "pard") and s.method_works
    if (
        s.cuda
        and draft_model
        and not s.eager
        and not s.speaking.traits["draft_graphs"]
        and s.speaking.traits["engine"] == "V1"
    ):
        yield finding(
            "DRAFT_EAGER", f"{s.version} runs draft models without CUDA graphs; 0.26.0 is the first that keeps them"
        )
