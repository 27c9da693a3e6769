"""What the checks share. They run against Molecule's hosts and, by `./rig verify`, against real ones; they change nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

HOST_PROGRAM = "/usr/local/lib/specrig/specrig-host"


def as_root(host: Any, *command: str) -> Any:
    """Run a command with sudo; the ansible backend's own become is not needed for plain commands."""
    with host.sudo():
        return host.run(" ".join(["%s"] * len(command)), *command)


def output(host: Any, *command: str) -> str:
    """What a command prints; a failure shows its words."""
    done = as_root(host, *command)
    assert done.rc == 0, f"{' '.join(command)}: {done.stderr or done.stdout}"
    text: str = done.stdout
    return text


@pytest.fixture
def services(host: Any) -> list[dict[str, Any]]:
    """The specrig services of the host, as the host program reports them."""
    if not host.file(HOST_PROGRAM).exists:
        pytest.fail("specrig is not on this host yet: ./rig up", pytrace=False)
    report = json.loads(output(host, HOST_PROGRAM, "status").splitlines()[-1])
    found: list[dict[str, Any]] = report["units"]
    return found
