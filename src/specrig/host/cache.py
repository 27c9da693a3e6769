"""Compile caches of a service: one directory for each image, method and pair; the last two that were used are kept."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

KEPT = 2  # of this plan, and of the one before, for the way back


def prune(current: Path) -> dict[str, Any]:
    """Note that `current` is in use and remove its siblings but the last used. Returns {changed, removed: [name]}."""
    os.utime(current)
    others = [p for p in current.parent.iterdir() if p.is_dir() and not p.is_symlink() and p.name != current.name]
    others.sort(key=lambda p: p.stat().st_mtime, reverse=True)
    removed = others[KEPT - 1 :]
    for directory in removed:
        shutil.rmtree(directory)
    return {"changed": bool(removed), "removed": sorted(p.name for p in removed)}
