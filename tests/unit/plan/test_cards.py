"""How two cards talk, and their power limits."""

from typing import Any

import pytest

from specrig.plan import plan_host
from specrig.plan.render import table
from specrig.plan.types import HostPlan
from tests.unit.plan.tiny import service

DUAL = "dual_rtx3090_r1_32b_tp2"
THERE = {"gpus": [{"name": "NVIDIA GeForce RTX 3090"}, {"name": "NVIDIA GeForce RTX 3090"}]}
BRIDGED = [{"name": "rtx_3090", "count": 2, "nvlink": True}]
PAIR: dict[str, Any] = {
    "rig_gpus": [{"name": "a6000", "count": 2}],
    "rig_services": [
        {"name": "a", "target": {"repo": "casperhansen/deepseek-r1-distill-qwen-32b-awq"}, "tensor_parallel": 2}
    ],
}


def dual(facts: dict[str, Any] | None = None, p2p: str | None = None, **host: Any) -> HostPlan:
    """The two-card profile, with facts and the service's own p2p."""
    services = [{"name": "r1-32b", "p2p": p2p}] if p2p else []
    return plan_host("host", {"rig_profile": DUAL, "rig_services": services, **host}, None, facts)


def codes(plan: HostPlan) -> list[str]:
    return [found.code for found in plan.refusals]


@pytest.mark.parametrize(
    ("facts", "p2p", "host", "expected"),
    [
        (None, None, {}, "off"),
        ({"p2p": "none"}, None, {}, "off"),
        # A GeForce that passed a test: NVIDIA's driver does not support it, so the test may not turn it on.
        ({"p2p": "pcie"}, None, {}, "off"),
        ({"p2p": "nvlink"}, None, {}, "nvlink"),
        ({"links": {"0-1": "NV4"}}, None, {}, "nvlink"),
        ({"links": {"0-1": "PHB"}}, None, {}, "off"),
        (None, None, {"rig_gpus": BRIDGED}, "nvlink"),
        (None, "nvlink", {}, "nvlink"),
        ({"p2p": "nvlink"}, "off", {"rig_gpus": BRIDGED}, "off"),
    ],
)
def test_how_two_cards_talk(facts: dict[str, Any] | None, p2p: str | None, host: dict[str, Any], expected: str) -> None:
    plan = dual(facts, p2p, **host)
    assert plan.ok, plan.refusals
    only = plan.services[0]
    assert only.p2p == expected
    assert ("--disable-custom-all-reduce" in only.argv) is (expected != "nvlink")
    assert only.env.get("NCCL_P2P_DISABLE") == ("1" if expected == "off" else None)
    assert only.shm_size_mb == (10240 if expected == "off" else 4096)
    assert "draft_tensor_parallel_size" not in only.argv[-1]


def test_cards_that_support_peer_access_use_it_once_it_was_tested() -> None:
    plan = plan_host("host", PAIR, None, {"p2p": "pcie"})
    only = plan.services[0]
    assert only.p2p == "pcie" and "NCCL_P2P_DISABLE" not in only.env and "--disable-custom-all-reduce" in only.argv
    assert "P2P_REDIRECTED" not in {found.code for found in plan.warnings}
    assert plan_host("host", PAIR).services[0].p2p == "off"


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"acs_redirect": ["0000:00:01.0"]}, "ACS redirects at 0000:00:01.0"),
        ({"iommu": {"on": True, "passthrough": False}}, "the IOMMU translates"),
        ({"iommu": {"on": True, "passthrough": True}}, ""),
    ],
)
def test_a_way_that_is_not_straight_is_told(facts: dict[str, Any], words: str) -> None:
    plan = plan_host("host", PAIR, None, {"p2p": "pcie", **facts})
    told = [found.cause for found in plan.warnings if found.code == "P2P_REDIRECTED"]
    assert plan.ok and (words in told[0] if words else not told)
    assert not [
        f for f in plan_host("host", PAIR, None, facts).warnings if f.code == "P2P_REDIRECTED"
    ]  # off: no matter


@pytest.mark.parametrize(
    ("facts", "p2p", "host", "words"),
    [
        (
            {**THERE, "links": {"0-1": "PHB"}},
            None,
            {"rig_gpus": BRIDGED},
            "nvlink: true; the host's cards are joined by PHB",
        ),
        ({"p2p": "pcie"}, "nvlink", {}, "p2p is nvlink; the host's cards are joined by pcie"),
        (
            None,
            None,
            {"rig_gpus": [{"name": "rtx_4090", "count": 2, "nvlink": True}]},
            "GeForce RTX 4090 has no NVLink",
        ),
        (None, "nvlink", {"rig_gpus": [{"name": "rtx_4090", "count": 2}]}, "GeForce RTX 4090 has no NVLink"),
    ],
)
def test_nvlink_that_is_not_there_is_refused(
    facts: dict[str, Any] | None, p2p: str | None, host: dict[str, Any], words: str
) -> None:
    plan = dual(facts, p2p, **host)
    assert set(codes(plan)) == {"NVLINK_ABSENT"} and any(words in found.cause for found in plan.refusals)


def test_nvlink_for_one_card_is_refused() -> None:
    one = {"rig_profile": "rtx4090_r1_14b", "rig_services": [{"name": "r1-14b", "p2p": "nvlink"}]}
    plan = plan_host("host", one)
    assert codes(plan) == ["NVLINK_ABSENT"] and "tensor_parallel is 1" in plan.refusals[0].cause


def test_one_card_has_nothing_to_say() -> None:
    only = plan_host("host", {"rig_profile": "rtx4090_r1_14b"}).services[0]
    assert only.p2p == "" and only.shm_size_mb == 1024 and "NCCL_P2P_DISABLE" not in only.env


def test_the_plan_shows_how_cards_talk_and_what_they_may_draw() -> None:
    text = table({"host": dual(rig_gpu_tuning={"power_w": 250, "cards": [{"gpu": 1, "power_percent": 80}]})})
    assert "talk through the host's memory" in text
    assert "all cards 250 W; card 1 80 % of the default limit; no sleep" in text


def tuned(facts: dict[str, Any] | None = None, **tuning: Any) -> HostPlan:
    return dual(facts, rig_gpu_tuning=tuning)


def test_the_job_that_the_host_carries_out() -> None:
    plan = tuned(power_w=250, cards=[{"gpu": "GPU-1", "power_percent": 70}], clock_lock={"max_mhz": 1500})
    assert plan.ok and plan.host["gpu_tuning"] == {
        "state": "present",
        "cards": [
            {"gpu": "all", "watts": 250, "percent": None, "clocks_mhz": [210, 1500]},
            {"gpu": "GPU-1", "watts": None, "percent": 70, "clocks_mhz": [210, 1500]},
        ],
        "fans": [],
        "mask_sleep": True,
    }
    assert dual().host["gpu_tuning"] is None
    assert tuned(mask_sleep=True).host["gpu_tuning"]["cards"] == []


@pytest.mark.parametrize(
    ("tuning", "words"),
    [
        ({"power_w": 400}, "rig_gpu_tuning asks 400 W of GeForce RTX 3090, which takes 100 to 350 W"),
        ({"power_w": 99}, "99 W"),
        ({"power_percent": 20}, "70 W (20 % of 350 W)"),
        ({"cards": [{"gpu": 1, "power_w": 400}]}, "rig_gpu_tuning.cards[0] asks 400 W"),
        ({"cards": [{"gpu": "GPU-1", "power_w": 400}]}, "rig_gpu_tuning.cards[0] asks 400 W"),
    ],
)
def test_a_limit_that_the_card_does_not_take(tuning: dict[str, Any], words: str) -> None:
    plan = tuned(**tuning)
    assert codes(plan) == ["GPU_POWER_LIMIT"] and words in plan.refusals[0].cause
    assert tuned(**{**tuning, "state": "absent"}).ok


def test_the_cards_own_word_beats_the_catalog() -> None:
    """A partner's board takes 370 W where the reference board ends at 350 W."""
    own = {"gpus": [{**THERE["gpus"][0], "power_w": {"default": 370.0, "min": 100.0, "max": 385.0}}, THERE["gpus"][1]]}
    assert tuned(own, cards=[{"gpu": 0, "power_w": 380}]).ok
    assert codes(tuned(own, cards=[{"gpu": 1, "power_w": 380}])) == ["GPU_POWER_LIMIT"]
    assert "100 to 385 W" in tuned(own, cards=[{"gpu": 0, "power_w": 390}]).refusals[0].cause


def test_a_card_that_is_not_there() -> None:
    assert codes(tuned(cards=[{"gpu": 2, "power_w": 300}])) == ["GPU_TUNING_CARD"]
    with_uuids = {"gpus": [{**gpu, "uuid": f"GPU-{n}"} for n, gpu in enumerate(THERE["gpus"])]}
    assert tuned(with_uuids, cards=[{"gpu": "GPU-1", "power_w": 300}]).ok
    assert codes(tuned(with_uuids, cards=[{"gpu": "GPU-9", "power_w": 300}])) == ["GPU_TUNING_CARD"]
    assert codes(plan_host("h", {"rig_profile": "cpu_demo", "rig_gpu_tuning": {"power_w": 300}})) == ["GPU_TUNING_CARD"]


@pytest.mark.parametrize(
    "tuning",
    [
        {"power_w": 300, "power_percent": 80},
        {"cards": [{"gpu": 0}]},
        {"clock_lock": {"max_mhz": 1500}},
        {"power_w": 300, "clock_lock": {"min_mhz": 1600, "max_mhz": 1500}},
    ],
)
def test_a_tuning_that_contradicts_itself(tuning: dict[str, Any]) -> None:
    assert codes(tuned(**tuning)) == ["GPU_TUNING_CONTRADICTION"]


CURVE = [[40, 30], [60, 50], [75, 80], [83, 100]]


def test_fans_that_follow_a_curve() -> None:
    quiet = [[50, 30], [83, 100]]
    plan = tuned(fan_curve=CURVE, cards=[{"gpu": 1, "power_w": 250, "fan_curve": quiet}])
    job = plan.host["gpu_tuning"]
    assert plan.ok and job["fans"] == [{"gpu": "all", "curve": CURVE}, {"gpu": 1, "curve": quiet}]
    assert [card["gpu"] for card in job["cards"]] == [1]
    assert "fans of card 1 30 % at 50 °C, 100 % at 83 °C; no sleep" in " ".join(table({"host": plan}).split())
    assert tuned(cards=[{"gpu": 0, "fan_curve": CURVE}]).ok


@pytest.mark.parametrize(
    ("tuning", "code", "words"),
    [
        ({"fan_curve": [[40, 30], [80, 60]]}, "GPU_FAN_CURVE", "rig_gpu_tuning.fan_curve: it ends with 60 % at 80 °C"),
        ({"fan_curve": [[83, 100]]}, "GPU_FAN_CURVE", "2 to 16 points"),
        (
            {"cards": [{"gpu": 1, "fan_curve": [[60, 50], [50, 100]]}]},
            "GPU_FAN_CURVE",
            "cards[0].fan_curve: [50, 100] after",
        ),
        ({"cards": [{"gpu": 2, "fan_curve": CURVE}]}, "GPU_TUNING_CARD", "cards[0] names 2"),
        (
            {"cards": [{"gpu": 1, "fan_curve": CURVE}] * 2},
            "GPU_TUNING_CONTRADICTION",
            "cards names 1 twice",
        ),
        (
            {"cards": [{"gpu": 1, "fan_curve": CURVE}, {"gpu": "GPU-1", "fan_curve": CURVE}]},
            "GPU_TUNING_CONTRADICTION",
            "cards names 1 twice",
        ),
        ({"fan_curve": CURVE, "clock_lock": {"max_mhz": 1500}}, "GPU_TUNING_CONTRADICTION", "no power limit"),
    ],
)
def test_a_curve_that_is_refused(tuning: dict[str, Any], code: str, words: str) -> None:
    plan = tuned({"gpus": [{**gpu, "uuid": f"GPU-{n}"} for n, gpu in enumerate(THERE["gpus"])]}, **tuning)
    assert codes(plan) == [code] and words in plan.refusals[0].cause
    assert tuned(**{**tuning, "state": "absent"}).ok


def test_off_without_quotes_is_off() -> None:
    """YAML reads `p2p: off` as false."""
    for written in ("off", False):
        plan = plan_host("host", service("dual_rtx3090_r1_32b_tp2", "r1-32b", p2p=written))
        assert plan.ok and plan.services[0].p2p == "off"
    assert codes(plan_host("host", service("dual_rtx3090_r1_32b_tp2", "r1-32b", p2p=True))) == ["VALUE_OUT_OF_RANGE"]


def test_an_engine_without_tensor_parallelism_takes_no_p2p() -> None:
    services = [{"name": "r1-14b", "p2p": "off"}]
    plan = plan_host("host", {"rig_profile": "rtx4090_r1_14b_llama_cpp", "rig_services": services})
    assert codes(plan) == ["ENGINE_FIELD"] and "p2p" in plan.refusals[0].cause
