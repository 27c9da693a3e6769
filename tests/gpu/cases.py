"""What is to be measured on a GPU, rendered from the plan: `python -m tests.gpu.cases > cases.json`.

Every case is one engine: the argv and env of `plan_host`, word for word, and the measuring overlay that is appended to it
(a later flag wins): dummy weights, an imposed acceptance, a share of the card. `measure.py` reads the result there.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from specrig.plan import plan_host
from tests.contract import shapes

VERSION = "0.26.0"
# Mean length of a verified run, bonus token included: 1 + K x accepted / drafted, with the article's ratios (K=3 .764,
# K=5 .718); 1 and 2 as K=3's, 8 with fewer accepted per drafted.
LENGTHS = {1: 1.8, 2: 2.6, 3: 3.29, 5: 4.59, 8: 5.4}
SHARES = {"14b": 0.14, "32b": 0.22}  # of an H200: several engines live on it side by side
GIB = 1 << 30
SHORT = ["--max-model-len", "2048", "--kv-cache-memory-bytes", str(GIB)]  # for what only its speed is wanted of
FOLDERS = {
    "casperhansen/deepseek-r1-distill-qwen-14b-awq": "r1-14b-awq",
    "casperhansen/deepseek-r1-distill-qwen-32b-awq": "r1-32b-awq",
    "casperhansen/deepseek-r1-distill-qwen-1.5b-awq": "r1-1.5b-awq",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": "r1-1.5b",
    "amd/PARD-DeepSeek-R1-Distill-Qwen-1.5B": "r1-1.5b-pard",
    "thoughtworks/DeepSeek-R1-Distill-Qwen-14B-Eagle3": "r1-14b-eagle3-head",
}
ALONE, BESIDE = True, False
SERVICES = {"rtx4090_r1_14b": ("r1-14b", "14b"), "dual_rtx3090_r1_32b_tp2": ("r1-32b", "32b")}


def models() -> dict[str, dict[str, Any]]:
    """Folder name -> config.json."""
    made = {name: shapes.config(name) for name in shapes.SHAPES}
    made["r1-1.5b-pard-padded"] = made["r1-1.5b-padded"] | {"pard_token": 151700}
    made["r1-14b-eagle3-head"] = {
        **{key: made["r1-14b-awq"][key] for key in ("hidden_size", "intermediate_size", "num_attention_heads")},
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 152064,
        "draft_vocab_size": 32000,
        "max_position_embeddings": 131072,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-06,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
    }
    return made


def plan(profile: str, service: dict[str, Any], **host: Any) -> dict[str, Any]:
    """The one service of a plan; a refusal ends the program."""
    name = SERVICES[profile.removesuffix("_article")][0]
    said = {"rig_profile": profile, "rig_services": [{"name": name, "version": VERSION, **service}], **host}
    planned = plan_host("gpu", said).as_json()
    if not planned["ok"]:
        sys.exit(f"{profile} {service}: {planned['refusals']}")
    found: dict[str, Any] = planned["services"][0]
    return found


def folder(mount: dict[str, Any]) -> str:
    """The folder that stands for a model of the plan."""
    repo, _, revision = mount["artefact"].partition("@")
    return FOLDERS[repo] + ("-padded" if "-pad" in revision else "")


def case(
    profile: str,
    service: dict[str, Any] | None = None,
    *extra: str,
    alone: bool = BESIDE,
    short: bool = False,
    host: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """One engine. `alone`: it starts while nothing else moves, so that its own memory profile counts."""
    service, host = service or {}, host or {}
    size = SERVICES[profile.removesuffix("_article")][1]
    if size == "32b":  # one card where the profile has two: said in the results
        host = {"rig_gpus": [{"name": "h200", "count": 1}], **host}
        service = {"tensor_parallel": 1, "gpu_memory_utilization": 0.9, "draft_tensor_parallel": None, **service}
    planned = plan(profile, service, **host)
    here = {"gpu_memory_utilization": SHARES[size]}
    ledger = plan(profile, service | here, **{**host, "rig_gpus": [{"name": "h200", "count": 1}]})["vram"]
    argv: list[str] = planned["argv"]
    overlay = ["--load-format", "dummy"]
    if "--speculative-config" in argv:
        k = planned["k"]
        config = json.loads(argv[argv.index("--speculative-config") + 1])
        config |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": LENGTHS[k]}
        overlay += ["--speculative-config", json.dumps(config, separators=(",", ":"))]
    if alone:
        overlay += ["--gpu-memory-utilization", str(SHARES[size])]
    else:  # no profiling of memory, which neighbours that are starting would disturb
        overlay += ["--gpu-memory-utilization", "0.05"]
        token = ledger["gpus"][0]["kv_bytes_per_token"]
        full = ["--kv-cache-memory-bytes", str((16384 + 256) * token)]
        overlay += SHORT if short else full
    return {
        "profile": profile,
        "k": planned["k"],
        "method": planned["method"],
        "argv": argv,
        "overlay": [*overlay, *extra],
        "env": planned["env"],
        "models": {mount["path_in_container"]: folder(mount) for mount in planned["models"]},
        "alone": alone,
        "ledger": ledger["gpus"][0],
    }


def cases() -> dict[str, dict[str, Any]]:
    """Name -> engine."""
    small, large = "rtx4090_r1_14b", "dual_rtx3090_r1_32b_tp2"
    asynchronous = "--async-scheduling"
    trace = {"profiler": "torch", "torch_profiler_dir": "/tmp/specrig-gpu/trace", "torch_profiler_with_stack": False}
    partition = json.dumps({"use_inductor_graph_partition": True})
    off = {"rig_speculation": False}
    pard = {"method": "pard", "k": 5, "draft": {"repo": "amd/PARD-DeepSeek-R1-Distill-Qwen-1.5B"}}
    eagle = {"method": "eagle3", "k": 5, "draft": {"repo": "thoughtworks/DeepSeek-R1-Distill-Qwen-14B-Eagle3"}}
    awq = {"k": 5, "draft": {"repo": "casperhansen/deepseek-r1-distill-qwen-1.5b-awq"}}
    return {
        # the musts: planned, the article's flags, no speculation
        "planned": case(small, alone=ALONE),
        "article": case(f"{small}_article", alone=ALONE),
        "plain": case(small, host=off),
        "k3": case(small, {"k": 3}, "--profiler-config", json.dumps(trace | {"ignore_frontend": True})),
        "k5-async": case(small, {"k": 5}, asynchronous),
        "planned-32b": case(large, alone=ALONE),
        "article-32b": case(f"{large}_article", short=True),
        "plain-32b": case(large, short=True, host=off),
        # what one drafted token costs
        "k1": case(small, {"k": 1}, short=True),
        "k2": case(small, {"k": 2}, short=True),
        "k8": case(small, {"k": 8, "k_measured_reason": "what a drafted token costs"}, short=True),
        # what lowers it
        "pard-k5": case(small, pard, short=True),
        "pard-k5-async": case(small, pard, asynchronous, short=True),
        "ngram-k5": case(small, {"method": "ngram", "k": 5, "draft": None}, short=True),
        "eagle3-k5": case(small, eagle, short=True),
        "awq-draft-k5": case(small, awq, short=True),
        "heterogeneous-k5": case(small, {"k": 5, "vocab": "heterogeneous"}, short=True),
        "partition-k5": case(small, {"k": 5}, "--compilation-config", partition, short=True),
        "k2-async": case(small, {"k": 2}, asynchronous, short=True),
        "k3-async": case(small, {"k": 3}, asynchronous, short=True),
        "plain-sync": case(small, None, "--no-async-scheduling", short=True, host=off),
    }


if __name__ == "__main__":
    json.dump({"version": VERSION, "models": models(), "cases": cases()}, sys.stdout, indent=1)
