"""Keeps what is published: lists it, reads it again for bits that fell over, removes what nothing uses any more."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specrig.host import manifest, proven, stage
from specrig.host.errors import COULD_NOT_RUN, HostError
from specrig.host.manifest import DAMAGED, MANIFEST, read_manifest
from specrig.host.progress import Progress, amount, write_json
from specrig.host.status import PLAN, models

UNITS = Path("/etc/systemd/system")
REPORT = Path("/var/lib/specrig/scrub.json")


def published(root: Path) -> list[Path]:
    """Directories of all published models, damaged ones too."""
    return [
        d for d in sorted(root.glob("*/*")) if not d.is_symlink() and d.parent.name != ".partial" and read_manifest(d)
    ]


def listing(root: Path) -> dict[str, Any]:
    """{models, partial_bytes, free_bytes}: what is there, what is on its way, what is left."""
    rows = models(root)
    used = in_use(root)
    for row in rows:
        row.setdefault("damaged", False)
        row["used"] = None if used is None else Path(row["path"]) in used
    partial = sum(_size(p) for p in (root / ".partial").glob("*/*"))
    free = shutil.disk_usage(root).free if root.is_dir() else 0
    return {"changed": False, "root": str(root), "models": rows, "partial_bytes": partial, "free_bytes": free}


def _size(directory: Path) -> int:
    """Bytes that a directory takes; a file that is linked elsewhere too would stay, and counts for nothing."""
    total = 0
    for base, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                info = Path(base, name).lstat()
                total += info.st_blocks * 512 if info.st_nlink == 1 else 0
    return total


# -- reading again ---------------------------------------------------------------------------------------------------


def verify(root: Path, progress: Progress, limit: int | None = None, report: Path | None = None) -> dict[str, Any]:
    """Read every file of every published model from the disk and compare it with its manifest.

    `limit` is bytes per second (scrub); `report` gets the result as JSON. A model with a fault is marked: it stays where it
    is, for a service may use it, and the next `stage` repairs it. Returns {changed, verified, bytes, models}. Raises
    HostError STORE_DAMAGED with the files, STORE_EMPTY when nothing was there to be verified.
    """
    found = published(root)
    total = sum(_listed(d) for d in found)
    faults, rows, done, begin = [], [], 0, time.monotonic()
    for directory in found:
        bad = []
        for entry in (read_manifest(directory) or {}).get("files") or []:
            path, kind = directory / str(entry.get("path")), "sha256" if entry.get("sha256") else "git_sha1"

            def tick(count: int) -> None:
                nonlocal done
                done += count
                progress.update("scrub" if limit else "verify", done, total, directory.parent.name)  # noqa: B023
                if limit:
                    time.sleep(max(0.0, done / limit - (time.monotonic() - begin)))

            try:
                manifest.check_path(entry.get("path"))
                _uncache(path)
                same = manifest.has_size(path, entry["size"]) and manifest.digest(path, kind, tick) == entry[kind]
                if limit:
                    _uncache(path)  # what was read for its own sake must not push out what a service reads
            except (OSError, KeyError, HostError):
                same = False
            if not same:
                bad.append(str(entry.get("path")))
        _mark(directory, bad)
        rows.append({"path": str(directory), "ok": not bad, "damaged": bad})
        faults += [f"{directory}/{name}" for name in bad]
    if report is not None:
        report.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        write_json(
            report, {"at": round(time.time()), "ok": not faults and bool(found), "bytes": done, "models": rows}, 0o644
        )
    if not found:
        raise HostError("STORE_EMPTY", f"no model under {root}: nothing was verified", "./rig up")
    if faults:
        raise HostError(
            "STORE_DAMAGED",
            f"{len(faults)} of the files in {root} are not what was staged: {', '.join(faults[:5])}",
            "./rig up fetches these files again; then look at the disk: smartctl -a",
            lines=faults,
        )
    return {"changed": False, "verified": len(rows), "bytes": done, "models": rows}


def _listed(directory: Path) -> int:
    files = (read_manifest(directory) or {}).get("files") or []
    return sum(f["size"] for f in files if isinstance(f, dict) and isinstance(f.get("size"), int))


def _uncache(path: Path) -> None:
    """Have the next reading come from the disk, not from memory."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def _mark(directory: Path, bad: list[str]) -> None:
    mark = directory / DAMAGED
    if bad:
        write_json(mark, {"files": bad, "at": round(time.time())}, 0o644)
    else:
        mark.unlink(missing_ok=True)


# -- removing --------------------------------------------------------------------------------------------------------


def in_use(root: Path, plan_file: Path = PLAN, units: Path = UNITS) -> set[Path] | None:
    """Directories that the applied plan or any unit of ours names; None without a plan: then nobody knows."""
    try:
        plan = json.loads(plan_file.read_text())
        used = {Path(m["path"]) for m in plan["models"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    for unit in sorted(units.glob("specrig-*.service")) + sorted(units.glob("specrig-*.service.d/*.conf")):
        for text in re.findall(re.escape(str(root)) + r"/[^\s:'\"/]+/[^\s:'\"/]+", unit.read_text(errors="replace")):
            used.add(Path(text))
    used |= proven.model_paths()  # an upgrade must not take away what it would go back to
    # A link counts as what it points at: somebody may have written .../current into a unit.
    return used | {path.resolve() for path in used}


def gc(root: Path, progress: Progress, apply: bool = False, keep: int = 0, plan_file: Path = PLAN) -> dict[str, Any]:
    """Remove published models that neither the applied plan nor a unit names, but the newest `keep` of each repository.

    Also removes what is left of downloads for models that nothing needs. Without `apply` it only says what it would do.
    Returns {changed, removed | would_remove: [{path, bytes}], bytes}. Raises HostError GC_NO_PLAN, STAGE_BUSY.
    """
    if in_use(root, plan_file) is None:
        raise HostError(
            "GC_NO_PLAN", f"{plan_file} cannot be read, so nobody knows what is used", "./rig up first", COULD_NOT_RUN
        )
    lock = stage.locked(root) if apply else contextlib.nullcontext()
    with lock:
        used = in_use(root, plan_file) or set()
        rows = []
        for directory in _removable(root, used, keep):
            rows.append({"path": str(directory), "bytes": _size(directory)})
            if apply:
                progress.update("remove", message=str(directory))
                stage.remove(directory, root)
        if apply:
            for link in [home / "current" for home in sorted(root.iterdir())]:
                if link.is_symlink() and not link.exists():
                    link.unlink()
                with contextlib.suppress(OSError):
                    link.parent.rmdir()  # only when nothing else is in it
    size = sum(int(str(row["bytes"])) for row in rows)
    progress.update("remove", message=f"{len(rows)} directories, {amount(size)}")
    return {"changed": bool(rows), ("removed" if apply else "would_remove"): rows, "bytes": size}


def _removable(root: Path, used: set[Path], keep: int) -> Iterator[Path]:
    unused: dict[Path, list[Path]] = {}
    for directory in published(root):
        if directory not in used:
            unused.setdefault(directory.parent, []).append(directory)
    for directories in unused.values():
        newest = sorted(directories, key=lambda d: (d / MANIFEST).stat().st_mtime_ns, reverse=True)
        yield from newest[keep:]
    for partial in sorted((root / ".partial").glob("*/*")):
        if root / partial.parent.name / partial.name not in used:
            yield partial
