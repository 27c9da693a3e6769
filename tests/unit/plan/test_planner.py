"""The plan as its callers see it: shapes, artefacts, drivers, and the one switch."""

import copy
import hashlib
import json
from dataclasses import fields
from types import MappingProxyType
from typing import Any

import pytest
import yaml

from specrig.plan import plan_host, plan_hosts, render
from specrig.plan.catalog import catalog, profiles
from specrig.plan.dialects import speculative_parts
from specrig.plan.types import ServicePlan
from specrig.runner import ROOT
from tests.unit.plan.tiny import r1, service, tiny_lock

PROFILES = sorted(profiles())


@pytest.mark.parametrize("profile", PROFILES)
def test_three_lines_plan(profile: str) -> None:
    plan = plan_host("alpha", {"ansible_host": "192.0.2.10", "rig_profile": profile})
    assert plan.ok, plan.refusals
    assert len(plan.services) == 1


def test_the_demo_host_is_what_others_build_on() -> None:
    plan = plan_host("lab", {"rig_profile": "cpu_demo"}, tiny_lock()).as_json()
    assert plan["ok"] and plan["refusals"] == []
    assert plan["driver"] == {}
    only = plan["services"][0]
    assert only["entrypoint"] == ["vllm", "serve"]
    assert only["argv"][:7] == ["/models/target", "--served-model-name", "tiny", "--host", "0.0.0.0", "--port", "8000"]
    assert "--enforce-eager" in only["argv"]
    assert json.loads(only["argv"][-1]) == {
        "method": "draft_model",
        "model": "/models/draft",
        "num_speculative_tokens": 5,
    }
    assert only["env"] == {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    assert only["ports"] == [{"bind": "127.0.0.1", "port": 8000, "container_port": 8000}]
    assert only["unit"] == "specrig-tiny.service"
    assert [model["path_in_container"] for model in only["models"]] == ["/models/target", "/models/draft"]
    assert only["pair"]["tokenizer"] == "identical"
    assert {"VLLM_API_KEY", "--api-key"}.isdisjoint({*only["argv"], *only["env"]})


def test_a_padded_draft_is_an_artefact_of_its_own() -> None:
    target, draft, padded = plan_host("lab", {"rig_profile": "cpu_demo"}, tiny_lock()).as_json()["models"]
    one, two = "1" * 40, "2" * 40
    assert target["path"] == f"/srv/models/specrig-lab--tiny-target/{one}"
    assert (draft["revision"], draft["derive"]) == (two, None)
    assert [file["path"] for file in draft["files"]] == ["config.json", "model.safetensors"]
    assert padded == {
        "id": f"specrig-lab/tiny-draft@{two}-pad1152",
        "repo": "specrig-lab/tiny-draft",
        "revision": f"{two}-pad1152",
        "files": [],
        "path": f"/srv/models/specrig-lab--tiny-draft/{two}-pad1152",
        "derive": {"kind": "pad_vocab", "source": draft["id"], "vocab_size": 1152},
    }


def test_widths_that_agree_need_no_padding() -> None:
    plan = plan_host("lab", {"rig_profile": "cpu_demo"}, tiny_lock(draft={"vocab_size": 1152}))
    assert plan.ok
    assert [model["derive"] for model in plan.models] == [None, None]


def _without_speculation(argv: list[str], engine: str) -> list[str]:
    flags, _ = speculative_parts(engine)
    kept: list[str] = []
    skip = False
    for word in argv:
        skip = word in flags if word.startswith("--") else skip
        kept += [] if skip else [word]
    return kept


@pytest.mark.parametrize("version", [None, "0.6.4.post1", "0.8.2", "0.9.2", "0.16.0", "0.26.0", "0.33.0"])
@pytest.mark.parametrize("profile", PROFILES)
def test_the_switch_changes_nothing_else(profile: str, version: str | None) -> None:
    name = profiles()[profile].services[0]["name"]
    engine = profiles()[profile].services[0]["engine"]
    if version is not None and (profile == "cpu_demo" or engine != "vllm"):
        pytest.skip("a version of its own")
    if profiles()[profile].services[0].get("method") == "none":
        pytest.skip("nothing to switch off")
    over: dict[str, Any] = {"draft_tensor_parallel": None, **({"version": version} if version else {})}
    if profile.endswith("_article"):
        over["gpu_memory_utilization"] = None
    declaration = service(profile, name, **over)
    on = plan_host("host", declaration)
    off = plan_host("host", {**declaration, "rig_speculation": False})
    assert on.ok and off.ok, (on.refusals, off.refusals)
    a, b = on.services[0].as_json(), off.services[0].as_json()
    assert b["argv"] == _without_speculation(a["argv"], engine)
    assert b["argv"] != a["argv"] or b["files"] != a["files"]
    _, variables = speculative_parts(engine)
    assert b["env"] == {key: value for key, value in a["env"].items() if key not in variables}
    assert b["models"] == a["models"][:1]
    assert (b["k"], b["method"], b["pair"]) == (0, "none", {})
    changed = {"argv", "env", "models", "k", "method", "pair", "vram", "cache_key", "files"}
    assert {key: a[key] for key in a.keys() - changed} == {key: b[key] for key in b.keys() - changed}
    assert a["vram"].get("gpu_memory_utilization") == b["vram"].get("gpu_memory_utilization")
    assert on.images == off.images and a["cache_key"] != b["cache_key"]


def test_the_hash_is_of_the_canonical_plan() -> None:
    told = plan_host("lab", {"rig_profile": "cpu_demo"}, tiny_lock()).as_json()
    stored = told.pop("plan_hash")
    assert stored == hashlib.sha256(json.dumps(told, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    again = plan_host("lab", MappingProxyType({"rig_profile": "cpu_demo"}), tiny_lock()).as_json()
    assert again["plan_hash"] == stored
    other = plan_host("lab", {"rig_profile": "cpu_demo", "rig_speculation": False}, tiny_lock()).as_json()
    assert other["plan_hash"] != stored


def test_planning_leaves_its_inputs_alone() -> None:
    declaration, lock = r1(k=4, env={"A": "1"}), tiny_lock()
    before = copy.deepcopy((declaration, lock))
    plan_host("host", declaration, lock)
    assert (declaration, lock) == before
    plan_host("host", {"rig_profile": "cpu_demo"})
    assert plan_host("host", {"rig_profile": "cpu_demo"}).services[0].k == 5


def test_plan_hosts_is_plan_host_for_each() -> None:
    hosts = {"a": {"rig_profile": "cpu_demo"}, "b": {"rig_profile": "nope"}, "c": r1()}
    plans = plan_hosts(hosts, tiny_lock())
    assert {name: plan.as_json() for name, plan in plans.items()} == {
        name: plan_host(name, declaration, tiny_lock()).as_json() for name, declaration in hosts.items()
    }


@pytest.mark.parametrize(
    ("driver", "version", "branch"),
    [
        (None, "0.33.0", 580),
        ({"branch": 580}, "0.33.0", 580),
        ({"version": "580.159.03"}, "0.33.0", 580),
        ({"branch": 575}, "0.19.1", 575),
        ({"branch": 570}, "0.9.2", 570),  # 0.10 and 0.11 have no draft models
        ({"branch": 550}, "0.8.5.post1", 550),
    ],
)
def test_auto_is_the_newest_the_driver_runs(driver: Any, version: str, branch: int) -> None:
    plan = plan_host("host", r1(host={"rig_driver": driver} if driver else {}))
    assert plan.ok, plan.refusals
    assert plan.services[0].version == version
    assert plan.driver and plan.driver["branch"] == branch
    assert ("ENGINE_HELD_BACK" in {found.code for found in plan.warnings}) == (version != "0.33.0")


def test_a_driver_mismatch_names_both_ways_out() -> None:
    refused = plan_host("host", r1(host={"rig_driver": {"branch": 550}}, version="0.33.0")).refusals
    assert [found.code for found in refused] == ["DRIVER_TOO_OLD"]
    assert refused[0].fix == "rig_driver: {branch: 580}, or version: 0.8.5.post1, which has known holes"


@pytest.mark.parametrize("version", ["auto", "0.8.5.post1"])
def test_an_old_driver_is_not_told_of_a_version_that_it_does_not_run(version: str) -> None:
    old = r1(host={"rig_driver": {"source": "distro", "branch": 550}}, version=version)
    [found] = [w for w in plan_host("host", old).warnings if w.code == "SECURITY_FLOOR"]
    assert "driver 550 runs none without known holes: 0.33.0 needs 580.65.06" in found.cause
    assert found.fix.startswith("rig_driver: {source: nvidia, branch: 580, …}") and "version: 0.33.0" in found.fix
    [found] = [w for w in plan_host("host", r1(version="0.26.0")).warnings if w.code == "SECURITY_FLOOR"]
    assert found.fix == "version: 0.33.0, and keep bind on loopback"


def test_the_distributions_archive_is_not_proposed_for_what_it_lacks() -> None:
    old = {"rig_driver": {"source": "distro", "branch": 535}}
    [found] = plan_host("host", r1(host=old, version="0.33.0")).refusals
    assert found.code == "DRIVER_TOO_OLD" and found.fix.startswith("rig_driver: {source: nvidia, branch: 580, …}")
    [held] = [w for w in plan_host("host", r1(host={"rig_driver": {"source": "distro", "branch": 550}})).warnings
              if w.code == "ENGINE_HELD_BACK"]  # fmt: skip
    assert "source: nvidia" in held.fix


def test_what_could_not_be_read_is_not_shown_as_no_card() -> None:
    text = render.table({"typo": plan_host("typo", {"rig_profile": "rtx4090"})})
    assert text.startswith("typo    rtx4090    REFUSED (1)")
    assert "on no GPU" in render.table({"cpu": plan_host("cpu", {"rig_profile": "cpu_demo"}, tiny_lock())})


def test_what_is_declared_beats_what_is_there() -> None:
    facts = {"driver_version": "550.163.01"}
    assert plan_host("host", r1(), None, facts).services[0].version == "0.8.5.post1"
    plan = plan_host("host", r1(host={"rig_driver": {"branch": 580}}), None, facts)
    assert plan.ok and plan.services[0].version == "0.33.0"


def test_data_centre_cards_may_have_forward_compatibility() -> None:
    plan = plan_host("host", r1(host={"rig_gpus": [{"name": "l40s"}], "rig_driver": {"branch": 550}}, version="0.33.0"))
    assert plan.ok and "DRIVER_COMPAT" in {found.code for found in plan.warnings}


@pytest.mark.parametrize(
    ("card", "branch", "wanted", "module"),
    [
        ("rtx_4090", 550, "auto", "proprietary"),
        ("rtx_4090", 580, "auto", "open"),
        ("rtx_4090", 580, "proprietary", "proprietary"),
        ("rtx_3090", 550, "open", "open"),
        ("rtx_2080_ti", 580, "auto", "open"),
        ("rtx_5090", 580, "auto", "open"),
        ("tesla_p40", 580, "auto", "proprietary"),
    ],
)
def test_the_modules_flavour_follows_card_and_branch(card: str, branch: int, wanted: str, module: str) -> None:
    host = {"rig_gpus": [{"name": card}], "rig_driver": {"source": "distro", "branch": branch, "module": wanted}}
    plan = plan_host("host", r1(host=host))
    assert plan.driver and plan.driver["module"] == module
    assert "DRIVER_MODULE" not in {found.code for found in plan.refusals}


@pytest.mark.parametrize(
    ("cards", "module", "fix"),
    [
        (["tesla_p40"], "open", "rig_driver: {module: proprietary}, or auto"),
        (["rtx_5090"], "proprietary", "rig_driver: {module: open}, or auto"),
        (["tesla_p40", "rtx_5090"], "auto", "put the cards into two machines"),
    ],
)
def test_a_flavour_that_does_not_run_the_card_is_refused(cards: list[str], module: str, fix: str) -> None:
    host = {"rig_gpus": [{"name": card} for card in cards], "rig_driver": {"branch": 580, "module": module}}
    found = [one for one in plan_host("host", r1(host=host)).refusals if one.code == "DRIVER_MODULE"]
    assert [one.fix for one in found] == [fix]


def test_nvidias_repository_is_declared_whole() -> None:
    whole = {
        "source": "nvidia",
        "branch": 580,
        "repository_url": "https://repo.example/debian13/x86_64",
        "repository_key_url": "https://repo.example/key.pub",
        "repository_key_sha256": "0" * 64,
    }
    plan = plan_host("host", r1(host={"rig_driver": whole}))
    assert plan.ok and plan.driver and plan.driver["repository_url"] == whole["repository_url"]
    del whole["repository_key_sha256"]
    [one] = plan_host("host", r1(host={"rig_driver": whole})).refusals
    assert one.code == "DRIVER_REPOSITORY" and one.cause.endswith("no repository_key_sha256")
    refused = plan_host("host", r1(host={"rig_driver": {**whole, "repository_key_sha256": "0" * 64, "branch": 550}}))
    assert any("known by its package names are 570, 575, 580" in one.cause for one in refused.refusals)


def test_a_driver_never_reboots_or_enrols_unless_told() -> None:
    plan = plan_host("host", r1(host={"rig_driver": {"source": "distro", "branch": 580}}))
    assert plan.driver and (plan.driver["reboot"], plan.driver["mok"]) == ("never", "none")


def test_cards_as_the_driver_names_them() -> None:
    facts = {
        "gpus": [{"name": "NVIDIA GeForce RTX 4090", "uuid": "GPU-1", "memory_total_mib": 24564}],
        "driver_version": "580.159.03",
    }
    plan = plan_host("host", {"rig_profile": "rtx4090_r1_14b"}, None, facts)
    assert plan.ok and plan.host["gpus"][0]["uuid"] == "GPU-1"
    by_uuid = plan_host("host", r1(gpus=["GPU-1"]), None, facts)
    assert by_uuid.ok and by_uuid.services[0].gpus == ["GPU-1"]
    gone = plan_host(
        "host", {"rig_profile": "dual_rtx3090_r1_32b_tp2"}, None, {"gpus": [{"name": "NVIDIA GeForce RTX 3090"}]}
    )
    assert [found.code for found in gone.refusals] == ["GPU_CLAIM_MISMATCH"]
    assert gone.refusals[0].cause == "declared: 2 x rtx_3090; the host has: 1 x rtx_3090"


def test_an_override_is_merged_by_name_and_the_rest_stays() -> None:
    plan = plan_host("lab", service("cpu_demo", "tiny", k=2, env={"OMP_NUM_THREADS": "2"}), tiny_lock())
    only = plan.services[0]
    assert only.k == 2 and only.env["OMP_NUM_THREADS"] == "2" and only.env["VLLM_CPU_KVCACHE_SPACE"] == "1"


def test_two_services_share_a_card() -> None:
    small = {
        "name": "small",
        "port": 8001,
        "target": {"repo": "casperhansen/deepseek-r1-distill-qwen-1.5b-awq"},
        "gpu_memory_utilization": 0.2,
        "max_model_len": 2048,
    }
    declaration = {
        "rig_profile": "rtx4090_r1_14b",
        "rig_services": [{"name": "r1-14b", "gpu_memory_utilization": 0.75}, small],
    }
    plan = plan_host("host", declaration)
    assert plan.ok, plan.refusals
    assert [s.name for s in plan.services] == ["r1-14b", "small"]


def test_k_above_six_with_its_measurement() -> None:
    assert plan_host("host", r1(k=8, k_measured_reason="./rig tune, 2026-11-20: 1.9x at K=8, code prompts")).ok


def test_a_key_is_no_part_of_the_plan() -> None:
    vaulted = {"__ansible_vault": "$ANSIBLE_VAULT;1.1;AES256\n6162"}
    for key in ("k" * 32, vaulted):
        plan = plan_host("host", r1(host={"rig_api_key": key, "rig_allow_from": ["192.0.2.0/24"]}, bind="192.0.2.10"))
        assert plan.ok
        assert plan.host["firewall"] == {
            "allow": ["192.0.2.0/24"],
            "ports": [{"bind": "192.0.2.10", "port": 8000, "unit": "specrig-r1-14b.service"}],
        }
        assert "k" * 32 not in json.dumps(plan.as_json()) and "ANSIBLE_VAULT" not in json.dumps(plan.as_json())


def test_what_is_on_loopback_needs_no_rules() -> None:
    assert plan_host("host", r1()).host["firewall"] == {"allow": [], "ports": []}


@pytest.mark.parametrize(
    ("options", "codes"),
    [
        ({"hosts": ["tcp://0.0.0.0:2375", "unix:///run/docker.sock"]}, {"DOCKER_API_EXPOSED", "DOCKER_HOSTS_TWICE"}),
        ({"hosts": ["tcp://0.0.0.0:2376"], "tlsverify": True}, {"DOCKER_HOSTS_TWICE"}),
        ({"hosts": [], "log-driver": "local"}, set()),
    ],
)
def test_dockers_own_api_is_not_opened_unnoticed(options: dict[str, Any], codes: set[str]) -> None:
    plan = plan_host("host", r1(host={"rig_docker_daemon_options": options}))
    assert plan.ok and {w.code for w in plan.warnings if w.code.startswith("DOCKER")} == codes


def test_every_version_is_planned_or_refused_for_a_reason_of_its_own() -> None:
    for version in catalog().engines["vllm"].versions:
        plan = plan_host("host", r1(version=version))
        minor = tuple(int(part) for part in version.split(".")[:2])
        expected = {"METHOD_VERSION_WINDOW"} if (0, 10) <= minor < (0, 15) else set()
        assert {found.code for found in plan.refusals} == expected, version


def test_the_table_shows_all_a_person_needs() -> None:
    plans = plan_hosts({"alpha": r1(), "beta": r1(max_model_len=65536)}, tiny_lock())
    text = render.table(plans)
    for part in (
        "alpha    rtx4090_r1_14b on 1 × GeForce RTX 4090",
        "vllm 0.33.0 on cuda, draft_model, K=5",
        "padded from 151936 to 152064 tokens",
        "--max-model-len 16384\n",
        "left for the KV cache",
        "16384 asked, 29440 would fit",
        "driver     branch 580, there already, or yours to install; vllm 0.33.0 carries CUDA 13.0: driver 580.65.06 or newer",
        "beta    rtx4090_r1_14b on 1 × GeForce RTX 4090    REFUSED (1)",
        "VRAM_OVERCOMMIT",
        "fix: max_model_len: 26368 (29440 if the estimates hold)",
    ):
        assert part in text
    assert max(len(line) for line in text.splitlines()) <= 125


def test_the_role_takes_every_field_of_a_planned_service() -> None:
    """A field that the role does not list stops every converge."""
    spec = yaml.safe_load((ROOT / "roles/inference_service/meta/argument_specs.yml").read_text())
    listed = spec["argument_specs"]["main"]["options"]["inference_service_list"]["options"]
    assert {field.name for field in fields(ServicePlan)} <= set(listed)
