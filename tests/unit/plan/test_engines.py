"""Engines other than vLLM: what each is told, and what is refused because it can not be told."""

import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from specrig.plan import plan_gateway, plan_host, versions
from specrig.plan.catalog import catalog, profiles, read
from specrig.plan.dialects import dialect, method_works, methods
from specrig.plan.types import ServiceDecl
from tests.unit.plan.tiny import service

ENGINES = list(catalog().engines)
OTHERS = [name for name in ENGINES if name != "vllm"]
BASE = "rtx4090_r1_14b"
AWQ = {"repo": "casperhansen/deepseek-r1-distill-qwen-14b-awq"}
DRAFT = {"repo": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"}
GGUF = {"repo": "bartowski/DeepSeek-R1-Distill-Qwen-14B-GGUF"}
GGUF_DRAFT = {"repo": "bartowski/DeepSeek-R1-Distill-Qwen-1.5B-GGUF"}
PARTS = ("entrypoints", "flags", "speculative_config", "env", "known", "metrics", "progress")


def declared(engine: str, **over: Any) -> dict[str, Any]:
    """The 14B host with this engine, its service changed."""
    return service(f"{BASE}_{engine}", "r1-14b", **over)


def told(declaration: dict[str, Any]) -> set[str]:
    return {found.code for found in plan_host("host", declaration).refusals}


@pytest.mark.parametrize("engine", ENGINES)
def test_tables_are_whole(engine: str) -> None:
    tables = read(f"dialects/{engine}.yml")
    for part in PARTS:
        assert all(len(row["source"]) > 8 for row in tables[part]), part
    for name, rows in (("methods", tables["methods"]), ("traits", tables["traits"])):
        assert all(len(row["source"]) > 8 for row in rows.values()), name
    for version in catalog().engines[engine].versions:
        at = versions.key(version)
        for name, trait in tables["traits"].items():
            assert sum(versions.within(at, row) for row in trait["values"]) == 1, (version, name)
        for part in ("entrypoints", "metrics", "progress"):
            assert sum(versions.within(at, row) for row in tables[part]) == 1, (version, part)
        assert set(dialect(engine, version).fields) <= set(ServiceDecl.model_fields)
    shared = set(read("dialects/ollama.yml")["traits"])
    assert shared <= set(tables["traits"]), "rules ask every engine for these"


@pytest.mark.parametrize("engine", OTHERS)
def test_every_engine_has_a_profile_for_the_same_target(engine: str) -> None:
    plan = plan_host("host", {"rig_profile": f"{BASE}_{engine}"})
    assert plan.ok, plan.refusals
    [one] = plan.services
    assert one.engine == engine and one.ports[0]["container_port"] == catalog().engines[engine].container_port
    assert one.health_path.startswith("/") and one.completion_path == "/v1/completions"
    assert "sk-" not in str(one.argv) and not any("api-key" in word for word in one.argv)


def test_an_engine_shows_that_it_works_or_is_given_time() -> None:
    """The longest answer, made slowly: 16384 tokens at 10 a second. A probe that may take longer by itself has its own time."""
    plans = {name: plan_host("host", {"rig_profile": f"{BASE}_{name}"}).services[0] for name in OTHERS}
    assert {name for name, one in plans.items() if not one.progress} == {"ollama", "tensorrt_llm"}
    assert {name: one.probe["patience_s"] for name, one in plans.items() if one.probe["patience_s"]} == {
        "ollama": 1638,
        "tensorrt_llm": 1638,
    }
    assert all(one.metrics_path for one in plans.values() if one.progress)
    [slow] = plan_host("host", declared("ollama", probe={"timeout_s": 3000})).services
    assert slow.probe["patience_s"] == 3000


def test_a_gateway_is_told_how_to_tell_busy_from_hung() -> None:
    for engine in ("llama_cpp", "ollama"):
        host = {"rig_profile": f"{BASE}_{engine}"}
        [one] = plan_host("host", host).services
        [pool] = plan_gateway("host", host, {"host": host}).pools
        told = {key: pool["upstreams"][0][key] for key in ("metrics_path", "progress", "patience_s")}
        assert told == {
            "metrics_path": one.metrics_path,
            "progress": one.progress,
            "patience_s": one.probe["patience_s"],
        }


# engine × (method, draft): accepted or the code that refuses it
MATRIX = {
    ("llama_cpp", "draft_model"): None,
    ("llama_cpp", "none"): None,
    ("llama_cpp", "ngram"): "METHOD_NOT_IN_ENGINE",
    ("llama_cpp", "eagle3"): "METHOD_NOT_IN_ENGINE",
    ("llama_cpp", "pard"): "METHOD_NOT_IN_ENGINE",
    ("sglang", "draft_model"): None,
    ("sglang", "none"): None,
    ("sglang", "ngram"): "METHOD_NOT_IN_ENGINE",
    ("aphrodite", "draft_model"): None,
    ("aphrodite", "none"): None,
    ("aphrodite", "ngram"): None,
    ("aphrodite", "eagle3"): "METHOD_NOT_IN_ENGINE",
    ("tensorrt_llm", "draft_model"): None,
    ("tensorrt_llm", "none"): None,
    ("tensorrt_llm", "pard"): "METHOD_NOT_IN_ENGINE",
    ("ollama", "none"): None,
    ("ollama", "draft_model"): "METHOD_NOT_IN_ENGINE",
    ("ollama", "ngram"): "METHOD_NOT_IN_ENGINE",
}


@pytest.mark.parametrize(("engine", "method"), MATRIX)
def test_methods_of_an_engine(engine: str, method: str) -> None:
    gguf = engine in ("llama_cpp", "ollama")
    draft = None if method in ("none", "ngram") else GGUF_DRAFT if gguf else DRAFT
    code = MATRIX[engine, method]
    refused = told(declared(engine, method=method, draft=draft, k=0 if method == "none" else 3))
    assert (code in refused) if code else not refused


def test_the_matrix_names_every_method_that_an_engine_has() -> None:
    for engine in OTHERS:
        assert {m for e, m in MATRIX if e == engine and MATRIX[e, m] is None} | {"pard"} >= set(methods(engine)), engine


@pytest.mark.parametrize("engine", OTHERS)
def test_the_other_form_of_a_model_is_refused(engine: str) -> None:
    gguf = engine in ("llama_cpp", "ollama")
    target, draft = (AWQ, DRAFT) if gguf else (GGUF, GGUF_DRAFT)
    wrong = told(declared(engine, target=target, **({} if engine == "ollama" else {"draft": draft})))
    assert "MODEL_FORMAT" in wrong
    assert "MODEL_FORMAT" in told(service(BASE, "r1-14b", target=GGUF))


@pytest.mark.parametrize(
    ("engine", "over", "code"),
    [
        ("llama_cpp", {"gpu_memory_utilization": 0.8}, "ENGINE_FIELD"),
        ("llama_cpp", {"tensor_parallel": 2}, "ENGINE_FIELD"),
        ("llama_cpp", {"vocab": "pad"}, "ENGINE_FIELD"),
        ("llama_cpp", {"max_num_seqs": 16}, "VRAM_MODELS_DO_NOT_FIT"),
        ("llama_cpp", {"extra_args": ["--hf-repo", "a/b"]}, "FLAG_OWNED"),
        ("llama_cpp", {"extra_args": ["--api-key", "x"]}, "SECRET_IN_ARGS"),
        ("llama_cpp", {"version": "b1"}, "VERSION_TOO_OLD"),
        ("llama_cpp", {"version": "0.33.0"}, "VERSION_TOO_OLD"),
        ("ollama", {"eager": True}, "ENGINE_FIELD"),
        ("ollama", {"extra_args": ["--verbose"]}, "FLAG_UNKNOWN"),
        ("ollama", {"bind": "0.0.0.0"}, "ENGINE_KEYLESS_EXPOSED"),
        ("sglang", {"bind": "192.0.2.1"}, "ENGINE_KEYLESS_EXPOSED"),
        ("sglang", {"vocab": "heterogeneous"}, "VOCAB_MODE_VERSION"),
        ("sglang", {"device": "cpu"}, "ENGINE_DEVICE"),
        ("sglang", {"draft_tensor_parallel": 1, "tensor_parallel": 1}, "ENGINE_FIELD"),
        ("sglang", {"extra_args": ["--config", "/x"]}, "FLAG_OWNED"),
        ("sglang", {"version": "0.5.12"}, "VERSION_TOO_OLD"),
        ("tensorrt_llm", {"eager": True}, "ENGINE_FIELD"),
        ("tensorrt_llm", {"bind": "192.0.2.1"}, "ENGINE_KEYLESS_EXPOSED"),
        ("aphrodite", {"max_model_len": 40000}, "VRAM_OVERCOMMIT"),
        ("aphrodite", {"draft_tensor_parallel": 2}, "DRAFT_TP"),
    ],
)
def test_refused(engine: str, over: dict[str, Any], code: str) -> None:
    assert code in told(declared(engine, **over))


def test_an_engine_with_a_key_may_listen_on_the_network() -> None:
    host = {"rig_api_key": "a-long-enough-key-0123456789", "rig_allow_from": ["192.0.2.0/24"]}
    assert plan_host("host", service(f"{BASE}_llama_cpp", "r1-14b", host, bind="192.0.2.1")).ok


def test_k_means_the_same_in_every_engine() -> None:
    """K drafted tokens a round: SGLang counts the token after them as well."""

    def after(engine: str, flag: str) -> str:
        argv = plan_host("host", declared(engine, k=4)).services[0].argv
        return argv[argv.index(flag) + 1]

    assert after("llama_cpp", "--spec-draft-n-max") == "4"
    assert (after("sglang", "--speculative-num-steps"), after("sglang", "--speculative-num-draft-tokens")) == ("4", "5")
    assert '"num_speculative_tokens":4' in after("aphrodite", "--speculative-config")
    [file] = plan_host("host", declared("tensorrt_llm", k=4)).services[0].files
    assert yaml.safe_load(file["content"])["speculative_config"]["max_draft_len"] == 4


def test_several_cards_are_split_by_layers_in_llama_cpp() -> None:
    host = {"rig_gpus": [{"name": "rtx_3090", "count": 2}]}
    plan = plan_host("host", service(f"{BASE}_llama_cpp", "r1-14b", host, gpus=[0, 1]))
    assert plan.ok and plan.services[0].gpus == [0, 1]
    argv = plan.services[0].argv
    assert argv[argv.index("--tensor-split") + 1] == "1,1" and argv[argv.index("--split-mode") + 1] == "layer"


def test_the_widths_of_gguf_files_may_differ_as_the_engine_says() -> None:
    plan = plan_host("host", declared("llama_cpp"))
    assert plan.services[0].pair["vocab"] == "near" and all(model["derive"] is None for model in plan.models)


def locked(files: dict[str, int]) -> dict[str, Any]:
    config = {
        "vocab_size": 152064,
        "num_hidden_layers": 48,
        "hidden_size": 5120,
        "num_attention_heads": 40,
        "max_position_embeddings": 131072,
    }
    rows = [{"path": path, "size": size, "sha256": "4" * 64} for path, size in files.items()]
    return {
        "models": {GGUF["repo"]: {"revision": "1" * 40, "files": rows, "config": {**config, "quantization": "gguf"}}}
    }


@pytest.mark.parametrize(
    ("files", "asked", "code"),
    [
        ({"a.gguf": 9}, None, None),
        ({"a.gguf": 9, "b.gguf": 9}, "b.gguf", None),
        ({"a.gguf": 9, "b.gguf": 9}, None, "MODEL_FILE"),
        ({"a-00001-of-00002.gguf": 9, "a-00002-of-00002.gguf": 9}, "a-00001-of-00002.gguf", None),
        ({"a-00001-of-00002.gguf": 9, "a-00002-of-00002.gguf": 9}, None, None),
        ({"a-00001-of-00002.gguf": 9, "a-00002-of-00002.gguf": 9}, "a-00002-of-00002.gguf", "MODEL_FILE"),
    ],
)
def test_which_gguf_file_is_meant(files: dict[str, int], asked: str | None, code: str | None) -> None:
    target = {**GGUF, **({"file": asked} if asked else {})}
    plan = plan_host("host", declared("ollama", target=target), locked(files))
    assert {found.code for found in plan.refusals} == ({code} if code else set())
    if not code:
        [service] = plan.services
        assert service.models[0]["file"] == (asked or next(iter(files)))
        assert [file["path"] for file in plan.models[0]["files"]] == list(files)


def test_another_file_of_a_locked_repository_waits_for_the_lock() -> None:
    other = "DeepSeek-R1-Distill-Qwen-14B-Q4_K_M.gguf"
    plan = plan_host("host", declared("ollama", target={**GGUF, "file": other}), locked({"a.gguf": 9}))
    assert plan.ok and "MODEL_UNLOCKED" in {found.code for found in plan.warnings}


def test_configuration_files_are_the_services_own(tmp_path: Path) -> None:
    [trt] = plan_host("host", declared("tensorrt_llm", gpu_memory_utilization=0.8)).services
    assert [f["path"] for f in trt.files] == ["/etc/specrig/services/r1-14b/config.yml"]
    assert trt.argv[trt.argv.index("--config") + 1] == trt.files[0]["path_in_container"]
    assert yaml.safe_load(trt.files[0]["content"]) == {
        "kv_cache_config": {"free_gpu_memory_fraction": 0.8},
        "disable_overlap_scheduler": True,
        "speculative_config": {
            "decoding_type": "DraftTarget",
            "max_draft_len": 3,
            "speculative_model": "/models/draft",
        },
    }
    off = plan_host("host", {**declared("tensorrt_llm"), "rig_speculation": False}).services[0]
    assert yaml.safe_load(off.files[0]["content"]) == {}


def test_ollama_gets_its_model_from_the_file() -> None:
    [ollama] = plan_host("host", declared("ollama")).services
    content = {file["path_in_container"]: file["content"] for file in ollama.files}
    assert content["/specrig/Modelfile"].splitlines() == [
        "FROM /models/target/DeepSeek-R1-Distill-Qwen-14B-Q4_K_M.gguf",
        "PARAMETER num_ctx 16384",
    ]
    assert ollama.entrypoint[-1] in content and ollama.argv == []
    assert ollama.env["OLLAMA_HOST"] == "0.0.0.0:11434" and ollama.env["OLLAMA_CONTEXT_LENGTH"] == "16384"


OLLAMA = """#!/bin/sh
echo "$*" >>"$LOG"
case $1 in
serve) touch up; trap 'echo stopped >>"$LOG"; exit 0' TERM; while :; do sleep 0.05; done ;;
list) test -e up ;;
esac
"""


def test_ollamas_start_script_makes_the_model_and_passes_the_stop_on(tmp_path: Path) -> None:
    """`ollama` is played by a script: whether the real one answers so is its documentation's word."""
    [ollama] = plan_host("host", declared("ollama")).services
    script = next(file["content"] for file in ollama.files if file["path"].endswith("start.sh"))
    (tmp_path / "ollama").write_text(OLLAMA)
    (tmp_path / "ollama").chmod(0o755)
    (tmp_path / "start.sh").write_text(script)
    log = tmp_path / "log"
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "LOG": str(log)}
    with subprocess.Popen(["/bin/sh", "start.sh"], cwd=tmp_path, env=env) as started:
        deadline = time.monotonic() + 20
        while not (log.exists() and "create" in log.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.2)
        assert started.poll() is None
        started.terminate()
        started.wait(20)
    said = log.read_text().splitlines()
    assert {"serve", "list", "create r1-14b -f /specrig/Modelfile"} <= set(said) and said[-1] == "stopped"


def test_an_engine_that_nobody_ran_says_so() -> None:
    for engine in ENGINES:
        name = BASE if engine == "vllm" else f"{BASE}_{engine}"
        codes = {found.code for found in plan_host("host", {"rig_profile": name}).warnings}
        assert ("ENGINE_NOT_RUN" in codes) is catalog().engines[engine].not_run


def test_nothing_is_claimed_of_engines_that_were_not_measured() -> None:
    for engine in OTHERS:
        [one] = plan_host("host", {"rig_profile": f"{BASE}_{engine}"}).services
        assert one.pair.get("payoff", {}) == {}
        assert (one.vram == {}) is (engine != "aphrodite")
    band = {
        name: plan_host("host", {"rig_profile": name}).services[0].vram["error_band_mib"]
        for name in (BASE, f"{BASE}_aphrodite")
    }
    assert band[f"{BASE}_aphrodite"] > 2 * band[BASE]


@pytest.mark.parametrize(("version", "works"), [("0.5.19", True), ("0.5.23", True)])
def test_standalone_needs_a_version_that_compares_vocabularies(version: str, works: bool) -> None:
    assert method_works("sglang", "draft_model", version) is works
    assert not method_works("sglang", "draft_model", "0.5.12")


def test_profiles_of_engines_say_what_was_not_run() -> None:
    assert any("nothing of this was run" in n for n in profiles()[f"{BASE}_tensorrt_llm"].services[0]["notes"])


def test_the_forms_that_an_engine_reads_are_named_as_words() -> None:
    services = [{"name": "r1-14b", "engine": "llama_cpp", "draft": None, "method": "none", "k": 0}]
    plan = plan_host("host", {"rig_profile": "rtx4090_r1_14b", "rig_services": services})
    said = {found.code: found.cause for found in plan.refusals}
    assert said["MODEL_FORMAT"].endswith("llama.cpp server reads gguf")
