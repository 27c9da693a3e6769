"""From a resolved service to the values that a dialect's tables name."""

from typing import Any

from specrig.plan.resolve import Model, Service

TARGET_PATH, DRAFT_PATH = "/models/target", "/models/draft"
FILES_PATH = "/specrig"  # where an engine's configuration files are mounted
GUARD = "specrig_guard.Guard"  # asks for the key before any page of the engine; the unit mounts it, the wrapper puts it on Python's path
DRAIN_S = 20  # how long the engine may finish running requests after SIGTERM, where the version can
# Values that a declaration's field decides under another name.
FIELDS = {
    "target_path": "target",
    "utilization_declared": "gpu_memory_utilization",
    "context_total": "max_model_len",
    "no_custom_all_reduce": "p2p",
    "eager_declared": "eager",
    "spec_json": "method, draft and k",
    "spec_model": "draft",
    "spec_model_legacy": "draft",
    "draft_tokens": "k",
    "spec_type": "method",
    "algorithm": "method",
}
NGRAM = {"ngram_max": 4, "ngram_min": 2}  # prompt lookup window: short enough to hit, long enough to mean something


def inside(folder: str, model: Model | None) -> str:
    """Where an engine finds a model: its folder, or the one GGUF file in it."""
    return f"{folder}/{model.file}" if model is not None and model.file else folder


def values(service: Service) -> dict[str, Any]:
    """What the dialect's tables may name."""
    decl, method = service.decl, service.method if service.speculates else "none"
    draft = method in ("draft_model", "pard", "eagle3")
    several = service.tp > 1
    said: dict[str, Any] = {
        "always": True,
        "quiet": True,
        "target_path": inside(TARGET_PATH, service.target),
        "served_name": decl.served_name or decl.name,
        "host": "0.0.0.0",  # noqa: S104  # inside the container; the host side publishes on `bind`
        "port": service.engine.container_port,
        "max_model_len": decl.max_model_len,
        "max_num_seqs": decl.max_num_seqs,
        "gpu_memory_utilization": f"{service.utilization:g}" if service.cuda else None,
        "tensor_parallel": service.tp if several else None,
        "executor": "mp" if several else None,
        "no_custom_all_reduce": several and service.p2p != "nvlink",
        "no_p2p": several and service.p2p not in ("nvlink", "pcie"),
        "eager": service.eager,
        "reasoning_parser": service.target.reasoning_parser,
        "reasoning_parser_switch": service.target.reasoning_parser is not None,
        "drain_s": DRAIN_S,
        "guard": GUARD,
        # other engines' words for the same
        "address": f"0.0.0.0:{service.engine.container_port}",
        "cache": "/home/engine/models",
        "config_file": f"{FILES_PATH}/config.yml",
        "backend": "pytorch",
        "context_total": decl.max_model_len * decl.max_num_seqs,
        "gpu_layers": "all" if service.cuda else None,
        "split_mode": "layer" if len(service.gpus) > 1 else None,
        "tensor_split": ",".join("1" for _ in service.gpus) if len(service.gpus) > 1 else None,
        "utilization_declared": decl.gpu_memory_utilization,
        "eager_declared": service.eager and service.cuda,
        "reasoning_parser_dashed": (service.target.reasoning_parser or "").replace("_", "-"),
        "engine_v0": service.cuda and service.method in ("draft_model", "pard"),
    }
    if method == "none":
        return said
    return said | {
        "k": service.k,
        "spec_method": "draft_model" if method == "pard" else method,
        "spec_model": inside(DRAFT_PATH, service.draft) if draft else None,
        "drafts": True,
        "draft_tokens": service.k + 1,
        "topk": 1,
        "algorithm": "STANDALONE",
        "spec_type": "draft-simple",
        "decoding_type": "DraftTarget",
        "draft_gpu_layers": "all" if service.cuda else None,
        "draft_unquantized": "unquant" if draft and _widens(service) else None,
        "spec_model_legacy": DRAFT_PATH if draft else "[ngram]",
        "draft_tensor_parallel": service.draft_tp if draft and (several or decl.draft_tensor_parallel) else None,
        "parallel_drafting": method == "pard",
        "heterogeneous_vocab": service.vocab == "heterogeneous",
        "runner_v1": service.cuda and method in ("draft_model", "pard"),
        **(NGRAM if method == "ngram" else {}),
    }


def _widens(service: Service) -> bool:
    """Is the target quantised and the draft not?"""
    return bool(service.target.config.quantization and service.draft and not service.draft.config.quantization)
