"""Brings models to the host: fetch, verify, publish. A directory under its final name is complete and verified, always.

<root>/.partial/<org>--<name>/<revision>/   what is being fetched; survives a kill and is resumed
<root>/<org>--<name>/<revision>/            published: plain files, read-only use, with .specrig-manifest.json
<root>/<org>--<name>/current                relative link to the revision of the last job

Sources, in this order: what is there already, a sibling rig, an offline bundle, the hub. All are verified alike.
"""

from __future__ import annotations

import contextlib
import email.utils
import fcntl
import http.client
import itertools
import json
import os
import re
import shutil
import stat
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from specrig.host import aria2, bundle, pad, share
from specrig.host.errors import COULD_NOT_RUN, HostError
from specrig.host.manifest import (
    MANIFEST,
    Artefact,
    FileSpec,
    Job,
    digest,
    has_size,
    identity,
    is_published,
    read_manifest,
)
from specrig.host.progress import Progress, amount, sync

# Left free on the filesystem: a full disk breaks more than the download.
RESERVE = 512 * 10**6
# Runs of aria2c in a row that brought nothing before we give up; waits double from the first one.
ATTEMPTS = 5
# A hub that says "later" (429, 503) means minutes: so many attempts are a quarter of an hour.
ATTEMPTS_THROTTLED = 20
# A sibling has no network between it and us to be patient with; there is the hub.
ATTEMPTS_SIBLING = 2
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0
LOCK_WAIT_S = 10.0
# A hub that says how long it wants to be left alone is left alone so long, up to this.
LONGEST_RETRY_AFTER_S = 3600.0
# Parts of models that no job has asked for any more, for so long, are swept.
ORPHAN_S = 14 * 86400.0


def stage(job: Job, progress: Progress, check: bool = False) -> dict[str, Any]:
    """Make every artefact of `job` present. Returns {changed, staged, unchanged}; with `check` says what would be done.

    Raises HostError: STAGE_BUSY, STAGE_DISK, STAGE_DENIED, STAGE_NOT_FOUND, STAGE_DOWNLOAD, STAGE_CHECKSUM, STAGE_PATH,
    STAGE_OFFLINE, BUNDLE_BROKEN.
    """
    todo = [a for a in job.artefacts if not is_published(a, job)]
    links = _stale_links(job)
    unchanged = [a.id for a in job.artefacts if a not in todo]
    if check or not (todo or links):
        size = sum(a.size for a in todo)
        return {
            "changed": bool(todo or links),
            "would_stage": [a.id for a in todo],
            "bytes": size,
            "unchanged": unchanged,
        }
    with locked(job.root) as lock:
        _sweep(job)
        todo = [a for a in todo if not is_published(a, job)]
        for artefact in todo:
            _prepare(artefact, job)
        _check_budget(todo, job)
        staged, before = [], 0
        total = sum(a.size for a in todo)
        for artefact in todo:
            start = time.monotonic()
            if artefact.source is None:
                files = [f.as_json() for f in artefact.files]
                with share.claimed(artefact, job) as tell:
                    came = _Fetch(artefact, job, progress, lock, before, total).run(tell)
                    _publish(artefact, job, files, progress)
                before += artefact.size
            else:
                files, came = _derive(artefact, job, progress), {}
                _publish(artefact, job, files, progress)
            row = {"id": artefact.id, "path": str(artefact.path), "bytes": sum(f["size"] for f in files)}
            staged.append({**row, "from": came, "seconds": round(time.monotonic() - start, 1)})
        for link, target in _stale_links(job).items():
            _flip(link, target)
    return {"changed": True, "staged": staged, "unchanged": unchanged}


# -- what is there ---------------------------------------------------------------------------------------------------


def _partial(artefact: Artefact, job: Job) -> Path:
    return job.root / ".partial" / artefact.path.parent.name / artefact.path.name


def _stale_links(job: Job) -> dict[Path, str]:
    """`current` links that do not point at the last revision the job names for their repository."""
    wanted = {a.path.parent / "current": a.revision for a in job.artefacts}
    return {link: target for link, target in wanted.items() if not link.is_symlink() or str(link.readlink()) != target}


@contextlib.contextmanager
def locked(root: Path) -> Iterator[int]:
    """One stager per root. The kernel drops the lock with its last holder, so a killed stager leaves none behind."""
    try:
        (root / ".partial").mkdir(mode=0o755, parents=True, exist_ok=True)
        handle = os.open(root / ".partial" / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise HostError("STAGE_PATH", f"cannot write under {root}: {error}", f"ls -ld {root}", COULD_NOT_RUN) from error
    try:
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    owner = os.pread(handle, 32, 0).decode(errors="replace").strip()
                    raise HostError(
                        "STAGE_BUSY",
                        f"another stager (pid {owner or '?'}) has held {root}/.partial/.lock for {LOCK_WAIT_S:.0f} s",
                        "wait for it to finish, then run this again",
                    ) from None
                time.sleep(0.2)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield handle
    finally:
        os.close(handle)


def _sweep(job: Job) -> None:
    """Remove what a publication left when it was cut off, and old parts of models that this job does not want."""
    wanted = {_partial(a, job) for a in job.artefacts}
    for path in (job.root / ".partial").glob("*/*"):
        if path.name.startswith(".old-") or (path not in wanted and _age(path) > ORPHAN_S):
            _discard(path)
        with contextlib.suppress(OSError):  # not empty: something is still wanted
            path.parent.rmdir()


def _age(path: Path) -> float:
    """Seconds since anything in `path` changed."""
    entries = [path, *path.rglob("*")] if path.is_dir() and not path.is_symlink() else [path]
    return time.time() - max(entry.lstat().st_mtime for entry in entries)


def _prepare(artefact: Artefact, job: Job) -> None:
    """Make the partial directory hold nothing but usable parts of wanted files."""
    partial = _partial(artefact, job)
    for directory in (artefact.path.parent, partial.parent, partial):
        if directory.is_symlink():
            raise HostError("STAGE_PATH", f"{directory} is a symbolic link", f"rm {directory}", COULD_NOT_RUN)
    if artefact.source is not None:
        shutil.rmtree(partial, ignore_errors=True)  # a half-written derivation has no use: it is made again
        return
    partial.mkdir(mode=0o755, parents=True, exist_ok=True)
    wanted = {partial / f.path: f for f in artefact.files}
    keep = set(wanted) | {aria2.control_file(p) for p in wanted}
    parents = {parent for p in wanted for parent in p.parents}
    for base, directories, names in os.walk(partial, topdown=False):
        for name in [*names, *directories]:
            entry = Path(base, name)
            info = entry.lstat()
            if stat.S_ISDIR(info.st_mode):
                if entry not in parents:
                    shutil.rmtree(entry)
            elif not stat.S_ISREG(info.st_mode) or entry not in keep:
                entry.unlink()
    for path, spec in wanted.items():
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        control = aria2.control_file(path)
        if control.exists() and not (path.exists() and aria2.can_resume(path, spec.size)):
            control.unlink()
            path.unlink(missing_ok=True)
        # Without its control file a partial may have holes: only one of full size is worth checking.
        if path.exists() and not control.exists() and not has_size(path, spec.size):
            path.unlink()
        # What an earlier publication of this revision still has is not fetched again, when it is still right.
        old = artefact.path / spec.path
        if not path.exists() and has_size(old, spec.size) and digest(old, spec.kind) == spec.digest:
            with contextlib.suppress(OSError):
                os.link(old, path)


def _check_budget(todo: list[Artefact], job: Job) -> None:
    need = 0
    for artefact in todo:
        if artefact.source is None:
            partial = _partial(artefact, job)
            need += sum(f.size - aria2.on_disk(aria2.Request("", partial / f.path, f.size)) for f in artefact.files)
        else:  # the weights are written anew; all else is linked
            need += sum(f.size for f in job.by_id(artefact.source).files if f.path.endswith(".safetensors"))
    free = shutil.disk_usage(job.root).free
    if need + RESERVE > free:
        raise HostError(
            "STAGE_DISK",
            f"{amount(need)} to write and {amount(RESERVE)} to spare, but {amount(free)} are free in {job.root}",
            f"free space in {job.root}, or set rig_models_root to a larger disk",
        )


# -- fetching --------------------------------------------------------------------------------------------------------


class _LaterError(OSError):
    """The hub asks to be left alone for `seconds` (0: it does not say how long)."""

    def __init__(self, status: int, where: str, seconds: float) -> None:
        super().__init__(f"HTTP {status} from {where}")
        self.seconds = seconds


def retry_after(value: str | None) -> float:
    """Seconds that a Retry-After header asks for: a number or a date; 0 when it says neither."""
    if not value:
        return 0.0
    try:
        seconds = float(value)
    except ValueError:
        try:
            when = email.utils.parsedate_to_datetime(value)
            seconds = when.timestamp() - time.time()
        except (ValueError, TypeError):
            return 0.0
    return min(max(seconds, 0.0), LONGEST_RETRY_AFTER_S) if seconds == seconds else 0.0


def _asked_to_wait(request: aria2.Request) -> float:
    """What the hub says now of a transfer that it refused with 429 or 503: aria2c does not pass the header on."""
    ask = urllib.request.Request(request.url, headers={"Range": "bytes=0-0"})  # noqa: S310  parse_job allows only http(s)
    for header in request.headers:
        ask.add_unredirected_header(*header.split(": ", 1))
    try:
        urllib.request.urlopen(ask, timeout=30).close()  # noqa: S310
    except urllib.error.HTTPError as error:
        error.close()
        return retry_after(error.headers.get("Retry-After")) if error.code in (429, 503) else 0.0
    except (OSError, http.client.HTTPException):
        pass
    return 0.0


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def read_token(path: Path | None) -> str | None:
    """The hub token in `path`, or None when no file is named. Refuses what cannot be one header value."""
    if path is None:
        return None
    try:
        token = path.read_text().strip()
    except OSError as error:
        raise HostError("STAGE_TOKEN", f"cannot read the token: {error}", f"ls -l {path}", COULD_NOT_RUN) from error
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise HostError(
            "STAGE_TOKEN", f"{path} does not hold one printable token", "write the token alone into it", COULD_NOT_RUN
        )
    return token


def _resolve(url: str, token: str) -> tuple[str, tuple[str, ...]]:
    """Follow redirects ourselves when there is a token: it goes to the hub's own origin and to no other.

    Returns the last URL and the headers it may get. Raises STAGE_DENIED, STAGE_NOT_FOUND; OSError when it may pass.
    """
    opener = urllib.request.build_opener(_NoRedirect)
    origin, header = urlsplit(url)[:2], f"Authorization: Bearer {token}"
    for _ in range(6):
        request = urllib.request.Request(url, method="HEAD")  # noqa: S310  parse_job allows only http(s)
        request.add_unredirected_header("Authorization", f"Bearer {token}")
        try:
            opener.open(request, timeout=30).close()
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in (401, 403):
                raise denied(url, str(error.code)) from None
            if error.code == 404:
                raise not_found(url) from None
            if error.code in (429, 503):
                raise _LaterError(error.code, origin[1], retry_after(error.headers.get("Retry-After"))) from None
            if error.code not in (301, 302, 303, 307, 308) or not error.headers.get("Location"):
                raise OSError(f"HTTP {error.code} from {urlsplit(url)[1]}") from None
            url = urljoin(url, error.headers["Location"])
            if urlsplit(url)[0] not in ("http", "https"):
                raise OSError(f"redirected to {urlsplit(url)[0]}:") from None
            if urlsplit(url)[:2] != origin:
                return url, ()
        else:
            return url, (header,)
    raise OSError(f"too many redirects from {origin[1]}")


def denied(url: str, answer: str) -> HostError:
    """The hub knows the file and does not give it to us."""
    return HostError("STAGE_DENIED", f"{url}: {answer}", "accept the licence on the hub and set rig_hub_token")


def not_found(url: str) -> HostError:
    """The locked file is not upstream."""
    return HostError("STAGE_NOT_FOUND", f"{url} does not exist upstream", "./rig models lock, then ./rig plan")


def _requests(
    base: str, token: str | None, artefact: Artefact, partial: Path, missing: list[FileSpec]
) -> list[aria2.Request]:
    def one(spec: FileSpec) -> aria2.Request:
        url = f"{base}/{artefact.repo}/resolve/{artefact.revision}/{quote(spec.path)}"
        headers: tuple[str, ...] = ()
        if token:
            url, headers = _resolve(url, token)
        return aria2.Request(url, partial / spec.path, spec.size, headers)

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(one, missing))


def _complete(path: Path, spec: FileSpec) -> bool:
    return has_size(path, spec.size) and not aria2.control_file(path).exists()


class _Fetch:
    """Brings one artefact's files into its partial directory, verified, from the first sources that have them."""

    def __init__(self, artefact: Artefact, job: Job, progress: Progress, lock: int, before: int, total: int) -> None:
        self.artefact, self.job, self.progress, self.lock = artefact, job, progress, lock
        self.before, self.total = before, total
        self.partial = _partial(artefact, job)
        self.verified: set[Path] = set()

    def missing(self) -> list[FileSpec]:
        """Files that are not whole yet."""
        return [f for f in self.artefact.files if not _complete(self.partial / f.path, f)]

    def run(self, tell: Callable[[str], None]) -> dict[str, int]:
        """Try the sources in turn; `tell` is this rig's claim (see share). Returns {source: bytes it gave}. Raises the last source's HostError."""
        came: dict[str, int] = {}
        if not self.missing():
            with contextlib.suppress(HostError):  # what is wrong has been thrown away: it is fetched
                self._verify()
                return came
        waits = self.job.bundle is None
        siblings = share.turn(self.artefact, self.job, self.progress, tell, waits)
        tell("fetching")
        sources = [*siblings, *(["bundle"] if self.job.bundle else []), *(["hub"] if self.job.endpoint else [])]
        error: HostError | None = None
        for source in sources:
            try:
                self._from(source, came)
                return came
            except HostError as failed:
                if failed.status == COULD_NOT_RUN and failed.code != "BUNDLE_BROKEN":
                    raise
                error = failed
                self.progress.update("retry", message=f"{source}: {failed.cause}")
        if error and error.code == "STAGE_CHECKSUM" and len(sources) > 1 and sources[-1] == "hub":
            self._from("hub", came)  # the wrong bytes may have been another source's half of a file
            return came
        if not self.job.endpoint:
            lacking = ", ".join(f.path for f in self.missing()[:3]) or "files"
            raise HostError(
                "STAGE_OFFLINE",
                f"{self.artefact.repo} at {self.artefact.revision[:12]}: no hub is to be asked, and neither a sibling nor a "
                f"bundle has good copies of {lacking}" + (f" ({error.cause})" if error else ""),
                "give a bundle that holds this revision, or set model_store_endpoint",
            )
        assert error is not None  # noqa: S101  there was a hub to fail
        raise error

    def _from(self, source: str, came: dict[str, int]) -> None:
        start = self._have()
        try:
            if source == "bundle":
                self._copy()
                self._verify()
                return
            with _Verifier(self.artefact, self.partial, self.verified) as verifier:
                for spec in self.artefact.files:
                    if _complete(self.partial / spec.path, spec):
                        verifier.add(self.partial / spec.path)
                self._download(source, verifier)
                verifier.finish(self.progress)
        finally:
            if (more := self._have() - start) > 0:
                came[source] = came.get(source, 0) + more

    def _have(self) -> int:
        missing = self.missing()
        return self.artefact.size - sum(f.size for f in missing) + _present(self.partial, missing)

    def _verify(self) -> None:
        with _Verifier(self.artefact, self.partial, self.verified) as verifier:
            verifier.finish(self.progress)

    def _copy(self) -> None:
        missing = self.missing()
        for spec in missing:  # a part that another source began is no use here
            aria2.control_file(self.partial / spec.path).unlink(missing_ok=True)
            (self.partial / spec.path).unlink(missing_ok=True)
        done = self.before + self.artefact.size - sum(f.size for f in missing)

        def tick(count: int) -> None:
            self.progress.update("copy", done + count, self.total, f"{self.artefact.id}, from the bundle")

        assert self.job.bundle is not None  # noqa: S101  else it is no source
        bundle.copy(self.job.bundle, self.artefact, missing, self.partial, tick)

    def _download(self, source: str, verifier: _Verifier) -> None:
        artefact, job, partial, progress = self.artefact, self.job, self.partial, self.progress
        hub = source == "hub"
        base, token, limit = (job.endpoint, read_token(job.token_file), job.limit) if hub else (source, None, None)
        failures, pause, fault = 0, FIRST_WAIT_S, ""

        def ticker(base: int, label: str) -> Callable[[int], None]:
            def tick(count: int) -> None:
                progress.update("download", base + count, self.total, label)
                # Somebody else fills the disk: stop while aria2c can still save what it has.
                if shutil.disk_usage(job.root).free < RESERVE // 2:
                    raise _full(job)

            return tick

        while missing := self.missing():
            have = artefact.size - sum(f.size for f in missing)
            start = _present(partial, missing)
            throttled = re.search(r"\b(429|503)\b", fault) is not None
            if failures >= (ATTEMPTS_THROTTLED if throttled else ATTEMPTS if hub else ATTEMPTS_SIBLING):
                raise HostError(
                    "STAGE_DOWNLOAD",
                    f"{artefact.repo}: {amount(have + start)} of {amount(artefact.size)} came; "
                    f"{failures} attempts brought nothing more; last: {fault}",
                    "check the network and the endpoint, then run this again: it resumes",
                )
            if failures:
                progress.update("retry", message=f"{artefact.id} in {pause:.0f} s: {fault}")
                time.sleep(pause)
                pause = min(pause * 2, LONGEST_WAIT_S)
            label = f"{artefact.id}, {len(missing)} file{'s' * (len(missing) > 1)}"
            label += "" if hub else f", from {urlsplit(source)[1]}"
            progress.update("download", self.before + have + start, self.total, label)
            resumes = not failures and any(aria2.control_file(partial / f.path).exists() for f in missing)
            asked = 0.0
            try:
                requests = _requests(base, token, artefact, partial, missing)
                tick = ticker(self.before + have, label)
                outcome = aria2.fetch(requests, tick, verifier.add, (self.lock,), head=resumes, limit=limit)
                fault = str(outcome)
                if re.search(r"\b(429|503)\b", fault):
                    refused = (r for f, r in zip(missing, requests) if not _complete(partial / f.path, f))
                    asked = max(map(_asked_to_wait, itertools.islice(refused, 1)), default=0.0)
            except (OSError, http.client.HTTPException) as error:
                outcome, fault = aria2.Outcome(1, {}), str(error)
                asked = error.seconds if isinstance(error, _LaterError) else 0.0
            if not resumes:  # a mirror may refuse the question about the size: ask again without it
                _raise_final(outcome, artefact, job, base)
            for spec in missing:  # whole by the server's word, and not of the locked size: another file
                path = partial / spec.path
                if path.exists() and not aria2.control_file(path).exists() and not has_size(path, spec.size):
                    size = path.stat().st_size
                    path.unlink()
                    raise _checksum(artefact, [f"{spec.path} came with {size} bytes, locked are {spec.size}"])
            if _present(partial, missing) > start:
                failures, pause = 0, FIRST_WAIT_S
            failures += 1
            pause = max(pause, asked)


def _present(partial: Path, files: list[FileSpec]) -> int:
    return sum(aria2.on_disk(aria2.Request("", partial / f.path, f.size)) for f in files)


def _raise_final(outcome: aria2.Outcome, artefact: Artefact, job: Job, base: str) -> None:
    """Stop at once on what no retry cures."""
    where = f"{base}/{artefact.repo} at {artefact.revision[:12]}"
    if gone := outcome.faults.get(3):
        raise not_found(gone.url or where)
    for number in (22, 24):
        if (fault := outcome.faults.get(number)) and (number == 24 or "403" in fault.words):
            raise denied(fault.url or where, fault.words)
    failed = {outcome.status, *outcome.faults}
    if 9 in failed or (failed & {16, 17, 18} and shutil.disk_usage(job.root).free < RESERVE):
        raise _full(job)


def _full(job: Job) -> HostError:
    return HostError(
        "STAGE_DISK",
        f"the disk of {job.root} filled up while fetching: {amount(shutil.disk_usage(job.root).free)} are free",
        f"free space in {job.root}, then run this again: it resumes",
    )


def _checksum(artefact: Artefact, faults: list[str]) -> HostError:
    return HostError(
        "STAGE_CHECKSUM",
        f"{artefact.repo} at {artefact.revision[:12]}: " + "; ".join(faults) + "; thrown away, nothing published",
        "run this again; if it fails twice, upstream or a mirror has other bytes: ./rig models lock shows the change",
    )


class _Verifier:
    """Checks files against the lock while others are still coming, and makes the good ones durable."""

    def __init__(self, artefact: Artefact, partial: Path, verified: set[Path]) -> None:
        self._artefact = artefact
        self._verified = verified  # by an earlier source's verifier too
        self._specs = {partial / f.path: f for f in artefact.files}
        self._running: dict[Path, Future[str | None]] = {}
        self._read = 0
        self._pool = ThreadPoolExecutor(min(4, os.cpu_count() or 1))

    def __enter__(self) -> _Verifier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for future in self._running.values():
            future.cancel()
        self._pool.shutdown()

    def add(self, path: Path) -> None:
        """Start on a complete file."""
        if path not in self._running and path not in self._verified and has_size(path, self._specs[path].size):
            self._running[path] = self._pool.submit(self._check, path, self._specs[path])

    def _check(self, path: Path, spec: FileSpec) -> str | None:
        found = digest(path, spec.kind, self._tick)
        if found != spec.digest:
            return f"{spec.path} has {spec.kind} {found[:12]}…, locked is {spec.digest[:12]}…"
        sync(path)
        return None

    def _tick(self, count: int) -> None:
        self._read += count  # shown only: a lost update between threads does no harm

    def finish(self, progress: Progress) -> None:
        """Wait for the rest; raise STAGE_CHECKSUM when a file differs (it has been thrown away)."""
        for path in self._specs:
            self.add(path)
        waiting = set(self._running.values())
        while waiting:
            waiting = wait(waiting, timeout=1.0).not_done
            progress.update("verify", self._read, self._artefact.size, self._artefact.id)
        faults = []
        for path, future in self._running.items():
            if fault := future.result():
                path.unlink()  # not before: the download would see a missing file and fetch it again
                faults.append(fault)
            else:
                self._verified.add(path)
        if faults:
            raise _checksum(self._artefact, faults)
        if self._verified != set(self._specs):  # a file vanished under our hands
            raise _checksum(self._artefact, ["not every file was there to be verified"])


# -- deriving and publishing -----------------------------------------------------------------------------------------


def _derive(artefact: Artefact, job: Job, progress: Progress) -> list[dict[str, Any]]:
    source, partial = job.by_id(artefact.source or ""), _partial(artefact, job)
    for spec in source.files:  # a bit that fell over on the disk must not be passed on under a new checksum
        progress.update("verify", message=f"{source.id}: {spec.path}")
        if digest(source.path / spec.path, spec.kind) != spec.digest:
            (source.path / MANIFEST).unlink()  # no longer published: the next run repairs it
            raise _checksum(source, [f"{spec.path} is not what was staged"])
    partial.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    pad.pad_vocab(source.path, partial, artefact.vocab_size or 0, progress)
    known = {f["path"]: f for f in (read_manifest(source.path) or {}).get("files", [])}
    files = []
    for path in sorted(p for p in partial.rglob("*") if p.is_file()):
        name, size = path.relative_to(partial).as_posix(), path.stat().st_size
        progress.update("verify", message=f"{artefact.id}: {name}")
        same = name in known and path.samefile(source.path / name)
        files.append(known[name] if same else {"path": name, "size": size, "sha256": digest(path, "sha256")})
    return files


def _publish(artefact: Artefact, job: Job, files: list[dict[str, Any]], progress: Progress) -> None:
    """Make everything durable, then give it its name in one step."""
    progress.update("publish", message=artefact.id)
    partial, manifest = _partial(artefact, job), {**identity(artefact, job), "files": files}
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
    for base, _, names in os.walk(partial, topdown=False):
        for name in names:
            path = Path(base, name)
            path.chmod(0o644)
            sync(path)
        Path(base).chmod(0o755)
        sync(Path(base))
    parent = artefact.path.parent
    parent.mkdir(mode=0o755, exist_ok=True)
    trash = partial.with_name(f".old-{artefact.path.name}")
    if artefact.path.exists() or artefact.path.is_symlink():  # broken, or another manifest's: it makes room
        _discard(trash)
        artefact.path.rename(trash)
    partial.rename(artefact.path)
    sync(parent)
    sync(parent.parent)
    _discard(trash)
    with contextlib.suppress(OSError):  # not empty: another revision is on its way
        partial.parent.rmdir()


def remove(directory: Path, root: Path) -> None:
    """Take a directory of `root` away: out of its name in one step, so that it is never half there. Hold the lock."""
    trash = root / ".partial" / directory.parent.name / f".old-{directory.name}"
    trash.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    _discard(trash)
    directory.rename(trash)
    sync(directory.parent)
    _discard(trash)
    with contextlib.suppress(OSError):
        trash.parent.rmdir()


def _discard(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _flip(link: Path, target: str) -> None:
    """Point `link` at `target` without a moment in which it points nowhere."""
    scratch = link.with_name(".current.new")
    scratch.unlink(missing_ok=True)
    scratch.symlink_to(target)
    scratch.replace(link)
    sync(link.parent)
