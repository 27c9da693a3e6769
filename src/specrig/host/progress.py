"""Progress of a long verb: phase, amount, rate, time left; in a JSON file for `job poll`, or as lines for a person."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any

# The rate is the mean over this many seconds: long enough to be steady, short enough to show a stall.
WINDOW_S = 10.0
BEAT_S = 1.0  # the document is written this often, whatever the work says
STARTING = "starting"


def amount(count: float) -> str:
    """Bytes as people say them, decimal: `9.9 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit in ("B", "kB") or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def clock(seconds: float) -> str:
    """Seconds as `0:32` or `1:02:03`."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def line(state: dict[str, Any]) -> str:
    """One line for a person from a progress document: `download 3.1/9.9 GB · 210 MB/s · ETA 0:32`."""
    parts = [str(state.get("phase") or "")]
    done, total = state.get("done"), state.get("total")
    if done is not None and state.get("unit", "B") == "B":
        whole = amount(total) if total else ""
        part = amount(done)
        if total:
            number, _, unit = part.partition(" ")
            part = f"{number}/{whole}" if whole.endswith(" " + unit) else f"{part}/{whole}"
        parts[0] = f"{parts[0]} {part}".strip()
        if state.get("rate"):
            parts.append(f"{amount(state['rate'])}/s")
        if state.get("eta_s") is not None:
            parts.append(f"ETA {clock(state['eta_s'])}")
    elif state.get("elapsed_s") is not None:
        parts.append(clock(state["elapsed_s"]))
    if state.get("message"):
        parts.append(str(state["message"]))
    return " · ".join(p for p in parts if p)


class Progress:
    """Where a verb says how far it is. A thread writes the state every second, so a long call is not silence.

    `path` is the JSON file of a job (replaced atomically, 0600); without one, lines go to standard error.
    """

    def __init__(self, path: Path | None = None, quiet: bool = False) -> None:
        self._path = path
        self._quiet = quiet
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._samples: deque[tuple[float, float]] = deque()
        self._state: dict[str, Any] = {"phase": STARTING, "done": None, "total": None, "unit": "B", "message": ""}
        self._since = time.monotonic()
        self._printed = ("", 0.0)
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Progress:
        self._write()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(timeout=5)

    def update(self, phase: str, done: float | None = None, total: float | None = None, message: str = "") -> None:
        """Set the state. Bytes when `done` is given; otherwise a phase with its running time."""
        now = time.monotonic()
        with self._lock:
            changed = phase != self._state["phase"]
            if changed:
                self._samples.clear()
                self._since = now
            self._state.update(phase=phase, done=done, total=total, message=message)
            if done is not None:
                self._samples.append((now, done))
                while len(self._samples) > 2 and now - self._samples[0][0] > WINDOW_S:
                    self._samples.popleft()
        if changed:
            self._write()

    def snapshot(self) -> dict[str, Any]:
        """The progress document: {phase, done, total, unit, rate, eta_s, elapsed_s, message, at}."""
        now = time.monotonic()
        with self._lock:
            state = dict(self._state)
            rate = None
            if len(self._samples) >= 2:
                (begin, first), (_, last) = self._samples[0], self._samples[-1]
                # Measured up to now, not up to the last sample: a stalled transfer's rate must fall.
                rate = max(0.0, (last - first) / max(now - begin, 0.001))
            left = (state["total"] or 0) - (state["done"] or 0)
            state["rate"] = rate and round(rate)
            state["eta_s"] = round(left / rate) if rate and left >= 0 and state["total"] else None
            state["elapsed_s"] = round(now - self._since)
        state["at"] = round(time.time(), 1)
        return state

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_S):
            self._write()

    def _write(self) -> None:
        state = self.snapshot()
        if self._path is not None:
            with contextlib.suppress(OSError):  # progress must never be what breaks the work
                write_json(self._path, state)
        elif not self._quiet and self._state["phase"] != STARTING:
            text, now = line(state), time.monotonic()
            if state["phase"] != self._printed[0] or now - self._printed[1] >= 2.0:
                print(text, file=sys.stderr, flush=True)
                self._printed = (state["phase"], now)


def write_json(path: Path, value: Any, mode: int = 0o600) -> None:
    """Replace `path` atomically with `value` as sorted JSON (no fsync: for state that a reboot may lose)."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(handle, "w") as out:
        json.dump(value, out, sort_keys=True)
    scratch.replace(path)


def sync(path: Path) -> None:
    """Have a file, or the names in a directory, on the disk before going on."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
