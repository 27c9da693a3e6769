"""Where the lab keeps things: state that a person may delete under `.rig/lab`, caches under XDG_CACHE_HOME."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from specrig.console import complain


def state(lab: str | None = None) -> Path:
    """`.rig/lab` of the repository, or the folder of one lab in it; made when missing."""
    root = Path(os.environ.get("RIG_STATE", Path(__file__).parents[3] / ".rig")) / "lab"
    folder = root / lab if lab else root
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def cache(name: str) -> Path:
    """`${XDG_CACHE_HOME:-~/.cache}/specrig/<name>`; made when missing."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specrig" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def exclusive(name: str) -> Iterator[None]:
    """Hold the lock `name` against other threads and other processes: two that make the same thing make it once."""
    with _lock_file(name).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            complain(f"waiting for another command that makes {name}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def held(name: str) -> bool:
    """Whether somebody holds the lock `name` now."""
    with _lock_file(name).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _lock_file(name: str) -> Path:
    return cache("lock") / name.replace("/", "_").replace(":", "_")
