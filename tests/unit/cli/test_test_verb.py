"""`./rig test` itself: a part that lacks a program says so or gets it; it is never skipped in silence."""

from __future__ import annotations

import argparse
import subprocess
from typing import Any

import pytest

from specrig.console import CannotRun
from specrig.lab import apt
from specrig.verbs import test as verb


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A machine without aria2 where everything that would be run is only written down."""
    ran: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(apt, "which", lambda program: None if program == "aria2c" else f"/usr/bin/{program}")
    monkeypatch.setattr(apt, "as_root", lambda command: command)
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.delenv("CI", raising=False)
    return ran


def test_without_consent_nothing_is_installed_and_nothing_is_tested(bare: list[list[str]]) -> None:
    with pytest.raises(CannotRun) as refused:
        verb.run(argparse.Namespace(parts=["unit"]))
    assert str(refused.value).startswith("TEST_NEEDS: the unit tests need aria2c")
    assert refused.value.fix == "sudo apt-get install aria2" and bare == []


def test_ci_gets_what_a_part_needs_before_any_part_runs(bare: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "1")
    assert verb.run(argparse.Namespace(parts=["lint", "contract"])) == 0
    install = next(n for n, command in enumerate(bare) if "install" in command)
    assert bare[install][-1] == "aria2"
    assert all("pytest" not in command and "ruff" not in command for command in bare[:install])
    assert any("tests/contract" in command for command in bare[install:])
