"""One streamed completion, and what the server itself says of its drafts.

Words as in docs/bench.md: decode t/s = (completion_tokens - 1) / (t_last - t_first), tokens from the server's usage; α = accepted / drafted tokens;
mean acceptance length = 1 + accepted / drafts. What each engine says of them, and where: host/acceptance.py.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from specrig.console import CannotRun
from specrig.host import acceptance
from specrig.host.acceptance import Acceptance

TIMEOUT_S = 600


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI-compatible server: base URL without /v1, served model name, API key or None, where its acceptance is read (the plan's `metrics`)."""

    url: str
    model: str
    key: str | None = None
    metrics: Mapping[str, str] = field(default_factory=dict)

    def open(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Send a request; a refusal carries the server's own words."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        request = urllib.request.Request(self.url + path, json.dumps(body).encode() if body else None, headers)  # noqa: S310 - the caller's own server
        try:
            return urllib.request.urlopen(request, timeout=TIMEOUT_S)  # noqa: S310
        except urllib.error.HTTPError as error:
            raise CannotRun(
                f"{self.url}{path} answered {error.code}: {error.read()[:300].decode(errors='replace')}",
                "./rig status",
                "ENDPOINT",
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise CannotRun(f"{self.url}{path} cannot be reached: {error}", "./rig status", "ENDPOINT") from error


@dataclass(frozen=True)
class Completion:
    """A finished completion. Times in seconds."""

    text: str
    tokens: int  # completion tokens, as the server counted them
    ttft: float  # request sent to first text, reasoning text included
    decode_tps: float  # tokens per second after the first one


def complete(
    server: Endpoint, prompt: str, max_tokens: int, show: Callable[[str], None] = lambda _: None
) -> Completion:
    """Stream one greedy chat completion of exactly `max_tokens`; `show` gets each piece of text as it comes."""
    body = {
        "model": server.model, "messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens, "temperature": 0,
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    sent, first, last, tokens, text = time.monotonic(), 0.0, 0.0, 0, ""
    try:
        with server.open("/v1/chat/completions", body) as stream:
            for line in stream:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:  # the status was sent long before
                    raise CannotRun(
                        f"the server gave up: {json.dumps(chunk['error'])[:300]}", "./rig status", "ENDPOINT"
                    )
                tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
                for choice in chunk.get("choices", []):
                    delta = choice["delta"]
                    reasoning = delta.get("reasoning") or delta.get("reasoning_content") or ""
                    if piece := reasoning + (delta.get("content") or ""):
                        last = time.monotonic()
                        first = first or last
                        text += piece
                        show(piece)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise CannotRun(f"the completion broke off: {error!r}", "./rig status", "ENDPOINT") from error
    if not text or not tokens:
        raise CannotRun(
            f"the completion ended with {len(text)} characters and {tokens} tokens counted by the server",
            "./rig status; the server must report usage (stream_options.include_usage)",
            "ENDPOINT",
        )
    return Completion(text, tokens, first - sent, (tokens - 1) / (last - first) if last > first else 0.0)


def speculation(server: Endpoint) -> Acceptance:
    """What the engine says of its drafts now; unknown where it says nothing."""
    path = server.metrics.get("path", "/metrics")
    try:
        with server.open(path) as page:
            return acceptance.read(page.read().decode(), server.metrics)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise CannotRun(f"{path} of {server.url} can not be read: {error!r}", "./rig status", "ENDPOINT") from error


def since(server: Endpoint, before: Acceptance) -> Acceptance:
    """What was drafted after the reading `before`; where the engine counts nothing, what it says now.

    A counter that went back means that the engine restarted in between: CannotRun.
    """
    now = speculation(server)
    if server.metrics.get("kind") != "counters":
        return now
    moved = now.since(before)
    if moved.drafted is None and now.drafted is not None and before.drafted is not None:
        raise CannotRun(
            "the engine restarted during the measurement: its counters went back", "measure again", "COUNTER_RESET"
        )
    return moved
