"""Preflight sees what the machine's own tools see, and leaves nothing behind."""

from __future__ import annotations

import functools
import json
import subprocess
from typing import Any

import pytest

from specrig import runner
from specrig.host.build import build
from tests.host.conftest import as_root, output


@functools.cache
def look(inventory: str) -> dict[str, Any]:
    """All facts of all hosts, as `./rig preflight --json` gets them. A host without a plan is not judged, only read."""
    command = [runner.tool("ansible"), "-i", inventory, "rigs", "-b", "-m", "host_job", "-a", json.dumps(ARGUMENTS)]
    settings = {"ANSIBLE_LOAD_CALLBACK_PLUGINS": "1", "ANSIBLE_STDOUT_CALLBACK": "ansible.posix.json"}
    done = subprocess.run(
        command, cwd=runner.ROOT, env=runner.environment(settings), check=False, capture_output=True, text=True
    )
    result = json.loads(done.stdout[done.stdout.index("{") :])
    return {host: found["result"] for host, found in result["plays"][0]["tasks"][0]["hosts"].items()}


ARGUMENTS = {"argv": ["preflight"], "carry": True}


@pytest.fixture
def report(host: Any, request: pytest.FixtureRequest) -> Any:
    name = host.backend.get_pytest_id().rpartition("://")[2]
    return look(str(request.config.getoption("ansible_inventory")))[name]


def test_kernel_and_cards_are_those_of_the_machine(host: Any, report: dict[str, Any]) -> None:
    facts = report["facts"]
    assert facts["kernel"]["running"] == output(host, "uname", "-r").strip()
    lines = [line for line in output(host, "lspci", "-D", "-d", "10de:").splitlines() if "VGA" in line or "3D" in line]
    assert [card["slot"] for card in facts["cards"]] == [line.split()[0] for line in lines]
    assert all(card["name"] in line for card, line in zip(facts["cards"], lines, strict=True))


def test_the_machine_is_in_order(report: dict[str, Any]) -> None:
    assert report["ok"], report["findings"]
    assert report["facts"]["apt"] == {"present": True, "half_configured": [], "errors": [], "locked_by": ""}


def test_it_left_nothing(host: Any, report: dict[str, Any]) -> None:
    assert not report["changed"]
    listing = as_root(host, "find", "/tmp", "/var/tmp", "/root", "-xdev", "-size", f"{len(build())}c").stdout
    assert listing == ""
