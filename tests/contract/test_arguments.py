"""What a rig asks an image before an upgrade, asked of thirteen vLLM versions' own code: planned words pass, others do not."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence

import pytest

from specrig.host.arguments import NO_ANSWER, REFUSED, VLLM
from specrig.plan import plan_host
from specrig.plan.types import ServicePlan
from tests.contract.parsers import CACHE, HERE, VERSIONS, each, environment

RENAMED = ["--max-sequences", "8"]


def planned(version: str) -> ServicePlan:
    """The 4090 profile in this version; without speculation where it has no draft models."""
    service = {"name": "r1-14b", "version": version}
    plan = plan_host("contract", {"rig_profile": "rtx4090_r1_14b", "rig_services": [service]})
    if plan.refusals:
        plan = plan_host(
            "contract", {"rig_profile": "rtx4090_r1_14b", "rig_services": [service], "rig_speculation": False}
        )
    assert not plan.refusals, plan.refusals
    return plan.services[0]


def ask(version: str, service: ServicePlan, argv: Sequence[str]) -> tuple[int, str]:
    """(exit status, last lines) of the snippet."""
    words = [
        str(environment()),
        "-W",
        "ignore",
        "-m",
        "tests.contract.ask_image",
        str(CACHE / version),
        version,
        "vllm",
    ]
    words += [json.dumps(service.entrypoint), *argv]
    env = {
        "PATH": "/usr/bin:/bin",
        "HOME": "/nonexistent",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        **service.env,
    }
    done = subprocess.run(words, input=VLLM, env=env, cwd=HERE.parents[1], capture_output=True, text=True, check=False)
    return done.returncode, done.stderr[-1500:]


def three(version: str) -> list[tuple[int, str]]:
    """Planned words; a flag of another name; a JSON key of another name where the version reads JSON."""
    service = planned(version)
    other = [word.replace('"num_speculative_tokens"', '"num_speculative_tokenz"') for word in service.argv]
    cases: list[list[str]] = [service.argv, [*service.argv, *RENAMED]]
    return [ask(version, service, argv) for argv in [*cases, *([other] if other != service.argv else [])]]


@pytest.fixture(scope="module")
def answers() -> dict[str, list[tuple[int, str]]]:
    return each(three)


@pytest.mark.parametrize("version", VERSIONS)
def test_planned_words_pass_and_renamed_flags_do_not(version: str, answers: dict[str, list[tuple[int, str]]]) -> None:
    (planned_rc, planned_said), (renamed_rc, renamed_said), *_ = answers[version]
    assert planned_rc == 0, planned_said
    assert renamed_rc == REFUSED != NO_ANSWER and "--max-sequences" in renamed_said, renamed_said


def test_a_key_that_a_version_would_drop_in_silence_is_seen(answers: dict[str, list[tuple[int, str]]]) -> None:
    refused = {version: rows[2] for version, rows in answers.items() if len(rows) > 2}
    assert refused
    assert {version: said for version, (rc, said) in refused.items() if rc != REFUSED} == {}
