"""The code table: every code is used, explained, and provoked by its own example."""

import re
from pathlib import Path

import pytest

from specrig.plan import GatewayPlan, HostPlan, plan_gateway, plan_host, refusals
from specrig.plan.declare import CONSTRAINT_CODES
from specrig.plan.docs import pages
from specrig.plan.refusals import CODES, Code, explain

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("code", CODES.values(), ids=lambda code: code.code)
def test_the_example_provokes_its_code_and_no_other_refusal(code: Code) -> None:
    assert code.example is not None
    plan: HostPlan | GatewayPlan
    declaration, rigs = code.example["declaration"], code.example.get("rigs")
    if code.code.startswith("GATEWAY_"):
        rigs = {"example": declaration} if rigs is None else rigs  # a rig may be its own gateway
        plan = plan_gateway("example", declaration, rigs)
    else:
        plan = plan_host("example", declaration, code.example.get("lock"), code.example.get("facts"))
    assert code.code in {found.code for found in (*plan.refusals, *plan.warnings)}
    assert {found.code for found in plan.refusals} == ({code.code} if code.level == "refusal" else set())
    assert plan.ok == (code.level == "warning")


def test_every_code_in_the_source_is_listed_and_the_other_way_round() -> None:
    sources = "\n".join(path.read_text("utf-8") for path in Path(refusals.__file__).parent.glob("*.py"))
    words = set(re.findall(r'"([A-Z][A-Z0-9_]+)"', sources))
    assert set(CODES) <= words | set(CONSTRAINT_CODES.values())
    raised = set(re.findall(r'finding\(\s*"([A-Z0-9_]+)"', sources))
    assert raised <= set(CODES)
    assert set(CONSTRAINT_CODES.values()) <= set(CODES)


@pytest.mark.parametrize("code", CODES.values(), ids=lambda code: code.code)
def test_a_code_is_written_well(code: Code) -> None:
    assert re.fullmatch(r"[A-Z][A-Z0-9_]*[A-Z0-9]", code.code)
    assert 5 < len(code.title) < 90
    assert not code.title.endswith(".")
    assert code.why.endswith(".")
    assert len(code.fix) > 3


def test_explain() -> None:
    text = explain("draft_tp")
    assert text.startswith("DRAFT_TP (refusal)")
    assert "Fix: " in text
    assert "rig_profile: dual_rtx3090_r1_32b_tp2" in text
    with pytest.raises(KeyError, match="nearest: PORT_CLASH"):
        explain("PORT_CLASHES")


@pytest.mark.parametrize("page", pages())
def test_generated_pages_are_fresh(page: str) -> None:
    path = ROOT / "docs" / page
    assert path.exists() and path.read_text("utf-8") == pages()[page], "run: .venv/bin/python -m specrig.plan.docs"
