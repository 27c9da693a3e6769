"""What each version's own engine configuration says to a whole command line: draft widths, TP, methods, JSON keys.

Real code, real model shapes, no device: `AsyncEngineArgs.create_engine_config`, then the checks that a worker or a
drafter makes first. A method's existence is checked here; the parsers accept what the engine refuses.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from typing import Any

import pytest

from tests.contract.parsers import RTX_4090, VERSIONS, Result, check_speculative, each
from tests.contract.test_parsers import ALL, DRAFT, NONE, TARGET, Windows, key, model

PADDED = {TARGET: "r1-14b-awq", DRAFT: "r1-1.5b-padded"}
STOCK = {TARGET: "r1-14b-awq", DRAFT: "r1-1.5b"}  # 151936 rows against 152064
TP2 = ["--tensor-parallel-size", "2"]
LEGACY = ["--speculative-model", DRAFT, "--num-speculative-tokens", "3"]
LEGACY_TP = [*LEGACY, "--speculative-draft-tensor-parallel-size"]
V0: Windows = [("0", "0.10")]
V1: Windows = [("0.15", "9")]
DRAFTS: Windows = [*V0, *V1]  # the two windows in which a draft model runs


def spec(**keys: Any) -> list[str]:
    """`--speculative-config` for three drafted tokens."""
    return ["--speculative-config", json.dumps({"num_speculative_tokens": 3, **keys})]


def draft(**keys: Any) -> list[str]:
    """The same for a draft model."""
    return spec(method="draft_model", model=DRAFT, **keys)


JSON_V0 = [("0.8.2", "0.10")]
# case -> (arguments, models, environment, windows that accept, what the others say; "" where the parser refuses)
Case = tuple[Sequence[str], dict[str, str], dict[str, str], Windows, str]
CASES: dict[str, Case] = {
    "no speculation": ([], PADDED, {}, ALL, ""),
    "legacy, padded": (LEGACY, PADDED, {}, [("0", "0.8.3")], ""),
    "legacy, stock": (LEGACY, STOCK, {}, NONE, "AssertionError"),
    "legacy, TP 2 and draft TP 1": ([*TP2, *LEGACY_TP, "1"], PADDED, {}, [("0", "0.8.3")], ""),
    "legacy, draft TP 2, chunked": (
        [*TP2, *LEGACY_TP, "2", "--enable-chunked-prefill"],
        PADDED,
        {},
        [("0.7", "0.8.3")],
        "Chunked prefill and speculative decoding",
    ),
    "padded": (draft(), PADDED, {}, [*JSON_V0, *V1], "draft model is not supported yet"),
    "stock": (draft(), STOCK, {"VLLM_USE_V1": "0"}, NONE, "AssertionError|same vocabulary size|not supported yet"),
    "stock, heterogeneous": (
        draft(use_heterogeneous_vocab=True),
        STOCK,
        {},
        [("0.25", "9")],
        # 0.8.2 reads the value as Python, so `true` is malformed; 0.9 to 0.15 ignore the key and then the widths differ
        "malformed|unexpected keyword|AssertionError|same vocabulary size|Unexpected keyword|not supported yet",
    ),
    # 0.15 takes no method for draft_model; later versions do.
    "no method named": (
        spec(model=DRAFT),
        PADDED,
        {},
        [*JSON_V0, ("0.16", "9")],
        "Unsupported speculative|not supported",
    ),
    "TP 2": ([*TP2, *draft()], PADDED, {}, [*JSON_V0, *V1], "not supported yet"),
    "TP 2, draft TP 1, runner V1": (
        [*TP2, *draft(draft_tensor_parallel_size=1)],
        PADDED,
        {"VLLM_USE_V2_MODEL_RUNNER": "0"},
        JSON_V0,
        "must be the same|not supported yet",
    ),
    "ngram": (spec(method="ngram", prompt_lookup_max=4), PADDED, {}, [("0.8.2", "9")], ""),
    "parallel drafting": (
        draft(parallel_drafting=True),
        PADDED,
        {},
        [("0.9", "0.10"), ("0.15", "9")],  # before 0.16 the key is ignored
        "malformed|unexpected keyword|not supported yet",
    ),
    # An unknown key is silently dropped in 0.9 to 0.15.
    "misspelt key": (
        draft(num_speculatve_tokens=3),
        PADDED,
        {},
        [("0.9", "0.10"), ("0.15", "0.19")],
        "keyword argument|not supported yet",
    ),
    "tensor_parallel_size": (
        draft(tensor_parallel_size=1),
        PADDED,
        {},
        [("0.9", "0.10")],
        "not a valid argument|keyword argument|not supported yet",
    ),
    "--quantization awq, bfloat16": (
        ["--quantization", "awq", "--dtype", "bfloat16"],
        PADDED,
        {},
        [("0.25", "9")],
        "bfloat16 is not supported",
    ),
    "--spec-method": (
        ["--spec-method", "draft_model", "--spec-model", DRAFT, "--spec-tokens", "3"],
        PADDED,
        {},
        [("0.22", "9")],
        "",
    ),
    "runner V2 forced": (draft(), PADDED, {"VLLM_USE_V2_MODEL_RUNNER": "1"}, [*JSON_V0, *V1], ""),
}


@functools.cache
def answers() -> dict[str, dict[str, Result]]:
    """Every version's answer to every case."""

    def one(version: str) -> dict[str, Result]:
        cases = [
            {
                "argv": [*model(version), "--max-model-len", "16384", *argv],
                "models": models,
                "env": env,
                "cards": [RTX_4090] * 2,
            }
            for argv, models, env, _, _ in CASES.values()
        ]
        return dict(zip(CASES, check_speculative(version, cases), strict=True))

    return each(one)


@pytest.mark.parametrize("case", [c for c in CASES if c != "runner V2 forced"])
@pytest.mark.parametrize("version", VERSIONS)
def test_engine(version: str, case: str) -> None:
    *_, windows, says = CASES[case]
    result = answers()[version][case]
    accepted = any(key(since) <= key(version) < key(until) for since, until in windows)
    assert result.ok == accepted, result.error or result.stderr[-600:]
    if not accepted and result.exit_code != 2:
        assert says and re.search(says, result.error), result.error


@pytest.mark.parametrize("version", VERSIONS)
def test_which_engine_and_runner(version: str) -> None:
    """V0 or V1, runner V1 or V2, async scheduling: what the version chooses when nothing is set."""
    mine = answers()[version]
    case = mine["padded" if key(version) >= (0, 8, 2) else "legacy, padded"]
    if key(version) < (0, 8) or (0, 10) <= key(version) < (0, 15):
        assert case.values.get("engine_v1") is None
        return
    if key(version) < (0, 10):
        # 0.8.2 looks for the legacy flags only: with JSON it chooses V1, whose worker then asserts "ngram".
        assert case.values["engine_v1"] == ("1" if key(version) == (0, 8, 2) else "0")
        return
    assert bool(case.values["runner_v2"]) == (key(version) >= (0, 31))
    assert case.values["async_scheduling"] == (key(version) >= (0, 30))
    if key(version) >= (0, 25):
        assert mine["stock, heterogeneous"].values["runner_v2"] is False
        assert mine["runner V2 forced"].ok == (key(version) >= (0, 31))
        assert mine["no speculation"].values["runner_v2"] is True


@pytest.mark.parametrize("version", VERSIONS)
def test_kernel(version: str) -> None:
    """Without --quantization an AWQ target gets the fast kernel."""
    assert answers()[version]["no speculation"].values["quantization"] == (
        "awq_marlin" if key(version) < (0, 25) else "auto_awq"
    )
