"""Engines besides vLLM: what the plan writes is taken by their own parsers; what it refuses is not, where a parser can tell."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from specrig.plan import plan_host
from specrig.plan.catalog import catalog
from specrig.plan.dialects import dialect
from tests.contract.parsers import OTHERS, RTX_3090, RTX_4090, Result, check_speculative, engine_of, flags, parse
from tests.contract.test_plan import models

DRAFT = "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"
TWO = [{"name": "rtx_3090", "count": 2}]
# method -> the service's fields, host fields
METHODS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "draft_model": ({}, {}),
    "off": ({}, {"rig_speculation": False}),
    "ngram": ({"draft": None, "method": "ngram"}, {}),
    "pard": ({"draft": {"repo": "amd/PARD-DeepSeek-R1-Distill-Qwen-1.5B"}, "method": "pard"}, {}),
    "heterogeneous": ({"vocab": "heterogeneous"}, {}),
    "tp2": ({"tensor_parallel": 2}, {"rig_gpus": TWO}),
    "k6": ({"k": 6}, {}),
    "share": ({"gpu_memory_utilization": 0.8}, {}),
    "eager": ({"eager": True}, {}),
}
CASES = [(release, method) for release in OTHERS for method in METHODS]


def plan(release: str, method: str, **over: Any) -> dict[str, Any]:
    fields, host = METHODS[method]
    service = {"name": "r1-14b", "version": release.partition("@")[2], **fields, **over}
    return plan_host(
        "host", {"rig_profile": f"rtx4090_r1_14b_{engine_of(release)}", **host, "rig_services": [service]}
    ).as_json()


@functools.cache
def parsed(release: str) -> dict[str, tuple[dict[str, Any], Result]]:
    """Per method that the plan allows: the service, the parser's answer."""
    made = {method: plan(release, method) for method in METHODS}
    services = {method: p["services"][0] for method, p in made.items() if p["ok"]}
    said = parse(release, [service["argv"] for service in services.values()])
    return {method: (service, result) for (method, service), result in zip(services.items(), said, strict=True)}


def after(service: dict[str, Any], flag: str) -> str:
    return str(service["argv"][service["argv"].index(flag) + 1])


@pytest.mark.parametrize(("release", "method"), CASES)
def test_what_the_plan_allows_is_taken(release: str, method: str) -> None:
    if method not in parsed(release):
        pytest.skip("refused by the plan: see below")
    service, result = parsed(release)[method]
    assert result.ok, result.stderr[-600:] or result.error
    values = result.values
    assert values.get("model") == "/models/target" or values.get("model_path") == "/models/target"
    assert values["served_model_name"] in ("r1-14b", ["r1-14b"])
    if engine_of(release) == "sglang":
        assert values["context_length"] == 16384 and values["max_running_requests"] == 8
        assert values["reasoning_parser"] == "deepseek-r1"
        if method == "off":
            assert not [name for name in values if name.startswith("speculative")]
        else:
            k = service["k"]
            speculative = {
                name: values.get(f"speculative_{name}")
                for name in ("algorithm", "num_steps", "eagle_topk", "num_draft_tokens")
            }
            assert speculative == {
                "algorithm": "STANDALONE",
                "num_steps": k,
                "eagle_topk": 1,
                "num_draft_tokens": k + 1,
            }
        assert values.get("tp_size", 1) == (2 if method == "tp2" else 1)
        assert values.get("mem_fraction_static") == (0.8 if method == "share" else None)
        assert bool(values.get("disable_cuda_graph")) == (method == "eager")


def test_the_cases_are_not_empty() -> None:
    for release in OTHERS:
        wanted = {"draft_model", "off", "tp2", "k6", "share", "eager"}
        wanted |= {"ngram", "pard", "heterogeneous"} if engine_of(release) == "aphrodite" else set()
        assert set(parsed(release)) == wanted, release


@pytest.mark.parametrize("release", OTHERS)
def test_the_dialect_writes_only_options_that_there_are(release: str) -> None:
    engine, _, version = release.partition("@")
    known = flags(release)
    assert [flag for flag, _ in dialect(engine, version).flags if flag and flag not in known] == []


EXTRA = (["--no-such-flag"], ["--seed", "1"], ["--kv-cache-dtype", "fp8_e5m2"], ["--swap-space", "4"])


@pytest.mark.parametrize("release", OTHERS)
@pytest.mark.parametrize("extra", EXTRA, ids=lambda extra: extra[0])
def test_extra_arguments(release: str, extra: list[str]) -> None:
    """The plan knows which engine takes which flag."""
    codes = {refusal["code"] for refusal in plan(release, "off", extra_args=extra)["refusals"]}
    first = ["--model-path", "/m"] if engine_of(release) == "sglang" else ["/m"]
    [result] = parse(release, [[*first, *extra]])
    assert bool(codes & {"FLAG_NOT_IN_VERSION", "FLAG_UNKNOWN"}) == (result.exit_code == 2), (
        codes,
        result.stderr[-300:],
    )


@functools.cache
def configured() -> dict[str, Result]:
    """What Aphrodite's own engine configuration says to each method that the plan allows, and to two that it refuses."""
    release, cases, names = "aphrodite@0.24.1", [], []
    for method in METHODS:
        made = plan(release, method)
        cards = [RTX_3090] * 2 if method == "tp2" else [RTX_4090]
        shapes = models(made)
        assert made["ok"] and shapes
        service = made["services"][0]
        cases.append({"argv": service["argv"], "env": service["env"], "models": shapes, "cards": cards})
        names.append(method)
    argv = plan(release, "draft_model")["services"][0]["argv"]
    narrow = {"/models/target": "r1-14b-awq", "/models/draft": "r1-1.5b"}
    cases.append({"argv": argv, "env": {}, "models": narrow, "cards": [RTX_4090]})
    return dict(zip([*names, "narrow draft"], check_speculative(release, cases), strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_aphrodites_configuration_takes_it(method: str) -> None:
    result = configured()[method]
    assert result.ok, result.error
    values, speculative = result.values, result.values["speculative"]
    assert values["max_model_len"] == 16384 and values["tensor_parallel_size"] == (2 if method == "tp2" else 1)
    if method == "off":
        assert speculative is None
        return
    assert speculative["method"] == ("ngram" if method == "ngram" else "draft_model")
    assert speculative["num_speculative_tokens"] == (6 if method == "k6" else 5)
    assert bool(speculative["parallel_drafting"]) == (method == "pard")
    assert bool(speculative["use_heterogeneous_vocab"]) == (method == "heterogeneous")
    assert not values["runner_v2"] or method == "ngram"


def test_aphrodite_refuses_the_stock_draft_that_the_plan_pads() -> None:
    result = configured()["narrow draft"]
    assert not result.ok and "vocabulary size" in result.error, result.error


def test_every_version_that_the_plan_offers_was_asked() -> None:
    for engine in {engine_of(release) for release in OTHERS}:
        assert {f"{engine}@{v}" for v in catalog().engines[engine].versions} == {
            r for r in OTHERS if engine_of(r) == engine
        }
