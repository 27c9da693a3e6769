"""One progress printer for all long work of the lab: phase, amount, rate, time left; never silent for 15 s."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import TextIO

HEARTBEAT_S = 15.0
BEAT_S = 1.0
_LINE = threading.Lock()
_UNITS = ("B", "kB", "MB", "GB", "TB")


def human(amount: float) -> str:
    """Bytes in decimal units with three significant digits: 1536 → '1.54 kB'."""
    for unit in _UNITS:
        if amount < 999.5 or unit == _UNITS[-1]:
            return f"{amount:.3g} {unit}"
        amount /= 1000
    raise AssertionError


def clock(seconds: float) -> str:
    """Seconds as m:ss."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Progress:
    """Says on `stream` (default stderr) what one piece of work is doing; a context manager.

    A new phase is a line at once. An amount is a line at most every `every` seconds (2 on a terminal, 10 elsewhere).
    When nothing was said for 15 s, a heartbeat repeats where the work stands. Several may speak at once from threads.
    """

    def __init__(self, what: str, stream: TextIO | None = None, every: float | None = None) -> None:
        self.what = what
        self.stream = stream or sys.stderr
        self.every = every if every is not None else (2.0 if self.stream.isatty() else 10.0)
        self.started = self.said = time.monotonic()
        self.text, self.amount = "", ""
        self._phase_at, self._phase_done = self.started, 0.0
        self._over = threading.Event()

    def __enter__(self) -> Progress:
        threading.Thread(target=self._beat, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()

    def phase(self, text: str) -> None:
        """Begin a phase."""
        self.text, self.amount = text, ""
        self._phase_at, self._phase_done = time.monotonic(), -1.0
        self._say(text)

    def update(self, done: float, total: float = 0.0, unit: str = "bytes") -> None:
        """Report `done` of `total` (0 = unknown), in bytes or in things called `unit`."""
        now = time.monotonic()
        if self._phase_done < 0:  # what was there before this run is not part of its rate
            self._phase_at, self._phase_done = now, done
        rate = (done - self._phase_done) / max(now - self._phase_at, 0.1)
        show = human if unit == "bytes" else (lambda n: f"{n:.0f}")
        self.amount = show(done) + (f" of {show(total)}" if total else "") + ("" if unit == "bytes" else f" {unit}")
        if unit == "bytes" and rate > 0:
            self.amount += f", {human(rate)}/s"
        if total and rate > 0 and done < total:
            self.amount += f", {clock((total - done) / rate)} left"
        if now - self.said >= self.every:
            self._say(f"{self.text}: {self.amount}")

    def detail(self, text: str) -> None:
        """A sign of life from below (a log line): shown with the usual restraint."""
        self.amount = text
        if time.monotonic() - self.said >= self.every:
            self._say(f"{self.text}: {text}")

    def done(self, text: str) -> None:
        """The last word, with the time it took."""
        self._over.set()
        self._say(f"{text} ({clock(time.monotonic() - self.started)})")

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S):
            now = time.monotonic()
            if now - self.said >= HEARTBEAT_S - BEAT_S:
                self._say(
                    f"{self.text}{': ' + self.amount if self.amount else ''} … {clock(now - self._phase_at)} so far"
                )

    def _say(self, text: str) -> None:
        with _LINE:
            self.said = time.monotonic()
            print(f"[{self.what}] {text}", file=self.stream, flush=True)
