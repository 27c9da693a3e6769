"""Asks a running engine for one token. An engine that is busy is not hung.

A busy one shows it: samples of its metrics page move. Which ones do so before an answer ends is the engine's affair, and said by the plan
(`progress`). Of an engine that has none the probe waits its turn, for as long as the health page answers and no longer than `patience`.
"""

from __future__ import annotations

import http.client
import socket
from collections.abc import Collection

from specrig.host import acceptance, ready
from specrig.host.background import Background
from specrig.host.errors import HostError

OK, BUSY, FAILED, HUNG = "ok", "busy", "failed", "hung"
PAGE_S = 5.0


class Watch:
    """Reads what shows that an engine works, beside a request that begins now. Some answer for their metrics between two steps only."""

    def __init__(self, url: str, path: str, key: str | None, names: Collection[str], timeout: float) -> None:
        self._asked = url, path, key, timeout
        self._names = frozenset(names) if path else frozenset()
        self._before = Background(self._read)

    def _read(self) -> dict[str, float]:
        """The samples; empty when there is no page or none of them is on it."""
        url, path, key, timeout = self._asked
        if not self._names:
            return {}
        status, page = ready.call(url, path, key=key, timeout=timeout)
        return {n: value for n, value in acceptance.samples(page).items() if n in self._names and status == 200}

    def moved(self, grace: float = 0) -> bool:
        """Whether they are not what they were when the request began; False when that was not told within `grace` seconds from now."""
        if not self._before.wait(grace) or not isinstance(self._before.result, dict) or not self._before.result:
            return False
        try:
            after = self._read()
        except (OSError, http.client.HTTPException):
            return False
        return bool(after) and after != self._before.result


def probe(
    url: str,
    model: str,
    timeout: float,
    key: str | None,
    completion_path: str,
    *,
    metrics_path: str = "",
    progress: Collection[str] = (),
    health_path: str = "",
    patience: float = 0,
) -> tuple[str, str]:
    """(ok | busy | failed | hung, why) of one real completion. Never raises. Hung: it had all its `patience`."""
    watch = Watch(url, metrics_path, key, progress, timeout)
    try:
        if patience > timeout:
            why = _patiently(url, model, timeout, key, completion_path, health_path, patience)
        else:
            why = ready.complete_one(url, model, key, timeout, completion_path)
    except HostError as error:
        return FAILED, error.cause
    except socket.timeout:
        why = f"no token within {max(timeout, patience):.0f} s"
        if patience > timeout:
            return HUNG, why
    except (OSError, http.client.HTTPException) as error:
        return FAILED, f"no answer: {error or type(error).__name__}"
    if why is None:
        return OK, ""
    if why.startswith("HTTP 429"):
        return BUSY, "the engine's queue is full"
    if watch.moved(PAGE_S):
        return BUSY, f"{why}, and others get tokens"
    return FAILED, why


def _patiently(
    url: str, model: str, timeout: float, key: str | None, completion_path: str, health_path: str, patience: float
) -> str | None:
    """As ready.complete_one within `patience`: asked again, a request would lose its place in the engine's queue."""
    asked = Background(lambda: ready.complete_one(url, model, key, patience, completion_path))
    while not asked.wait(timeout):
        try:
            status, _ = ready.call(url, health_path, key=key, timeout=min(timeout, PAGE_S))
        except (OSError, http.client.HTTPException) as error:
            return f"no token within {timeout:.0f} s, nor {health_path}: {error or type(error).__name__}"
        if status != 200:
            return f"no token within {timeout:.0f} s, and {health_path} says HTTP {status}"
    if isinstance(asked.result, Exception):
        raise asked.result
    return None if asked.result is None else str(asked.result)
