"""A small threaded HTTP server with ranges and switchable faults: what the stager meets, without a network."""

from __future__ import annotations

import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Hub:
    """Serves `files` ({path: bytes}); counts bytes sent per path and notes every request's headers."""

    def __init__(self, files: dict[str, bytes], rate: int | None = None) -> None:
        self.files = files
        self.rate = rate  # bytes per second and connection; None: no limit
        self.sent: dict[str, int] = {}
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.faults: list[int] = []  # statuses to answer before anything else, one per request
        self.retry_after: str | None = None
        self.redirects: dict[str, str] = {}
        self.token: str | None = None
        self.break_at: dict[str, tuple[int, str]] = {}  # once: after so many bytes, "reset" or "stall"
        self.silence = 0.1  # seconds that a stall lasts before the connection is closed
        self.lock = threading.Lock()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:
                pass

            def do_HEAD(self) -> None:
                self.answer(body=False)

            def do_GET(self) -> None:
                self.answer(body=True)

            def plain(self, status: int, **headers: str) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def answer(self, body: bool) -> None:
                with hub.lock:
                    hub.requests.append((self.command, self.path, dict(self.headers)))
                    fault = hub.faults.pop(0) if hub.faults else 0
                if fault:
                    return self.plain(fault, **({"Retry_After": hub.retry_after} if hub.retry_after else {}))
                if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
                    return self.plain(401)
                if self.path in hub.redirects:
                    return self.plain(302, Location=hub.redirects[self.path])
                data = hub.files.get(self.path)
                if data is None:
                    return self.plain(404)
                begin, end, status = 0, len(data), 200
                if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
                    begin, end, status = int(match[1]), int(match[2] or len(data) - 1) + 1, 206
                self.send_response(status)
                self.send_header("Accept-Ranges", "bytes")
                self.send_header("Content-Length", str(end - begin))
                if status == 206:
                    self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}")
                self.end_headers()
                if body:
                    self.send(data, begin, end)
                return None

            def send(self, data: bytes, begin: int, end: int) -> None:
                step = 16384
                start = time.monotonic()
                for at in range(begin, end, step):
                    chunk = data[at : min(at + step, end)]
                    if at >= hub.break_at.get(self.path, (end, ""))[0]:
                        self.close_connection = True
                        if hub.break_at.pop(self.path)[1] == "stall":
                            time.sleep(hub.silence)
                        return
                    try:
                        self.wfile.write(chunk)
                    except OSError:
                        self.close_connection = True
                        return
                    with hub.lock:
                        hub.sent[self.path] = hub.sent.get(self.path, 0) + len(chunk)
                    if hub.rate:
                        time.sleep(max(0.0, (at + len(chunk) - begin) / hub.rate - (time.monotonic() - start)))

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def __enter__(self) -> Hub:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
