"""What each vLLM version's own argument parser accepts: the facts that the plan's dialects rest on."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence

import pytest

from tests.contract.parsers import ENTRY, VERSIONS, Result, each, parse

TARGET, DRAFT = "/models/target", "/models/draft"
LEGACY = ["--speculative-model", DRAFT, "--num-speculative-tokens", "5"]
JSON = ["--speculative-config", json.dumps({"model": DRAFT, "num_speculative_tokens": 5})]


def key(version: str) -> tuple[int, ...]:
    """`0.6.4.post1` as (0, 6, 4), for comparing."""
    return tuple(int(p) for p in version.split(".") if p.isdigit())


def model(version: str) -> list[str]:
    """The way of naming the model that the image of this version takes."""
    return [TARGET] if ENTRY[version] == "serve" else ["--model", TARGET]


Windows = Sequence[tuple[str, str]]  # of versions: from the first, before the second
ALL: Windows = [("0", "9")]
NONE: Windows = []

# case -> (arguments after the model, the windows of versions whose parser accepts them)
FACTS: dict[str, tuple[Sequence[str], Windows]] = {
    "bare": ([], ALL),
    "legacy": (LEGACY, [("0", "0.8.3")]),
    "legacy draft TP": ([*LEGACY, "--speculative-draft-tensor-parallel-size", "1"], [("0", "0.8.3")]),
    "json": (JSON, [("0.8.2", "9")]),
    # 0.8.2 keeps the text and reads it when the engine is configured; later versions read it here.
    "malformed json": (["--speculative-config", "{model: x}"], [("0.8.2", "0.8.3")]),
    "-sc": (["-sc", JSON[1]], [("0.19", "9")]),
    "--spec-method": (["--spec-method", "draft_model", "--spec-model", DRAFT, "--spec-tokens", "3"], [("0.22", "9")]),
    # Gone in 0.17; in 0.33 it is back as the inverse of --enable-log-requests.
    "--disable-log-requests": (["--disable-log-requests"], [("0", "0.17"), ("0.33", "9")]),
    "--no-enable-log-requests": (["--no-enable-log-requests"], [("0.10.2", "9")]),
    "--swap-space": (["--swap-space", "4"], [("0", "0.18")]),
    "--block-size 16": (["--block-size", "16"], ALL),
    "--enforce-eager": (["--enforce-eager"], ALL),
    "--disable-custom-all-reduce": (["--disable-custom-all-reduce"], ALL),
    "--enable-chunked-prefill": (["--enable-chunked-prefill"], ALL),
    "--gpu-memory-utilization": (["--gpu-memory-utilization", "0.92"], ALL),
    "--quantization awq": (["--quantization", "awq"], ALL),
    "--served-model-name": (["--served-model-name", "r1"], ALL),
    "--uvicorn-log-level": (["--uvicorn-log-level", "warning"], ALL),
    "--reasoning-parser": (["--reasoning-parser", "deepseek_r1"], [("0.7", "9")]),
    "--enable-reasoning": (["--enable-reasoning", "--reasoning-parser", "deepseek_r1"], [("0.7", "0.10")]),
    "--shutdown-timeout": (["--shutdown-timeout", "30"], [("0.18", "9")]),
    "--per-request-spec-decode-metrics": (["--per-request-spec-decode-metrics", "summary"], [("0.30", "9")]),
    "--disable-access-log-for-endpoints": (["--disable-access-log-for-endpoints", "/health"], [("0.19", "9")]),
    "unknown flag": (["--no-such-flag"], NONE),
}
CASES = list(FACTS)


@functools.cache
def answers() -> dict[str, dict[str, Result]]:
    """Every version's answer to every case."""

    def one(version: str) -> dict[str, Result]:
        argvs = [[*model(version), *FACTS[case][0]] for case in CASES]
        return dict(zip(CASES, parse(version, argvs), strict=True))

    return each(one)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("version", VERSIONS)
def test_fact(version: str, case: str) -> None:
    windows = FACTS[case][1]
    result = answers()[version][case]
    assert result.ok == any(key(since) <= key(version) < key(until) for since, until in windows), (
        result.stderr[-600:] or result.error
    )
    if result.ok:
        assert result.values["model"] == TARGET
    else:
        assert result.exit_code == 2, result.error
