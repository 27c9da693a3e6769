"""Runs an engine as a unit's main process: waits for its turn and its memory, says how far it is, and asks it for a token now and then.

The command is `docker run` in the foreground; the engine's lines go on to the journal. What it does is said to systemd (`systemctl
status`) and in <runtime directory>/state.json. An engine that ends, does not come up, or stops giving tokens ends this process;
systemd starts it again, each time after a longer pause, until the budget of tries is spent. Nothing here reads the wall clock: it may
jump.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from specrig.host import docker_api, gate, machine, probe, ready, turns, units
from specrig.host.background import Background
from specrig.host.errors import HostError
from specrig.host.phases import phase_of
from specrig.host.progress import clock as as_clock
from specrig.host.progress import write_json

TICK_S = 0.5
# Exit statuses. 2 is how an argument parser says no; 3 is ours: enough tries. systemd starts neither again.
STOPPED, FAILED, REFUSED, GAVE_UP = 0, 1, 2, 3
# The engine's own: its parser said no; the image lacks the command, or it cannot be run.
NO_USE_STATUS = (2, 126, 127)
# Before the second, third… try, in seconds, on top of the unit's RestartSec.
DELAYS_S = (3.0, 9.0, 27.0, 81.0, 243.0)
# An engine that was ready this long has not failed "in a row" with the start before it.
STEADY_S = 600.0
# systemd waits this much longer each time we say that we live.
EXTEND_S, BEAT_S = 120, 10.0
WARM_TIMEOUT_S = 120.0
DIAGNOSIS_S, ASK_DOCKER_S = 30, 3.0
READY, DEGRADED = "ready", "degraded"


@dataclass(frozen=True)
class Settings:
    """What the unit says. Times in seconds, memory in MiB by index or UUID of a card."""

    name: str
    container: str
    url: str
    model: str
    command: list[str]
    key_file: Path | None = None
    health_path: str = "/health"
    completion_path: str = "/v1/completions"
    metrics_path: str = ""
    progress: tuple[str, ...] = ()  # samples there that move while the engine works
    plan_key: str = ""  # what the times of earlier starts are comparable by
    start_timeout: float = 900
    stop_timeout: int = 60
    vram: dict[str, int] = field(default_factory=dict)
    probe_interval: float = 60
    probe_timeout: float = 60
    probe_failures: int = 3
    patience: float = 0  # how long a probe may wait its turn where nothing can show that the engine works
    restarts: int = 5
    refused_words: tuple[str, ...] = ()  # how a line begins that says no to the command line


class End(Exception):
    """The service ends, with this exit status and cause."""

    def __init__(self, status: int, cause: str) -> None:
        super().__init__(cause)
        self.status, self.cause = status, cause


def notify(*words: str) -> None:
    """Tell systemd (sd_notify's protocol); nothing where there is no systemd to listen."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        out.sendto("\n".join(words).encode(), address)


def _directory(variable: str) -> Path | None:
    """The first directory that systemd made for the unit, or None."""
    first = os.environ.get(variable, "").split(":")[0]
    return Path(first) if first else None


def _read(path: Path | None) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text()) if path else {}
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _write(path: Path | None, value: dict[str, Any]) -> None:
    """Keep `value`, if that can be: a full disk must not end a service that runs."""
    if path is not None:
        with contextlib.suppress(OSError):
            write_json(path, value, 0o644)


class Report:
    """Where the service is, for systemd, the journal and `state.json`; and how long that took the last time."""

    def __init__(self, settings: Settings, now: Callable[[], float]) -> None:
        self._settings, self._now = settings, now
        self._file = (d / "state.json") if (d := _directory("RUNTIME_DIRECTORY")) else None
        self._history_file = (d / "start.json") if (d := _directory("STATE_DIRECTORY")) else None
        history = _read(self._history_file)
        # Times of another image or pair would mislead.
        self._history = history if history.get("key") == settings.plan_key else {}
        self._begin: float | None = None
        self._phases: list[tuple[str, float]] = []
        self._said = ("", "")
        self.phase, self.detail = "", ""
        self.extra: dict[str, Any] = {}

    def started(self) -> None:
        """The engine's start begins now: times count from here."""
        self._begin, self._phases = self._now(), []

    def finished(self) -> None:
        """The engine is ready: keep how long each phase took to come."""
        if self._begin is not None:
            seconds = round(self._now() - self._begin, 1)
            self.extra["start_s"] = seconds
            phases = [[name, round(at, 1)] for name, at in self._phases]
            _write(self._history_file, {"key": self._settings.plan_key, "seconds": seconds, "phases": phases})

    def eta(self) -> float | None:
        """Seconds until ready by the last start's times; None without one, or when it takes longer than that."""
        if self._begin is None or not self._history or not self._phases:
            return None
        name, at = self._phases[-1]
        then = {str(phase): float(when) for phase, when in reversed(self._history.get("phases") or [])}
        left = float(self._history["seconds"]) - then.get(name, at) - (self._now() - self._begin - at)
        return left if left > 0 else None

    def enter(self, phase: str, detail: str = "") -> None:
        """Say where the service is. A line in the journal for each new phase, a status for each change."""
        if self._begin is not None and phase != self.phase and phase not in (READY, DEGRADED):
            self._phases.append((phase, self._now() - self._begin))
        fresh = phase != self.phase
        self.phase, self.detail = phase, detail
        left = self.eta() if phase not in (READY, DEGRADED) else None
        text = ", ".join(part for part in (phase, detail) if part)
        # In steps of five seconds: each change is a message to systemd and a file.
        eta = f", about {as_clock(5 * round(left / 5))} left" if left and left >= 2.5 else ""
        if (text, eta) != self._said:
            if fresh or (phase == DEGRADED and text != self._said[0]):
                print(f"specrig: {text}{eta}", flush=True)
            self._said = (text, eta)
            notify(f"STATUS={text}{eta}")
            state = {"phase": phase, "detail": detail, "eta_s": round(left) if left else None, **self.extra}
            _write(self._file, state)


class Service:
    """One run of the engine."""

    def __init__(self, settings: Settings, now: Callable[[], float] = time.monotonic) -> None:
        self.settings, self.now = settings, now
        self.stop = threading.Event()
        self.report = Report(settings, now)
        self._lines: list[str] = []
        self._heard = threading.Lock()
        runtime = _directory("RUNTIME_DIRECTORY")
        self._tries_file = runtime / "tries.json" if runtime else None
        self._tries = 0
        self._ready_at: float | None = None
        self._no = ""  # the engine's line that refuses the command line
        self._child: subprocess.Popen[bytes] | None = None
        self._healthy = False
        self._key: str | None = None
        self._beat = -BEAT_S

    def run(self) -> int:
        """All of it; the exit status. `stop` ends it in good order."""
        try:
            self._turn()
            # Until it is ready, no other service of ours starts on its cards.
            with turns.take(self.settings.vram, self.settings.name, self._pause, self.report.enter):
                self._room()
                self._engine()
                self._until_ready()
            self._while_ready()
        except End as end:
            return self._ended(end)
        except HostError as error:
            return self._ended(End(FAILED, error.cause))
        return self._ended(End(STOPPED, "stopped"))

    # Before the engine.

    def _turn(self) -> None:
        """The pause before another try. systemd counts how often it has started us by itself; a person's start is a new first try."""
        with contextlib.suppress(HostError, IndexError, ValueError, KeyError):
            unit = f"specrig-{self.settings.name}.service"
            if os.environ.get("INVOCATION_ID") and int(units.show(unit)[0]["NRestarts"]) == 0:
                _write(self._tries_file, {})
        last = _read(self._tries_file)
        self._tries = int(last.get("tries") or 0)
        if not self._tries:
            return
        self.report.extra.update(tries=self._tries, last_failure=last.get("cause"))
        until = self.now() + DELAYS_S[min(self._tries, len(DELAYS_S)) - 1]
        while (left := until - self.now()) > 0:
            what = f"try {self._tries + 1} of {self.settings.restarts + 1} in {as_clock(left)}"
            self.report.enter("waiting", f"{what}: {last.get('cause')}")
            self._pause(min(left, 1.0))

    def _room(self) -> None:
        """The cards' memory has to be free, and still."""
        if not self.settings.vram:
            return

        def say(why: str) -> None:
            phase, _, detail = why.partition(": ")
            self.report.enter(phase, detail)

        def pause(seconds: float) -> bool:
            self._pause(seconds)
            return False

        if why := gate.wait(self.settings.vram, pause, say, self.now, machine.Machine()):
            raise End(FAILED, f"the engine was not started: {why}")

    def _pause(self, seconds: float) -> None:
        """Wait, and let systemd know that this is no hang. Raises End when we are to stop."""
        if self.now() - self._beat >= BEAT_S:
            self._beat = self.now()
            notify(f"EXTEND_TIMEOUT_USEC={EXTEND_S * 1_000_000}", "WATCHDOG=1")
        if self.stop.wait(seconds):
            raise End(STOPPED, "stopped")

    # The engine.

    def _engine(self) -> None:
        # The engine's own, for as long as it runs: a key that is written later is for the next start.
        self._key = ready.read_key(self.settings.key_file)
        self.report.started()
        self.report.enter("starting the engine")
        self._child = subprocess.Popen(
            self.settings.command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self._listener = threading.Thread(target=self._listen, args=(self._child.stdout,), daemon=True)
        self._listener.start()

    def _listen(self, output: IO[bytes]) -> None:
        """Hand the engine's output on, and keep its lines for `_hear`."""
        rest = ""
        while data := os.read(output.fileno(), 1 << 16):
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
            *whole, rest = re.split(r"[\r\n]+", (rest + data.decode(errors="replace"))[-(1 << 16) :])
            with self._heard:
                self._lines = (self._lines + whole)[-500:]

    def _hear(self) -> None:
        with self._heard:
            lines, self._lines = self._lines, []
        for line in lines:
            if self.settings.refused_words and line.startswith(self.settings.refused_words):
                self._no = line.strip()[:300]
            if found := phase_of(line):
                self.report.enter(*found)

    def _lives(self) -> None:
        """Raises End when the engine has ended by itself."""
        status = self._child.poll() if self._child else None
        if status is None:
            return
        cause = f"the engine ended with exit status {status}"
        with contextlib.suppress(HostError):
            # Docker may be on its way down, and wait for us to end before it comes up again: do not wait for it.
            found = docker_api.inspect_container(self.settings.container, ASK_DOCKER_S)
            if ((found or {}).get("State") or {}).get("OOMKilled"):
                cause = "the engine was killed: out of memory"
        if self._ready_at is None:
            cause += f" while {self.report.phase}"
            self._listener.join(1)
            self._hear()  # its last words
            if self._no:
                raise End(REFUSED, f"{cause}: {self._no}")
            if status in NO_USE_STATUS:
                raise End(REFUSED, f"{cause}: the same command line will not do better")
        raise End(FAILED, cause)

    def _until_ready(self) -> None:
        """Follow the engine's words until it is healthy and gives a token."""
        begin, asked = self.now(), None
        while True:
            self._pause(TICK_S)
            self._hear()
            self._lives()
            if self._healthy:
                self.report.enter("warming", "first token")
            else:
                self.report.enter(self.report.phase, self.report.detail)
            if self.now() - begin > self.settings.start_timeout:
                raise End(
                    FAILED,
                    f"the engine was not ready after {self.settings.start_timeout:.0f} s, while {self.report.phase}",
                )
            if asked is None:
                asked = Background(self._first_token)
            elif asked.done:
                if isinstance(asked.result, HostError):  # a wrong key, a model of another name: no use to wait
                    raise End(REFUSED, asked.result.cause)
                if asked.result is None:
                    break
                asked = None
        self._ready_at = self.now()
        self.report.finished()
        self.report.enter(READY)
        notify("READY=1")

    def _first_token(self) -> Any:
        """None once the engine has given a token; raises OSError or the like before that."""
        s = self.settings
        status, _ = ready.call(s.url, s.health_path, key=self._key, timeout=5)
        if status != 200:
            return f"{s.health_path} says HTTP {status}"
        self._healthy = True
        return ready.complete_one(s.url, s.model, self._key, WARM_TIMEOUT_S, s.completion_path)

    def _while_ready(self) -> None:
        """Ask for a token now and then; enough failures in a row end it."""
        s, failures, asked = self.settings, 0, None
        due = self.now() + s.probe_interval
        while True:
            self._pause(TICK_S)
            self._lives()
            if self._tries and self._ready_at is not None and self.now() - self._ready_at > STEADY_S:
                self._tries = 0
                self.report.extra.clear()
                _write(self._tries_file, {})
            if asked is None:
                if s.probe_interval and self.now() >= due:
                    asked = Background(self._probe)
                continue
            if not asked.done:
                continue
            outcome, why = asked.result if isinstance(asked.result, tuple) else (probe.FAILED, repr(asked.result))
            asked = None
            if outcome == probe.HUNG:
                raise End(FAILED, f"the engine gave no token: {why}")
            if outcome == probe.FAILED:
                failures += 1
                self.report.enter(DEGRADED, f"{why}, {failures} of {s.probe_failures} times")
                if failures >= s.probe_failures:
                    raise End(FAILED, f"the engine gave no token {failures} times in a row: {why}")
            else:
                failures = 0
                self.report.enter(READY, f"busy: {why}" if outcome == probe.BUSY else "")
            due = self.now() + (min(s.probe_interval, 10) if failures else s.probe_interval)

    def _probe(self) -> tuple[str, str]:
        s = self.settings
        return probe.probe(
            s.url,
            s.model,
            s.probe_timeout,
            self._key,
            s.completion_path,
            metrics_path=s.metrics_path,
            progress=s.progress,
            health_path=s.health_path,
            patience=s.patience,
        )

    # After it.

    def _ended(self, end: End) -> int:
        """Leave nothing running, say why, and decide whether systemd may try again."""
        if end.status == STOPPED:
            notify("STOPPING=1", "STATUS=stopping")
        child = self._child if self._child is not None and self._child.poll() is None else None
        if child and end.status != STOPPED and self._ready_at is not None:
            # What a hung engine looks like can only be seen before it is killed.
            self._run("systemctl", "start", f"specrig-diagnosis@{self.settings.name}.service", timeout=DIAGNOSIS_S)
        if child:
            grace = self.settings.stop_timeout if end.status == STOPPED else 5
            self._run("docker", "stop", "--time", str(grace), self.settings.container, timeout=grace + 20)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(5)
            child.kill()
        if end.status == STOPPED:
            return STOPPED
        self._tries += 1
        status, text = end.status, end.cause
        if status == FAILED and self._tries > self.settings.restarts:
            status, text = GAVE_UP, f"gave up after {self._tries} tries in a row; the last time {text}"
        _write(self._tries_file, {"tries": self._tries, "cause": end.cause})
        self.report.extra.update(tries=self._tries, last_failure=end.cause)
        self.report.enter("failed", text)
        return status

    def _run(self, *command: str, timeout: float) -> None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, check=False)


def run(settings: Settings) -> int:
    """Be the unit's main process; the exit status."""
    service = Service(settings)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: service.stop.set())
    return service.run()
