"""STAND-IN for an engine: takes exactly the planned command line (else status 2), and answers as an engine does.

It reads both models' config.json as the engine would, wants the key that the wrapper hands over, and computes nothing.
"""

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

KEY = os.environ.get("VLLM_API_KEY", "")


def value(argv: list[str], flag: str) -> str:
    """The word after `flag`."""
    return argv[argv.index(flag) + 1]


class Api(BaseHTTPRequestHandler):
    """The few paths that are asked for."""

    protocol_version = "HTTP/1.1"

    def answer(self, status: int, document: dict[str, object]) -> None:
        """Send a JSON document."""
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def allowed(self) -> bool:
        """Whether the request has the key; else it is answered with 401."""
        if self.headers.get("Authorization") == f"Bearer {KEY}":
            return True
        self.answer(401, {"error": "Unauthorized"})
        return False

    def do_GET(self) -> None:
        """Health, and the command line that came in; with the key, as the guard has it: models, and metrics without a number."""
        if self.path == "/health":
            self.answer(200, {})
        elif self.path == "/stand-in/argv":  # no page of an engine
            self.answer(200, {"argv": sys.argv[1:]})
        elif self.allowed():
            pages: dict[str, dict[str, object]] = {
                "/v1/models": {"object": "list", "data": [{"id": NAME, "object": "model"}]},
                "/metrics": {},
            }
            self.answer(200 if self.path in pages else 404, pages.get(self.path, {}))

    def do_POST(self) -> None:
        """One token, whatever was asked."""
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.allowed():
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            choice = {"index": 0, "text": " stand-in", "finish_reason": "length"}
            self.answer(
                200, {"id": "0", "object": "text_completion", "model": NAME, "choices": [choice], "usage": usage}
            )

    def log_message(self, *_: object) -> None:
        """Nothing."""


expected = json.loads(Path("/opt/stand-in/expected.json").read_text())
if sys.argv[1:] not in expected:
    print(f"STAND-IN: not a planned command line: {json.dumps(sys.argv[1:])}", file=sys.stderr)
    sys.exit(2)
NAME = value(sys.argv, "--served-model-name")
target = json.loads(Path("/models/target/config.json").read_text())
if Path("/models/draft").exists():
    draft = json.loads(Path("/models/draft/config.json").read_text())
    if draft["vocab_size"] != target["vocab_size"]:
        print(f"STAND-IN: vocab_size {target['vocab_size']} and {draft['vocab_size']}", file=sys.stderr)
        sys.exit(1)
server = ThreadingHTTPServer(("0.0.0.0", int(value(sys.argv, "--port"))), Api)  # noqa: S104  in the container
print("STAND-IN: ready", flush=True)
server.serve_forever()
