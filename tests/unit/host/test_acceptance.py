"""Acceptance, read from what engines really answered (or, where labelled, from their documentation)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specrig.host.acceptance import Acceptance, read, samples
from specrig.plan.catalog import catalog
from specrig.plan.dialects import dialect

HERE = Path(__file__).parent / "fixtures"


def vllm(version: str) -> dict[str, str]:
    return dict(dialect("vllm", version).metrics)


def test_counters_of_a_real_run() -> None:
    found = read((HERE / "vllm-0.26.0-metrics.txt").read_text(), vllm("0.26.0"))
    assert found[:3] == (347, 1735, 1269)
    assert found.rate == pytest.approx(1269 / 1735) and found.mean_length == pytest.approx(1 + 1269 / 347)


def test_what_came_between_two_readings() -> None:
    text = (HERE / "vllm-0.26.0-metrics.txt").read_text()
    before, after = (
        read(t, vllm("0.26.0")) for t in (text, text.replace(" 347.0", " 447.0").replace(" 1735.0", " 2235.0"))
    )
    assert after.since(before)[:3] == (100, 500, 0)
    assert before.since(after) == Acceptance()  # counters that fell: another process
    assert after.since(Acceptance()) == Acceptance()


def test_counters_that_are_not_there_are_unknown_and_zero_is_zero() -> None:
    assert read("# nothing yet\n", vllm("0.26.0")) == Acceptance()
    zero = read(
        "vllm:spec_decode_num_draft_tokens_total 0\nvllm:spec_decode_num_accepted_tokens_total 0\n", vllm("0.26.0")
    )
    assert zero.drafted == 0 and zero.rate is None


def test_an_old_version_has_only_the_gauge() -> None:
    text = 'vllm:spec_decode_draft_acceptance_rate{model_name="m"} 0.71\nvllm:spec_decode_num_draft_tokens_total 10\n'
    assert read(text, vllm("0.6.4.post1")) == Acceptance(rate=0.71)


def test_samples_are_summed_over_labels() -> None:
    text = 'a{x="1"} 2\na{x="2"} 3.5 1700000000\n# a 9\nb NaN\nbroken{ 1\n c:d 1e3\n'
    found = samples(text)
    assert found["a"] == 5.5 and found["c:d"] == 1000.0 and "broken" not in found


def test_a_response_of_its_own() -> None:
    metrics = {"kind": "response", "drafted": "timings.draft_n", "accepted": "timings.draft_n_accepted"}
    answer = {"choices": [], "timings": {"predicted_n": 64, "draft_n": 50, "draft_n_accepted": 40}}
    assert read(json.dumps(answer), metrics) == Acceptance(None, 50, 40, 0.8, None)
    assert read(json.dumps({"timings": {"predicted_n": 64}}), metrics) == Acceptance()
    assert read("<html>", metrics) == Acceptance()


def test_llama_cpp_says_the_same_in_its_answer_and_its_counters() -> None:
    """One request to a fresh b11434: recorded."""
    counted = read((HERE / "llama-cpp-b11434-metrics.txt").read_text(), dialect("llama_cpp", "b11434").metrics)
    metrics = {"kind": "response", "drafted": "timings.draft_n", "accepted": "timings.draft_n_accepted"}
    own = read((HERE / "llama-cpp-b11434-answer.json").read_text(), metrics)
    assert (counted.drafted, counted.accepted) == (own.drafted, own.accepted) == (132, 68)
    assert counted.drafts == 27 and counted.mean_length == pytest.approx(1 + 68 / 27)


def test_a_mean_length_somewhere_in_a_document() -> None:
    metrics = {"kind": "length", "path": "/server_info", "mean_length": "avg_spec_accept_length"}
    document = {"model_path": "m", "internal_states": [{"avg_spec_accept_length": 2.75}]}
    assert read(json.dumps(document), metrics) == Acceptance(mean_length=2.75)
    assert read(json.dumps({"internal_states": [{}]}), metrics) == Acceptance()


def test_every_version_says_where_it_is_read() -> None:
    counted = {"drafted", "accepted"}
    wanted = {"counters": counted, "response": counted, "gauge": {"acceptance"}, "length": {"mean_length"}}
    for name, engine in catalog().engines.items():
        for version in engine.versions:
            metrics = dialect(name, version).metrics
            assert wanted.get(metrics["kind"], set()) <= set(metrics), (name, version)
            assert metrics["kind"] in ("none", "response") or metrics["path"].startswith("/")
