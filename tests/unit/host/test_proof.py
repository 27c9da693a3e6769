"""Is it really speculating? Asked of a server that counts as engines count."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from specrig.host import proof
from specrig.host.acceptance import Acceptance
from specrig.host.errors import HostError
from specrig.plan.dialects import dialect

from .test_pull import Recorder

VLLM = dict(dialect("vllm", "0.32.0").metrics)


class Engine:
    """Each completion drafts `drafted` and accepts `accepted` tokens in `drafts` rounds; None: it has no such counters."""

    def __init__(self) -> None:
        self.step: tuple[int, int, int] | None = (10, 30, 12)
        self.sum = [1000, 5000, 700]  # what others asked for before
        self.keys: set[str] = set()
        self.status = 200
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: object) -> None:
                pass

            def reply(self, status: int, text: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def do_GET(self) -> None:
                names = ("drafts", "draft_tokens", "accepted_tokens")
                rows = [
                    f'vllm:spec_decode_num_{n}_total{{engine="0"}} {v}.0'
                    for n, v in zip(names, engine.sum, strict=True)
                ]
                self.reply(200, "\n".join(rows if engine.step else ["vllm:prompt_tokens_total 3.0"]) + "\n")

            def do_POST(self) -> None:
                engine.keys.add(self.headers.get("Authorization", ""))
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                assert body["temperature"] == 0 and body["model"] == "chat"
                for n, more in enumerate(engine.step or ()):
                    engine.sum[n] += more
                self.reply(engine.status, '{"usage": {"completion_tokens": 48}}' if engine.status == 200 else "dead")

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]

    def service(self, **more: Any) -> dict[str, Any]:
        ports = [{"bind": "127.0.0.1", "port": self.port}]
        return {
            "name": "chat",
            "unit": "specrig-chat.service",
            "served_name": "chat",
            "k": 3,
            "metrics": VLLM,
            "ports": ports,
            **more,
        }


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr(proof, "SETTLE_S", 0.1)
    monkeypatch.setattr(proof, "POLL_S", 0.01)
    one = Engine()
    threading.Thread(target=one.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield one
    one.server.shutdown()
    one.server.server_close()


def test_acceptance_is_of_the_prompts_alone(engine: Engine, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    found = proof.prove(engine.service(), key, Recorder())
    assert (found["drafted"], found["accepted"], found["acceptance"], found["mean_length"]) == (120, 48, 0.4, 2.2)
    assert found["measured"] and not found["short"] and engine.keys == {"Bearer secret"}


def test_a_draft_that_is_not_used_is_seen(engine: Engine) -> None:
    engine.step = (0, 0, 0)
    assert "no token was drafted" in proof.prove(engine.service(), None, Recorder())["cause"]
    engine.step = None  # the counters are not even there
    assert "no token was drafted" in proof.prove(engine.service(), None, Recorder())["cause"]


def test_off_means_exactly_none(engine: Engine) -> None:
    assert "switched off, and 120 tokens were drafted" in proof.prove(engine.service(k=0), None, Recorder())["cause"]
    engine.step = None
    found = proof.prove(engine.service(k=0), None, Recorder())
    assert (found["drafted"], found["short"]) == (0, False)


def test_a_bound_is_held(engine: Engine) -> None:
    assert proof.prove(engine.service(min_acceptance=0.4), None, Recorder())["short"] is False
    assert "0.40 of the drafted" in proof.prove(engine.service(min_acceptance=0.41), None, Recorder())["cause"]


def test_an_engine_that_says_nothing_is_not_accused(engine: Engine) -> None:
    found = proof.prove(engine.service(metrics={"kind": "none"}, min_acceptance=0.5), None, Recorder())
    assert (found["measured"], found["short"]) == (False, False)


def test_a_prompt_that_is_not_answered_is_a_failure(engine: Engine) -> None:
    engine.status = 500
    with pytest.raises(HostError, match=r"PROOF_FAILED.*HTTP 500: dead"):
        proof.prove(engine.service(), None, Recorder())


def test_gauges_of_older_engines_are_read(engine: Engine) -> None:
    gauge = dict(dialect("vllm", "0.9.2").metrics)
    assert gauge["kind"] == "gauge"
    assert proof.judge(engine.service(min_acceptance=0.3), Acceptance(rate=0.2))["short"] is True
    assert proof.judge(engine.service(), Acceptance(rate=0.2))["short"] is False


def test_requests_are_added_up() -> None:
    assert proof.total([Acceptance(None, 10, 5), Acceptance(None, 30, 5), Acceptance()])[1:4] == (40, 10, 0.25)
    assert proof.total([Acceptance()]) == Acceptance()


@pytest.mark.parametrize(("bind", "host"), [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("192.0.2.1", "192.0.2.1")])
def test_where_a_service_is_asked(bind: str, host: str) -> None:
    assert proof.url({"ports": [{"bind": bind, "port": 8000}]}) == f"http://{host}:8000"
