"""`./rig switch`: what is not planned is refused on the controller; the play runs on the hosts that have the service."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specrig import cli, runner
from specrig.plan import plan_host
from specrig.verbs import switch
from tests.unit.plan.tiny import r1, tiny, tiny_lock

SECOND = {"name": "coder", "target": {"repo": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"}}


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, list[str]]]:
    both = r1(exclusive=True)
    plans = {
        "alpha": plan_host("alpha", {**both, "rig_services": [*both["rig_services"], SECOND]}, tiny_lock()),
        "beta": plan_host("beta", tiny(), tiny_lock()),
    }
    monkeypatch.setattr(switch, "make_plans", lambda _, names: {n: plans[n] for n in names or plans})
    calls: list[tuple[str, list[str]]] = []

    def playbook(name: str, _: Path, arguments: Any = ()) -> int:
        calls.append((name, list(arguments)))
        return 0

    monkeypatch.setattr(runner, "playbook", playbook)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts.yml").touch()
    return calls


def rig(*words: str) -> int:
    return cli.main(["switch", *words, "-i", "hosts.yml"])


def test_hosts_that_have_it(played: list[tuple[str, list[str]]], capsys: pytest.CaptureFixture[str]) -> None:
    assert rig("coder") == 0
    assert played == [("switch", ["--limit", "alpha", "-e", json.dumps({"switch_service": "coder"})])]
    assert "alpha: specrig-coder.service instead of specrig-r1-14b.service" in capsys.readouterr().out
    assert rig("coder", "alpha", "--check") == 0 and played[1][1][-1] == "--check"


@pytest.mark.parametrize("words", [("nothing",), ("coder", "beta"), ("coder", "alpha", "beta"), ("", "alpha"), ("-",)])
def test_what_is_not_planned_is_refused(
    played: list[tuple[str, list[str]]], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert rig(*words) == 2
    assert played == [] and "UNKNOWN_SERVICE" in capsys.readouterr().err
