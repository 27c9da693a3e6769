"""Stand-ins for what an engine's parser imports but never needs: torch, compiled kernels, servers.

torch stub: names only, so that the parser module imports; says nothing about tensors. The same holds for every other
name in NAMES. A stand-in answers any attribute with another stand-in, can be called, subclassed, subscripted and used
as a decorator, and computes nothing. Two things carry facts: `torch.dtype` members have their names and sizes, and
`pynvml` describes the cards that a case asks for, so that the engine takes its own CUDA code path.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import inspect
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, get_args, get_origin

# Also never installed, for one engine's sake.
NAMES_OF = {"sglang": set("orjson sgl_kernel soundfile decord IPython dill hf_transfer torchao".split())}  # noqa: SIM905
# Third-party packages that are never installed here. Anything else that is missing is a real ImportError.
NAMES = set(
    """
    torch torchvision torchaudio functorch triton xformers outlines outlines_core xgrammar llguidance lmformatenforcer gguf
    compressed_tensors mistral_common zmq uvloop uvicorn prometheus_fastapi_instrumentator depyf cv2 PIL sentencepiece
    tiktoken aiohttp cpuinfo partial_json_parser einops blake3 numba watchfiles setproctitle openai_harmony anthropic
    mcp model_hosting_container_standards pybase64 cbor2 ijson scipy diskcache lark pynvml nvtx flashinfer opentelemetry
    openai fastapi starlette prometheus_client pythonjsonlogger google requests urllib3
    """.split()  # noqa: SIM905
)
TORCH_VERSION = "2.13.0"
# Parts of the engine itself: what is compiled, what is not unpacked, and a configuration class that 0.9.2 registers
# under a name which today's transformers has taken.
PARTS = """
    _C _C_stable_libtorch _core_C _moe_C _moe_C_stable_libtorch cumem_allocator model_executor.kernels models third_party
    transformers_utils.configs.ovis vllm_flash_attn
    """.split()  # noqa: SIM905
ENGINE_NAMES = {f"{engine}.{part}" for engine in ("vllm", "aphrodite") for part in PARTS}
ENGINE_NAMES |= {"sglang.srt.layers", "sglang.srt.models", "sglang.lang"}
MODELS = ("vllm.model_executor.models.", "aphrodite.model_executor.models.")
# Other makers' devices, which an engine looks for by the name of torch's module.
ABSENT = {"torch.npu", "torch.musa", "torch_npu"}


class _Meta(type(Protocol)):  # type: ignore[misc]  # so that a class may have both bases
    """A class whose unknown attributes are stand-ins, and which may be called, subscripted, joined with `|`."""

    def __getattr__(cls, name: str) -> Any:
        # An engine's own class below a stand-in has what it defines, and no more.
        if (name.startswith("__") and name.endswith("__")) or not cls.__dict__.get("_stand_in"):
            raise AttributeError(name)
        value = make(f"{cls.__module__}.{cls.__qualname__}", name)
        setattr(cls, name, value)
        return value

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls.__dict__.get("_stand_in") and len(args) == 1 and not kwargs and isinstance(args[0], types.FunctionType):
            return args[0]  # used as a bare decorator
        return super().__call__(*args, **kwargs)

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return object if isinstance(other, str) else super().__or__(other)

    def __ror__(cls, other: Any) -> Any:
        return object if isinstance(other, str) else super().__ror__(other)

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


class _Base(metaclass=_Meta):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__()

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        return {"type": "any"}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return make(type(self).__name__, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]  # the second half of a decorator with arguments
        return _Base()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def __getitem__(self, item: Any) -> Any:
        return _Base()

    def __setitem__(self, item: Any, value: Any) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __bool__(self) -> bool:
        return False


def make(parent: str, name: str) -> Any:
    """A new stand-in class called `name`."""
    body: dict[str, Any] = {"__module__": parent, "_stand_in": True}
    if parent.startswith(
        ("vllm.models", "aphrodite.models")
    ):  # the engine asks every quantisation whether it takes a checkpoint over
        body["override_quantization_method"] = staticmethod(lambda *args, **kwargs: None)
    return _Meta(name, (_Base,), body)


class StandIn(types.ModuleType):
    """A module made of stand-ins; sub-modules are importable."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        below = f"{self.__name__}.{name}"
        if below in ABSENT:
            raise AttributeError(name)
        value = (
            importlib.import_module(below) if below in FACTS else sys.modules.get(below) or make(self.__name__, name)
        )
        setattr(self, name, value)
        return value


class _Torch(importlib.metadata.Distribution):
    def read_text(self, filename: str) -> str | None:
        return f"Name: torch\nVersion: {TORCH_VERSION}\n" if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(path)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Serves stand-ins for NAMES, ENGINE_NAMES and everything below them."""

    def __init__(self) -> None:
        self.served: list[str] = []

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        top, _, leaf = name.partition(".")[0], *name.rpartition(".")[1:]
        ours = top in NAMES or name in ENGINE_NAMES or any(name.startswith(f"{n}.") for n in ENGINE_NAMES)
        if name.startswith(MODELS):  # model classes that are not unpacked
            ours = not any(Path(folder, leaf + suffix).exists() for folder in path or () for suffix in ("", ".py"))
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if ours else None

    def find_distributions(self, context: Any) -> Iterator[Any]:
        """Versions that the engine asks the package metadata for."""
        if context.name == "torch":
            yield _Torch()

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        self.served.append(module.__name__)
        module.__file__ = f"/stand-in/{module.__name__.replace('.', '/')}.py"
        module.__version__ = TORCH_VERSION if module.__name__ == "torch" else "0.0.0"  # type: ignore[attr-defined]
        if module.__name__ in FACTS:
            FACTS[module.__name__](module)


class _DType:
    def __init__(self, name: str, itemsize: int) -> None:
        self.name, self.itemsize = name, itemsize
        self.is_floating_point = "float" in name

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        return {"type": "is-instance", "cls": cls}

    def __repr__(self) -> str:
        return f"torch.{self.name}"

    def __reduce__(self) -> str:
        return self.name


_DType.__name__ = _DType.__qualname__ = "dtype"
_DType.__module__ = "torch"
DTYPES = {
    n: _DType(n, s)
    for n, s in (
        *(
            (n, 1)
            for n in ("uint8", "int8", "bool", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
        ),
        *((n, 1) for n in ("float8_e8m0fnu", "float4_e2m1fn_x2")),
        *((n, 2) for n in ("float16", "bfloat16", "int16", "uint16")),
        *((n, 4) for n in ("float32", "int32", "uint32")),
        *((n, 8) for n in ("float64", "int64", "uint64")),
    )
}


LARGEST = {
    "float16": 65504.0,
    "bfloat16": 3.3895313892515355e38,
    "float32": 3.4028234663852886e38,
    "float64": sys.float_info.max,
    "float8_e4m3fn": 448.0,
    "float8_e4m3fnuz": 240.0,
    "float8_e5m2": 57344.0,
    "float8_e5m2fnuz": 57344.0,
}


def _torch(torch: Any) -> None:
    torch.dtype = _DType
    for name, value in DTYPES.items():
        setattr(torch, name, value)
    torch.half, torch.float, torch.long, torch.int = (DTYPES[n] for n in ("float16", "float32", "int64", "int32"))
    torch.iinfo = lambda dtype: types.SimpleNamespace(
        min=-(1 << 8 * dtype.itemsize - 1), max=(1 << 8 * dtype.itemsize - 1) - 1, bits=8 * dtype.itemsize
    )
    torch.finfo = lambda dtype: types.SimpleNamespace(min=-LARGEST[dtype.name], max=LARGEST[dtype.name])
    torch.double, torch.short = DTYPES["float64"], DTYPES["int16"]


def _torch_library(library: Any) -> None:
    library.infer_schema = _schema

    def operator(function: Any) -> Any:
        function.register_fake = function.register_autograd = function.register_kernel = _Base()
        return function

    library.custom_op = lambda *args, **kwargs: operator


def _schema(function: Any, **kwargs: Any) -> str:
    """An operator's schema, as far as the engine counts in it: one `Tensor` per value returned."""
    returned = inspect.signature(function).return_annotation
    many = get_args(returned) if get_origin(returned) is tuple else (returned,)
    values = ["Tensor" for one in many if one not in (None, inspect.Signature.empty)]
    return f"() -> ({', '.join(values)})" if len(values) != 1 else "() -> Tensor"


def _torch_version(version: Any) -> None:
    version.cuda, version.hip, version.xpu = "13.0", None, None


def _torch_distributed(distributed: Any) -> None:
    distributed.ReduceOp = types.SimpleNamespace(SUM=0, PRODUCT=2, MIN=3, MAX=4)


def _torch_cuda(cuda: Any) -> None:
    cuda.is_available = cuda._is_compiled = lambda: True
    cuda.is_initialized = lambda: False
    cuda.device_count = lambda: len(cards)
    cuda._device_count_nvml = lambda: len(cards)


cards: list[tuple[str, int, tuple[int, int]]] = [("NVIDIA GeForce RTX 4090", 24 << 30, (8, 9))] * 2


def _nvml(nvml: Any) -> None:
    nvml.NVMLError = type("NVMLError", (Exception,), {})
    nvml.nvmlInit = nvml.nvmlShutdown = lambda: None
    nvml.nvmlDeviceGetCount = lambda: len(cards)
    nvml.nvmlDeviceGetHandleByIndex = lambda index: index
    nvml.nvmlDeviceGetName = lambda handle: cards[handle][0]
    nvml.nvmlDeviceGetMemoryInfo = lambda handle: types.SimpleNamespace(total=cards[handle][1])
    nvml.nvmlDeviceGetCudaComputeCapability = lambda handle: cards[handle][2]
    nvml.nvmlDeviceGetUUID = lambda handle: f"GPU-{handle:08d}"
    nvml.nvmlDeviceGetP2PStatus = lambda *args: 1
    nvml.NVML_P2P_STATUS_OK = 0


def _triton_backends(backends: Any) -> None:
    driver = types.SimpleNamespace(is_active=lambda: True)
    backends.backends = {"nvidia": types.SimpleNamespace(driver=driver)}


# The modules whose stand-ins carry facts.
FACTS = {
    "torch": _torch,
    "torch.cuda": _torch_cuda,
    "torch.distributed": _torch_distributed,
    "torch.library": _torch_library,
    "torch.version": _torch_version,
    "triton.backends": _triton_backends,
    "pynvml": _nvml,
    "vllm.third_party.pynvml": _nvml,
    "aphrodite.third_party.pynvml": _nvml,
}


def install(engine: str = "vllm") -> Finder:
    """Put the stand-ins before every real finder."""
    NAMES.update(NAMES_OF.get(engine, ()))
    finder = Finder()
    sys.meta_path.insert(0, finder)
    return finder
