"""A declaration with every default filled in from catalog, lock and facts: what rules judge and dialects render."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from specrig.plan import versions, vram
from specrig.plan.catalog import CATALOG, Catalog, Engine, Gpu, ModelConfig
from specrig.plan.declare import parse, show
from specrig.plan.dialects import Dialect, dialect, method_works
from specrig.plan.refusals import finding
from specrig.plan.types import (
    Facts,
    Finding,
    HostDecl,
    LockedImage,
    LockedModel,
    Method,
    ModelRef,
    PowerFact,
    ServiceDecl,
)

DEFAULT_K = 3
DEFAULT_UTILIZATION = 0.90
CPU_KV_GIB = 4  # vLLM's own default for VLLM_CPU_KVCACHE_SPACE


@dataclass(frozen=True)
class Model:
    """A model of a service with all that is known about it."""

    ref: ModelRef
    config: ModelConfig
    weights: int
    locked: LockedModel | None
    tokenizer: str | None  # the catalog's family name
    kind: str
    reasoning_parser: str | None
    file: str | None = None  # the one GGUF file; None: safetensors, the whole folder

    @property
    def format(self) -> str:
        """What its files are: gguf or safetensors."""
        return "gguf" if self.file else "safetensors"

    @property
    def revision(self) -> str | None:
        """The commit to stage: declared, else the lock's, else unknown."""
        return self.ref.revision or (self.locked.revision if self.locked else None)

    @property
    def fingerprint(self) -> str | None:
        """The tokenizer's fingerprint, once locked."""
        value = self.locked.tokenizer.get("fingerprint") if self.locked else None
        return value if isinstance(value, str) else None

    @property
    def chat_template(self) -> str | None:
        """The chat template's hash, where the lock has one."""
        value = self.locked.tokenizer.get("chat_template") if self.locked else None
        return value if isinstance(value, str) else None

    def widened(self, vocab: int) -> "Model":
        """The same model with its embedding and head padded to `vocab` rows."""
        config = self.config.model_copy(update={"vocab_size": vocab})
        rows = vram.embedding_rows(config) - vram.embedding_rows(self.config)
        return replace(self, config=config, weights=self.weights + rows * 2 * config.hidden_size)


def gguf_parts(file: str) -> list[str]:
    """All files of a GGUF model, of which `file` is one: itself, or every part of a split one, the first one first."""
    split = re.fullmatch(r"(.+)-\d{5}-of-(\d{5})\.gguf", file)
    if not split:
        return [file]
    return [f"{split[1]}-{part:05}-of-{split[2]}.gguf" for part in range(1, min(int(split[2]), 999) + 1)] or [file]


class Lock:
    """models.lock.yml and images.lock.yml beside the inventory. Entries are checked when first asked for, once per lock."""

    def __init__(self, lock: Any) -> None:
        self._entries: Mapping[str, Any] = {}
        self._images: Mapping[str, Any] = {}
        self.findings: list[Finding] = []
        self._read: dict[str, tuple[LockedModel | None, list[Finding]]] = {}
        models = lock.get("models") if isinstance(lock, Mapping) else None
        if isinstance(models, Mapping):
            self._entries = models
        elif lock is not None and not (isinstance(lock, Mapping) and models is None):
            self.findings = [finding("LOCK_INVALID", f"the lock is {show(lock)}, not a mapping with models")]
        images = lock.get("images") if isinstance(lock, Mapping) else None
        if isinstance(images, Mapping):
            self._images = images
        elif images is not None:
            self.findings.append(finding("LOCK_INVALID", f"images of the lock are {show(images)}, not a mapping"))

    def image(self, name: str) -> tuple[LockedImage | None, list[Finding]]:
        """The entry of the image that is declared as `name`, None when it is not locked; findings when it is malformed."""
        if name not in self._images:
            return None, []
        image, found = parse(LockedImage, self._images[name], f"images[{name}]")
        fix = "./rig images lock writes the entry again"
        return image, [finding("LOCK_INVALID", entry.cause, fix) for entry in found[:3]]

    def get(self, repo: str) -> tuple[LockedModel | None, list[Finding]]:
        """The entry of `repo`, None when it is not locked; findings when it is malformed."""
        if repo not in self._entries:
            return None, []
        if repo not in self._read:
            model, found = parse(LockedModel, self._entries[repo], f"models[{repo}]")
            if model is not None:
                _, found = parse(ModelConfig, model.config, f"models[{repo}].config")
                model = None if found else model
            causes = [finding("LOCK_INVALID", entry.cause) for entry in found[:3]]
            self._read[repo] = (model, causes)
        return self._read[repo]


@dataclass(frozen=True)
class HostCard:
    """One physical card of a host."""

    index: int
    key: str
    gpu: Gpu
    total_mib: int
    display: bool
    nvlink: bool
    uuid: str | None = None
    power: PowerFact | None = None

    @property
    def watts(self) -> tuple[float, float, float]:
        """(least, default, most) power limit in W: the card's own word, else the catalog's."""
        own, known = self.power or PowerFact(), self.gpu.power
        return (
            known.min if own.min is None else own.min,
            known.default if own.default is None else own.default,
            known.max if own.max is None else own.max,
        )

    @cached_property
    def ledger_card(self) -> vram.Card:
        """As the ledger sees it."""
        return vram.Card(
            self.key,
            self.gpu.title,
            self.total_mib,
            self.total_mib - self.gpu.reserved_mib,
            vram.DISPLAY_MIB if self.display else 0,
        )


@dataclass(frozen=True)
class Host:
    """One host: its declaration, its cards, its driver."""

    name: str
    decl: HostDecl
    cards: tuple[HostCard, ...]
    cards_clear: bool  # False: the cards could not be made out, so rules about them stay silent
    driver: str | None  # exact version, where known
    driver_branch: int | None
    facts: Facts
    catalog: Catalog
    unread: frozenset[str] = frozenset()  # variables that could not be read: decl has their defaults

    @cached_property
    def driver_key(self) -> versions.Key | None:
        """The driver as a comparable version; a branch alone counts as its newest release."""
        if self.driver is not None:
            return versions.parse(self.driver)
        return (self.driver_branch, 999, 999, 0, 0) if self.driver_branch is not None else None


@dataclass(frozen=True)
class Service:
    """One service with nothing left open."""

    host: Host
    decl: ServiceDecl
    engine: Engine
    version: str
    image: str
    target: Model
    draft: Model | None
    method: Method
    k: int
    vocab: str  # same | pad | heterogeneous | unlike | n/a
    cards: tuple[HostCard, ...]
    gpus: tuple[int | str, ...]
    utilization: float = DEFAULT_UTILIZATION
    eager: bool = False
    eager_forced: bool = False
    ledger: vram.Ledger | None = field(default=None)
    declared_image: str = ""
    locked_image: LockedImage | None = None

    @property
    def name(self) -> str:
        """The service's name."""
        return self.decl.name

    @property
    def speaking(self) -> Dialect:
        """The version's dialect."""
        return dialect(self.decl.engine, self.version)

    @property
    def speculates(self) -> bool:
        """Declared and switched on."""
        return self.host.decl.rig_speculation and self.method != "none" and self.k > 0

    @property
    def method_works(self) -> bool:
        """Does this version have the method?"""
        return method_works(self.decl.engine, self.method, self.version)

    @property
    def uses_draft(self) -> bool:
        """Does a second model run?"""
        return self.speculates and self.draft is not None and self.method != "ngram"

    @property
    def cuda(self) -> bool:
        """Does it run on cards?"""
        return self.decl.device == "cuda"

    @property
    def tp(self) -> int:
        """Tensor parallel size of the target."""
        return self.decl.tensor_parallel

    @property
    def draft_tp(self) -> int:
        """Tensor parallel size of the draft."""
        if self.speaking.traits["draft_tp"] == "target":
            return self.tp
        return self.decl.draft_tensor_parallel or 1

    @property
    def padded(self) -> bool:
        """Is the draft a padded copy?"""
        return self.uses_draft and self.vocab == "pad"

    @property
    def bridged(self) -> bool:
        """Do the cards reach each other by NVLink?"""
        seen = linked(self.host.facts, self.cards)
        return len(self.cards) > 1 and (all(card.nvlink for card in self.cards) if seen is None else seen)

    @property
    def p2p(self) -> str:
        """How the cards talk: nvlink, pcie (peer access), off (through the host's memory); empty for one card."""
        if self.tp < 2 or not self.cuda:
            return ""
        if self.decl.p2p != "off" and (self.bridged or self.decl.p2p == "nvlink"):
            return "nvlink"
        # A test that passed may not turn on what NVIDIA's driver does not support: such pairs were seen to hang, to lose
        # bytes and to reset the machine.
        tested = self.host.facts.p2p == "pcie" and all(card.gpu.p2p for card in self.cards)
        return "pcie" if tested and self.decl.p2p == "auto" else "off"


def linked(facts: Facts, cards: tuple[HostCard, ...]) -> bool | None:
    """Whether NVLink joins these cards, by the host's own facts; None where they do not say."""
    if facts.p2p is not None:
        return facts.p2p == "nvlink"
    numbers = sorted(card.index for card in cards)
    ways = [facts.links.get(f"{a}-{b}") for i, a in enumerate(numbers) for b in numbers[i + 1 :]]
    return None if not ways or None in ways else all(str(way).startswith("NV") for way in ways)


def excludes(one: Service, other: Service) -> bool:
    """Can the two not run side by side? One of them is exclusive, and they share a card, or both run on the CPU."""
    if one is other or not (one.decl.exclusive or other.decl.exclusive):
        return False
    if not one.cuda or not other.cuda:
        return one.cuda == other.cuda
    return bool(set(one.gpus) & set(other.gpus)) or any(card in other.cards for card in one.cards)


def model_of(ref: ModelRef, lock: Lock, catalog: Catalog) -> tuple[Model | None, list[Finding]]:
    """What lock and catalog know of a repository; the lock wins."""
    locked, found = lock.get(ref.repo)
    if found:
        return None, found
    known = catalog.models.get(ref.repo)
    if locked is not None and ref.file and ref.file not in {f.path for f in locked.files}:
        locked = None  # locked for another of its files
    if locked is not None:
        config = ModelConfig.model_validate(locked.config)
    elif known is not None:
        config = known.config
    else:
        cause = f"{ref.repo} is neither locked nor in the catalog: its size and vocabulary are unknown"
        return None, [
            finding("MODEL_UNKNOWN", cause, f"./rig models lock asks the hub; or add the model to {CATALOG}/models.yml")
        ]
    sizes = {f.path: f.size for f in locked.files} if locked else known.files if known else {}
    several = [path for path in sizes if path.endswith(".gguf") and gguf_parts(path)[0] == path]
    file = ref.file or (several[0] if len(several) == 1 else None)
    if several and file not in several:
        cause = f"{ref.repo} has {len(several)} GGUF files" + (f", {ref.file} is not among them" if ref.file else "")
        return None, [finding("MODEL_FILE", cause, f"file: {' or '.join(several[:4])}")]
    real = (
        sum(sizes.get(part, 0) for part in gguf_parts(file))
        if file
        else sum(n for path, n in sizes.items() if path.endswith(".safetensors"))
    )
    model = Model(
        ref=ref,
        config=config,
        weights=real or vram.weight_bytes(config),
        locked=locked,
        tokenizer=known.tokenizer if known else None,
        kind=known.kind if known else "causal",
        reasoning_parser=known.reasoning_parser if known else None,
        file=file,
    )
    return model, []


def models_to_ask(decl: ServiceDecl, host: Host, lock: Lock) -> list[ModelRef]:
    """The models of a service, when neither lock nor catalog know one of them, or its entry is malformed: what to ask the hub for."""
    refs = [decl.target, *([decl.draft] if decl.draft else [])]
    known = [model_of(ref, lock, host.catalog) for ref in refs]
    if not any(found.code in ("MODEL_UNKNOWN", "LOCK_INVALID") for _, faults in known for found in faults):
        return []
    return [
        ref.model_copy(update={"file": ref.file or (model.file if model else None)})
        for ref, (model, _) in zip(refs, known, strict=True)
    ]


def vocab_mode(decl: ServiceDecl, method: Method, target: Model, draft: Model | None, traits: Mapping[str, Any]) -> str:
    """How draft and target vocabularies of different width meet: the version takes a gap, maps it itself, or wants a padded draft."""
    wide = bool(traits["heterogeneous_vocab"])
    if draft is None or method not in ("draft_model", "pard"):
        return "n/a"
    if draft.config.vocab_size == target.config.vocab_size:
        return "same"
    if draft.file or target.file:  # only safetensors can be padded here
        near = abs(draft.config.vocab_size - target.config.vocab_size) <= int(traits["vocabulary_gap"])
        return "near" if near else "unlike"
    if decl.vocab != "auto":
        return decl.vocab
    if draft.config.vocab_size < target.config.vocab_size:
        return "pad"  # works in every version, keeps the draft's CUDA graphs, and is verified like any other artefact
    return "heterogeneous" if wide and method == "draft_model" else "unlike"


def pick_version(decl: ServiceDecl, method: Method, host: Host, cards: tuple[HostCard, ...], engine: Engine) -> str:
    """The newest version that has the method and whose image the host's driver and cards run; else the newest."""

    def runs(version: str) -> bool:
        if not method_works(decl.engine, method, version):
            return False
        if decl.device == "cpu":
            return True
        image = engine.image_of(version)
        need = versions.key(host.catalog.drivers.cuda[image.cuda].min_driver)
        fits_driver = host.driver_key is None or host.driver_key >= need
        return fits_driver and all(
            versions.key(image.min_compute) <= versions.key(c.gpu.compute) <= versions.key(image.max_compute)
            for c in cards
        )

    return next((v for v in reversed(engine.versions) if runs(v)), engine.versions[-1])


def demand(service: Service, *, with_draft: bool, graphs: bool) -> vram.Demand:
    """The ledger's question for a service."""
    draft = service.draft if with_draft and service.method != "ngram" else None
    if draft is not None and service.vocab == "pad" and draft.config.vocab_size < service.target.config.vocab_size:
        draft = draft.widened(service.target.config.vocab_size)

    def load(model: Model, tp: int) -> vram.Load:
        exact = model.locked is not None and any(f.path.endswith(".safetensors") for f in model.locked.files)
        return vram.Load(model.config, model.weights, exact, tp)

    return vram.Demand(
        cards=tuple(card.ledger_card for card in service.cards),
        target=load(service.target, service.tp),
        draft=load(draft, min(service.draft_tp, service.tp)) if draft else None,
        k=service.k if with_draft else 0,
        max_model_len=service.decl.max_model_len,
        max_num_seqs=service.decl.max_num_seqs,
        utilization=service.utilization,
        graphs=graphs,
        traits=service.speaking.traits,
    )


def with_memory(service: Service) -> Service:
    """The service with its ledger, its utilization where left open, and CUDA graphs unless they are what does not fit.

    Both are decided with the declared draft counted in, so that switching speculation off changes no other flag.
    """
    if service.speaking.traits["budget"] != "share":
        return replace(service, eager=bool(service.decl.eager))  # no account of this engine: memory.estimate
    if not service.cuda:
        return replace(service, eager=service.decl.eager is not False)
    if not service.cards:
        return replace(service, eager=bool(service.decl.eager))
    eager, forced = bool(service.decl.eager), False
    declared = service.method != "none" and service.k > 0
    asked = demand(service, with_draft=declared, graphs=not eager)
    if service.decl.gpu_memory_utilization is None:
        highest = min(vram.highest_utilization(account) for account in vram.accounts(asked))
        service = replace(service, utilization=max(0.01, min(DEFAULT_UTILIZATION, highest)))
        asked = replace(asked, utilization=service.utilization)
    if service.decl.eager is None and not vram.starts(asked):
        forced = eager = vram.starts(replace(asked, graphs=False))
    account = vram.ledger(demand(service, with_draft=service.speculates, graphs=not eager))
    return replace(service, eager=eager, eager_forced=forced, ledger=account)


def cpu_cache(service: Service) -> dict[str, Any]:
    """The KV cache of a CPU service: {device, kv_mib, kv_bytes_per_token, kv_tokens}."""
    space = service.decl.env.get("VLLM_CPU_KVCACHE_SPACE", "")
    gib = int(space) if space.isascii() and space.isdigit() and 0 < len(space) < 5 else CPU_KV_GIB
    per_token = vram.kv_bytes_per_token(service.target.config, 1)
    if service.uses_draft and service.draft is not None:
        per_token += vram.kv_bytes_per_token(service.draft.config, 1)
    tokens = gib * 1024 * vram.MIB // per_token
    return {"device": "cpu", "kv_mib": gib * 1024, "kv_bytes_per_token": per_token, "kv_tokens": tokens}


def _cards_of(decl: ServiceDecl, host: Host) -> tuple[tuple[HostCard, ...], tuple[int | str, ...]]:
    if decl.device == "cpu":
        return (), ()
    wanted: tuple[int | str, ...] = tuple(decl.gpus) if decl.gpus is not None else tuple(range(decl.tensor_parallel))
    by_uuid: dict[int | str, HostCard] = {card.uuid: card for card in host.cards if card.uuid}
    by_index: dict[int | str, HostCard] = {card.index: card for card in host.cards}
    found = [by_index.get(gpu) if isinstance(gpu, int) else by_uuid.get(gpu) for gpu in wanted]
    if host.cards and any(isinstance(gpu, str) for gpu in wanted) and not by_uuid:
        found = [
            host.cards[i] if i < len(host.cards) else None for i in range(len(wanted))
        ]  # no facts: assume in order
    return tuple(card for card in found if card is not None), wanted


def image_row(image: str, declared: str, locked: LockedImage | None) -> dict[str, Any]:
    """An image as a plan lists it: as it is run, as declared, and what the lock knows of its size."""
    layers = [layer.model_dump() for layer in locked.layers] if locked else []
    return {"image": image, "declared": declared, "size": locked.size if locked else None, "layers": layers}


def by_digest(declared: str, locked: LockedImage | None) -> str:
    """The image as it is run: with the lock's digest, where the declaration has none."""
    return f"{declared}@{locked.digest}" if locked and "@" not in declared else declared


def resolve(decl: ServiceDecl, host: Host, lock: Lock) -> tuple[Service | None, list[Finding]]:
    """A service with everything filled in, or what is missing to do so."""
    catalog, engine = host.catalog, host.catalog.engines[decl.engine]
    target, found = model_of(decl.target, lock, catalog)
    draft: Model | None = None
    if decl.draft is not None:
        draft, more = model_of(decl.draft, lock, catalog)
        found = found + more
    found = list(_version_findings(decl, engine)) + found
    if found or target is None:
        return None, [replace(f, cause=f"{decl.name}: {f.cause}") for f in found]
    default: Method = "draft_model" if decl.draft else "none"
    method: Method = decl.method or default
    cards, gpus = _cards_of(decl, host)
    version = decl.version if decl.version != "auto" else pick_version(decl, method, host, cards, engine)
    official = engine.image if decl.device == "cuda" or not engine.image_cpu else engine.image_cpu
    declared = decl.image or official.format(version=version)
    locked, faults = lock.image(declared)
    service = Service(
        host=host,
        decl=decl,
        engine=engine,
        version=version,
        image=by_digest(declared, locked),
        declared_image=declared,
        locked_image=locked,
        target=target,
        draft=draft,
        method=method,
        k=decl.k if decl.k is not None else DEFAULT_K if method != "none" else 0,
        vocab=vocab_mode(decl, method, target, draft, dialect(decl.engine, version).traits),
        cards=cards,
        gpus=gpus,
        utilization=decl.gpu_memory_utilization or DEFAULT_UTILIZATION,
    )
    return with_memory(service), [replace(f, cause=f"{decl.name}: {f.cause}") for f in faults]


def _version_findings(decl: ServiceDecl, engine: Engine) -> Iterator[Finding]:
    if decl.version == "auto" or decl.version in engine.versions:
        return
    at, oldest, newest = versions.parse(decl.version), engine.versions[0], engine.versions[-1]
    if at is None:
        yield finding("VERSION_INVALID", f"version is {show(decl.version)}, not a release number", f"version: {newest}")
    elif at < versions.key(oldest):
        cause = f"version {decl.version} is older than {oldest}, the oldest this plan speaks"
        yield finding("VERSION_TOO_OLD", cause, f"version: {newest}")
    else:
        near = min(engine.versions, key=lambda v: [abs(a - b) for a, b in zip(versions.key(v), at, strict=True)])
        fix = f"version: {near}, or add it to {CATALOG}/engines.yml"
        yield finding("VERSION_UNKNOWN", f"version {decl.version} is not in the catalog (newest: {newest})", fix)
