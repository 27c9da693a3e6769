"""What a person declares, what a host reports, and what the plan says. Types only; decisions live elsewhere.

Ranges stand here so that the published JSON schema has them; `CONSTRAINT_CODES` names the refusal for each.
"""

import hashlib
import ipaddress
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

MAX_K_UNMEASURED = 6
MAX_K = 12
Method = Literal["draft_model", "ngram", "eagle3", "pard", "none"]

Text = Annotated[str, Field(min_length=1, max_length=4096)]
Repo = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}$")]


def _json_only(value: dict[str, Any]) -> dict[str, Any]:
    """What can not be written to a JSON file is refused here. Raises ValueError."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"it can not be written as JSON ({type(error).__name__})") from None
    return value


def _inside(path: str) -> str:
    """A path that stays in its folder. Raises ValueError."""
    if not path.isprintable() or any(part in ("", ".", "..") for part in path.split("/")):
        raise ValueError("it is no plain path inside the repository")
    return path


def _network(text: str) -> str:
    """A network or an address in its shortest true form: 192.0.2.0/24. Raises PydanticCustomError."""
    try:
        network = ipaddress.ip_network(text)
    except ValueError as error:
        raise PydanticCustomError("literal_error", "{why}", {"why": str(error)}) from None
    return str(network)


def _unquoted_off(value: Any) -> Any:
    """`off` without quotes is false in YAML; where off is one of the words, nothing else can have been meant."""
    return "off" if value is False else value


def _not_ours(name: str) -> str:
    """A service's name whose unit is not one of specrig's own. Raises PydanticCustomError."""
    if name in ("cdi", "gateway", "gateway-relay", "gpu-fans", "gpu-tuning", "scrub", "share", "webui"):
        raise PydanticCustomError("literal_error", "it is taken: specrig has a unit of this name")
    return name


class Declared(BaseModel):
    """Closed and strict: an unknown key and a "5" where a 5 belongs are both refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class GpuClaim(Declared):
    """Cards the host is said to have."""

    name: Text = Field(description="catalog name, for example rtx_4090")
    count: int = Field(1, ge=1, le=16)
    display: bool = Field(False, description="a desktop runs on this card (costs VRAM)")
    nvlink: bool = Field(False, description="the cards are bridged")


FanCurve = Annotated[
    list[Annotated[list[int], Field(min_length=2, max_length=2)]],
    Field(
        description="[[°C, %], …], rising to 100 %; the card's own control below the first point. Absent: fans are left to the card"
    ),
]


class CardTuning(Declared):
    """One card's power limit (watts or per cent) or fan curve, where it is not that of the others."""

    gpu: int | Annotated[str, Field(pattern=r"^(all|GPU-[A-Za-z0-9-]{1,64})$")] = Field(
        description="index, or UUID: that stays when cards are moved"
    )
    power_w: int | None = Field(None, ge=1, le=2000)
    power_percent: int | None = Field(None, ge=1, le=200, description="of the card's own default limit")
    fan_curve: FanCurve | None = None


class ClockLock(Declared):
    """The graphics clock's range, in MHz."""

    min_mhz: int = Field(210, ge=1, le=10_000)
    max_mhz: int = Field(ge=1, le=10_000)


class GpuTuningDecl(Declared):
    """Power limits, fans and sleep. Absent: specrig leaves them alone."""

    state: Literal["present", "absent"] = Field(
        "present", description="absent: back to the cards' own limits and fan control"
    )
    power_w: int | None = Field(None, ge=1, le=2000, description="limit of every card, W")
    power_percent: int | None = Field(
        None, ge=1, le=200, description="limit of every card, of its own default limit; instead of power_w"
    )
    fan_curve: FanCurve | None = None
    cards: list[CardTuning] = Field([], max_length=16, description="single cards, over what all have")
    clock_lock: ClockLock | None = Field(None, description="only for a card that takes no power limit")
    mask_sleep: bool = Field(True, description="the machine never sleeps: CUDA does not survive it")


class DriverClaim(Declared):
    """The driver the host has or shall keep. Absent: the plan names the branch to install."""

    source: Literal["none", "distro", "nvidia"] = Field(
        "none",
        description="distro: specrig installs it from the distribution's archive; nvidia: from NVIDIA's repository; none: it is yours",
    )
    branch: int | None = Field(None, ge=390, le=999)
    version: str | None = Field(None, pattern=r"^\d{3}\.\d{1,3}(\.\d{1,3})?$", description='for example "580.159.03"')
    module: Literal["auto", "open", "proprietary"] = Field(
        "auto", description="flavour of the kernel module; auto: by card and branch"
    )
    reboot: Literal["never", "ask", "allow"] = Field("never", description="into a driver that is installed, not loaded")
    mok: Literal["none", "stage"] = Field(
        "none", description="stage: put DKMS's key up for Secure Boot; a person confirms it at the console"
    )
    repository_url: str | None = Field(
        None, pattern=r"^https?://[^\s]+$", description="of NVIDIA, as its installation page gives it"
    )
    repository_key_url: str | None = Field(None, pattern=r"^https?://[^\s]+$")
    repository_key_sha256: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")


class ToolkitDecl(Declared):
    """NVIDIA's container toolkit, installed by specrig. Absent: what is there is used, through `--gpus`."""

    repository_url: str = Field(pattern=r"^https?://[^\s]+$", description="as NVIDIA's installation page gives it")
    repository_key_url: str = Field(pattern=r"^https?://[^\s]+$")
    repository_key_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    version: str = Field("", pattern=r"^[0-9a-z.+~-]*$", description="for example 1.17.8-1; empty: the newest")
    mode: Literal["auto", "cdi", "runtime"] = "auto"


class ModelRef(Declared):
    """A hub repository. Without a revision the lock's is used."""

    repo: Repo
    revision: str | None = Field(None, pattern=r"^[0-9a-f]{40}$", description="a full commit id, never a branch or tag")
    file: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.gguf$",
        description="one GGUF file of a repository that has several",
    )


class ProbeDecl(Declared):
    """How a running engine is asked for one token."""

    interval_s: int = Field(60, ge=0, le=86_400, description="0: never")
    timeout_s: int = Field(60, ge=1, le=3600, description="then the engine has to show that it works for others")
    failures: int = Field(3, ge=1, le=100, description="in a row, with no token for anybody: then it is started again")


class ServiceDecl(Declared):
    """One engine under one systemd unit."""

    name: Annotated[str, AfterValidator(_not_ours)] = Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")
    engine: Literal["vllm", "llama_cpp", "sglang", "aphrodite", "tensorrt_llm", "ollama"] = "vllm"
    version: Text = Field("auto", description="an exact version, or auto: the newest that the driver runs")
    image: Text | None = Field(None, description="overrides the official image; tag or tag@sha256, never latest")
    device: Literal["cuda", "cpu"] = "cuda"
    target: ModelRef
    draft: ModelRef | None = None
    method: Method | None = Field(None, description="default: draft_model with a draft, else none")
    k: int | None = Field(None, ge=0, le=MAX_K, description="num_speculative_tokens; default 3 when speculating")
    k_measured_reason: Text | None = Field(None, description="why K above 6 pays here, with its measurement")
    max_model_len: int = Field(8192, ge=256, le=10_000_000, description="tokens, prompt and answer together")
    max_num_seqs: int = Field(8, ge=1, le=4096, description="requests decoded at once")
    gpu_memory_utilization: float | None = Field(
        None, gt=0.0, le=1.0, description="default: 0.9, less where the version keeps something outside its budget"
    )
    tensor_parallel: int = Field(1, ge=1, le=16)
    draft_tensor_parallel: int | None = Field(None, ge=1, le=16, description="default: what the version wants")
    p2p: Annotated[Literal["auto", "off", "nvlink"], BeforeValidator(_unquoted_off)] = Field(
        "auto", description="how two cards talk; auto: NVLink where it is, else through the host's memory"
    )
    gpus: list[int | str] | None = Field(
        None, min_length=1, max_length=16, description="indices or UUIDs; default: the first ones"
    )
    bind: Text = Field("127.0.0.1", description="host address that the port is published on")
    port: int = Field(8000, ge=1024, le=65535)
    served_name: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$", description="default: name")
    vocab: Literal["auto", "pad", "heterogeneous"] = "auto"
    min_acceptance: float | None = Field(
        None,
        gt=0.0,
        lt=1.0,
        description="accepted / drafted tokens below which an upgrade is taken back and status falls short; default: only 0 does",
    )
    start_timeout_s: int | None = Field(
        None, ge=30, le=86400, description="how long a start may take; default: from the size of the weights"
    )
    eager: bool | None = Field(None, description="default: CUDA graphs wherever they fit")
    extra_args: list[Annotated[str, Field(max_length=4096)]] = Field([], max_length=64)
    env: dict[str, Annotated[str, Field(max_length=4096)]] = Field({}, max_length=64)
    exclusive: bool = Field(
        False,
        description="runs alone on its cards (a CPU service: on the CPU); ./rig switch chooses among those that share them",
    )
    probe: ProbeDecl = Field(ProbeDecl(), description="a real completion now and then, besides health")
    restarts: int = Field(5, ge=0, le=100, description="failed starts in a row after which the unit gives up")
    notes: list[str] = Field([], description="travel into the plan: why a value is what it is")


def _once(names: list[str]) -> list[str]:
    """Each name once. Raises PydanticCustomError."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            twice = {"name": ascii(name[:60]), "fix": "name each once"}
            raise PydanticCustomError("literal_error", "{name} is there twice", twice)
        seen.add(name)
    return names


class GatewayDecl(Declared):
    """One OpenAI endpoint before the rigs; for hosts of the group `gateways`."""

    server_name: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?)*$",
        max_length=253,
        description="DNS name of the endpoint; with one it speaks TLS",
    )
    tls: Literal["internal", "acme"] | None = Field(
        None,
        description="internal: an authority of its own, whose root clients must trust; acme: a public one. Default with a name: internal",
    )
    email: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9._+-]{1,64}@[A-Za-z0-9.-]{1,190}$",
        description="where the public authority may write to",
    )
    bind: Text = Field("127.0.0.1", description="host address that it listens on")
    port: int | None = Field(None, ge=1, le=65535, description="default: 443 with TLS, else 8080")
    rigs: Annotated[list[Text], AfterValidator(_once)] | None = Field(
        None, max_length=1000, description="default: all of the group rigs"
    )
    models: Annotated[list[Text], AfterValidator(_once)] | None = Field(
        None, max_length=256, description="served names to offer; default: all that the rigs serve"
    )
    clients: Annotated[
        list[Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")]], AfterValidator(_once)
    ] = Field(
        ["default"],
        min_length=1,
        max_length=1000,
        description="who may ask: each has a key of its own; a name that goes takes its key along",
    )


class WebuiDecl(Declared):
    """Open WebUI beside the services: chats and accounts in a browser. Absent: specrig leaves it alone."""

    state: Literal["present", "absent"] = Field("present", description="absent: removed; its data stays")
    bind: Text = Field("127.0.0.1", description="host address that it listens on")
    port: int = Field(3000, ge=1024, le=65535)
    image: Text | None = Field(None, description="overrides the official image; tag or tag@sha256, never latest")
    env: dict[str, Annotated[str, Field(max_length=4096)]] = Field(
        {}, max_length=64, description="Open WebUI's own settings; never a secret"
    )


class HostDecl(Declared):
    """The rig_* variables of one host. Other variables are Ansible's and are not read."""

    rig_profile: str | None = None
    rig_gpus: list[GpuClaim] | None = Field(None, max_length=16)
    rig_driver: DriverClaim | None = None
    rig_container_toolkit: ToolkitDecl | None = None
    rig_gpu_tuning: GpuTuningDecl | None = None
    rig_models_root: str = Field(
        "/srv/models",
        max_length=512,
        pattern=r"^(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+$",
    )
    rig_hub_endpoint: str | None = Field(None, pattern=r"^https?://[A-Za-z0-9.:\[\]_-]+(/[A-Za-z0-9._~/-]*)?$")
    rig_hub_limit: int | None = Field(None, ge=50_000, description="bytes per second from the hub")
    rig_models_offline: bool = Field(False, description="true: no hub is asked; models come from siblings or a bundle")
    rig_models_bundle: str | None = Field(
        None, pattern=r"^(/[A-Za-z0-9._-]+)+$", description="a bundle of models on the host: tar file or directory"
    )
    rig_models_share: str | None = Field(
        None,
        pattern=r"^(\d{1,3}(\.\d{1,3}){3}|\[[0-9a-f:]+\]):\d{2,5}$",
        description="serve models to other rigs on address:port",
    )
    rig_speculation: bool = Field(True, description="false: K=0 everywhere; the one switch")
    rig_images_archive: str | None = Field(
        None,
        pattern=r"^(/[A-Za-z0-9._-]+)+$",
        description="directory on the host that keeps a file of each image, for the day when the registry has it no more; 10 GB or more each",
    )
    rig_docker_daemon_options: Annotated[dict[str, Any], AfterValidator(_json_only)] = Field(
        {}, description="keys to set in Docker's daemon.json; others stay"
    )
    rig_docker_data_root: str | None = Field(
        None,
        pattern=r"^(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+$",
        description="where Docker's images, containers and volumes lie, for instance on an NVMe disk",
    )
    rig_docker_data_root_existing: Literal["refuse", "leave"] = Field(
        "refuse", description="what becomes of those in the present place: refuse to go on, or leave them there, unused"
    )
    rig_allow_from: list[Annotated[str, AfterValidator(_network)]] = Field(
        [], max_length=64, description="networks that may reach what is published off loopback"
    )
    rig_preflight_ignore: list[Annotated[str, Field(pattern=r"^[A-Z0-9_]+$")]] = Field(
        [], max_length=32, description="refusals of preflight that you accept for this host"
    )
    rig_services: list[dict[str, Any]] = Field([], max_length=64, description="merged over the profile's by name")
    rig_hub_token: Any = Field(None, description="vaulted; for gated models, used while staging only")
    rig_mok_password: Any = Field(
        None, description="vaulted; one-time, 8 to 16 characters; for rig_driver: {mok: stage}"
    )
    rig_api_key: Any = Field(None, description="vaulted; absent: generated on the host, once")
    rig_gateway: GatewayDecl | None = Field(None, description="of a host in the group gateways; absent: its defaults")
    rig_gateway_keys: Any = Field(
        None, description="{client: vaulted key}; a client without one: generated on the host, once"
    )
    rig_webui: WebuiDecl | None = Field(None, description="Open WebUI for this host's gateway or services")


class PowerFact(BaseModel):
    """Limits that a card reports, in W."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    default: float | None = None
    min: float | None = None
    max: float | None = None


class IommuFact(BaseModel):
    """Whether the IOMMU is on, and lets devices pass untranslated."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    on: bool = False
    passthrough: bool = False


class GpuFact(BaseModel):
    """One card as the host reports it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    name: str
    uuid: str | None = None
    memory_total_mib: int | None = Field(None, gt=0)
    memory_used_mib: int | None = Field(None, ge=0)
    power_w: PowerFact | None = None


class Facts(BaseModel):
    """What a host reports of itself (`preflight`); each part is optional and beats the claim."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    gpus: list[GpuFact] | None = None
    driver_version: str | None = Field(None, pattern=r"^\d{3}\.\d{1,3}(\.\d{1,3})?$")
    p2p: Literal["nvlink", "pcie", "none"] | None = Field(None, description="how the cards reach each other, tested")
    links: dict[str, str] = Field({}, description='each pair in nvidia-smi\'s words: {"0-1": "PHB"}; NV# is NVLink')
    acs_redirect: list[str] = Field([], description="bridges that send traffic between cards to the root complex")
    iommu: IommuFact = IommuFact()


class LockedFile(BaseModel):
    """One file of a locked model."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    path: Annotated[str, AfterValidator(_inside)]
    size: int = Field(ge=0, le=10**14)
    sha256: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")
    sha1: str | None = Field(None, pattern=r"^[0-9a-f]{40}$", description="git blob id")


class LockedModel(BaseModel):
    """One model of inventory/models.lock.yml. `config` is config.json's own content."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    revision: str = Field(pattern=r"^[0-9a-f]{40}$")
    files: list[LockedFile] = []
    config: dict[str, Any]
    tokenizer: dict[str, Any] = {}


class LockedLayer(BaseModel):
    """One layer: compressed bytes, and the digest of what it unpacks to."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    size: int = Field(ge=0, le=10**13)
    diff_id: str = Field(pattern=r"^sha256:[0-9a-f]{64}$")


class LockedImage(BaseModel):
    """One image of inventory/images.lock.yml, by the name it is declared with."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    digest: str = Field(pattern=r"^sha256:[0-9a-f]{64}$")
    size: int = Field(ge=0, le=10**14, description="compressed bytes of all layers")
    layers: list[LockedLayer] = []


@dataclass(frozen=True, slots=True)
class Finding:
    """A refusal or a warning: the code's level (refusals.CODES) says which."""

    code: str
    cause: str
    fix: str

    def as_json(self) -> dict[str, str]:
        """{code, cause, fix}."""
        return {"code": self.code, "cause": self.cause, "fix": self.fix}


@dataclass(frozen=True, slots=True)
class ServicePlan:
    """One service, fully resolved: what the unit runs. Paths inside the container; sizes in MiB, times in seconds."""

    name: str
    engine: str
    version: str
    image: str
    device: str
    entrypoint: list[str]
    argv: list[str]
    env: dict[str, str]
    ports: list[dict[str, Any]]
    unit: str
    models: list[dict[str, str]]
    user: str  # uid:gid of the engine in its container
    shm_size_mb: int
    gpus: list[int | str]
    served_name: str
    key_env: str  # the variable with which the engine takes its API key; "": it has none, see docs/engines.md
    health_path: str
    completion_path: str
    metrics_path: str  # Prometheus text; "": none
    metrics: dict[str, str]  # where the acceptance is read: host/acceptance.py
    progress: list[str]  # samples at metrics_path that move while the engine works; []: none does before an answer ends
    files: list[dict[str, str]]  # configuration files mounted read-only: {path, path_in_container, content}
    k: int
    method: str
    min_acceptance: float | None
    start_timeout_s: int
    stop_timeout_s: int
    free_vram: dict[str, int]  # MiB that must be free before the start, by index or UUID of a card
    conflicts: list[str]  # units that cannot run beside this one, declared before it first
    probe: dict[
        str, int
    ]  # interval_s, timeout_s, failures; patience_s: how long it may wait its turn where nothing shows progress, 0: counters do
    restarts: int
    refused_words: list[str]  # how a line of an engine begins whose parser says no, where its exit status does not tell
    cache_key: str  # of the compile cache: what was compiled for one pair must not be found by another
    vram: dict[str, Any]
    pair: dict[str, Any]
    notes: list[str]
    p2p: str = ""  # how several cards talk: nvlink, pcie, off; empty for one card

    def as_json(self) -> dict[str, Any]:
        """A JSON object with these fields."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True)
class HostPlan:
    """Everything that will be true of one host, or why it can not be."""

    host: Mapping[str, Any]
    services: tuple[ServicePlan, ...] = ()
    models: tuple[Mapping[str, Any], ...] = ()
    images: tuple[Mapping[str, Any], ...] = ()
    driver: Mapping[str, Any] | None = None
    refusals: tuple[Finding, ...] = ()
    warnings: tuple[Finding, ...] = ()

    @property
    def ok(self) -> bool:
        """True when nothing was refused."""
        return not self.refusals

    @classmethod
    def from_json(cls, plan: Mapping[str, Any]) -> "HostPlan":
        """The inverse of `as_json`."""
        return cls(
            host=plan["host"],
            services=tuple(ServicePlan(**service) for service in plan["services"]),
            models=tuple(plan["models"]),
            images=tuple(plan["images"]),
            driver=plan["driver"],
            refusals=tuple(Finding(**found) for found in plan["refusals"]),
            warnings=tuple(Finding(**found) for found in plan["warnings"]),
        )

    def as_json(self) -> dict[str, Any]:
        """The plan as a JSON object; `plan_hash` is the sha256 of its canonical form without itself."""
        plan: dict[str, Any] = {
            "ok": self.ok,
            "refusals": [finding.as_json() for finding in self.refusals],
            "warnings": [finding.as_json() for finding in self.warnings],
            "services": [service.as_json() for service in self.services],
            "driver": dict(self.driver or {}),
            "models": [dict(model) for model in self.models],
            "images": [dict(image) for image in self.images],
            "host": dict(self.host),
        }
        canonical = json.dumps(plan, sort_keys=True, separators=(",", ":"))
        return plan | {"plan_hash": hashlib.sha256(canonical.encode()).hexdigest()}
