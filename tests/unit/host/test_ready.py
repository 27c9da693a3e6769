"""Readiness against a small engine that comes up in steps, and Docker's API on a socket of our own."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from specrig.host import ready
from specrig.host.errors import HostError

from .docker import Docker

Answer = Callable[[str, dict[str, Any] | None, str | None], tuple[int, Any]]
TOKEN = {"choices": [{"text": " 4"}], "usage": {"completion_tokens": 1}}


class Engine:
    def __init__(self, answer: Answer) -> None:
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: object) -> None:
                pass

            def reply(self, body: dict[str, Any] | None) -> None:
                status, value = answer(self.path, body, self.headers.get("Authorization"))
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self) -> None:
                self.reply(None)

            def do_POST(self) -> None:
                self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()


@pytest.fixture
def engine() -> Iterator[Callable[[Answer], str]]:
    made: list[Engine] = []

    def make(answer: Answer) -> str:
        made.append(Engine(answer))
        return made[-1].url

    yield make
    for one in made:
        one.server.shutdown()
        one.server.server_close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready, "POLL_S", 0.02)


def refused(code: str, *args: Any, **more: Any) -> HostError:
    with pytest.raises(HostError) as caught:
        ready.ready(*args, **more)
    assert caught.value.code == code, caught.value
    return caught.value


def test_ready_is_a_completion_and_not_a_green_health(
    engine: Callable[[Answer], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "key"
    key.write_text("k-123\n")
    calls: list[str] = []

    def answer(path: str, body: dict[str, Any] | None, authorization: str | None) -> tuple[int, Any]:
        calls.append(path)
        if path == "/health":
            return (503 if len(calls) < 3 else 200), {}
        assert authorization == "Bearer k-123"
        assert body is not None and body["model"] == "m" and body["max_tokens"] == 1
        if calls.count("/v1/completions") < 3:
            return 500, {"error": "engine is warming"}
        return 200, TOKEN

    result = ready.ready(engine(answer), "m", 20, key)
    assert result["ready"] and set(result["phases"]) == {"loading", "warming"}
    printed = capsys.readouterr().out
    assert [line.split(",")[0] for line in printed.splitlines()] == [
        "specrig: loading",
        "specrig: warming",
        "specrig: ready",
    ]
    assert "k-123" not in printed


def test_without_a_model_health_is_enough(engine: Callable[[Answer], str]) -> None:
    asked: list[str] = []

    def answer(path: str, body: dict[str, Any] | None, key: str | None) -> tuple[int, Any]:
        asked.append(path)
        return (503 if len(asked) < 3 else 200), {"status": True}

    assert ready.ready(engine(answer), None, 10)["ready"]
    assert asked == ["/health"] * 3


def test_waits_for_the_port_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    error = refused("READY_TIMEOUT", "http://127.0.0.1:1", "m", 0.2)
    assert "waiting for port" in error.cause and "waiting for port" in capsys.readouterr().out


def test_a_wrong_key_and_a_wrong_name_end_at_once(engine: Callable[[Answer], str]) -> None:
    url = engine(lambda path, *_: (200, {}) if path == "/health" else (401, {}))
    refused("READY_KEY", url, "m", 20)

    def other(path: str, *_: Any) -> tuple[int, Any]:
        return {"/health": (200, {}), "/v1/models": (200, {"data": [{"id": "chat"}]})}.get(path, (404, {}))

    assert "chat" in refused("READY_MODEL", engine(other), "m", 20).cause


def test_an_answer_without_a_token_is_not_ready(engine: Callable[[Answer], str]) -> None:
    url = engine(lambda path, *_: (200, {"choices": [], "usage": {"completion_tokens": 0}}))
    assert "no token" in refused("READY_TIMEOUT", url, "m", 3).cause


def test_a_container_that_ended_is_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Docker(tmp_path, monkeypatch) as docker:
        docker.containers["c"] = {"State": {"Status": "exited", "ExitCode": 137, "OOMKilled": True}}
        start = time.monotonic()
        error = refused("READY_GONE", "http://127.0.0.1:1", "m", 20, container="c")
        assert "137" in error.cause and "memory" in error.cause and time.monotonic() - start < 2


def test_a_container_that_is_removed_is_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Docker(tmp_path, monkeypatch) as docker:
        docker.containers["c"] = {"State": {"Status": "running"}}
        threading.Timer(0.3, docker.containers.clear).start()
        assert "removed" in refused("READY_GONE", "http://127.0.0.1:1", "m", 20, container="c").cause
        monkeypatch.setattr(ready, "APPEAR_S", 0.1)
        assert "appear" in refused("READY_GONE", "http://127.0.0.1:1", "m", 20, container="other").cause


def test_a_main_process_that_ended_is_the_cause() -> None:
    assert "4194305" in refused("READY_GONE", "http://127.0.0.1:1", "m", 20, main_pid=4194305).cause


def test_an_empty_key_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("\n")
    refused("READY_KEY", "http://127.0.0.1:1", "m", 1, tmp_path / "key")
