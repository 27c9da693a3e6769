"""What the checks share. They run against Molecule's hosts and, by `./rig verify`, against real ones; they change nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
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


# Roles that a rig may be without. Where there is no applied plan (a role alone, in Molecule), all its checks run.
OPTIONAL: dict[str, Callable[[Any], bool]] = {
    "nvidia_driver": lambda plan: plan["driver"].get("source", "none") != "none",
    "gpu_tuning": lambda plan: (plan["host"].get("gpu_tuning") or {}).get("state") == "present",
    "nvidia_container_toolkit": lambda plan: bool(plan["host"].get("container_toolkit")),
    "webui": lambda plan: (plan["host"].get("webui") or {}).get("state") == "present",
}


# Of a module, so that it is asked before what a module prepares.
@pytest.fixture(scope="module", autouse=True)
def only_what_is_planned(request: pytest.FixtureRequest, host: Any) -> None:
    """Skip the checks of a role that the rig's applied plan does not have."""
    role = request.path.parent.name
    plan = host.file("/etc/specrig/plan.json")
    if role in OPTIONAL and plan.exists and not OPTIONAL[role](json.loads(plan.content_string)):
        pytest.skip(f"{role} is not in this rig's plan")


@pytest.fixture
def services(host: Any) -> list[dict[str, Any]]:
    """The specrig services that are to run on the host, as the host program reports them."""
    if not host.file(HOST_PROGRAM).exists:
        pytest.fail("specrig is not on this host yet: ./rig up", pytrace=False)
    report = json.loads(output(host, HOST_PROGRAM, "status").splitlines()[-1])
    return [unit for unit in report["units"] if not unit.get("alternate")]
