"""The locks beside the inventory, as files."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from specrig.console import CannotRun, complain
from specrig.faults import slip
from specrig.files import write_atomically
from specrig.plan import HostPlan
from specrig.plan.declare import show
from specrig.verbs.answers import add_host_arguments, result, with_inventory

Plans = Mapping[str, HostPlan]
_MEANT = {"models": "hold", "images": "run"}


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """The arguments of both lock verbs."""
    add_host_arguments(verb)
    verb.add_argument("--update", action="store_true", help="resolve again what is locked already")
    verb.add_argument("--check", action="store_true", help="only say what changed upstream; 1 when something did")


def read(path: Path, what: str) -> dict[str, Any]:
    """The entries of the lock at `path`, which are under `what`; empty where there is none. Raises CannotRun LOCK_INVALID."""
    try:
        document = yaml.safe_load(path.read_text()) if path.exists() else None
    except (OSError, ValueError, yaml.YAMLError) as error:
        why = slip(path) or f"{path}: {error}"
    else:
        entries = document.get(what) if isinstance(document, dict) else document
        if entries is None:
            return {}
        if isinstance(entries, dict):
            return entries
        why = f"{path}: {what} of a lock is a mapping, and there is {show(entries)}"
    raise CannotRun(
        why, f"take it from git again; or remove it, and ./rig {what} lock writes a new one", "LOCK_INVALID"
    )


def conclude(
    options: argparse.Namespace, path: Path, what: str, entries: dict[str, Any], told: Mapping[str, Any], plans: Plans
) -> int:
    """Save the lock where it changed and say so; 1 when a host's plan is refused so early that it names nothing to lock."""
    written = not options.check and entries != read(path, what)
    if written:
        save(path, what, entries)
    lines = [] if options.check else [f"wrote {path}" if written else f"{path} stays as it is"]
    bare = {name: plan for name, plan in plans.items() if plan.refusals and not getattr(plan, what)}
    result(options, {"lock": str(path), "written": written, what: told}, lines)
    for name, plan in bare.items():
        again = f"./rig plan {name}{with_inventory(options)}"
        complain(f"{name}: nothing to lock, its plan is refused: {plan.refusals[0].code}\n  next: {again}")
    return 1 if bare else 0


def save(path: Path, what: str, entries: dict[str, Any]) -> None:
    """Write the lock of models or images."""
    text = yaml.safe_dump({what: entries}, sort_keys=True, allow_unicode=True, width=160)
    write_atomically(
        path, f"# Written by ./rig {what} lock. Commit it: it is what every rig will {_MEANT[what]}.\n{text}"
    )
