"""What the plan writes is taken by the version's own parser and engine configuration; what it refuses there is not."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from specrig.plan import plan_host
from specrig.plan.catalog import profiles
from tests.contract.parsers import (
    RTX_3060,
    RTX_3090,
    RTX_4090,
    VERSIONS,
    Result,
    check_speculative,
    each,
    parse,
)
from tests.contract.test_parsers import DRAFT, TARGET, key, model

METHODS: dict[str, dict[str, Any]] = {
    "draft_model": {},
    "off": {},
    "ngram": {"draft": None, "method": "ngram"},
    "heterogeneous": {"vocab": "heterogeneous"},
    "pard": {"draft": {"repo": "amd/PARD-DeepSeek-R1-Distill-Qwen-1.5B"}, "method": "pard"},
    "eagle3": {"draft": {"repo": "thoughtworks/DeepSeek-R1-Distill-Qwen-14B-Eagle3"}, "method": "eagle3"},
}
CASES = [
    (name, method)
    for name, profile in profiles().items()
    if profile.services[0]["engine"] == "vllm"
    for method in METHODS
]
CARDS = {"rtx4090": [RTX_4090], "dual_rtx3090": [RTX_3090] * 2, "12gb": [RTX_3060]}
SHAPES = {  # repository -> our configuration of the same shape; an EAGLE head has none, its command is only parsed
    "casperhansen/deepseek-r1-distill-qwen-32b-awq": "r1-32b-awq",
    "casperhansen/deepseek-r1-distill-qwen-14b-awq": "r1-14b-awq",
    "casperhansen/deepseek-r1-distill-qwen-7b-awq": "r1-7b-awq",
    "casperhansen/deepseek-r1-distill-qwen-1.5b-awq": "r1-1.5b-awq",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": "r1-1.5b",
    "amd/PARD-DeepSeek-R1-Distill-Qwen-1.5B": "r1-1.5b",
}


def plan(profile: str, method: str, version: str, **over: Any) -> dict[str, Any]:
    """The plan of one profile with one method in one version."""
    item = {"name": profiles()[profile].services[0]["name"], "version": version, **METHODS[method], **over}
    return plan_host(
        profile, {"rig_profile": profile, "rig_services": [item], "rig_speculation": method != "off"}
    ).as_json()


def models(made: dict[str, Any]) -> dict[str, str] | None:
    """Path in the container -> shape, for the plan's only service; None where we have no shape."""
    artefacts = {artefact["id"]: artefact for artefact in made["models"]}
    found = {}
    for mount in made["services"][0]["models"]:
        artefact = artefacts[mount["artefact"]]
        if artefact["repo"] not in SHAPES:
            return None
        found[mount["path_in_container"]] = SHAPES[artefact["repo"]] + ("-padded" if artefact["derive"] else "")
    return found


@functools.cache
def answers() -> dict[str, dict[tuple[str, str], tuple[dict[str, Any], Result, Result | None]]]:
    """Per version and case that the plan allows: the service, the parser's answer, the engine configuration's."""

    def one(version: str) -> dict[tuple[str, str], tuple[dict[str, Any], Result, Result | None]]:
        made = {case: plan(*case, version) for case in CASES}
        allowed = {case: p for case, p in made.items() if p["ok"]}
        parsed = dict(zip(allowed, parse(version, [p["services"][0]["argv"] for p in allowed.values()]), strict=True))
        asked, cases = [], []
        for case, p in allowed.items():
            cards = next((c for name, c in CARDS.items() if case[0].startswith(name)), None)
            if (shapes := models(p)) is not None and cards:
                asked.append(case)
                service = p["services"][0]
                cases.append({"argv": service["argv"], "env": service["env"], "models": shapes, "cards": cards})
        checked = dict(zip(asked, check_speculative(version, cases), strict=True))
        return {case: (p["services"][0], parsed[case], checked.get(case)) for case, p in allowed.items()}

    return each(one)


@pytest.mark.parametrize("case", CASES, ids="-".join)
@pytest.mark.parametrize("version", VERSIONS)
def test_what_the_plan_allows(version: str, case: tuple[str, str]) -> None:
    found = answers()[version].get(case)
    if found is None:
        return  # refused: see below
    service, parsed, checked = found
    assert parsed.ok, parsed.stderr[-600:] or parsed.error
    assert parsed.values["model"] == TARGET
    if checked is None:
        return
    assert checked.ok, checked.error
    speculative = checked.values["speculative"]
    assert checked.values["max_model_len"] == int(service["argv"][service["argv"].index("--max-model-len") + 1])
    if case[1] == "off":
        assert speculative is None
        return
    assert speculative["num_speculative_tokens"] == service["k"]
    if speculative["method"] is not None:  # named by the configuration from 0.8 on
        assert speculative["method"] == ("ngram" if case[1] == "ngram" else "draft_model")
    assert bool(speculative["use_heterogeneous_vocab"]) == (case[1] == "heterogeneous")
    assert bool(speculative["parallel_drafting"]) == (case[1] == "pard")
    if case[1] in ("draft_model", "heterogeneous", "pard"):
        # A draft model runs in V0 up to 0.9 and under runner V1 later (graphs kept); the plan pins both.
        assert checked.values["engine_v1"] in (None, "0") or key(version) >= (0, 15)
        assert not checked.values["runner_v2"]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_method_is_somewhere(version: str) -> None:
    """The test above is not empty: what each version must be able to run."""
    got = {method for _, method in answers()[version]}
    assert {"off", "ngram"} <= got
    assert ("draft_model" in got) == (not (0, 10) <= key(version) < (0, 15))
    assert ("heterogeneous" in got) == (key(version) >= (0, 25))
    assert ("pard" in got) == (key(version) >= (0, 16))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("method", ["draft_model", "heterogeneous", "pard"])
def test_what_the_plan_refuses(version: str, method: str) -> None:
    """Where the plan says that a method is not in a version, the engine refuses it or silently does something else."""
    codes = {refusal["code"] for refusal in plan("rtx4090_r1_14b", method, version)["refusals"]}
    if not codes & {"METHOD_VERSION_WINDOW", "VOCAB_MODE_VERSION"}:
        return
    keys = {"heterogeneous": {"use_heterogeneous_vocab": True}, "pard": {"parallel_drafting": True}}.get(method, {})
    config = {"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 3, **keys}
    argv = [*model(version), "--max-model-len", "16384", "--speculative-config", json.dumps(config)]
    shapes = {TARGET: "r1-14b-awq", DRAFT: "r1-1.5b" if method == "heterogeneous" else "r1-1.5b-padded"}
    env = {"VLLM_USE_V1": "0"} if key(version) < (0, 10) else {}
    (result,) = check_speculative(version, [{"argv": argv, "models": shapes, "env": env}])
    assert not result.ok or result.values["speculative"]["parallel_drafting"] is None, result.values


EXTRA = (
    ["--swap-space", "4"],
    ["--disable-log-requests"],
    ["--no-enable-log-requests"],
    ["--use-v2-block-manager"],
    ["--enable-reasoning"],
    ["--per-request-spec-decode-metrics", "summary"],
    ["--disable-access-log-for-endpoints", "/health"],
    ["--block-size", "16"],
    ["--kv-cache-dtype", "fp8"],
    ["--enable-prefix-caching"],
    ["--no-such-flag"],
)


@functools.cache
def extras() -> dict[str, list[Result]]:
    """Every version's answer to every extra argument."""
    return each(lambda version: parse(version, [[*model(version), *extra] for extra in EXTRA]))


@pytest.mark.parametrize("extra", EXTRA, ids=lambda extra: extra[0])
@pytest.mark.parametrize("version", VERSIONS)
def test_extra_arguments(version: str, extra: list[str]) -> None:
    """The plan knows which version takes which flag."""
    made = plan("rtx4090_r1_14b", "off", version, extra_args=extra)
    codes = {refusal["code"] for refusal in made["refusals"]}
    result = extras()[version][EXTRA.index(extra)]
    assert bool(codes & {"FLAG_NOT_IN_VERSION", "FLAG_UNKNOWN"}) == (result.exit_code == 2), (
        codes,
        result.stderr[-300:],
    )
