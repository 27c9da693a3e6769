"""Offline bundles: one uncompressed tar of published models, for rigs without a network. Weights do not compress.

<org>--<name>/<revision>/.specrig-manifest.json, then the files it lists. A directory laid out the same way does as well,
such as another rig's models on a disk. A bundle needs no trust: what is taken from it is verified against the lock.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from specrig.host.errors import COULD_NOT_RUN, HostError
from specrig.host.manifest import MANIFEST, Artefact, FileSpec, Job, parse_job, read_manifest
from specrig.host.progress import Progress, amount

_CHUNK = 4 << 20
# A manifest of ten thousand files has less; the rest of a hostile one is not read.
_MAX_MANIFEST = 8 << 20


def _broken(path: Path, cause: object) -> HostError:
    return HostError("BUNDLE_BROKEN", f"{path}: {cause}", "copy the bundle again, or make a new one", COULD_NOT_RUN)


class Bundle:
    """An open bundle. Raises HostError BUNDLE_BROKEN when it cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tar: tarfile.TarFile | None = None
        self._members: dict[str, tarfile.TarInfo] = {}
        try:
            if not path.is_dir():
                self._tar = tarfile.open(path, "r:")  # noqa: SIM115  closed in __exit__
                self._members = {m.name: m for m in self._tar if m.isreg() and not m.issparse()}
        except (OSError, tarfile.TarError) as error:
            raise _broken(path, error) from error

    def __enter__(self) -> Bundle:
        return self

    def __exit__(self, *_: object) -> None:
        if self._tar:
            self._tar.close()

    def open(self, name: str, size: int | None = None) -> IO[bytes] | None:
        """The file `name`, or None when it is not there, is no plain file or has another size."""
        if self._tar:
            member = self._members.get(name)
            if member is None or (size is not None and member.size != size):
                return None
            return self._tar.extractfile(member)
        try:
            handle = os.open(self.path / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        source = os.fdopen(handle, "rb")
        if size is not None and os.fstat(handle).st_size != size:
            source.close()
            return None
        return source

    def manifests(self) -> Iterator[dict[str, Any]]:
        """Manifests of the models in the bundle; their word, not checked yet."""
        names = (
            sorted(n for n in self._members if n.endswith("/" + MANIFEST))
            if self._tar
            else sorted(
                str(p.relative_to(self.path))
                for p in self.path.glob(f"*/*/{MANIFEST}")
                if not p.parent.is_symlink() and p.parents[1].name != ".partial"
            )
        )
        for name in names:
            source = self.open(name)
            if source is None:
                continue
            with source:
                try:
                    value = json.loads(source.read(_MAX_MANIFEST))
                except (OSError, ValueError) as error:
                    raise _broken(self.path, f"{name}: {error}") from error
            if isinstance(value, dict):
                yield value


def copy(path: Path, artefact: Artefact, files: list[FileSpec], partial: Path, tick: Callable[[int], None]) -> int:
    """Copy what the bundle has of `files` into `partial`; return how many bytes. `tick` gets their sum so far."""
    done = 0
    with Bundle(path) as bundle:
        for spec in files:
            source = bundle.open(f"{artefact.path.parent.name}/{artefact.revision}/{spec.path}", spec.size)
            if source is None:
                continue
            target = partial / spec.path
            try:
                with source, target.open("wb") as out:
                    while block := source.read(_CHUNK):
                        out.write(block)
                        done += len(block)
                        tick(done)
            except (OSError, tarfile.TarError) as error:
                target.unlink(missing_ok=True)
                raise _broken(path, error) from error
    return done


def job_of(path: Path, root: Path) -> Job:
    """A stage job for all models of a bundle, by the bundle's own manifests: for hosts without a lock."""
    with Bundle(path) as bundle:
        artefacts = [
            {"id": f"{m.get('repo')}@{m.get('revision')}", **{key: m.get(key) for key in ("repo", "revision", "files")}}
            for m in bundle.manifests()
            if m.get("derive") is None
        ]
    if not artefacts:
        raise _broken(path, "no model in it")
    return parse_job({"root": str(root), "endpoint": None, "artefacts": artefacts, "bundle": str(path)})


class _Hashing:
    """A file that notes the checksum of what is read from it."""

    def __init__(self, source: IO[bytes], kind: str, size: int, tick: Callable[[int], None]) -> None:
        self._source, self._tick = source, tick
        self.state = hashlib.new("sha256" if kind == "sha256" else "sha1")
        if kind != "sha256":
            self.state.update(b"blob %d\0" % size)

    def read(self, count: int = -1) -> bytes:
        data = self._source.read(count)
        self.state.update(data)
        self._tick(len(data))
        return data


def write(root: Path, dest: Path, wanted: list[str], progress: Progress) -> dict[str, Any]:
    """Write the published models under `root` to the tar `dest`. Returns {changed, path, bytes, models}.

    `wanted` are <org>/<name> or <org>/<name>@<revision>; empty: all. Derived models are left out: each rig makes its own.
    Files are verified while they are read. Raises HostError BUNDLE_NOTHING, BUNDLE_DISK, BUNDLE_DEST, STORE_DAMAGED.
    """
    found = []
    for directory in sorted(root.glob("*/*")):
        value = read_manifest(directory) if not directory.is_symlink() and directory.parent.name != ".partial" else None
        if value is None or value.get("derive") is not None:
            continue
        if not wanted or value.get("repo") in wanted or f"{value.get('repo')}@{value.get('revision')}" in wanted:
            found.append(
                {
                    "id": directory.name + directory.parent.name,
                    **{k: value.get(k) for k in ("repo", "revision", "files")},
                }
            )
    if not found:
        asked = ", ".join(wanted) or "any model"
        raise HostError("BUNDLE_NOTHING", f"{asked}: not under {root}", "specrig-host models")
    job = parse_job({"root": str(root), "endpoint": None, "artefacts": found})
    total = sum(a.size for a in job.artefacts)
    part = dest.with_name(dest.name + ".part")
    try:
        free = shutil.disk_usage(dest.parent).free
        if free < total * 1.001 + 10**6:
            cause = f"{amount(total)} to write, {amount(free)} free in {dest.parent}"
            raise HostError("BUNDLE_DISK", cause, "name a larger disk")
        with part.open("wb") as out:
            done = [0]

            def tick(count: int) -> None:
                done[0] += count
                progress.update("bundle", done[0], total)

            with tarfile.open(fileobj=out, mode="w:", format=tarfile.PAX_FORMAT) as tar:
                for artefact in job.artefacts:
                    _add(tar, artefact, tick)
            out.flush()
            os.fsync(out.fileno())
        size = part.stat().st_size
        part.replace(dest)
    except OSError as error:
        raise HostError(
            "BUNDLE_DEST", f"cannot write {dest}: {error}", "name a file on a disk", COULD_NOT_RUN
        ) from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
    models = [f"{a.repo}@{a.revision}" for a in job.artefacts]
    return {"changed": True, "path": str(dest), "bytes": size, "models": models}


def _add(tar: tarfile.TarFile, artefact: Artefact, tick: Callable[[int], None]) -> None:
    base = f"{artefact.path.parent.name}/{artefact.revision}"
    for name in [MANIFEST, *(f.path for f in artefact.files)]:
        spec = next((f for f in artefact.files if f.path == name), None)
        path = artefact.path / name
        info = tarfile.TarInfo(f"{base}/{name}")
        info.size, info.mode = path.stat().st_size, 0o644
        with path.open("rb") as source:
            if spec is None:
                tar.addfile(info, source)
                continue
            reader = _Hashing(source, spec.kind, spec.size, tick)
            tar.addfile(info, reader)
            if info.size != spec.size or reader.state.hexdigest() != spec.digest:
                raise HostError("STORE_DAMAGED", f"{path} is not what was staged", "./rig models verify, then ./rig up")
