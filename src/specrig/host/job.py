"""Runs a long verb detached from the connection that asked for it, so that a lost SSH session costs nothing.

Per job, under /run/specrig/jobs (0700): `<id>.job` what to run, `<id>.json` progress, `<id>.log` its output,
`<id>.result` its last word, `<id>.lock` held by the process for as long as it lives: the kernel lets go of it, whatever
ends the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrig.host.errors import COULD_NOT_RUN, HostError
from specrig.host.progress import STARTING, line, write_json
from specrig.host.redact import redact

_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
LAUNCH_S = 60.0  # of a machine that is busy with something else: seen above 15


def directory() -> Path:
    """Where jobs live; made when missing. `SPECRIG_RUN_DIR` moves it (tests)."""
    path = Path(os.environ.get("SPECRIG_RUN_DIR", "/run/specrig")) / "jobs"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise HostError(
            "JOB_DIR", f"cannot create {path}: {error}", "run it as root (become: true)", COULD_NOT_RUN
        ) from error
    return path


@dataclass(frozen=True)
class Files:
    """The files of one job."""

    id: str

    def __post_init__(self) -> None:
        if not _ID.fullmatch(self.id):
            raise HostError(
                "JOB_ID", f"{self.id!r:.80} is not {_ID.pattern}", "name the job in lower case", COULD_NOT_RUN
            )

    def path(self, kind: str) -> Path:
        """`<id>.<kind>` in the jobs' directory."""
        return directory() / f"{self.id}.{kind}"


@contextlib.contextmanager
def locked(path: Path, block: bool = True) -> Iterator[bool]:
    """Hold `path`'s lock. Yields False when another process holds it and `block` is false."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX if block else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(handle)


def alive(files: Files) -> bool:
    """True while the job's process lives."""
    with locked(files.path("lock"), block=False) as free:
        return not free


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def fingerprint(argv: list[str], stdin: str) -> str:
    """Tells two jobs of one id apart."""
    return hashlib.sha256(json.dumps([argv, stdin]).encode()).hexdigest()


def _launch(files: Files) -> None:
    """Start `job exec` out of this connection's reach: as a transient unit, else in a session of its own."""
    command = [sys.executable, str(Path(sys.argv[0]).resolve()), "job", "exec", "--id", files.id]
    if not Path("/run/systemd/system").is_dir() or os.environ.get("SPECRIG_RUN_DIR"):
        with files.path("log").open("ab") as log:
            subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/")
        return
    unit = f"specrig-job-{files.id}"
    output = f"append:{files.path('log')}"
    runner = ["systemd-run", "--quiet", "--collect", f"--unit={unit}", f"--description=specrig job {files.id}"]
    runner += [f"--property=StandardOutput={output}", f"--property=StandardError={output}"]
    done = None
    for _ in range(10):  # the unit of a job that has just ended may not be unloaded yet
        done = subprocess.run([*runner, *command], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        time.sleep(0.3)
    raise HostError(
        "JOB_START",
        f"systemd-run: {done.stderr.strip()[:300] if done else ''}",
        f"systemctl status {unit}",
        COULD_NOT_RUN,
    )


def run(name: str, argv: list[str], stdin: str) -> dict[str, Any]:
    """Start job `name`, or attach to it when it runs already; then answer as `poll` does after a moment."""
    files = Files(name)
    print_ = fingerprint(argv, stdin)
    with locked(files.path("start")):
        if alive(files):
            if (_read(files.path("job")) or {}).get("fingerprint") != print_:
                raise HostError(
                    "JOB_BUSY",
                    f"job {name} is running on {socket.gethostname()} with other arguments",
                    f"wait for it, or there: sudo systemctl stop specrig-job-{name}",
                )
        else:
            for kind in ("result", "json", "log"):
                files.path(kind).unlink(missing_ok=True)
            write_json(files.path("job"), {"argv": argv, "stdin": stdin, "fingerprint": print_})
            files.path("log").touch(mode=0o600)
            _launch(files)
            deadline = time.monotonic() + LAUNCH_S
            while not (alive(files) or files.path("result").exists()):
                if time.monotonic() > deadline:
                    raise _lost(files, f"job {name} did not start within {LAUNCH_S:.0f} s")
                time.sleep(0.02)
    return poll(name, wait=0.5)


def poll(name: str, wait: float = 0.0) -> dict[str, Any]:
    """{job, state: running, progress, line} or {job, state: done, rc, changed, result}; waits up to `wait` s."""
    files = Files(name)
    deadline = time.monotonic() + wait
    while True:
        running = alive(files)  # before the result: a job writes its result and then lets go of the lock
        result = _read(files.path("result"))
        if result is not None:
            document = result["result"]
            return {
                "job": name,
                "state": "done",
                "rc": result["rc"],
                "changed": bool(document.get("changed")),
                "result": document,
            }
        if not running:
            raise _lost(files, f"job {name} is not running and left no result")
        if time.monotonic() >= deadline:
            break
        time.sleep(0.05)
    progress = _read(files.path("json")) or {"phase": STARTING}
    return {"job": name, "state": "running", "changed": False, "progress": progress, "line": line(progress)}


def _lost(files: Files, cause: str) -> HostError:
    try:
        tail = [redact(text) for text in files.path("log").read_text(errors="replace").splitlines()[-20:]]
    except OSError:
        tail = []
    return HostError("JOB_LOST", cause, "run it again: it resumes", lines=tail)


def take(name: str) -> tuple[Files, list[str], str]:
    """What `job exec` has to run: (files, argv, stdin)."""
    files = Files(name)
    spec = _read(files.path("job"))
    if not isinstance(spec, dict):
        raise HostError("JOB_LOST", f"job {name} has nothing to run", "job run first", COULD_NOT_RUN)
    return files, [str(a) for a in spec["argv"]], str(spec["stdin"])


def finish(files: Files, status: int, document: dict[str, Any]) -> None:
    """Leave the result, and drop what was only needed to run."""
    write_json(files.path("result"), {"rc": status, "result": document})
