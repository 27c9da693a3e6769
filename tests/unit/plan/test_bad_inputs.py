"""Bad input is refused on the controller, each kind with its own code, a cause that names it, and a fix."""

import json
from typing import Any

import pytest

from specrig.plan import plan_host, render
from tests.unit.plan.tiny import r1, service, tiny, tiny_lock

P = "rtx4090_r1_14b"
TARGET = {"repo": "casperhansen/deepseek-r1-distill-qwen-14b-awq"}


def _deep() -> dict[str, Any]:
    deep: dict[str, Any] = {}
    deep["rig_gpus"] = [deep]
    return deep


KEY = {"rig_api_key": "k" * 32}
LIMIT = {"gpu": 0, "power_w": 300}
REPO = {"repository_url": "https://repo.example/debian13/x86_64"}


def docker(options: dict[str, Any]) -> dict[str, Any]:
    return {"rig_profile": P, "rig_docker_daemon_options": options}


OPEN = {"rig_allow_from": ["192.0.2.0/24"]}
# declaration, code, what the cause must show
BAD: list[tuple[Any, str, str]] = [
    (None, "NOT_A_MAPPING", "empty"),
    ("rtx4090_r1_14b", "NOT_A_MAPPING", "rtx4090_r1_14b"),
    ([], "NOT_A_MAPPING", "list"),
    ({}, "NOTHING_DECLARED", "rig_profile"),
    (_deep(), "NESTED_TOO_DEEP", "12"),
    ({"rig_profile": P, "rig_models_root": "/etc/models"}, "MODELS_ROOT_INVALID", "/etc is the system's"),
    ({"rig_profile": P, "rig_models_root": "/srv/../etc"}, "MODELS_ROOT_INVALID", "/srv/../etc"),
    ({"rig_profile": P, "rig_speculate": False}, "UNKNOWN_FIELD", "rig_speculation"),
    (r1(max_model_length=1), "UNKNOWN_FIELD", "max_model_len"),
    ({"rig_profile": "rtx4091"}, "PROFILE_UNKNOWN", "rtx4091"),
    ({"rig_profile": 4090}, "WRONG_TYPE", "4090"),
    ({"rig_profile": P, "rig_services": {"name": "a"}}, "WRONG_TYPE", "a mapping"),
    ({"rig_profile": P, "rig_services": ["r1-14b"]}, "WRONG_TYPE", "r1-14b"),
    ({"rig_profile": P, "rig_webui": "yes please"}, "WRONG_TYPE", "input should be a valid mapping"),
    (r1(k="5"), "WRONG_TYPE", "'5'"),
    (r1(k=True), "WRONG_TYPE", "true"),
    (r1(k=2.5), "WRONG_TYPE", "2.5"),
    (r1(port="8000"), "WRONG_TYPE", "port"),
    (r1(env={"A": 1}), "WRONG_TYPE", "env.A"),
    (r1(extra_args="--seed 1"), "WRONG_TYPE", "--seed"),
    (r1(eager="yes"), "WRONG_TYPE", "eager"),
    (r1(k=0), "K_ZERO_WITH_DRAFT", "k is 0"),
    (r1(k=40), "K_TOO_LARGE", "40"),
    (r1(k=-1), "K_NEGATIVE", "-1"),
    (r1(k=10**400), "K_TOO_LARGE", "very large"),
    (r1(k=8), "K_UNMEASURED", "8"),
    (r1(k=3, draft=None, method="none"), "K_WITHOUT_METHOD", "3"),
    (tiny(draft={"repo": "specrig-lab/tiny-target"}), "DRAFT_IS_TARGET", "tiny-target"),
    (r1(tensor_parallel=2), "TP_EXCEEDS_GPUS", "2"),
    (r1(tensor_parallel=0), "TP_INVALID", "0"),
    (r1(tensor_parallel=3, host={"rig_gpus": [{"name": "rtx_4090", "count": 3}]}), "TP_DOES_NOT_DIVIDE", "40 heads"),
    (service("dual_rtx3090_r1_32b_tp2", "r1-32b", draft_tensor_parallel=1), "DRAFT_TP", "1"),
    (r1(version="0.10.2"), "METHOD_VERSION_WINDOW", "0.9.2 and 0.15.0"),
    (r1(method="pard", version="0.33.0"), "DRAFT_KIND", "pard"),
    (r1(method="medusa"), "METHOD_UNKNOWN", "medusa"),
    (r1(draft=None, method="draft_model"), "DRAFT_MISSING", "draft"),
    (r1(method="ngram", draft={"repo": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"}), "DRAFT_UNUSED", "ngram"),
    (r1(vocab="heterogeneous", version="0.16.0"), "VOCAB_MODE_VERSION", "0.25.0"),
    (r1(vocab="crop"), "VOCAB_MODE_UNKNOWN", "crop"),
    (r1(image="vllm/vllm-openai:latest"), "IMAGE_LATEST", "latest"),
    (r1(image="vllm/vllm-openai"), "IMAGE_LATEST", "no tag"),
    (r1(image="vllm/vllm-openai:v0.33.0 -v /:/host"), "IMAGE_INVALID", "-v"),
    (r1(image="vllm/vllm-openai:v0.26.0"), "IMAGE_VERSION_MISMATCH", "0.26.0"),
    (tiny(image="specrig-lab-hub:5000/engine-vllm-cpu:0.31.0"), "IMAGE_VERSION_MISMATCH", "0.31.0"),
    (r1(version="0.34.0"), "VERSION_UNKNOWN", "0.34.0"),
    (r1(version="0.5.0"), "VERSION_TOO_OLD", "0.6.4.post1"),
    (r1(version="v1"), "VERSION_INVALID", "v1"),
    (r1(version="0." + "9" * 4000), "VERSION_INVALID", "…"),
    (r1(engine="exllama"), "ENGINE_UNKNOWN", "exllama"),
    (r1(device="rocm"), "DEVICE_UNKNOWN", "rocm"),
    (r1(target={**TARGET, "revision": "main"}), "REVISION_NOT_COMMIT", "main"),
    (r1(target={**TARGET, "revision": "abc123"}), "REVISION_NOT_COMMIT", "abc123"),
    (r1(target={"repo": "gpt2"}), "MODEL_NAME_INVALID", "gpt2"),
    (r1(target={"repo": "../..//etc/passwd"}), "MODEL_NAME_INVALID", "passwd"),
    (r1(target={"repo": "nobody/nothing"}), "MODEL_UNKNOWN", "nobody/nothing"),
    (r1(max_model_len=65536), "VRAM_OVERCOMMIT", "largest that fits"),
    (r1(target={"repo": "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B"}), "VRAM_MODELS_DO_NOT_FIT", "GiB"),
    (r1(gpu_memory_utilization=1.0), "UTIL_TOO_HIGH", "1"),
    (r1(gpu_memory_utilization=0.92, version="0.9.2"), "UTIL_TOO_HIGH", "outside the budget"),
    (r1(gpu_memory_utilization=0.0), "UTIL_INVALID", "0.0"),
    (r1(gpu_memory_utilization=float("nan")), "UTIL_INVALID", "nan"),
    (r1(max_model_len=131328), "CONTEXT_TOO_LONG", "131072"),
    (r1(max_model_len=0), "CONTEXT_INVALID", "0"),
    (r1(max_num_seqs=256), "SPEC_HIGH_CONCURRENCY", "256"),
    (r1(max_num_seqs=0), "CONCURRENCY_INVALID", "0"),
    (r1(draft={"repo": "alamios/DeepSeek-R1-DRAFT-Qwen2.5-0.5B"}, max_model_len=33024), "DRAFT_CONTEXT_SHORT", "32768"),
    (r1(host={"rig_gpus": [{"name": "rtx_4091"}]}), "GPU_UNKNOWN", "did you mean rtx_4090?"),
    (r1(host={"rig_gpus": []}), "DEVICE_NEEDS_GPU", "no card"),
    (r1(host={"rig_gpus": [{"name": "rtx_4090", "count": 99}]}), "GPU_COUNT_INVALID", "99"),
    (r1(host={"rig_gpus": [{"name": "tesla_p40"}]}), "GPU_TOO_OLD", "6.1"),
    (r1(gpus=[1]), "GPU_INDEX_UNKNOWN", "0 to 0"),
    (r1(host={"rig_driver": {"branch": 550}}, version="0.33.0"), "DRIVER_TOO_OLD", "580.65.06"),
    (r1(host={"rig_driver": {"version": "550.54.14"}}, version="0.26.0"), "DRIVER_TOO_OLD", "550.54.14"),
    (r1(host={"rig_driver": {"branch": 12}}), "DRIVER_INVALID", "12"),
    (
        r1(host={"rig_driver": {"source": "distro", "branch": 999}}),
        "DRIVER_BRANCH_UNKNOWN",
        "branch is 999; known are 535",
    ),
    (r1(host={"rig_driver": {"source": "distro", "version": "999.1"}}), "DRIVER_BRANCH_UNKNOWN", "999"),
    (r1(host={"rig_driver": {"branch": 535, "version": "580.65.06"}}), "DRIVER_CONTRADICTION", "535"),
    (r1(port=22), "PORT_INVALID", "22"),
    (r1(port=70000), "PORT_INVALID", "70000"),
    (r1(bind="0.0.0.0", host=OPEN), "BIND_EXPOSED_WITHOUT_KEY", "0.0.0.0"),
    (r1(bind="::", host={"rig_allow_from": ["2001:db8::/32"]}), "BIND_EXPOSED_WITHOUT_KEY", "::"),
    (r1(bind="::", host={**OPEN, **KEY}), "ALLOW_FROM_FAMILY", "IPv4 networks only"),
    (r1(bind="192.0.2.10", host={"rig_allow_from": ["2001:db8::/32"], **KEY}), "ALLOW_FROM_FAMILY", "IPv6 networks"),
    (r1(bind="192.0.2.10", host={"rig_allow_from": "192.0.2.0/24", **KEY}), "WRONG_TYPE", "rig_allow_from"),
    (r1(gpus=[]), "VALUE_OUT_OF_RANGE", "gpus"),
    (r1(host={"rig_gpus": "rtx_4090"}), "WRONG_TYPE", "rig_gpus"),
    (r1(host={"rig_driver": {"reboot": "allow"}}), "FIELD_UNUSED", "rig_driver.reboot is 'allow', and source is none"),
    (r1(host={"rig_driver": {"branch": 580, "source": "distro", **REPO}}), "FIELD_UNUSED", "repository_url"),
    (r1(host={"rig_docker_data_root_existing": "leave"}), "FIELD_UNUSED", "rig_docker_data_root is not set"),
    (r1(method="none", min_acceptance=0.4), "FIELD_UNUSED", "min_acceptance is 0.4, and nothing is drafted"),
    (service("rtx4090_r1_14b_sglang", "r1-14b", min_acceptance=0.4), "FIELD_UNUSED", "SGLang does not say"),
    (r1(method="none", vocab="pad"), "FIELD_UNUSED", "vocab is 'pad', and method none has no draft"),
    (r1(method="ngram", draft_tensor_parallel=1), "FIELD_UNUSED", "draft_tensor_parallel"),
    (tiny(gpu_memory_utilization=0.5), "FIELD_UNUSED", "device is cpu"),
    (r1(p2p="off"), "FIELD_UNUSED", "tensor_parallel is 1"),
    (r1(host={"rig_gpu_tuning": {"cards": [LIMIT, LIMIT]}}), "GPU_TUNING_CONTRADICTION", "names 0 twice"),
    (r1(host={"rig_gpu_tuning": {"cards": [LIMIT, {**LIMIT, "gpu": "GPU-1"}]}}), "GPU_TUNING_CONTRADICTION", "twice"),
    (docker({"log-opts": {"max-file": 3}}), "DOCKER_OPTION_TYPE", "log-opts.max-file is 3; Docker takes text"),
    (docker({"live-restore": "true"}), "DOCKER_OPTION_TYPE", "live-restore is 'true'; Docker takes true or false"),
    (docker({"max-concurrent-downloads": True}), "DOCKER_OPTION_TYPE", "a whole number"),
    (docker({"registry-mirrors": "https://m.example"}), "DOCKER_OPTION_TYPE", "a list of text"),
    (docker({"dns": ["192.0.2.1", 5]}), "DOCKER_OPTION_TYPE", "dns[1] is 5; Docker takes text"),
    (docker({"default-ulimits": {"nofile": 5}}), "DOCKER_OPTION_TYPE", "nofile is 5; Docker takes a mapping"),
    (docker({"features": {"cdi": "yes"}}), "DOCKER_OPTION_TYPE", "features.cdi"),
    (r1(bind="192.0.2.10", host={"rig_api_key": "k" * 32}), "BIND_EXPOSED_TO_ALL", "192.0.2.10"),
    ({"rig_profile": P, "rig_allow_from": ["192.0.2.5/24"]}, "ALLOW_FROM_INVALID", "192.0.2.5/24"),
    ({"rig_profile": P, "rig_allow_from": ["lan"]}, "ALLOW_FROM_INVALID", "rig_allow_from[0]"),
    ({"rig_profile": P, "rig_allow_from": "192.0.2.0/24"}, "WRONG_TYPE", "192.0.2.0/24"),
    ({"rig_profile": P, "rig_docker_daemon_options": {"graph": "/x"}}, "DOCKER_OPTION_OWNED", "graph"),
    ({"rig_profile": P, "rig_docker_data_root": "/etc/docker"}, "DATA_ROOT_INVALID", "/etc is the system's"),
    ({"rig_profile": P, "rig_docker_data_root": "/srv"}, "DATA_ROOT_INVALID", "/srv/models"),
    ({"rig_profile": P, "rig_docker_data_root": "nvme"}, "DATA_ROOT_INVALID", "nvme"),
    ({"rig_profile": P, "rig_docker_data_root_existing": "move"}, "VALUE_OUT_OF_RANGE", "move"),
    (r1(bind="everywhere"), "BIND_INVALID", "everywhere"),
    (r1(host={"rig_api_key": "short"}), "API_KEY_INVALID", "5 characters"),
    (r1(extra_args=["--api-key=hunter2hunter2hunter2"]), "SECRET_IN_ARGS", "--api-key"),
    (r1(extra_args=["--api_key", "x"]), "SECRET_IN_ARGS", "--api-key"),
    (r1(extra_args=["--api-k", "x"]), "SECRET_IN_ARGS", "--api-k"),
    (
        service("rtx4090_r1_14b_sglang", "r1-14b", extra_args=["--ssl-keyfile-password", "x"]),
        "SECRET_IN_ARGS",
        "--ssl-keyfile-password",
    ),
    (r1(env={"VLLM_API_KEY": "x"}), "SECRET_IN_ENV", "VLLM_API_KEY"),
    (r1(env={"A": "hf_" + "a" * 34}), "SECRET_IN_ENV", "env A has a Hugging Face token"),
    (r1(env={"HTTPS_PROXY": "http://me:pw@proxy.example"}), "SECRET_IN_ENV", "HTTPS_PROXY has a URL with a password"),
    (r1(extra_args=["--seed", "hf_" + "a" * 34]), "SECRET_IN_ARGS", "a Hugging Face token"),
    (
        r1(host={"rig_webui": {"env": {"DATABASE_URL": "postgresql://a:b@db.example/x"}}}),
        "SECRET_IN_ENV",
        "rig_webui: env DATABASE_URL",
    ),
    (r1(extra_args=["--max_model_len=1"]), "FLAG_OWNED", "--max-model-len"),
    (r1(extra_args=["-tp", "2"]), "FLAG_OWNED", "--tensor-parallel-size"),
    (r1(extra_args=["--no-enforce-eager"]), "FLAG_OWNED", "enforce-eager"),
    (r1(extra_args=["--swap-space", "4"]), "FLAG_NOT_IN_VERSION", "--swap-space"),
    (r1(extra_args=["--per-request-spec-decode-metrics=summary"], version="0.26.0"), "FLAG_NOT_IN_VERSION", "0.26.0"),
    (r1(extra_args=["--enable-prefix-cacheing"]), "FLAG_UNKNOWN", "--enable-prefix-caching"),
    (r1(extra_args=["--speculative-config.method", "ngram"]), "FLAG_OWNED", "--speculative-config"),
    (r1(extra_args=["--spec-tokens", "9"]), "FLAG_OWNED", "--spec-tokens"),
    (r1(extra_args=["-dp", "2"]), "PARALLELISM_UNSUPPORTED", "--data-parallel-size"),
    (r1(extra_args=["-x"]), "FLAG_UNKNOWN", "-x"),
    (r1(extra_args=["/models/other"]), "ARG_POSITIONAL", "/models/other"),
    (r1(extra_args=["--seed", "1\n[Service]\nUser=root"]), "CONTROL_CHARACTER", "extra_args"),
    (r1(env={"A": "\x00"}), "CONTROL_CHARACTER", "A"),
    (r1(env={"A": "\u202e"}), "CONTROL_CHARACTER", "A"),
    (r1(notes=["fine\n", "\x1b[31mred"]), "CONTROL_CHARACTER", "notes"),
    (r1(notes=["\u202e"]), "CONTROL_CHARACTER", "notes"),
    (r1(k=8, k_measured_reason="\x1b[2J"), "CONTROL_CHARACTER", "k_measured_reason"),
    (r1(env={"LD PRELOAD": "x"}), "ENV_NAME_INVALID", "LD PRELOAD"),
    (r1(env={"HF_HUB_OFFLINE": "0"}), "ENV_OWNED", "HF_HUB_OFFLINE"),
    (r1(served_name="a b"), "SERVED_NAME_INVALID", "a b"),
    ({"rig_profile": P, "rig_models_root": "/srv/../etc/x y"}, "MODELS_ROOT_INVALID", "x y"),
    ({"rig_profile": P, "rig_hub_endpoint": "file:///etc"}, "HUB_ENDPOINT_INVALID", "file"),
    ({"rig_profile": P, "rig_models_share": "rig:8790"}, "VALUE_OUT_OF_RANGE", "rig_models_share"),
    ({"rig_profile": P, "rig_models_share": "0.0.0.0"}, "VALUE_OUT_OF_RANGE", "rig_models_share"),
    ({"rig_profile": P, "rig_models_bundle": "usb/../x"}, "VALUE_OUT_OF_RANGE", "rig_models_bundle"),
    ({"rig_profile": P, "rig_hub_limit": 100}, "VALUE_OUT_OF_RANGE", "rig_hub_limit"),
    (
        {"rig_profile": P, "rig_services": [{"name": "scrub", "target": {"repo": "a/b"}}]},
        "SERVICE_NAME_INVALID",
        "scrub",
    ),
    ({"rig_services": [{"name": "../x", "target": TARGET}]}, "SERVICE_NAME_INVALID", "../x"),
    ({"rig_services": [{"target": TARGET}]}, "FIELD_MISSING", "name"),
    ({"rig_services": [{"name": "a"}]}, "FIELD_MISSING", "target"),
    (r1(extra_args=["x" * 65536]), "TOO_LONG", "extra_args"),
    (tiny(env={"VLLM_CPU_KVCACHE_SPACE": "0"}), "CPU_CACHE_TOO_SMALL", "2048"),
]


@pytest.mark.parametrize(
    ("declaration", "code", "shows"), BAD, ids=[f"{i}-{code}" for i, (_, code, _) in enumerate(BAD)]
)
def test_refused(declaration: Any, code: str, shows: str) -> None:
    plan = plan_host("bad", declaration)
    assert {found.code for found in plan.refusals} == {code}
    found = next(found for found in plan.refusals if found.code == code)
    assert shows in found.cause
    assert len(found.cause) < 400
    assert found.fix
    assert plan.as_json()["ok"] is False


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["--max-model-len", "1"], "the service's max_model_len"),
        (["--no-enforce-eager"], "the service's eager"),
        (["--speculative-config.method", "ngram"], "the service's method, draft and k"),
        (["--disable-custom-all-reduce"], "the service's p2p"),
        (["--middleware", "mine.Guard"], "leave --middleware out: no field changes it"),
        (["--middlew", "mine.Guard"], "no field changes it"),
    ],
)
def test_an_owned_flag_is_led_to_the_field_that_says_it(words: list[str], fix: str) -> None:
    plan = plan_host("bad", r1(extra_args=words))
    assert [found.code for found in plan.refusals] == ["FLAG_OWNED"] and fix in plan.refusals[0].fix


def test_there_are_fifty_kinds() -> None:
    assert len({code for _, code, _ in BAD}) >= 50


def test_several_faults_are_told_at_once() -> None:
    plan = plan_host(
        "bad", {"rig_profile": "nope", "rig_speculation": "no", "rig_services": [{"name": "A"}], "rig_x": 1}
    )
    assert {"PROFILE_UNKNOWN", "WRONG_TYPE", "SERVICE_NAME_INVALID", "UNKNOWN_FIELD"} <= {f.code for f in plan.refusals}


def test_tokenizers_that_differ() -> None:
    plan = plan_host("bad", {"rig_profile": "cpu_demo"}, tiny_lock(fingerprints=("a", "b")))
    assert [found.code for found in plan.refusals] == ["TOKENIZER_DIFFERS"]
    assert "aaaaaaaaaaaa" in plan.refusals[0].cause and "bbbbbbbbbbbb" in plan.refusals[0].cause


def test_a_draft_wider_than_its_target_can_not_be_padded() -> None:
    plan = plan_host("bad", {"rig_profile": "cpu_demo"}, tiny_lock(draft={"vocab_size": 2048}))
    assert [found.code for found in plan.refusals] == ["VOCAB_PAD_IMPOSSIBLE"]


def test_two_services_on_one_port() -> None:
    other = {"name": "other", "device": "cpu", "image": "x/cpu:0.32.0", "version": "0.32.0", "max_model_len": 2048}
    for bind, clash in (("127.0.0.1", True), ("127.0.0.2", False)):
        item = {**other, "target": {"repo": "specrig-lab/tiny-target"}, "bind": bind}
        plan = plan_host("bad", {"rig_profile": "cpu_demo", "rig_services": [item]})
        assert [found.code for found in plan.refusals] == (["PORT_CLASH"] if clash else [])


def _several(count: int, **over: Any) -> list[dict[str, Any]]:
    return [
        {
            "name": f"s{i}",
            "target": {"repo": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"},
            "max_model_len": 2048,
            **over,
        }
        for i in range(count)
    ]


def test_four_services_on_one_port_are_given_three_others() -> None:
    declared = {"rig_gpus": [{"name": "h200"}], "rig_webui": {"port": 8001}}
    services = _several(4, gpu_memory_utilization=0.1)
    plan = plan_host("bad", {**declared, "rig_services": services})
    assert [found.code for found in plan.refusals] == ["PORT_CLASH"] * 3
    assert [found.fix for found in plan.refusals] == [
        f"port: {p} for s{i}" for i, p in ((1, 8002), (2, 8003), (3, 8004))
    ]
    for item, port in zip(services[1:], (8002, 8003, 8004), strict=True):
        item["port"] = port
    assert plan_host("good", {**declared, "rig_services": services}).ok


def test_services_that_share_a_card_are_told_which_must_be_exclusive() -> None:
    services = _several(11, gpu_memory_utilization=0.4)
    services = [{**item, "port": 8000 + i} for i, item in enumerate(services)]
    [found] = plan_host("bad", {"rig_gpus": [{"name": "rtx_4090"}], "rig_services": services}).refusals
    names = [f"s{i}" for i in range(2, 11)]
    assert found.code == "GPU_OVERCOMMIT" and found.fix.startswith(f"exclusive: true for {', '.join(names)} (./rig")
    services = [{**item, "exclusive": item["name"] in names} for item in services]
    assert plan_host("good", {"rig_gpus": [{"name": "rtx_4090"}], "rig_services": services}).ok


@pytest.mark.parametrize(("cards", "asked", "fix"), [(3, 3, "1 or 2"), (8, 8, "1, 2 or 4"), (1, 8, "1"), (3, 8, "2")])
def test_tensor_parallelism_is_proposed_as_heads_and_cards_allow(cards: int, asked: int, fix: str) -> None:
    host = {"rig_gpus": [{"name": "rtx_4090", "count": cards}]}
    found = plan_host("bad", r1(tensor_parallel=asked, host=host)).refusals
    assert found[0].code in ("TP_DOES_NOT_DIVIDE", "TP_EXCEEDS_GPUS") and found[0].fix == f"tensor_parallel: {fix}"


@pytest.mark.parametrize(
    "lock", ["lock", [], {"models": []}, {"models": {"specrig-lab/tiny-target": 1}}, {"models": 7}]
)
def test_a_lock_that_is_none(lock: Any) -> None:
    plan = plan_host("bad", {"rig_profile": "cpu_demo"}, lock)
    assert {found.code for found in plan.refusals} == {"LOCK_INVALID"}


@pytest.mark.parametrize("path", ["../evil", "/etc/passwd", "a//b", "a/../b", "", "a\nb", "./a"])
def test_a_lock_that_leads_elsewhere(path: str) -> None:
    lock = tiny_lock()
    lock["models"]["specrig-lab/tiny-target"]["files"][0]["path"] = path
    assert [f.code for f in plan_host("bad", {"rig_profile": "cpu_demo"}, lock).refusals] == ["LOCK_INVALID"]


def test_a_lock_with_an_absurd_size() -> None:
    lock = tiny_lock()
    lock["models"]["specrig-lab/tiny-target"]["files"][1]["size"] = 10**5000
    assert [f.code for f in plan_host("bad", {"rig_profile": "cpu_demo"}, lock).refusals] == ["LOCK_INVALID"]


def test_fixes_name_what_is_there() -> None:
    def fix(declaration: Any, code: str) -> str:
        return next(found.fix for found in plan_host("bad", declaration).refusals if found.code == code)

    assert "docs/schema/service.json" in fix(r1(max_model_length=1), "UNKNOWN_FIELD")
    assert "docs/schema/host.json" in fix({"rig_profile": P, "rig_speculate": False}, "UNKNOWN_FIELD")
    unknown = fix(r1(target={"repo": "nobody/nothing"}), "MODEL_UNKNOWN")
    assert unknown.startswith("./rig models lock") and "src/specrig/plan/catalog/models.yml" in unknown
    assert "rig_hub_token" in fix(r1(env={"HF_TOKEN": "x"}), "SECRET_IN_ENV")
    assert "rig_api_key" in fix(r1(env={"VLLM_API_KEY": "x"}), "SECRET_IN_ENV")
    keyless = fix(service("rtx4090_r1_14b_sglang", "r1-14b", extra_args=["--api-key", "x"]), "SECRET_IN_ARGS")
    assert "rig_api_key" not in keyless and "gateway" in keyless
    wider = r1(vocab="heterogeneous", method="draft_model")
    assert fix({**wider, "rig_profile": "rtx4090_r1_14b_sglang"}, "VOCAB_MODE_VERSION") == "vocab: pad"


@pytest.mark.parametrize(
    ("over", "shows"),
    [
        ({"version": 0.10}, 'write it in quotes, version: "…"; without them YAML reads 0.10 as the number 0.1'),
        ({"served_name": 8}, 'served_name: "…"'),
        ({"env": {"A": False}}, 'A: "…"; without them YAML reads on, off, yes and no as true and false'),
        ({"extra_args": ["--seed", 1]}, 'write it in quotes, "…"; without them YAML reads it as a number'),
    ],
)
def test_text_that_yaml_takes_for_something_else_is_to_be_quoted(over: dict[str, Any], shows: str) -> None:
    refused = plan_host("bad", r1(**over)).refusals
    assert [found.code for found in refused] == ["WRONG_TYPE"] and shows in refused[0].fix


def test_what_is_no_secret_is_taken_and_shown() -> None:
    env = {"HF_HOME": "hf_transfer", "HTTPS_PROXY": "http://proxy.example:3128/me@here"}
    plan = plan_host("host", r1(env=env))
    assert plan.ok and env.items() <= plan.services[0].env.items()
    assert "HTTPS_PROXY=http://proxy.example:3128/me@here" in render.table({"host": plan})


@pytest.mark.parametrize(
    "over",
    [
        {"notes": ["\x1b[2J"]},
        {"env": {"\x1b[2J": "\u202e"}},
        {"extra_args": ["--seed", "1\n\x9b2J"]},
        {"image": "x\x1b[2J"},
        {"bind": "\x1b[2J"},
    ],
)
def test_nothing_that_is_refused_reaches_the_terminal_raw(over: dict[str, Any]) -> None:
    plan = plan_host("bad", r1(**over))
    assert plan.refusals
    assert all(line.isprintable() for line in render.table({"bad\x1b[2J": plan}).splitlines())


def test_a_note_may_have_several_lines() -> None:
    assert "note: one two" in render.table({"host": plan_host("host", r1(notes=["one\ntwo\n"]))})


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("rtx_4091", "rtx_4090"),
        ("rtx4090", "rtx_4090"),
        ("RTX_3090", "rtx_3090"),
        ("4090", "rtx_4090"),
        ("gtx_1080", ""),
    ],
)
def test_only_a_card_of_the_same_family_is_taken_for_a_typing_error(name: str, near: str) -> None:
    [found] = plan_host("bad", r1(host={"rig_gpus": [{"name": name}]})).refusals
    assert found.code == "GPU_UNKNOWN" and "rtx_4090" in found.fix and "gpus.yml" in found.fix
    assert found.cause.endswith(f"; did you mean {near}?" if near else "which the catalog does not have")


@pytest.mark.parametrize(
    ("declaration", "fix"),
    [
        (service("dual_rtx3090_r1_32b_tp2", "r1-32b", p2p="on"), "p2p: auto, off or nvlink"),
        ({"rig_profile": P, "rig_driver": {"reboot": "yes"}}, "reboot: never, ask or allow"),
        ({"rig_profile": P, "rig_gateway": {"tls": False}}, "tls: internal or acme"),
        (r1(method="medusa"), "method: draft_model, ngram, eagle3, pard or none"),
        (r1(engine="exllama"), "engine: vllm, llama_cpp, sglang, aphrodite, tensorrt_llm or ollama"),
    ],
)
def test_where_few_words_are_allowed_the_fix_names_them(declaration: dict[str, Any], fix: str) -> None:
    assert [found.fix for found in plan_host("bad", declaration).refusals] == [fix]


def test_mapping_vocabularies_is_told_in_the_engines_own_versions() -> None:
    def cause(profile: str, **over: Any) -> str:
        found = plan_host("bad", service(profile, "r1-14b", vocab="heterogeneous", **over)).refusals
        return next(one.cause for one in found if one.code == "VOCAB_MODE_VERSION")

    assert "vLLM 0.16.0 can not map vocabularies, 0.25.0 is the first" in cause(P, version="0.16.0")
    assert cause("rtx4090_r1_14b_sglang").endswith("SGLang can not map vocabularies")


def test_a_model_nobody_knows_is_there_to_be_locked_and_its_draft_with_it() -> None:
    plan = plan_host("bad", r1(target={"repo": "nobody/nothing", "file": "a.gguf"}))
    draft = "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"
    assert [(m["repo"], m["revision"], m["file"]) for m in plan.models] == [
        ("nobody/nothing", None, "a.gguf"),
        (draft, None, None),
    ]


def test_switching_speculation_off_makes_no_field_idle() -> None:
    assert plan_host("host", r1(min_acceptance=0.4, host={"rig_speculation": False})).ok


def test_a_method_takes_what_belonged_to_the_profiles_draft_along() -> None:
    assert plan_host("host", service("rtx4090_r1_14b_article", "r1-14b", method="none")).ok


def test_no_limit_is_not_shown_as_one() -> None:
    plans = {"bad": plan_host("bad", r1(host={"rig_gpu_tuning": {"cards": [{"gpu": 0}]}}))}
    assert "None" not in render.table(plans)


def test_ipv6_is_shown_in_brackets() -> None:
    host = {"rig_allow_from": ["2001:db8::/32"], **KEY}
    assert "listens  [2001:db8::5]:8000 as" in render.table({"v6": plan_host("v6", r1(bind="2001:db8::5", host=host))})


def test_a_misspelt_service_name_is_told_the_profiles() -> None:
    refused = plan_host("bad", {"rig_profile": P, "rig_services": [{"name": "r1-14", "k": 2}]}).refusals
    assert [found.code for found in refused] == ["FIELD_MISSING"]
    assert "r1-14b" in refused[0].fix


@pytest.mark.parametrize("facts", ["facts", [1], {"driver_version": 1}, {"gpus": {}}, {"gpus": [{"uuid": "x"}]}])
def test_facts_that_are_none(facts: Any) -> None:
    plan = plan_host("bad", {"rig_profile": P}, None, facts)
    assert {found.code for found in plan.refusals} == {"FACTS_INVALID"}


def test_no_secret_is_ever_told() -> None:
    secret = "hunter2-hunter2-hunter2"
    hub = "hf_" + "Hunter2" * 5
    for declaration in (
        r1(host={"rig_api_key": secret}),
        r1(host={"rig_api_key": [secret]}),
        r1(host={"rig_api_key": secret + "\n"}),
        r1(env={"HF_TOKEN": secret}),
        r1(env={"A": {"b": secret}}),
        r1(env={"A": hub}),
        r1(env={"HTTPS_PROXY": f"http://me:{secret}@proxy.example:3128"}),
        r1(extra_args=["--api-key=" + secret]),
        r1(extra_args=["--seed", "1", "--hf-token", secret]),
        r1(extra_args=["--hf-token " + secret]),
        r1(extra_args="--hf-token " + secret),
        r1(extra_args=["--generation-config", hub]),
        r1(host={"rig_hub_endpoint": f"https://me:{secret}@hub.example"}),
        r1(host={"rig_webui": {"env": {"DATABASE_URL": f"postgresql://webui:{secret}@db.example/webui"}}}),
        r1(host={"rig_webui": {"env": {"WEBUI_SECRET_KEY": secret}}}),
    ):
        plan = plan_host("bad", declaration)
        told = json.dumps(plan.as_json()) + render.table({"bad": plan})
        assert secret not in told and hub not in told
