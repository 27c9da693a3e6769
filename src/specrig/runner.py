"""Runs Ansible as a person would, from the repository's root, with the settings of `ansible.cfg`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specrig import faults
from specrig.console import CannotRun

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_INVENTORY = ROOT / "inventory" / "hosts.yml"
HOST_NAME = re.compile(r"[A-Za-z0-9_\[][A-Za-z0-9_.:\]-]{0,252}")
LOCK_NAME = "models.lock.yml"
IMAGES_LOCK_NAME = "images.lock.yml"
_GATEWAYS_OWN = {"rig_gateway", "rig_gateway_keys"}


def tool(name: str) -> str:
    """Path of a command of this virtual environment, such as `ansible-playbook`."""
    return str(Path(sys.executable).with_name(name))


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The caller's environment with the virtual environment first and `ansible.cfg` named."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return (
        os.environ
        | {"PATH": path, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "PYTHONUNBUFFERED": "1"}
        | {"LC_ALL": "C.UTF-8"}  # Ansible starts in UTF-8 only, and not where a locale is named that is not there
        | dict(extra or {})
    )


def given_path(given: str | None) -> Path:
    """A path as it was meant where it was typed (`./rig` works from the repository's root); default: the inventory."""
    return Path(os.environ.get("RIG_CWD", "."), given).resolve() if given else DEFAULT_INVENTORY


def inventory_path(given: str | None) -> Path:
    """The inventory to use; says how to make one when there is none."""
    path = given_path(given)
    if not path.exists():
        raise CannotRun(
            f"there is no inventory at {path}",
            "./rig init --host user@rig, or try -i inventory/example.yml",
            "NO_INVENTORY",
        )
    return path


def lock_path(inventory: Path, name: str = LOCK_NAME) -> Path:
    """A lock lies beside its inventory."""
    return (inventory if inventory.is_dir() else inventory.parent) / name


def playbook(name: str, inventory: Path, arguments: Sequence[str] = (), extra: Mapping[str, str] | None = None) -> int:
    """Run `playbooks/<name>.yml`; its output is the person's output. Returns Ansible's exit code."""
    command = [tool("ansible-playbook"), "-i", str(inventory), str(ROOT / "playbooks" / f"{name}.yml"), *arguments]
    with subprocess.Popen(command, cwd=ROOT, env=environment(extra)) as run:
        try:
            return run.wait()
        except KeyboardInterrupt:
            # The terminal has interrupted Ansible as well: let it end its tasks. Killing it here would leave half of one.
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.wait(timeout=30)
            raise


def playbook_json(name: str, inventory: Path, arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Run a read-only playbook and return what `ansible.posix.json` recorded of it."""
    command = [tool("ansible-playbook"), "-i", str(inventory), str(ROOT / "playbooks" / f"{name}.yml"), *arguments]
    return _recorded(command, inventory)


def module_json(module: str, inventory: Path, hosts: Sequence[str], arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Run one module on `hosts` and return what `ansible.posix.json` recorded of it."""
    return _recorded([tool("ansible"), ",".join(hosts), "-i", str(inventory), "-m", module, *arguments], inventory)


def _recorded(command: Sequence[str], inventory: Path) -> dict[str, Any]:
    """What `ansible.posix.json` recorded of a run of Ansible. Raises CannotRun where it recorded nothing."""
    settings = environment(
        {
            "ANSIBLE_STDOUT_CALLBACK": "ansible.posix.json",
            "ANSIBLE_CALLBACK_RESULT_FORMAT": "json",
            "ANSIBLE_LOAD_CALLBACK_PLUGINS": "true",  # `ansible` itself asks for it
        }
    )
    done = subprocess.run(command, cwd=ROOT, env=settings, check=False, capture_output=True, text=True)
    start = re.search(r"^\{", done.stdout, re.MULTILINE)  # lines of progress may stand before it
    if not start:
        raise faults.fault(inventory, done.stderr or done.stdout)
    result: dict[str, Any] = json.loads(done.stdout[start.start() :])
    return result


def load_hosts(
    inventory: Path, names: Sequence[str] = (), group: str = "rigs", also: str = ""
) -> dict[str, dict[str, Any]]:
    """Host variables of `group`, as Ansible merges them; `names` narrows it, an unknown name is an error.

    `also`: a second group whose hosts may be named, and need not be there.
    """
    command = [tool("ansible-inventory"), "-i", str(inventory), "--list"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), check=False, capture_output=True, text=True)
    if done.returncode:
        raise faults.fault(inventory, done.stderr)
    data = json.loads(done.stdout)
    variables = data.get("_meta", {}).get("hostvars", {})
    gateways = group_members(data, "gateways")
    stray = [host for host in variables if host not in gateways and _GATEWAYS_OWN & set(variables[host])]
    if stray:  # nobody would read them
        name = min(_GATEWAYS_OWN & set(variables[stray[0]]))
        raise CannotRun(
            f"{stray[0]} has {name}, and the group `gateways` of {inventory} has {', '.join(gateways) or 'no host'}",
            f"put {stray[0]} under `gateways:` too, or take {name} out (variables of all gateways: `gateways: {{vars: …}}`)",
            "GATEWAY_NOT_IN_GROUP",
        )
    members = group_members(data, group)
    if not members:
        raise CannotRun(
            f"{inventory} has no host in the group `{group}`",
            f"put your hosts under `{group}:` (see {'inventory/example.yml' if group == 'rigs' else 'docs/gateway.md'})",
            "NO_HOSTS",
        )
    members += [host for host in group_members(data, also) if host not in members]
    odd = [name for name in members if not HOST_NAME.fullmatch(name)]
    if odd:
        raise CannotRun(
            f"{odd[0]!r:.80} in {inventory} is no name for a host",
            "letters, digits, '.', '_', ':' and '-', at most 253 of them",
            "BAD_HOST",
        )
    unknown = [name for name in names if name not in members]
    if unknown:
        raise CannotRun(
            f"{', '.join(unknown)} is not in {inventory} (it has {', '.join(members)})",
            "name one of these",
            "UNKNOWN_HOST",
        )
    return {name: variables.get(name, {}) for name in (names or members)}


def group_members(data: Mapping[str, Any], group: str) -> list[str]:
    """Hosts of `group` and of its child groups, in inventory order."""
    entry = data.get(group, {})
    members = list(entry.get("hosts", []))
    for child in entry.get("children", []):
        members += [host for host in group_members(data, child) if host not in members]
    return members
