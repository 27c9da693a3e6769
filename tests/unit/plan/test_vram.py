"""The ledger against published sizes and a real engine's own log."""

import re
from dataclasses import replace
from typing import Any

import pytest

from specrig.plan import HostPlan, plan_host, vram
from specrig.plan.catalog import catalog
from specrig.plan.dialects import dialect
from tests.unit.plan.tiny import r1

GIB = 1 << 30
MODELS = catalog().models
R1 = "deepseek-ai/DeepSeek-R1-Distill-Qwen-"
AWQ = "casperhansen/deepseek-r1-distill-"


@pytest.mark.parametrize(
    ("repo", "gigabytes"),
    [
        (R1 + "1.5B", 3.55),
        (R1 + "7B", 15.23),
        (R1 + "14B", 29.54),
        (R1 + "32B", 65.53),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", 16.06),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-70B", 141.1),
        (AWQ + "qwen-1.5b-awq", 1.61),
        (AWQ + "qwen-7b-awq", 5.57),
        (AWQ + "qwen-14b-awq", 9.98),
        ("inarikami/DeepSeek-R1-Distill-Qwen-32B-AWQ", 19.33),
        (AWQ + "llama-8b-awq", 5.73),
        (AWQ + "llama-70b-awq", 39.77),
    ],
)
def test_weights_match_what_the_hub_shows(repo: str, gigabytes: float) -> None:
    assert vram.weight_bytes(MODELS[repo].config) / 1e9 == pytest.approx(gigabytes, abs=0.012, rel=0.0005)


@pytest.mark.parametrize(
    ("repo", "tp", "size"),
    [
        (R1 + "1.5B", 1, 28_672),
        (R1 + "7B", 1, 57_344),
        (R1 + "14B", 1, 196_608),
        (R1 + "32B", 1, 262_144),
        (R1 + "32B", 2, 131_072),
        (R1 + "1.5B", 4, 14_336),
    ],
)
def test_cache_bytes_per_token(repo: str, tp: int, size: int) -> None:
    assert vram.kv_bytes_per_token(MODELS[repo].config, tp) == size


def h200(tokens: int = 16384) -> vram.Demand:
    """vLLM 0.26.0 on an H200: 14B AWQ, 1.5B draft mapped to it, K=5, 8 sequences, 0.6 of the card."""

    def load(repo: str) -> vram.Load:
        return vram.Load(MODELS[repo].config, vram.weight_bytes(MODELS[repo].config), False, 1)

    gpu = catalog().gpus["h200"]
    card = vram.Card("h200", gpu.title, gpu.vram_mib, gpu.vram_mib - gpu.reserved_mib, 0)
    return vram.Demand(
        cards=(card,),
        target=load(AWQ + "qwen-14b-awq"),
        draft=load(R1 + "1.5B"),
        k=5,
        max_model_len=4096,
        max_num_seqs=8,
        utilization=0.6,
        graphs=True,
        traits={**dialect("vllm", "0.26.0").traits, "profile_tokens": tokens},
    )


def test_the_account_is_the_engines_own() -> None:
    """Its log: 13.04 GiB of weights, 1.73 activation, 0.25 context, 0.23 graphs, 68.64 left for 327,168 tokens."""
    account = vram.ledger(h200()).tightest
    sizes = {row.what: row.mib / 1024 for row in account.rows}
    target, draft = (sizes[f"{which} weights"] + sizes[f"loading the {which}"] for which in ("target", "draft"))
    assert target == pytest.approx(9.56, rel=0.01)
    assert target + draft == pytest.approx(13.04, rel=0.01)
    assert sizes["activations"] == pytest.approx(1.73, rel=0.10)
    assert sizes["CUDA graphs"] == pytest.approx(0.23, abs=0.1)
    assert account.card.visible_mib / 1024 == pytest.approx(139.8, abs=0.1)
    assert account.kv_mib / 1024 == pytest.approx(68.64, rel=0.01)
    assert account.kv_tokens == pytest.approx(327_168, rel=0.01)
    assert account.kv_token_bytes == pytest.approx(68.64 * GIB / 327_168, rel=0.0005)


def test_the_largest_context_is_exact() -> None:
    for tokens in (0, 2048):  # 0: the profiling pass grows with the context, as in V0
        demand = replace(h200(tokens), utilization=0.12)
        largest = vram.largest_context(demand)
        assert largest and largest % vram.STEP == 0
        assert vram.starts(replace(demand, max_model_len=largest))
        assert not vram.starts(replace(demand, max_model_len=largest + vram.STEP))


def test_more_of_anything_never_leaves_more_room() -> None:
    base = h200(2048)
    room = vram.ledger(base).tightest.kv_tokens
    for worse in (
        replace(base, max_num_seqs=16),
        replace(base, k=6),
        replace(base, utilization=0.5),
        replace(base, target=replace(base.target, weights=base.target.weights * 2)),
    ):
        assert vram.ledger(worse).tightest.kv_tokens < room
    assert vram.ledger(replace(base, draft=None)).tightest.kv_tokens > room


def _plan(**over: Any) -> HostPlan:
    return plan_host("host", r1(**over))


def test_over_commit_names_changes_that_do_fit() -> None:
    refused = _plan(max_model_len=40960).refusals[0]
    assert refused.code == "VRAM_OVERCOMMIT"
    assert refused.fix == "max_model_len: 26368 (29440 if the estimates hold), or rig_speculation: false"
    assert _plan(max_model_len=29440).ok
    assert plan_host("host", r1(host={"rig_speculation": False}, max_model_len=40960)).ok


@pytest.mark.parametrize(
    ("over", "code"),
    [
        ({"max_model_len": 131072}, "VRAM_OVERCOMMIT"),
        ({"max_model_len": 9_999_999}, "CONTEXT_TOO_LONG"),
        ({"max_model_len": 29440}, "VRAM_TIGHT"),
        ({"max_model_len": 36096}, "VRAM_TIGHT"),
        ({"max_model_len": 35072}, "EAGER_LAST_RESORT"),
        ({"max_model_len": 65536, "version": "0.6.6"}, "VRAM_OVERCOMMIT"),  # V0: the account grows with the context
        ({"max_model_len": 65536, "eager": True}, "VRAM_OVERCOMMIT"),
        ({"max_model_len": 33024, "draft": {"repo": "alamios/DeepSeek-R1-DRAFT-Qwen2.5-0.5B"}}, "DRAFT_CONTEXT_SHORT"),
    ],
)
def test_the_context_that_a_fix_names_is_the_largest_without_a_warning(over: dict[str, Any], code: str) -> None:
    def memory(length: int) -> set[str]:
        plan = _plan(**{**over, "max_model_len": length})
        codes = {found.code for found in (*plan.refusals, *plan.warnings)}
        return {c for c in codes if c.startswith(("VRAM", "CONTEXT", "DRAFT_CONTEXT", "EAGER_LAST"))}

    plan = _plan(**over)
    fix = next(found.fix for found in (*plan.refusals, *plan.warnings) if found.code == code)
    found = re.match(r"max_model_len: (\d+)", fix)
    assert found, fix
    named = int(found[1])
    assert memory(named) == set()
    assert memory(named + vram.STEP)


def test_graphs_are_given_up_last_and_said_so() -> None:
    kept, given = _plan(max_model_len=29440), _plan(max_model_len=36096)
    assert "--enforce-eager" not in kept.services[0].argv
    assert "--enforce-eager" in given.services[0].argv
    assert "EAGER_LAST_RESORT" in {found.code for found in given.warnings}
    assert plan_host("host", r1(max_model_len=36096, eager=False)).refusals[0].code == "VRAM_OVERCOMMIT"


def test_what_a_version_keeps_outside_its_budget_lowers_an_open_utilization() -> None:
    def of(version: str) -> tuple[str, bool]:
        plan = _plan(version=version)
        argv = plan.services[0].argv
        return argv[argv.index("--gpu-memory-utilization") + 1], plan.ok

    assert of("0.6.4.post1") == ("0.9", True)
    assert of("0.9.2") == ("0.82", True)  # counts the target only
    assert of("0.26.0") == ("0.9", True)


def test_a_v0_draft_sits_on_the_first_card_only() -> None:
    old = plan_host("host", {"rig_profile": "dual_rtx3090_r1_32b_tp2_article"}).services[0].vram
    new = plan_host("host", {"rig_profile": "dual_rtx3090_r1_32b_tp2"}).services[0].vram
    drafts = [
        [row["mib"] for row in gpu["rows"] if row["what"] == "draft weights"] for gpu in (*old["gpus"], *new["gpus"])
    ]
    assert [len(rows) for rows in drafts] == [1, 0, 1, 1]
    assert drafts[2][0] == drafts[3][0] == drafts[0][0] // 2
    assert old["kv_tokens"] == old["gpus"][0]["kv_tokens"] < old["gpus"][1]["kv_tokens"]


def test_a_desktop_costs_room_outside_the_budget() -> None:
    claim = {"rig_gpus": [{"name": "rtx_4090", "display": True}]}
    rows = plan_host("host", r1(host=claim)).services[0].vram["gpus"][0]["rows"]
    assert {"what": "display and others", "mib": vram.DISPLAY_MIB, "inside_budget": False, "note": ""} in rows


def test_real_bytes_replace_the_formula() -> None:
    repo = AWQ + "qwen-14b-awq"
    shape = MODELS[repo].config.model_dump()
    entry = {"revision": "5" * 40, "config": shape, "files": [{"path": "a.safetensors", "size": 9_990_000_000}]}
    plan = plan_host("host", r1(), {"models": {repo: entry}})
    row = plan.services[0].vram["gpus"][0]["rows"][0]
    assert (row["mib"], row["note"]) == (9_990_000_000 // vram.MIB, "real bytes")
