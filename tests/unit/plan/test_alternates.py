"""Several services on one host: side by side, or one of them at a time."""

from __future__ import annotations

from typing import Any

from specrig.plan import HostPlan, plan_host
from tests.unit.plan.tiny import r1, tiny, tiny_lock

SECOND = {"name": "second", "target": {"repo": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"}}


def plan(declaration: dict[str, Any], *more: dict[str, Any]) -> HostPlan:
    return plan_host("alpha", {**declaration, "rig_services": [*declaration["rig_services"], *more]}, tiny_lock())


def conflicts(found: HostPlan) -> dict[str, list[str]]:
    return {service.name: service.conflicts for service in found.services}


def test_one_card_for_two_is_refused_unless_one_runs_at_a_time() -> None:
    refused = plan(r1(), {**SECOND, "port": 8001})
    assert [f.code for f in refused.refusals] == ["GPU_OVERCOMMIT"] and "exclusive: true" in refused.refusals[0].fix
    both = plan(r1(exclusive=True), SECOND)  # on one port: clients need not know which runs
    assert both.ok, both.refusals
    assert conflicts(both) == {"r1-14b": ["specrig-second.service"], "second": ["specrig-r1-14b.service"]}


def test_shares_of_a_card_run_side_by_side() -> None:
    shared = plan(
        r1(gpu_memory_utilization=0.7, max_model_len=4096), {**SECOND, "port": 8001, "gpu_memory_utilization": 0.25}
    )
    assert shared.ok, shared.refusals
    assert conflicts(shared) == {"r1-14b": [], "second": []}


def test_shares_are_counted_beside_an_exclusive_one() -> None:
    third = {**SECOND, "name": "third", "port": 8002, "gpu_memory_utilization": 0.6}
    refused = plan(r1(exclusive=True), {**SECOND, "port": 8001, "gpu_memory_utilization": 0.6}, third)
    assert [f.code for f in refused.refusals] == ["GPU_OVERCOMMIT"]
    assert "second and third" in refused.refusals[0].cause


def test_other_cards_and_the_cpu_do_not_meet() -> None:
    two = {"rig_gpus": [{"name": "rtx_4090", "count": 2}]}
    apart = plan(r1(host=two, exclusive=True, gpus=[0]), {**SECOND, "port": 8001, "gpus": [1]})
    assert apart.ok and conflicts(apart) == {"r1-14b": [], "second": []}
    shared_port = plan(r1(host=two, exclusive=True, gpus=[0]), {**SECOND, "gpus": [1]})
    assert [f.code for f in shared_port.refusals] == ["PORT_CLASH"]


def test_on_a_cpu_the_cpu_is_what_is_shared() -> None:
    other = {**tiny()["rig_services"][0], "name": "other"}
    base = plan_host("alpha", tiny(), tiny_lock()).services[0]
    other |= {"engine": "vllm", "version": base.version, "image": base.image, "device": "cpu", "exclusive": True}
    other |= {"target": {"repo": "specrig-lab/tiny-target"}}
    assert conflicts(plan(tiny(), other)) == {"tiny": ["specrig-other.service"], "other": ["specrig-tiny.service"]}


def test_what_must_be_free_is_what_the_engine_takes() -> None:
    [service] = plan(r1()).services
    [card] = service.vram["gpus"]
    assert service.free_vram == {"0": card["budget_mib"]}
    assert plan(tiny()).services[0].free_vram == {}
