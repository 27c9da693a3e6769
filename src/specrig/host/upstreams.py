"""The rigs behind a gateway: which are up, which is the least busy, and since when nothing was heard of one."""

from __future__ import annotations

import http.client
import json
import math
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from specrig.host import ready
from specrig.host.errors import HostError
from specrig.host.probe import Watch
from specrig.host.progress import write_json

CONFIG = Path("/etc/specrig/gateway/relay.json")
DRAINED = Path("/var/lib/specrig-gateway/drained.json")
# Failures in a row that take a rig out; one may be a hiccup. A refused connection of a request does it at once.
FAILURES = 2
AGAIN_S = 1.0


@dataclass(eq=False)
class Upstream:
    """One service of one rig. Times are `time.monotonic()`; `up` is None until the first probe."""

    rig: str
    service: str
    model: str
    url: str
    key_file: Path | None
    # What shows that it works (`samples` of its metrics page); where nothing does, how long it may be silent with requests of ours, in seconds.
    metrics_path: str = ""
    progress: tuple[str, ...] = ()
    patience_s: float = 0.0
    up: bool | None = None
    why: str = "not probed yet"
    since: float = field(default_factory=time.monotonic)
    probe_s: float | None = None
    heard: float = -math.inf
    last: float = 0.0
    answered: int = 0
    lost: int = 0
    running: set[threading.Event] = field(default_factory=set)
    kicked: threading.Event = field(default_factory=threading.Event)
    gone: bool = False

    @property
    def name(self) -> str:
        """As people see it."""
        return f"{self.rig}/{self.service}"

    @property
    def address(self) -> tuple[str, int]:
        """Host and port to connect to."""
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or 80

    def key(self) -> str | None:
        """The rig's API key, read each time: it may have been replaced."""
        return ready.read_key(self.key_file)


def read_drained(path: Path = DRAINED) -> set[str]:
    """Rigs that get no new requests; what cannot be read drains nothing."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return set()
    return {str(name) for name in value} if isinstance(value, list) else set()


def set_drained(rig: str, on: bool, path: Path = DRAINED) -> bool:
    """Note that `rig` is drained, or no longer; returns whether that is new."""
    before = read_drained(path)
    after = before | {rig} if on else before - {rig}
    if after != before:
        write_json(path, sorted(after), mode=0o644)
    return after != before


class Fleet:
    """All upstreams. Thread-safe; `changed` is notified when a request may go somewhere that it could not go before."""

    def __init__(self, config: Path = CONFIG, drained: Path = DRAINED) -> None:
        self.changed = threading.Condition()
        self.upstreams: list[Upstream] = []
        self.models: dict[str, dict[str, Any]] = {}
        self.settings: dict[str, Any] = {}
        self.drained: set[str] = set()
        self._files = (config, drained)
        self._stamps: tuple[Any, ...] = ()

    def refresh(self) -> list[Upstream]:
        """Read the configuration and what is drained, when they have changed; returns upstreams that are new.

        What is known of an upstream that stays is kept, and so are its requests.
        """
        config, drained = self._files
        stamps = tuple(_stamp(path) for path in self._files)
        if stamps == self._stamps:
            return []
        told = json.loads(config.read_text())
        fresh: list[Upstream] = []
        with self.changed:
            old = {(u.rig, u.service, u.model, u.url): u for u in self.upstreams}
            found = []
            for pool in told["pools"]:
                for row in pool["upstreams"]:
                    key = (row["rig"], row["service"], pool["model"], row["url"])
                    one = old.pop(key, None)
                    if one is None:
                        one = Upstream(*key, key_file=None)
                        fresh.append(one)
                    one.key_file = Path(row["key_file"]) if row["key_file"] else None
                    one.metrics_path, one.progress = row.get("metrics_path", ""), tuple(row.get("progress", ()))
                    one.patience_s = float(row.get("patience_s", 0))
                    found.append(one)
            for one in old.values():
                one.gone = True
                one.kicked.set()
            self.upstreams = found
            self.models = {pool["model"]: pool for pool in told["pools"]}
            self.settings, self.drained, self._stamps = told, read_drained(drained), stamps
            self.changed.notify_all()
        return fresh

    def take(self, model: str, tried: Iterable[Upstream], until: float) -> Upstream | None:
        """The least busy upstream of `model` that is up and not drained, one that was not tried before if there is one.

        Waits for one until the time `until`. The caller gives it back with `give`.
        """
        tried = list(tried)
        with self.changed:
            while True:
                able = [
                    u for u in self.upstreams if u.model == model and u.up is not False and u.rig not in self.drained
                ]
                if able:
                    best = min(able, key=lambda u: (tried.count(u), len(u.running), u.last))
                    best.last = time.monotonic()
                    return best
                left = until - time.monotonic()
                if left <= 0:
                    return None
                self.changed.wait(min(left, 1.0))

    def mark(self, upstream: Upstream, up: bool, why: str = "") -> bool:
        """Note what is known of `upstream`; returns whether that is news. One that went down lets go of what has not begun."""
        with self.changed:
            news = upstream.up is not up
            upstream.why = why
            if news:
                upstream.up, upstream.since = up, time.monotonic()
                if not up:
                    for cut in upstream.running:
                        cut.set()
                self.changed.notify_all()
        if news:
            print(f"specrig: {upstream.name} is {'up' if up else 'down'}" + (f": {why}" if why else ""), flush=True)
        return news

    def state(self) -> dict[str, Any]:
        """What a person asks for. Seconds and counts; no keys."""
        now = time.monotonic()
        with self.changed:
            return {
                "upstreams": [
                    {
                        "rig": u.rig,
                        "service": u.service,
                        "model": u.model,
                        "url": u.url,
                        "state": "drained"
                        if u.rig in self.drained
                        else {None: "unknown", True: "up", False: "down"}[u.up],
                        "up": u.up,
                        "why": u.why,
                        "for_s": round(now - u.since, 1),
                        "probe_s": u.probe_s,
                        "running": len(u.running),
                        "answered": u.answered,
                        "lost": u.lost,
                    }
                    for u in self.upstreams
                ],
                "drained": sorted(self.drained),
            }


def _stamp(path: Path) -> Any:
    try:
        info = path.stat()
    except OSError:
        return None
    return info.st_mtime_ns, info.st_size, info.st_ino


# -- the probe -------------------------------------------------------------------------------------------------------


def probe(upstream: Upstream, timeout: float) -> tuple[str, str]:
    """One real token: ("up" | "error" | "hung", why). A busy rig that answers late but works for others is up."""
    began = time.monotonic()
    try:
        key = upstream.key()
        watch = Watch(upstream.url, upstream.metrics_path, key, upstream.progress, timeout)
        words = ready.complete_one(upstream.url, upstream.model, key, timeout)
    except socket.timeout:  # TimeoutError is the same only from Python 3.10 on
        if upstream.heard > began:
            return "up", "busy: no answer to the probe, but to others"
        if watch.moved():
            return "up", "busy: no answer to the probe, but it works: its counters move"
        if upstream.running and time.monotonic() - upstream.heard < upstream.patience_s:
            return "up", "busy: no answer to the probe, and requests run there"
        return "hung", f"no token within {timeout:.0f} s"
    except HostError as error:
        return "error", f"{error.code}: {error.cause}"
    except (OSError, http.client.HTTPException) as error:
        return "error", str(error) or type(error).__name__
    upstream.heard = time.monotonic()
    upstream.probe_s = round(time.monotonic() - began, 3)
    return ("error", words) if words else ("up", "")


def watch(fleet: Fleet, upstream: Upstream, stop: threading.Event) -> None:
    """Probe `upstream` for ever; take it out when it hangs or fails twice, and back in with its first token."""
    failures = 0
    while not (stop.is_set() or upstream.gone):
        upstream.kicked.clear()
        verdict, why = probe(upstream, float(fleet.settings.get("probe_timeout_s", 30)))
        failures = 0 if verdict == "up" else failures + 1
        if verdict == "up":
            fleet.mark(upstream, True, why)
        elif verdict == "hung" or failures >= FAILURES or upstream.up is not True:
            fleet.mark(upstream, False, why)
        pause = float(fleet.settings.get("probe_s", 10))
        upstream.kicked.wait(min(AGAIN_S, pause) if verdict != "up" else pause)
