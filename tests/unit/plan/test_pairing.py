"""When a pair works and when it pays."""

from typing import Any

import pytest

from specrig.plan import plan_host
from tests.unit.plan.tiny import r1, service, tiny_lock


def payoff(declaration: dict[str, Any]) -> dict[str, Any]:
    plan = plan_host("host", declaration)
    assert plan.ok, plan.refusals
    cost: dict[str, Any] = plan.services[0].pair["payoff"]
    return cost


def test_the_model_reproduces_what_was_measured_on_an_h200() -> None:
    """Per pass: 6.7 ms with graphs, 23.2 eager; a drafted token 3-4 ms, 11 eager (vLLM 0.26.0, lab notes)."""
    card = {"rig_gpus": [{"name": "h200"}]}
    graphs, eager = (
        payoff(r1(host=card, version="0.26.0", k=5)),
        payoff(r1(host=card, version="0.26.0", k=5, eager=True)),
    )
    assert graphs["target_ms"] == pytest.approx(6.7, rel=0.05)
    assert 3.0 <= graphs["draft_ms"] <= 4.0
    assert eager["target_ms"] == pytest.approx(23.2, rel=0.1)
    assert eager["draft_ms"] == pytest.approx(11.0, rel=0.2)


def test_a_4090_is_bound_by_bandwidth() -> None:
    cost = payoff(r1(k=3))
    assert cost["cost_ratio_bandwidth_only"] == pytest.approx(0.37, abs=0.01)
    assert 0.3 < cost["break_even_acceptance"] < 0.4
    assert all(1 <= best["k"] <= 6 for best in cost["best_k"].values())
    chances = list(cost["best_k"].values())
    assert [best["speedup"] for best in chances] == sorted(best["speedup"] for best in chances)


def test_a_cheaper_draft_pays_sooner() -> None:
    bf16 = payoff(r1(k=3))
    awq = payoff(r1(k=3, draft={"repo": "casperhansen/deepseek-r1-distill-qwen-1.5b-awq"}))
    pard = payoff(r1(k=3, draft={"repo": "amd/PARD-DeepSeek-R1-Distill-Qwen-1.5B"}, method="pard"))
    assert awq["break_even_acceptance"] < bf16["break_even_acceptance"]
    assert pard["break_even_acceptance"] == pytest.approx(bf16["break_even_acceptance"] / 3, abs=0.001)


def test_drafts_without_graphs_are_dear() -> None:
    assert payoff(r1(k=3, version="0.16.0"))["cost_ratio"] > 2 * payoff(r1(k=3, version="0.26.0"))["cost_ratio"]


@pytest.mark.parametrize(
    ("method", "over", "vocab"),
    [
        ("auto", {}, "pad"),
        ("pad", {"vocab": "pad"}, "pad"),
        ("mapped", {"vocab": "heterogeneous"}, "heterogeneous"),
        ("eagle", {"draft": {"repo": "thoughtworks/DeepSeek-R1-Distill-Qwen-14B-Eagle3"}, "method": "eagle3"}, "n/a"),
    ],
)
def test_how_vocabularies_meet(method: str, over: dict[str, Any], vocab: str) -> None:
    plan = plan_host("host", r1(**over))
    assert plan.ok and plan.services[0].pair["vocab"] == vocab
    assert bool([m for m in plan.models if m["derive"]]) == (vocab == "pad")


def test_a_wider_draft_is_mapped_where_the_version_can() -> None:
    lock = tiny_lock(draft={"vocab_size": 2048})
    plan = plan_host("lab", service("cpu_demo", "tiny", vocab="auto"), lock)
    assert plan.ok and plan.services[0].pair["vocab"] == "heterogeneous"
    assert '"use_heterogeneous_vocab":true' in plan.services[0].argv[-1]


def test_one_fingerprint_alone_proves_nothing() -> None:
    lock = tiny_lock()
    lock["models"]["specrig-lab/tiny-draft"]["tokenizer"] = {}
    plan = plan_host("lab", {"rig_profile": "cpu_demo"}, lock)
    assert plan.ok and "TOKENIZER_UNVERIFIED" in {found.code for found in plan.warnings}
