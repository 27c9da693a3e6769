"""The guard before an engine's pages: who is let in, and that nothing else of a request is touched."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from specrig.runner import ROOT

KEY = "an-example-of-a-key"
FILE = ROOT / "templates/usr/local/lib/specrig/specrig_guard.py"


@pytest.fixture(params=["VLLM_API_KEY", "APHRODITE_API_KEY"])
def guard(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The file as an engine imports it, with the key where that engine has it."""
    for name in ("VLLM_API_KEY", "APHRODITE_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(request.param, KEY)
    spec = importlib.util.spec_from_file_location("specrig_guard", FILE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module


def ask(guard: ModuleType, path: str, kind: str = "http", method: str = "GET", **headers: str) -> list[dict[str, Any]]:
    """What is sent back; the application streams two pieces."""
    sent: list[dict[str, Any]] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        assert scope is given
        for piece in (b"one", b"two"):
            await send({"type": "from the engine", "body": piece, "more_body": True})

    async def receive() -> dict[str, Any]:
        return {"type": f"{kind}.connect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    given: dict[str, Any] = {"type": kind, "path": path, "headers": pairs} | (
        {"method": method} if kind == "http" else {}
    )
    asyncio.run(guard.Guard(application)(given, receive, send))
    return sent


def let_in(sent: list[dict[str, Any]]) -> bool:
    return [message["body"] for message in sent if message["type"] == "from the engine"] == [b"one", b"two"]


@pytest.mark.parametrize(
    "path", ["/metrics", "/metrics/", "/version", "/v1/models", "/", "/health/", "/health/../metrics", "//health", ""]
)
def test_every_path_but_health_asks_for_the_key(guard: ModuleType, path: str) -> None:
    start, body = ask(guard, path)
    assert start["status"] == 401 and body["body"] == b'{"error":"Unauthorized"}'
    assert let_in(ask(guard, path, authorization=f"Bearer {KEY}"))


def test_health_is_open(guard: ModuleType) -> None:
    assert let_in(ask(guard, "/health"))


@pytest.mark.parametrize(
    "said",
    [
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        f"Basic {KEY}",
        KEY,
        f"Bearer {KEY}x",
        f"Bearer {KEY[:-1]}",
        "Bearer schlüssel",
    ],
)
def test_other_words_are_no_key(guard: ModuleType, said: str) -> None:
    assert ask(guard, "/metrics", authorization=said)[0]["status"] == 401


def test_the_scheme_has_no_case(guard: ModuleType) -> None:
    assert let_in(ask(guard, "/metrics", authorization=f"bearer {KEY}"))


def test_only_a_browsers_real_question_passes_without_a_key(guard: ModuleType) -> None:
    asked = {"origin": "http://editor.test", "access_control_request_method": "GET"}
    assert let_in(ask(guard, "/v1/models", method="OPTIONS", **asked))
    assert ask(guard, "/metrics", method="OPTIONS")[0]["status"] == 401
    assert ask(guard, "/metrics", method="GET", **asked)[0]["status"] == 401


def test_a_websocket_without_the_key_is_closed(guard: ModuleType) -> None:
    assert ask(guard, "/v1/realtime", "websocket") == [{"type": "websocket.close", "code": 1008}]
    assert let_in(ask(guard, "/v1/realtime", "websocket", authorization=f"Bearer {KEY}"))


def test_the_engines_own_start_and_end_pass(guard: ModuleType) -> None:
    assert let_in(ask(guard, "", "lifespan"))


def test_without_a_key_it_does_not_start(guard: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in guard.VARIABLES:
        monkeypatch.setenv(name, "")
    with pytest.raises(RuntimeError, match="VLLM_API_KEY"):
        guard.Guard(None)
