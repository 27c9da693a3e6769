"""Compile caches of a service: one directory for each image, method and pair; those of the unit as it is and of the ways back are kept."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from specrig.host import proven


def prune(current: Path) -> dict[str, Any]:
    """Remove the siblings of `current` that no proven or previous generation of its service uses. Returns {changed, removed: [name]}."""
    home = proven.Home(current.parent.name)
    records = [record for link in ("proven", "previous") if (record := home.get(link))]
    kept = {current.name, *(str((record.get("service") or {}).get("cache_key")) for record in records)}
    removed = [p for p in current.parent.iterdir() if p.is_dir() and not p.is_symlink() and p.name not in kept]
    for directory in removed:
        shutil.rmtree(directory)
    return {"changed": bool(removed), "removed": sorted(p.name for p in removed)}
