"""The locks beside the inventory, as files."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import yaml

from specrig.console import CannotRun
from specrig.files import write_atomically
from specrig.verbs.answers import add_host_arguments

_MEANT = {"models": "hold", "images": "run"}


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """The arguments of both lock verbs."""
    add_host_arguments(verb)
    verb.add_argument("--update", action="store_true", help="resolve again what is locked already")
    verb.add_argument("--check", action="store_true", help="only say what changed upstream; 1 when something did")


def read(path: Path, what: str) -> dict[str, Any]:
    """The entries of the lock at `path`, which are under `what`; empty where there is none. Raises CannotRun LOCK_INVALID."""
    try:
        entries = (yaml.safe_load(path.read_text()) or {}).get(what) if path.exists() else None
    except (yaml.YAMLError, AttributeError) as error:
        raise CannotRun(f"{path} is no lock: {error}", f"take {path.name} from git again", "LOCK_INVALID") from error
    return entries or {}


def save(path: Path, what: str, entries: dict[str, Any]) -> None:
    """Write the lock of models or images."""
    text = yaml.safe_dump({what: entries}, sort_keys=True, allow_unicode=True, width=160)
    write_atomically(
        path, f"# Written by ./rig {what} lock. Commit it: it is what every rig will {_MEANT[what]}.\n{text}"
    )
