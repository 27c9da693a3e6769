"""What `./rig plan` says before Ansible is asked anything; with Ansible: tests/contract/test_plan_verb.py."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from specrig import cli, runner
from specrig.plan import HostPlan, plan_host
from tests.unit.plan.tiny import tiny, tiny_lock


def test_no_inventory_is_2_and_says_how_to_make_one(tmp_path: Path) -> None:
    command = [str(runner.ROOT / "rig"), "plan", "-i", "none/hosts.yml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == (
        f"NO_INVENTORY: there is no inventory at {tmp_path}/none/hosts.yml\n"
        "  next: ./rig init --host user@rig, or try -i inventory/example.yml\n"
    )


@pytest.mark.parametrize(
    ("declared", "code", "says"),
    [(tiny(), 0, "specrig-tiny.service"), (tiny(k=40), 1, "K_TOO_LARGE")],
)
def test_exit_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    declared: Any,
    code: int,
    says: str,
) -> None:
    (tmp_path / "hosts.yml").touch()
    outcome = {"plans": {"alpha": plan_host("alpha", declared, tiny_lock()).as_json()}}
    answers = [outcome, {"plans": {}}]  # rigs, gateways
    recorded = {"plays": [{"tasks": [{"hosts": {"localhost": answer}} for answer in answers]}]}
    monkeypatch.setattr(runner, "load_hosts", lambda *_: {"alpha": {}})
    monkeypatch.setattr(runner, "playbook_json", lambda *_: recorded)
    assert cli.main(["plan", "-i", str(tmp_path / "hosts.yml")]) == code
    assert says in capsys.readouterr().out


def test_members_of_child_groups_count_once() -> None:
    data = {
        "rigs": {"hosts": ["a"], "children": ["gpu", "big"]},
        "gpu": {"hosts": ["b", "a"]},
        "big": {"hosts": ["b", "c"]},
    }
    assert runner.group_members(data, "rigs") == ["a", "b", "c"]


def test_the_plan_survives_the_way_through_json() -> None:
    made = plan_host("alpha", tiny(), tiny_lock())
    assert HostPlan.from_json(made.as_json()) == made
