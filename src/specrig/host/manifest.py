"""What is to be staged, checked as hostile input, and what a published directory says about itself."""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrig.host.errors import COULD_NOT_RUN, HostError

MANIFEST = ".specrig-manifest.json"
# Beside a manifest: a later reading found other bytes. Such a model counts as missing, so the next `stage` repairs it.
DAMAGED = ".specrig-damaged.json"
SCHEMA = 1
# Raised when `pad` would write other bytes for the same source: the derived models are then made again.
PAD_FORMAT = 1
# No published shard comes near it; a larger figure is a broken or hostile lock and would only fill the disk.
MAX_FILE_BYTES = 10**12
MAX_FILES = 10_000
MAX_SIBLINGS = 256
# Bytes per second; less than this and a 40 GB model takes more than a week.
MIN_LIMIT = 50_000
_CHUNK = 4 << 20

_REPO = re.compile(r"(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_REVISION = re.compile(r"[0-9a-f]{40}(-pad[1-9][0-9]{0,8})?")
_HEX = {"sha256": re.compile(r"[0-9a-f]{64}"), "git_sha1": re.compile(r"[0-9a-f]{40}")}


def _bad(cause: str) -> HostError:
    return HostError("STAGE_MANIFEST", cause, "./rig models lock, then ./rig plan", COULD_NOT_RUN)


@dataclass(frozen=True)
class FileSpec:
    """One wanted file: `path` relative to the model, `size` in bytes, and its checksum (`kind` sha256 or git_sha1)."""

    path: str
    size: int
    kind: str
    digest: str

    def as_json(self) -> dict[str, Any]:
        """As in the lock: {path, size, sha256|git_sha1}."""
        return {"path": self.path, "size": self.size, self.kind: self.digest}


@dataclass(frozen=True)
class Artefact:
    """One directory to publish. `source` and `vocab_size` are set for a padded draft, whose `files` are then empty."""

    id: str
    repo: str
    revision: str
    files: tuple[FileSpec, ...]
    path: Path
    source: str | None = None
    vocab_size: int | None = None

    @property
    def size(self) -> int:
        """Bytes to fetch."""
        return sum(f.size for f in self.files)


@dataclass(frozen=True)
class Job:
    """All that one `stage` brings to a host, and where it may come from.

    `endpoint` is the hub's base URL, "" for none. `siblings` are base URLs of rigs that share what they have; the first
    `rank` of them go first when several rigs want the same model at once. `bundle` is a tar file or a directory. `limit`
    is bytes per second from the hub.
    """

    root: Path
    endpoint: str
    artefacts: tuple[Artefact, ...]
    token_file: Path | None = None
    siblings: tuple[str, ...] = ()
    rank: int = 0
    bundle: Path | None = None
    limit: int | None = None

    def by_id(self, name: str) -> Artefact:
        """The artefact called `name`; `parse_job` made sure that each `source` exists."""
        return next(a for a in self.artefacts if a.id == name)


def check_path(path: object) -> str:
    """Return `path` when it stays inside its directory, whatever the reader; raise STAGE_MANIFEST otherwise."""
    if not isinstance(path, str) or not path or len(path) > 1000:
        raise _bad(f"a file path must be 1 to 1000 characters, not {path!r:.80}")
    if any(ord(c) < 32 or ord(c) == 127 for c in path) or "\\" in path:
        raise _bad(f"file path {path!r:.120} holds a control character or a backslash")
    for part in path.split("/"):
        if part in ("", ".", "..") or len(part.encode()) > 240:
            raise _bad(f"file path {path!r:.120} is absolute, leaves its directory, or has an empty or overlong part")
        if part.startswith(".specrig") or part.endswith(".aria2"):
            raise _bad(f"file path {path!r:.120} uses a name that the stager keeps for itself")
    return path


def _file(item: object) -> FileSpec:
    if not isinstance(item, dict):
        raise _bad(f"a file entry must be an object, not {item!r:.80}")
    path, size = check_path(item.get("path")), item.get("size")
    if not isinstance(size, int) or isinstance(size, bool) or not 0 < size <= MAX_FILE_BYTES:
        raise _bad(f"{path}: size {size!r:.40} is not between 1 and {MAX_FILE_BYTES} bytes")
    for kind, keys in (("sha256", ("sha256",)), ("git_sha1", ("git_sha1", "sha1"))):
        for digest in (item[key] for key in keys if item.get(key)):
            if not isinstance(digest, str) or not _HEX[kind].fullmatch(digest):
                raise _bad(f"{path}: {kind} {digest!r:.80} is not {_HEX[kind].pattern}")
            return FileSpec(path, size, kind, digest)
    raise _bad(f"{path}: no sha256 and no git_sha1; a file that cannot be verified is not staged")


def _files(items: object, name: str) -> tuple[FileSpec, ...]:
    if not isinstance(items, list) or len(items) > MAX_FILES:
        raise _bad(f"{name}: files must be a list of at most {MAX_FILES}")
    files = tuple(sorted((_file(i) for i in items), key=lambda f: f.path))
    seen = {f.path for f in files}
    if len(seen) != len(files):
        twice = next(a.path for a, b in zip(files, files[1:]) if a.path == b.path)
        raise _bad(f"{name}: {twice} is listed twice")
    for path in seen:
        parents = {"/".join(path.split("/")[:n]) for n in range(1, path.count("/") + 1)}
        if parents & seen:
            raise _bad(f"{name}: {sorted(parents & seen)[0]} is both a file and a directory")
    return files


def _artefact(item: object, root: Path) -> Artefact:
    if not isinstance(item, dict):
        raise _bad(f"an artefact must be an object, not {item!r:.80}")
    name, repo, revision = (str(item.get(key) or "") for key in ("id", "repo", "revision"))
    if not name:
        raise _bad("an artefact has no id")
    if not _REPO.fullmatch(repo):
        raise _bad(f"{name}: repo {repo!r:.120} is not <org>/<name>")
    if not _REVISION.fullmatch(revision):
        raise _bad(f"{name}: revision {revision!r:.80} is not a commit of 40 hex digits")
    path = root / repo.replace("/", "--") / revision
    if item.get("path") is not None and str(item["path"]) != str(path):
        raise _bad(f"{name}: path {item['path']!r:.200} is not {path}")
    files, derive = _files(item.get("files") or [], name), item.get("derive")
    if derive is None:
        if not files:
            raise _bad(f"{name}: no files; nothing would be verified")
        if "-pad" in revision:
            raise _bad(f"{name}: revision {revision} names a derived model, but derive is not set")
        return Artefact(name, repo, revision, files, path)
    if not isinstance(derive, dict) or derive.get("kind") != "pad_vocab" or files:
        raise _bad(f"{name}: derive must be {{kind: pad_vocab, source, vocab_size}} and files empty")
    width = derive.get("vocab_size")
    if not isinstance(width, int) or isinstance(width, bool) or not 0 < width < 10**8:
        raise _bad(f"{name}: vocab_size {width!r:.40} is not a vocabulary width")
    return Artefact(name, repo, revision, (), path, str(derive.get("source")), width)


def parse_job(value: object) -> Job:
    """Check a stage job {root, endpoint, artefacts, token_file}; raise STAGE_MANIFEST on what is not safe to do."""
    if not isinstance(value, dict) or not isinstance(value.get("artefacts"), list):
        raise _bad("the job must be an object with root, endpoint and artefacts")
    root, endpoint = Path(str(value.get("root") or "")), str(value.get("endpoint") or "").rstrip("/")
    if not root.is_absolute() or ".." in root.parts or len(root.parts) < 2:
        raise _bad(f"root {str(root)!r:.200} is not an absolute directory")
    siblings = [str(url).rstrip("/") for url in value.get("siblings") or []]
    for url in [*siblings, *([endpoint] if value.get("endpoint") is not None else [])]:
        if not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?", url):
            raise _bad(f"endpoint {url!r:.200} is not http(s)://host[/path]")
    rank, limit, bundle = value.get("rank") or 0, value.get("limit") or None, value.get("bundle") or None
    if not isinstance(rank, int) or not 0 <= rank <= len(siblings) or len(siblings) > MAX_SIBLINGS:
        raise _bad(f"rank {rank!r:.40} is not within the {len(siblings)} siblings (at most {MAX_SIBLINGS})")
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < MIN_LIMIT):
        raise _bad(f"limit {limit!r:.40} is not a number of bytes per second, {MIN_LIMIT} or more")
    if bundle is not None and not Path(str(bundle)).is_absolute():
        raise _bad(f"bundle {bundle!r:.200} is not an absolute path")
    artefacts = tuple(_artefact(item, root) for item in value["artefacts"])
    ids = [a.id for a in artefacts]
    if len(set(ids)) != len(ids) or len({a.path for a in artefacts}) != len(artefacts):
        raise _bad("two artefacts share an id or a directory")
    for index, artefact in enumerate(artefacts):
        if artefact.source is not None:
            before = next((a for a in artefacts[:index] if a.id == artefact.source), None)
            if before is None or before.source is not None:
                raise _bad(f"{artefact.id}: source {artefact.source!r:.80} is not a fetched artefact listed before it")
    token = value.get("token_file")
    return Job(
        root,
        endpoint,
        artefacts,
        Path(str(token)) if token else None,
        tuple(dict.fromkeys(siblings)),
        rank,
        Path(str(bundle)) if bundle else None,
        limit,
    )


def digest(path: Path, kind: str, tick: Callable[[int], None] = lambda _: None) -> str:
    """Checksum of a file: sha256 of its bytes, or git's blob id (sha1 over `blob <size>\\0` and the bytes)."""
    state = hashlib.new("sha256" if kind == "sha256" else "sha1")
    if kind != "sha256":
        state.update(b"blob %d\0" % path.stat().st_size)
    buffer = bytearray(_CHUNK)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as handle:
        while count := handle.readinto(buffer):
            state.update(view[:count])
            tick(count)
    return state.hexdigest()


def identity(artefact: Artefact, job: Job) -> dict[str, Any]:
    """What a published manifest must say to be this artefact: repo and revision, and its files or its derivation."""
    base: dict[str, Any] = {"schema": SCHEMA, "repo": artefact.repo, "revision": artefact.revision, "derive": None}
    if artefact.source is None:
        return {**base, "files": [f.as_json() for f in artefact.files]}
    source = job.by_id(artefact.source)
    derive = {"kind": "pad_vocab", "vocab_size": artefact.vocab_size, "format": PAD_FORMAT}
    return {**base, "derive": {**derive, "source": {"repo": source.repo, "revision": source.revision}}}


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """The manifest of a published directory, or None when there is none that can be read."""
    try:
        value = json.loads((directory / MANIFEST).read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def has_size(path: Path, size: int) -> bool:
    """True for a plain file of exactly `size` bytes."""
    try:
        info = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(info.st_mode) and info.st_size == size


def is_published(artefact: Artefact, job: Job) -> bool:
    """True when the directory holds this artefact, by its manifest and every file's size. Reads no weights."""
    found = read_manifest(artefact.path)
    wanted = identity(artefact, job)
    if (
        found is None
        or (artefact.path / DAMAGED).exists()
        or any(found.get(key) != value for key, value in wanted.items())
    ):
        return False
    try:
        files = [(check_path(f["path"]), f["size"]) for f in found["files"]]
    except (KeyError, TypeError, HostError):
        return False
    return bool(files) and all(has_size(artefact.path / path, size) for path, size in files)
