"""llama.cpp's own server: its parser takes every command line of the plan, and under the unit it serves, plain and with a draft."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from specrig.host.acceptance import Acceptance, read
from specrig.lab import llamaimage
from specrig.plan import plan_host
from specrig.plan.dialects import dialect
from tests.engines.conftest import UNIT, Rig
from tests.engines.help import FILE, accepts, text

PROMPT, TOKENS, REPEATS = '  "License" shall mean', 300, 3
METRICS = dialect("llama_cpp", llamaimage.VERSION).metrics
RESPONSE = {"kind": "response", "drafted": "timings.draft_n", "accepted": "timings.draft_n_accepted"}
CARDS = {"rig_gpus": [{"name": "rtx_3090", "count": 2}]}
ALLOWED: dict[str, dict[str, Any]] = {
    "cpu": {"rig_profile": "cpu_demo_llama_cpp"},
    "cpu, off": {"rig_profile": "cpu_demo_llama_cpp", "rig_speculation": False},
    "14B": {"rig_profile": "rtx4090_r1_14b_llama_cpp"},
    "14B, off": {"rig_profile": "rtx4090_r1_14b_llama_cpp", "rig_speculation": False},
    "14B, two cards": {
        "rig_profile": "rtx4090_r1_14b_llama_cpp",
        **CARDS,
        "rig_services": [{"name": "r1-14b", "gpus": [0, 1], "k": 3, "extra_args": ["--cache-type-k", "q8_0"]}],
    },
}


@pytest.mark.parametrize("case", ALLOWED)
def test_its_parser_takes_what_the_plan_writes(case: str) -> None:
    plan = plan_host("host", ALLOWED[case])
    assert plan.ok, plan.refusals
    said = accepts(plan.services[0].argv)
    assert said.returncode == 0, said.stderr[-600:]


@pytest.mark.parametrize(
    "extra", [["--no-such-flag"], ["--draft-max", "5"], ["--speculative-config", "{}"]], ids=lambda e: e[0]
)
def test_its_parser_refuses_what_the_plan_refuses(extra: list[str]) -> None:
    service = {"name": "r1-14b", "extra_args": extra}
    plan = plan_host("host", {"rig_profile": "rtx4090_r1_14b_llama_cpp", "rig_services": [service]})
    assert {found.code for found in plan.refusals} == {"FLAG_UNKNOWN"}
    assert accepts(["--model", "/m", *extra]).returncode != 0


def test_the_plans_options_are_its_own() -> None:
    assert FILE.read_text("utf-8") == text(), "run: python -m tests.engines.help"


def complete(rig: Rig) -> dict[str, Any]:
    body = {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": False,
    }
    answer: dict[str, Any] = json.loads(rig.get("/v1/completions", body))
    return answer


def measured(rig: Rig) -> dict[str, Any]:
    complete(rig)  # warm
    before = read(rig.get("/metrics"), METRICS)
    answers = [complete(rig) for _ in range(REPEATS)]
    counted = read(rig.get("/metrics"), METRICS).since(before)
    each = [read(json.dumps(answer), RESPONSE) for answer in answers]
    return {
        "texts": [answer["choices"][0]["text"] for answer in answers],
        "tokens": [answer["usage"]["completion_tokens"] for answer in answers],
        "tps": [round(answer["timings"]["predicted_per_second"], 1) for answer in answers],
        "counted": counted._asdict(),
        "responses": [one._asdict() for one in each],
    }


@pytest.fixture(scope="module")
def plain(rig: Rig, figures: dict[str, Any]) -> dict[str, Any]:
    begin = time.monotonic()
    assert rig.converge(speculation=False) == 0
    figures["plain"] = {"up_s": round(time.monotonic() - begin), **measured(rig)}
    found: dict[str, Any] = figures["plain"]
    return found


@pytest.fixture(scope="module")
def draft(rig: Rig, plain: dict[str, Any], figures: dict[str, Any]) -> dict[str, Any]:
    assert plain
    begin = time.monotonic()
    assert rig.converge(speculation=True) == 0
    figures["draft"] = {"up_s": round(time.monotonic() - begin), **measured(rig)}
    figures["version"], figures["k"] = llamaimage.VERSION, plan_host("host", ALLOWED["cpu"]).services[0].k
    found: dict[str, Any] = figures["draft"]
    return found


def test_without_a_draft_it_serves_and_drafts_nothing(plain: dict[str, Any]) -> None:
    assert plain["tokens"] == [TOKENS] * REPEATS and len(set(plain["texts"])) == 1
    assert plain["counted"]["drafted"] == 0
    assert all(one == Acceptance()._asdict() for one in plain["responses"])


def test_with_a_draft_the_text_is_the_same(plain: dict[str, Any], draft: dict[str, Any]) -> None:
    assert set(draft["texts"]) == set(plain["texts"]) and len(set(draft["texts"])) == 1


def test_the_acceptance_is_read_both_ways(draft: dict[str, Any]) -> None:
    counted, each = draft["counted"], draft["responses"]
    assert counted["drafts"] > 0 and 0 < counted["rate"] < 1
    assert counted["drafted"] == sum(one["drafted"] for one in each)
    assert counted["accepted"] == sum(one["accepted"] for one in each)
    # Every round yields one token besides the accepted ones; the last round may end beyond the answer.
    assert counted["accepted"] + counted["drafts"] >= REPEATS * (TOKENS - 1 - 6)


def test_the_unit_is_the_same_one(rig: Rig, draft: dict[str, Any]) -> None:
    assert draft
    assert rig.must("systemctl", "is-active", UNIT) == "active"
    inspected = json.loads(rig.must("docker", "inspect", UNIT.removesuffix(".service")))[0]
    key = rig.must("cat", "/etc/specrig/services/tiny/api-key")
    assert key and key not in json.dumps(inspected)
    assert key not in rig.must("ps", "axww", "-o", "args")
    assert key not in rig.must("journalctl", "-u", UNIT, "--no-pager")
    assert inspected["HostConfig"]["ReadonlyRootfs"] and inspected["Config"]["User"] not in ("", "0", "root")


@pytest.mark.parametrize("key", ["", "Bearer wrong"])
def test_without_the_key_nothing_is_served(rig: Rig, draft: dict[str, Any], key: str) -> None:
    assert draft
    url = "http://127.0.0.1:8000/v1/completions"
    code = rig.must(
        "curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "-H", f"Authorization: {key}", "-d", "{}", url
    )
    assert code == "401"


def test_a_killed_engine_comes_back(rig: Rig, draft: dict[str, Any], figures: dict[str, Any]) -> None:
    assert draft
    pid = rig.must("docker", "inspect", "--format", "{{.State.Pid}}", UNIT.removesuffix(".service"))
    begin = time.monotonic()
    rig.must("kill", "-9", pid)
    while rig.ask("systemctl", "is-active", UNIT).stdout.strip() == "active" and time.monotonic() - begin < 20:
        time.sleep(0.5)
    while rig.ask("systemctl", "is-active", UNIT).stdout.strip() != "active":
        assert time.monotonic() - begin < 120, rig.ask("journalctl", "-u", UNIT, "-n", "30", "--no-pager").stdout
        time.sleep(1)
    figures["back_after_kill_s"] = round(time.monotonic() - begin)
    assert complete(rig)["usage"]["completion_tokens"] == TOKENS


def test_a_second_run_changes_nothing(rig: Rig, draft: dict[str, Any]) -> None:
    assert draft
    done = runner_up(rig)
    assert "changed=0" in done, done[-2000:]


def runner_up(rig: Rig) -> str:
    """`./rig up` as a person would type it; its output."""
    import subprocess

    from specrig import runner

    command = [str(runner.ROOT / "rig"), "up", "-i", str(rig.inventory)]
    return subprocess.run(command, cwd=runner.ROOT, capture_output=True, text=True, timeout=600, check=False).stdout
