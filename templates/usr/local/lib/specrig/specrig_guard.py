"""Managed by specrig. Runs inside an engine as its `--middleware`: whoever asks for anything but /health has to show the key.

The engines' own check guards /v1 only; /metrics, /version, /tokenize and the like would answer to whoever reaches the port.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN = ("/health",)
# Where an engine finds its key: the wrapper with-api-key sets one of them.
VARIABLES = ("VLLM_API_KEY", "APHRODITE_API_KEY")
# What vLLM answers when its own check fails.
BODY = b'{"error":"Unauthorized"}'


class Guard:
    """ASGI, no more: what is let in passes through untouched, streams too."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._keys = [os.environ[name].encode() for name in VARIABLES if os.environ.get(name)]
        if not self._keys:  # it would have to let nobody in, or everybody
            raise RuntimeError(f"specrig_guard: none of {', '.join(VARIABLES)} is set")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or the server's start and end."""
        if scope["type"] == "lifespan" or scope["path"] in OPEN or _preflight(scope) or self._knows(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(BODY)).encode())]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": BODY})

    def _knows(self, scope: Scope) -> bool:
        kind, _, given = _header(scope, b"authorization").partition(b" ")
        same = [hmac.compare_digest(given.strip(), key) for key in self._keys]  # all of them: no early end
        return kind.lower() == b"bearer" and any(same)


def _preflight(scope: Scope) -> bool:
    """Whether a browser asks what it may ask: the engine answers that itself, before any path is looked at."""
    asked = _header(scope, b"origin") and _header(scope, b"access-control-request-method")
    return scope.get("method") == "OPTIONS" and bool(asked)


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for header, value in scope["headers"] if header == name), b"")
