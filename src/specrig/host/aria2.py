"""Fetches files with aria2c: range resume, several at once, a watchdog for stalls. Verification is not its business."""

from __future__ import annotations

import contextlib
import os
import re
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from specrig.host.errors import COULD_NOT_RUN, HostError

# Silence, or less than this rate, is a stall: the transfer is given up and started again where it was.
TIMEOUT_S = 30
# 0: "503, later" comes back to the stager, which knows how long the hub asked to be left alone.
RETRY_WAIT_S = 0
LOWEST_RATE = 10_000
# aria2c as a whole has brought nothing for so long, whatever it says: it is ended and started again.
STALL_S = 120.0

_ROW = re.compile(r"\[#[0-9a-f]+ (\d+)B/(\d+)B")
_FAULT = re.compile(r"errorCode=(\d+)(?: URI=(\S+))?(?: (.*))?")


@dataclass(frozen=True)
class Request:
    """One file to fetch: where from, where to, how large, and headers that must stay out of argv (a token)."""

    url: str
    path: Path
    size: int
    headers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fault:
    """One of aria2c's errors: the last URL it was about, and its words."""

    url: str
    words: str


@dataclass(frozen=True)
class Outcome:
    """How a run of aria2c ended: its exit status (0: all files complete) and its errors by number."""

    status: int
    faults: dict[int, Fault]

    def __str__(self) -> str:
        said = [f"{f.words or 'error'} (aria2c error {n}) {f.url}".strip() for n, f in self.faults.items()]
        return "; ".join(said) or f"aria2c ended with status {self.status}"


def options(parent: int, head: bool, limit: int | None = None) -> list[str]:
    """aria2c's arguments. Nothing secret may be among them: every user of the machine can read them.

    `head` asks for the size first, instead of starting a transfer that a resume then drops; not every mirror allows it.
    `limit` is bytes per second, all files together: no connection's share of it may count as a stall.
    """
    slowest = min(LOWEST_RATE, limit // 64) if limit else LOWEST_RATE
    return [
        f"--max-overall-download-limit={limit or 0}",
        f"--use-head={str(head).lower()}",
        "--no-conf=true",
        "--no-netrc=true",
        "--input-file=-",
        "--continue=true",
        "--allow-overwrite=true",
        "--auto-file-renaming=false",
        # A server without ranges still works; it only loses the resume.
        "--always-resume=false",
        # Preallocation would make a partial file look complete, and takes minutes on some filesystems.
        "--file-allocation=none",
        "--max-concurrent-downloads=4",
        "--split=4",
        "--max-connection-per-server=4",
        "--min-split-size=32M",
        # How much a killed run fetches again: what arrived since the control file was last saved.
        "--auto-save-interval=1",
        "--connect-timeout=15",
        f"--timeout={TIMEOUT_S}",
        "--max-tries=4",
        f"--retry-wait={RETRY_WAIT_S}",
        f"--lowest-speed-limit={slowest}",
        f"--stop-with-process={parent}",
        "--human-readable=false",
        "--summary-interval=1",
        "--show-console-readout=false",
        "--enable-color=false",
        "--console-log-level=notice",
    ]


def input_lines(requests: Iterable[Request]) -> str:
    """aria2c's input file: one URL each, with its directory, name and headers."""
    lines = []
    for request in requests:
        lines.append(request.url)
        lines.append(f"  dir={request.path.parent}")
        lines.append(f"  out={request.path.name}")
        lines.extend(f"  header={header}" for header in request.headers)
    return "\n".join(lines) + "\n"


def control_file(path: Path) -> Path:
    """Where aria2c notes which pieces of `path` it has; there until the file is complete."""
    return path.with_name(path.name + ".aria2")


def can_resume(path: Path, size: int) -> bool:
    """True when the control file of `path` is whole and is about a file of `size` bytes.

    A disk that filled up, or a power cut, leaves a cut-off one, at which aria2c would stop each time. The layout is the
    one of aria2's manual, "Control File": numbers in network order, the pieces in flight last.
    """
    try:
        raw = control_file(path).read_bytes()
        version, _, hash_length = struct.unpack_from(">HII", raw, 0)
        at = 10 + hash_length
        _, total, _, bits = struct.unpack_from(">IQQI", raw, at)
        at += 24 + bits
        (pieces,) = struct.unpack_from(">I", raw, at)
        at += 4
        for _ in range(pieces):
            _, _, bits = struct.unpack_from(">III", raw, at)
            at += 12 + bits
    except (OSError, struct.error):
        return False
    return bool(version == 1 and total == size and at == len(raw))


def on_disk(request: Request) -> int:
    """Bytes of a file that are certainly there: all when complete, else what is allocated (partials are sparse)."""
    try:
        info = request.path.stat()
    except OSError:
        return 0
    return min(info.st_blocks * 512 if control_file(request.path).exists() else info.st_size, request.size)


def fetch(
    requests: list[Request],
    tick: Callable[[int], None],
    complete: Callable[[Path], None],
    keep_fds: tuple[int, ...] = (),
    head: bool = False,
    limit: int | None = None,
) -> Outcome:
    """Run aria2c once over `requests`.

    `tick` gets the bytes present so far, about once a second; `complete` gets each file when its last byte is there.

    The input goes through a pipe: no token reaches argv, the environment or the disk. `keep_fds` stay open in aria2c,
    so a lock on one of them holds until the last writer is gone, even when this process was killed.
    """
    command = ["aria2c", *options(os.getpid(), head, limit)]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=keep_fds,
            text=True,
        )
    except FileNotFoundError as error:
        raise HostError(
            "STAGE_NO_ARIA2", "aria2c is not installed on this host", "apt-get install aria2", COULD_NOT_RUN
        ) from error
    assert process.stdin is not None and process.stdout is not None  # noqa: S101  both are pipes
    try:
        process.stdin.write(input_lines(requests))
        process.stdin.close()
        with _Watchdog(process) as watchdog:
            faults = _follow(process.stdout, requests, watchdog.watched(tick), complete)
            status = process.wait()
        if watchdog.fired:
            faults[2] = Fault("", f"nothing came for {STALL_S:.0f} s")
        return Outcome(status, faults)
    finally:  # stopped half way: it saves where it is and ends
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)


class _Watchdog(threading.Thread):
    """Ends a process that says nothing new for STALL_S: its own time-outs cover a connection, not a hang of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        super().__init__(daemon=True)
        self.fired = False
        self._process = process
        self._seen = (-1, time.monotonic())
        self._over = threading.Event()

    def __enter__(self) -> _Watchdog:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def watched(self, tick: Callable[[int], None]) -> Callable[[int], None]:
        """`tick`, noticed here too."""

        def both(count: int) -> None:
            if count != self._seen[0]:
                self._seen = (count, time.monotonic())
            tick(count)

        return both

    def run(self) -> None:
        while not self._over.wait(min(1.0, STALL_S / 4)):
            if time.monotonic() - self._seen[1] > STALL_S:
                self.fired = True
                self._process.kill()
                return


def _follow(
    output: Iterable[str], requests: list[Request], tick: Callable[[int], None], complete: Callable[[Path], None]
) -> dict[int, Fault]:
    """Read what aria2c prints until it ends; return its errors by number."""
    done = {request.path: on_disk(request) for request in requests}
    sizes = {str(request.path): request.size for request in requests}
    faults: dict[int, Fault] = {}
    current = 0
    for text in output:
        if match := _ROW.match(text):
            current = int(match[1])
        elif text.startswith("FILE: ") and (name := text[6:].strip()) in sizes:
            done[Path(name)] = min(current, sizes[name])
        elif "Download complete: " in text and (name := text.split("Download complete: ")[1].strip()) in sizes:
            done[Path(name)] = sizes[name]
            complete(Path(name))
        elif match := _FAULT.search(text):
            number, known = int(match[1]), faults.get(int(match[1]), Fault("", ""))
            # What follows a question mark may be a signature.
            faults[number] = Fault((match[2] or known.url).split("?")[0], (match[3] or known.words).strip())
            continue
        else:
            continue
        tick(sum(done.values()))
    return faults
