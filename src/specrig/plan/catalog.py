"""The packaged catalog (catalog/*.yml), read once, typed and checked. The only I/O of the plan."""

from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from specrig.plan import versions

CATALOG = "src/specrig/plan/catalog"  # where a person edits it, from the repository's root
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Entry(BaseModel):
    """A catalog entry: closed, so a misspelt key is an error of the catalog and not a silent default."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Sourced(Entry):
    """An entry that says where its numbers come from; `recall` marks what was written from memory."""

    source: str = Field(min_length=4)


class Power(Entry):
    """Watts."""

    default: int
    min: int
    max: int


class Gpu(Sourced):
    """One card. Memory in MiB, bandwidth in 10^9 bytes/s; the fields are explained at the top of gpus.yml."""

    title: str
    match: list[str]
    pci_ids: list[Annotated[str, Field(pattern=r"^[0-9a-f]{4}$")]] = Field(min_length=1)
    family: Literal["geforce", "workstation", "datacenter"]
    compute: str = Field(pattern=r"^\d+\.\d$")
    vram_mib: int = Field(gt=0)
    reserved_mib: int = Field(ge=0)
    bandwidth_gbs: int = Field(gt=0)
    power: Power
    bar1_mib: int = Field(gt=0)
    nvlink: bool
    p2p: bool
    min_driver: int


class ModelConfig(BaseModel):
    """The numbers of a model's config.json that the plan uses. Other keys of a real config.json are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    vocab_size: int = Field(gt=0, le=10_000_000)
    num_hidden_layers: int = Field(gt=0, le=10_000)
    hidden_size: int = Field(gt=0, le=1_000_000)
    num_attention_heads: int = Field(gt=0, le=100_000)
    num_key_value_heads: int = Field(gt=0, le=100_000)
    head_dim: int = Field(gt=0, le=100_000)
    max_position_embeddings: int = Field(gt=0, le=1_000_000_000)
    intermediate_size: int = Field(default=0, ge=0, le=10_000_000)
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    quantization: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _implied(cls, data: Any) -> Any:
        """What a config.json leaves out when it follows from the rest."""
        if not isinstance(data, dict):
            return data
        heads, hidden = data.get("num_attention_heads"), data.get("hidden_size")
        implied = {} if heads is None else {"num_key_value_heads": heads}
        if isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
            implied["head_dim"] = hidden // heads
        return implied | {key: value for key, value in data.items() if value is not None}


class Model(Sourced):
    """One repository's facts, used until it is locked."""

    config: ModelConfig
    tokenizer: str | None = None
    reasoning_parser: str | None = None
    kind: Literal["causal", "pard", "eagle3"] = "causal"
    files: dict[str, int] = Field({}, description="GGUF files of the repository, with their bytes; empty: safetensors")


class Image(Sourced):
    """The official image from version `since` on: its CUDA, and the compute capabilities it has code for."""

    since: str
    cuda: str
    min_compute: str
    max_compute: str


class Advisory(Entry):
    """A published weakness of versions since <= v < fixed."""

    id: str
    since: str
    fixed: str
    note: str


class Engine(Sourced):
    """One engine and the versions of it that the plan knows."""

    title: str
    devices: list[Literal["cuda", "cpu"]] = ["cuda"]
    evidence: str = Field(description="what of it was run, and what was not")
    not_run: bool = Field(False, description="true: none of it was run or asked by us")
    image: str
    image_cpu: str = Field("", description="the official image for a CPU, where there is one")
    key_env: str = Field("", description="the variable with the API key; empty: the engine takes none in secret")
    health_path: str
    completion_path: str
    metrics_path: str = Field("", description="Prometheus text; empty: none")
    container_port: int
    security_floor: str = Field("", description="empty: no list of weaknesses is kept here")
    versions: list[str]
    images: list[Image]
    advisories: list[Advisory] = []

    def image_of(self, version: str) -> Image:
        """The image facts that hold for `version`."""
        at = versions.key(version)
        return [entry for entry in self.images if at >= versions.key(entry.since)][-1]


class Cuda(Sourced):
    """What a CUDA runtime needs of the driver, and the branch to install for it."""

    min_driver: str
    branch: int


class DriverModules(Sourced):
    """Which flavour of the kernel module runs which card, by compute capability."""

    open_from: str
    open_only_from: str
    auto_open_from_branch: int


class Drivers(Entry):
    """drivers.yml."""

    cuda: dict[str, Cuda]
    branches: list[int]
    nvidia_branches: list[int]
    modules: DriverModules


class Profile(Sourced):
    """A named starting point: cards and services, both overridable."""

    title: str
    gpus: list[dict[str, Any]] = []
    services: list[dict[str, Any]]


class Catalog(Entry):
    """Everything the plan knows before it is told anything."""

    gpus: dict[str, Gpu]
    models: dict[str, Model]
    engines: dict[str, Engine]
    drivers: Drivers
    profiles: dict[str, Profile]
    docker: dict[str, list[str]]


def read(name: str) -> Any:
    """The parsed YAML file `name` of this package ("catalog/gpus.yml")."""
    return yaml.load(files("specrig.plan").joinpath(name).read_text("utf-8"), Loader=_Loader)  # noqa: S506  # a safe loader


@lru_cache(maxsize=1)
def catalog() -> Catalog:
    """The packaged catalog. Raises pydantic's ValidationError when an entry is malformed (a test holds that)."""
    return Catalog.model_validate(
        {
            "gpus": read("catalog/gpus.yml")["gpus"],
            "models": read("catalog/models.yml")["models"],
            "engines": read("catalog/engines.yml")["engines"],
            "drivers": read("catalog/drivers.yml"),
            "profiles": read("catalog/profiles.yml")["profiles"],
            "docker": read("catalog/docker.yml")["options"],
        }
    )


def gpu_named(text: str) -> str | None:
    """The catalog's key for a card as the driver or lspci names it, None when unknown.

    The longest match wins, so that a "RTX 4070 Ti" is not taken for a "RTX 4070".
    """
    upper = text.upper()
    if "LAPTOP" in upper or "MAX-Q" in upper:  # other cards under the same name
        return None
    hits = [(len(m), key) for key, gpu in catalog().gpus.items() for m in gpu.match if m.upper() in upper]
    return max(hits)[1] if hits else None


def gpu_from_lspci(line: str) -> str | None:
    """The same for a line of `lspci`."""
    return gpu_named(line)


def profiles() -> dict[str, Profile]:
    """Every profile by name."""
    return catalog().profiles


def profiles_for(cards: Mapping[str, int]) -> list[str]:
    """The profiles whose cards a host with `cards` (catalog name -> count) has, those that use most of them first."""

    def used(profile: Profile) -> int:
        return sum(int(claim.get("count", 1)) for claim in profile.gpus)

    fitting = {
        name: profile
        for name, profile in profiles().items()
        if profile.gpus and all(cards.get(claim["name"], 0) >= int(claim.get("count", 1)) for claim in profile.gpus)
    }
    return sorted(fitting, key=lambda name: (-used(fitting[name]), name.endswith("_article"), name))
