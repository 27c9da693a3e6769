"""A stand-in for an engine, and no engine: speaks as much of the OpenAI API as a gateway's tests need. Standard library, runs anywhere.

    python3 stand_in_engine.py --listen 127.0.0.1:8001 --model tiny --name alpha [--key-file FILE] [--delay 0.02]

Every answer begins with the stand-in's name, then comes `word` for each token; `--delay` seconds before each. Prompts that begin with
`!` ask for faults: `!500`, `!die` (the connection ends before the first byte), `!break` (it ends in the middle of the stream),
`!echo` (the answer is what was asked: path, headers and body).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Engine(ThreadingHTTPServer):
    """The server and its settings."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], model: str, name: str, key: str | None, delay: float) -> None:
        self.model, self.name, self.key, self.delay = model, name, key, delay
        self.asked = itertools.count()
        self.served: list[str] = []
        self.frozen = threading.Event()
        self.decodes = 0
        # An engine with one slot: threading.Lock().
        self.slot: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        super().__init__(address, Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is nothing to tell."""


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: Engine

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def knows_the_key(self) -> bool:
        """As engines under our unit ask for it: at every page but /health."""
        return not self.server.key or self.headers.get("Authorization") == f"Bearer {self.server.key}"

    def do_GET(self) -> None:
        """/health, /metrics, /v1/models."""
        if self.path == "/health":
            self.answer(200, {})
        elif not self.knows_the_key():
            self.answer(401, {"error": "Unauthorized"})
        elif self.path == "/v1/models":
            self.answer(200, {"object": "list", "data": [{"id": self.server.model}]})
        elif self.path == "/metrics":
            counted = {"generation_tokens": len(self.server.served), "decodes": self.server.decodes}
            self.answer(200, "".join(f'stand_in:{name}_total{{m="x"}} {value}\n' for name, value in counted.items()))
        else:
            self.answer(404, {})

    def do_POST(self) -> None:
        """A completion, whole or as a stream."""
        asked: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.knows_the_key():
            return self.answer(401, {"error": {"message": "wrong key", "code": 401}})
        if asked.get("model") != self.server.model:
            return self.answer(404, {"error": {"message": "no such model", "code": 404}})
        while self.server.frozen.is_set():
            time.sleep(0.02)
        prompt = str(asked.get("prompt") or (asked.get("messages") or [{}])[-1].get("content", ""))
        if asked.get("max_tokens") != 1:
            self.server.served.append(prompt)
        if prompt.startswith("!500"):
            return self.answer(500, {"error": {"message": "the stand-in was asked to fail", "code": 500}})
        if prompt.startswith("!die"):
            self.close_connection = True
            return None
        if prompt.startswith("!echo"):
            return self.answer(200, {"path": self.path, "headers": dict(self.headers), "body": asked})
        words = [self.server.name, *["word"] * (int(asked.get("max_tokens", 16)) - 1)]
        if asked.get("stream"):
            return self.stream(words, prompt.startswith("!break"))
        with self.server.slot:
            for _ in words:
                time.sleep(self.server.delay)
                self.server.decodes += 1
        usage = {"completion_tokens": len(words), "prompt_tokens": 1, "total_tokens": len(words) + 1}
        choice = {"index": 0, "text": " ".join(words), "message": {"role": "assistant", "content": " ".join(words)}}
        return self.answer(
            200, {"object": "completion", "model": self.server.model, "choices": [choice], "usage": usage}
        )

    def stream(self, words: list[str], breaks: bool) -> None:
        """Server-sent events, one per token; the headers go out at once, as an engine's do."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.flush()
        for number, word in enumerate(words):
            time.sleep(self.server.delay)
            if breaks and number == 2:
                self.close_connection = True
                return
            choice = {"index": 0, "text": f"{word} ", "delta": {"content": f"{word} "}}
            self.chunk(f"data: {json.dumps({'choices': [choice]})}\n\n")
        self.chunk("data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")
        self.close_connection = True

    def chunk(self, text: str) -> None:
        """One chunk of a chunked body."""
        data = text.encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def answer(self, status: int, document: dict[str, Any] | str) -> None:
        """A whole answer."""
        data = (document if isinstance(document, str) else json.dumps(document)).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main() -> None:
    """Serve until killed."""
    options = argparse.ArgumentParser()
    options.add_argument("--listen", required=True)
    options.add_argument("--model", required=True)
    options.add_argument("--name", required=True)
    options.add_argument("--key-file", type=Path)
    options.add_argument("--delay", type=float, default=0.02)
    said = options.parse_args()
    host, _, port = said.listen.rpartition(":")
    key = said.key_file.read_text().strip() if said.key_file else None
    Engine((host, int(port)), said.model, said.name, key, said.delay).serve_forever()


if __name__ == "__main__":
    main()
