"""The client against a server that streams as real ones do: bursts, reasoning, usage last, counters that move."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from specrig.bench.client import Endpoint, complete, since, speculation
from specrig.console import CannotRun
from specrig.host.acceptance import Acceptance
from specrig.plan.dialects import dialect

METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="a {{b}}"}} {drafts}
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="m"}} {drafted}
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {accepted}
vllm:spec_decode_num_accepted_tokens_total{{engine="1",model_name="m"}} 2.0
vllm:spec_decode_draft_acceptance_rate{{model_name="m"}} 0.25
vllm:kv_cache_usage_perc NaN
process_start_time_seconds 1.79e+09
"""


class Engine(ThreadingHTTPServer):
    """`script` is what a completion streams: a chunk, or seconds to wait. Every completion moves the counters."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: list[dict[str, Any] | float | str] = []
        self.drafts = 0
        self.asked: dict[str, Any] = {}
        self.length: int | None = None  # a Content-Length that promises more than comes


class Handler(BaseHTTPRequestHandler):
    server: Engine

    def log_message(self, *_: Any) -> None:
        pass

    def _start(self, status: int, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        if self.server.length:
            self.send_header("Content-Length", str(self.server.length))
        self.end_headers()

    def _refused(self) -> bool:
        if self.headers.get("Authorization") == "Bearer right":
            return False
        self._start(401, "application/json")
        self.wfile.write(b'{"error": "Unauthorized: no such key"}')
        return True

    def do_GET(self) -> None:
        if self._refused():
            return
        n = self.server.drafts
        self._start(200, "text/plain")
        self.wfile.write(METRICS.format(drafts=f"{n}.0", drafted=n * 5, accepted=f"{n * 3:e}").encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self._refused():
            return
        self.server.asked = body
        self.server.drafts += 4
        self._start(200, "text/event-stream")
        for step in self.server.script:
            if isinstance(step, float):
                time.sleep(step)
                continue
            self.wfile.write(f"data: {step if isinstance(step, str) else json.dumps(step)}\n\n".encode())
            self.wfile.flush()


@pytest.fixture
def engine() -> Iterator[Engine]:
    server = Engine()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def at(engine: Engine, key: str | None = "right", version: str = "0.32.0") -> Endpoint:
    return Endpoint(f"http://127.0.0.1:{engine.server_port}", "m", key, dialect("vllm", version).metrics)


def delta(**fields: Any) -> dict[str, Any]:
    return {"id": "x", "choices": [{"index": 0, "delta": fields, "finish_reason": None}], "usage": None}


USAGE = {"id": "x", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 9, "total_tokens": 12}}


def test_tokens_are_the_servers_and_time_starts_at_the_first_text(engine: Engine) -> None:
    # A role alone is no text; three pieces carry nine tokens, as they do when drafts are accepted.
    engine.script = [
        delta(role="assistant", content=""), 0.1, delta(content="one two three "), 0.1,
        delta(content="four "), 0.1, delta(content="five six"), USAGE, "[DONE]",
    ]  # fmt: skip
    shown: list[str] = []
    start = time.monotonic()
    done = complete(at(engine), "count", 9, shown.append)
    total = time.monotonic() - start
    assert done.text == "one two three four five six" == "".join(shown)
    assert done.tokens == 9
    assert 0.09 < done.ttft < total - 0.19
    assert 8 / (total - done.ttft) <= done.decode_tps < 8 / 0.19
    assert engine.asked["max_tokens"] == 9 and engine.asked["temperature"] == 0
    assert engine.asked["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_reasoning_counts_as_text(engine: Engine, field: str) -> None:
    engine.script = [
        delta(role="assistant"),
        delta(**{field: "hm, "}),
        0.1,
        delta(content="42", **{field: None}),
        USAGE,
    ]
    start = time.monotonic()
    done = complete(at(engine), "why", 9)
    assert done.text == "hm, 42" and done.ttft < time.monotonic() - start - 0.09


def test_one_burst_has_no_rate(engine: Engine) -> None:
    engine.script = [delta(content="all at once"), USAGE]
    assert complete(at(engine), "x", 9).decode_tps == 0.0


def test_a_refusal_carries_the_servers_words(engine: Engine) -> None:
    for key in ("wrong", None):
        with pytest.raises(CannotRun, match=r"401: .*no such key") as caught:
            complete(at(engine, key), "x", 9)
        assert caught.value.code == "ENDPOINT" and caught.value.fix


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ([delta(content="a"), {"error": {"message": "out of KV cache", "code": 500}}], "out of KV cache"),
        ([delta(role="assistant"), USAGE], "0 characters and 9 tokens"),
        ([delta(content="abc"), "[DONE]"], "3 characters and 0 tokens"),
        ([delta(content="abc"), '{"choices": [{"del'], "broke off"),
        ([], "0 characters and 0 tokens"),
    ],
    ids=["error in the stream", "no text", "no usage", "half a line", "nothing"],
)
def test_a_completion_that_measures_nothing_is_no_result(engine: Engine, script: list[Any], says: str) -> None:
    engine.script = script
    with pytest.raises(CannotRun, match=says) as caught:
        complete(at(engine), "x", 9)
    assert caught.value.code == "ENDPOINT"


def test_a_connection_that_breaks_is_told(engine: Engine) -> None:
    engine.script, engine.length = [delta(content="a")], 10_000
    with pytest.raises(CannotRun, match=r"broke off|0 tokens"):
        complete(at(engine), "x", 9)
    with pytest.raises(CannotRun, match="metrics"):
        speculation(at(engine))
    engine.shutdown()
    engine.server_close()
    with pytest.raises(CannotRun, match="cannot be reached"):
        complete(at(engine), "x", 9)


def test_counters_before_and_after(engine: Engine) -> None:
    engine.script = [delta(content="a"), USAGE]
    before = speculation(at(engine))
    complete(at(engine), "x", 9)
    complete(at(engine), "x", 9)
    assert since(at(engine), before) == Acceptance(drafts=8, drafted=40, accepted=24, rate=0.6, mean_length=4.0)


def test_an_engine_that_only_says_a_rate_is_read_as_well(engine: Engine) -> None:
    """Before vLLM 0.10 there was a gauge and nothing to subtract."""
    old = at(engine, version="0.9.2")
    assert since(old, speculation(old)) == Acceptance(rate=0.25)


def test_metrics_are_asked_for_with_the_key(engine: Engine) -> None:
    for key in ("wrong", None):
        with pytest.raises(CannotRun, match="401"):
            speculation(at(engine, key))


def test_a_restart_in_between_is_not_a_measurement(engine: Engine) -> None:
    engine.drafts = 7
    before = speculation(at(engine))
    engine.drafts = 1
    with pytest.raises(CannotRun) as caught:
        since(at(engine), before)
    assert caught.value.code == "COUNTER_RESET"
