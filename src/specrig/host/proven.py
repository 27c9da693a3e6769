"""What is known to have worked: for each service the proven generation and the one before it, with all that it takes to go back.

    /var/lib/specrig/services/<name>/generations/<id>/    files/<absolute path>, record.json
                                     proven, previous     links to two of them
                                     setback.json         the last upgrade that was undone

A generation is the unit and the engine's configuration files. Written to the disk before a link points at it; links are replaced
in one step, `previous` first, so that an interruption leaves two links that are both right.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from specrig.host import firewall
from specrig.host.progress import sync

ROOT = Path("/var/lib/specrig/services")
UNITS = Path("/etc/systemd/system")


class Home:
    """One service's records. `root` is the directory of all services'."""

    def __init__(self, name: str, root: Path | None = None) -> None:
        self.path = (root or ROOT) / name
        self.setback_file = self.path / "setback.json"

    def get(self, link: str) -> dict[str, Any] | None:
        """The record behind `proven` or `previous`, with its `id`; None when there is none that can be read."""
        try:
            where = (self.path / link).resolve(strict=True)
            record = json.loads((where / "record.json").read_text())
            return {**record, "id": where.name} if isinstance(record, dict) else None
        except (OSError, ValueError):
            return None

    def files(self, generation: str) -> dict[Path, bytes]:
        """Content of a generation's files, by where they belong."""
        base = self.path / "generations" / generation / "files"
        return {Path("/") / p.relative_to(base): p.read_bytes() for p in sorted(base.rglob("*")) if p.is_file()}

    def keep(self, content: Mapping[Path, bytes], record: Mapping[str, Any]) -> str:
        """Make these files the proven generation; return its id. The same files again renew the record."""
        name = identity(content)
        home = self.path / "generations" / name
        if not (home / "record.json").exists():
            scratch = home.with_name(f".{name}.{os.getpid()}")
            shutil.rmtree(scratch, ignore_errors=True)
            for path, data in content.items():
                write(scratch / "files" / path.relative_to("/"), data)
            shutil.rmtree(home, ignore_errors=True)
            scratch.replace(home)
        write(home / "record.json", json.dumps({"at": round(time.time()), **record}, indent=1, sort_keys=True).encode())
        now = self.get("proven")
        if now is not None and now["id"] != name:
            self._link("previous", now["id"])
        self._link("proven", name)
        self._forget_others()
        return name

    def _link(self, name: str, generation: str) -> None:
        scratch = self.path / f".{name}.{os.getpid()}"
        scratch.unlink(missing_ok=True)
        scratch.symlink_to(f"generations/{generation}")
        scratch.replace(self.path / name)
        sync(self.path)

    def _forget_others(self) -> None:
        kept = {record["id"] for link in ("proven", "previous") if (record := self.get(link))}
        for other in (self.path / "generations").iterdir():
            if other.name not in kept:
                shutil.rmtree(other, ignore_errors=True)

    def forget(self) -> None:
        """Remove all that was proven, asked or undone; the times of starts stay."""
        for name in ("proven", "previous", "setback.json", "asked.json"):
            (self.path / name).unlink(missing_ok=True)
        shutil.rmtree(self.path / "generations", ignore_errors=True)

    def setback(self) -> dict[str, Any] | None:
        """The upgrade that was undone last, until another one is proven."""
        try:
            found = json.loads(self.setback_file.read_text())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def remember_setback(self, what: Mapping[str, Any] | None) -> None:
        """Write it down, or forget it."""
        if what is None:
            self.setback_file.unlink(missing_ok=True)
        else:
            write(self.setback_file, json.dumps({"at": round(time.time()), **what}, sort_keys=True).encode())


def identity(content: Mapping[Path, bytes]) -> str:
    """A name for a set of files: by their places and their bytes."""
    parts = [f"{path}\0{hashlib.sha256(data).hexdigest()}\n" for path, data in sorted(content.items())]
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:16]


def read_files(paths: Iterable[Path]) -> dict[Path, bytes]:
    """Content of those files that are there."""
    found = {}
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            found[path] = path.read_bytes()
    return found


def write(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replace a file in one step, with what it holds on the disk before the step and the step after it."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())
    scratch.replace(path)
    sync(path.parent)


def restore(content: Mapping[Path, bytes]) -> None:
    """Put files back where they belong; those that are right already are left alone."""
    for path, data in content.items():
        if read_files([path]).get(path) != data:
            write(path, data)
    firewall.follow()  # before the unit that was put back publishes its port


def homes(root: Path | None = None) -> Iterator[Home]:
    """Every service that has a record."""
    base = root or ROOT
    for path in sorted(base.iterdir()) if base.is_dir() else []:
        if (path / "generations").is_dir():
            yield Home(path.name, base)


def records(root: Path | None = None) -> Iterator[dict[str, Any]]:
    """Proven and previous records of all services: what must not be removed."""
    for home in homes(root):
        yield from (record for link in ("proven", "previous") if (record := home.get(link)))


def model_paths(root: Path | None = None) -> set[Path]:
    """Directories of models that a proven or previous generation uses."""
    return {
        Path(str(model["path"]))
        for record in records(root)
        for model in (record.get("service") or {}).get("models") or []
        if model.get("path")
    }


def summary(name: str, root: Path | None = None) -> dict[str, Any]:
    """For `status`: what was proven, what could be gone back to, what was undone."""
    home = Home(name, root)
    now, previous = home.get("proven"), home.get("previous")
    short = ("at", "image", "seconds", "downtime_s")
    return {
        "proven": {field: now.get(field) for field in short} if now else None,
        "previous": {field: previous.get(field) for field in ("at", "image")} if previous else None,
        "speculation": (now or {}).get("speculation"),
        "setback": home.setback(),
    }
