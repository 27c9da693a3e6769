"""No input, of whatever type or shape, raises: it plans or it refuses with a listed code."""

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specrig.plan import HostPlan, plan_host, render
from specrig.plan.catalog import catalog
from specrig.plan.refusals import CODES
from specrig.plan.types import HostDecl, ServiceDecl
from tests.unit.plan.tiny import tiny_lock

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=40) | st.binary(max_size=8)
anything = st.recursive(
    scalars | st.dates(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(scalars, inner, max_size=4),
    max_leaves=12,
)
known = catalog()
repos = st.sampled_from(sorted(known.models))
files = st.sampled_from([*(file for model in known.models.values() for file in model.files), "other.gguf", "x"])
refs = st.fixed_dictionaries({"repo": repos}, optional={"revision": st.sampled_from(["1" * 40, "main"]), "file": files})
args = st.sampled_from(
    ["--seed", "1", "--api-key", "--swap-space", "-q", "awq", "--quantization=awq", "--max-model-len=4", "--n", ""]
)
plausible: dict[str, st.SearchStrategy[Any]] = {
    "name": st.sampled_from(["tiny", "r1-14b", "r1-32b", "r1-7b", "other"]),
    "engine": st.sampled_from(sorted(known.engines)),
    "version": st.sampled_from([*(v for e in known.engines.values() for v in e.versions), "auto", "0.34.0"]),
    "device": st.sampled_from(["cuda", "cpu"]),
    "image": st.sampled_from(["a/b:0.32.0", "a/b:latest", "a:5000/b@sha256:" + "0" * 64, None]),
    "target": refs,
    "draft": st.none() | refs,
    "method": st.sampled_from(["draft_model", "ngram", "eagle3", "pard", "none", None]),
    "k": st.none() | st.integers(-2, 20),
    "k_measured_reason": st.none() | st.just("measured"),
    "max_model_len": st.integers(0, 200_000),
    "max_num_seqs": st.integers(0, 300),
    "gpu_memory_utilization": st.none() | st.floats(0, 1.1),
    "tensor_parallel": st.integers(0, 9),
    "draft_tensor_parallel": st.none() | st.integers(0, 9),
    "gpus": st.none() | st.lists(st.integers(-1, 9) | st.just("GPU-1"), max_size=4),
    "bind": st.sampled_from(["127.0.0.1", "0.0.0.0", "::1", "x"]),
    "port": st.integers(0, 66_000),
    "vocab": st.sampled_from(["auto", "pad", "heterogeneous"]),
    "eager": st.none() | st.booleans(),
    "extra_args": st.lists(args, max_size=4),
    "env": st.dictionaries(
        st.sampled_from(["A", "HF_TOKEN", "VLLM_CPU_KVCACHE_SPACE"]), st.text(max_size=5), max_size=2
    ),
}
services = st.fixed_dictionaries({}, optional=plausible)
hosts = st.fixed_dictionaries(
    {},
    optional={
        "rig_profile": st.sampled_from(sorted(known.profiles)),
        "rig_gpus": st.lists(
            st.fixed_dictionaries(
                {"name": st.sampled_from(sorted(known.gpus))},
                optional={"count": st.integers(0, 9), "nvlink": st.booleans(), "display": st.booleans()},
            ),
            max_size=3,
        ),
        "rig_driver": st.fixed_dictionaries(
            {}, optional={"branch": st.integers(500, 600), "version": st.just("575.64.03")}
        ),
        "rig_speculation": st.booleans(),
        "rig_services": st.lists(services, max_size=3),
    },
)
facts = st.none() | st.fixed_dictionaries(
    {},
    optional={
        "gpus": st.lists(
            st.fixed_dictionaries(
                {"name": st.sampled_from(["NVIDIA GeForce RTX 4090", "NVIDIA H200", "?"])},
                optional={"uuid": st.just("GPU-1")},
            ),
            max_size=3,
        ),
        "driver_version": st.sampled_from(["550.163.01", "580.159.03"]),
        "p2p": st.sampled_from(["nvlink", "pcie", "none"]),
    },
)


def holds(plan: HostPlan) -> None:
    told = plan.as_json()
    assert json.loads(json.dumps(told)) == told
    assert told["ok"] is (not told["refusals"])
    for found in told["refusals"] + told["warnings"]:
        assert CODES[found["code"]].level == ("refusal" if found in told["refusals"] else "warning")
        assert found["cause"] and found["fix"]
    for service in told["services"]:
        assert all(isinstance(word, str) for word in service["argv"])
        assert all(isinstance(value, str) for value in service["env"].values())
    assert render.table({"host": plan})


quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@given(declaration=anything, lock=anything, told=anything, name=anything)
@quick
def test_any_shape(declaration: Any, lock: Any, told: Any, name: Any) -> None:
    plan = plan_host(name, declaration, lock, told)
    holds(plan)
    assert not plan.ok


@given(st.dictionaries(st.sampled_from(sorted(HostDecl.model_fields)), anything, max_size=4))
@quick
def test_any_value_in_a_host_field(declaration: dict[str, Any]) -> None:
    holds(plan_host("host", declaration))


@given(st.dictionaries(st.sampled_from(sorted(ServiceDecl.model_fields)), anything, max_size=4))
@quick
def test_any_value_in_a_service_field(over: dict[str, Any]) -> None:
    holds(plan_host("host", {"rig_profile": "cpu_demo", "rig_services": [{**over, "name": "tiny"}]}))


@given(hosts, st.sampled_from([None, {}, tiny_lock()]), facts)
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_combination_of_plausible_values(declaration: dict[str, Any], lock: Any, told: Any) -> None:
    holds(plan_host("host", declaration, lock, told))
