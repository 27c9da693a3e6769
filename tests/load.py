"""Clients that ask a gateway one request after the other while something is done to it, and what became of each request."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Gateway:
    """A gateway in clear text, as a client knows it."""

    address: str
    port: int
    key: str
    model: str = "tiny"

    def connection(self) -> http.client.HTTPConnection:
        """A connection of its own."""
        return http.client.HTTPConnection(self.address, self.port, timeout=120)

    def headers(self, key: str | None = None) -> dict[str, str]:
        """What each request carries."""
        return {"Authorization": f"Bearer {self.key if key is None else key}", "Content-Type": "application/json"}

    def body(self, tokens: int, **more: object) -> str:
        """A completion of so many tokens."""
        return json.dumps({"model": self.model, "prompt": "x", "max_tokens": tokens, **more})

    def ask(self, tokens: int = 8, key: str | None = None, **more: object) -> tuple[int, str, bytes]:
        """(status, rig that answered, body) of one whole request."""
        link = self.connection()
        try:
            link.request("POST", "/v1/completions", self.body(tokens, **more), self.headers(key))
            answer = link.getresponse()
            return answer.status, answer.headers.get("X-Served-By", ""), answer.read()
        finally:
            link.close()

    def stream(self, tokens: int) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """A stream whose headers have come."""
        link = self.connection()
        link.request("POST", "/v1/completions", self.body(tokens, stream=True), self.headers())
        return link, link.getresponse()


@dataclass
class Load:
    """Clients that ask one after the other, every second of them for streams, from `with` to its end."""

    gateway: Gateway
    clients: int = 12
    tokens: int = 12
    more: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.results: Counter[str] = Counter()
        self.served: Counter[str] = Counter()
        self.stop = threading.Event()
        self.threads = [threading.Thread(target=self._client, args=(n % 2 == 0,)) for n in range(self.clients)]

    def _client(self, streams: bool) -> None:
        while not self.stop.is_set():
            begun, link = False, self.gateway.connection()
            try:
                asked = self.gateway.body(self.tokens, stream=streams, **self.more)
                link.request("POST", "/v1/completions", asked, self.gateway.headers())
                answer, body = link.getresponse(), b""
                while piece := answer.read1(65536):
                    begun, body = True, body + piece
                whole = body.rstrip().endswith(b"data: [DONE]") if streams else b"completion_tokens" in body
                said = "ok" if answer.status == 200 and whole else f"failed: {answer.status} {body[:200]!r}"
                self.served[answer.headers.get("X-Served-By", "")] += said == "ok"
            except (OSError, http.client.HTTPException) as error:
                said = f"failed: {error!r}"
            finally:
                link.close()
            # A stream that has begun cannot move to another rig: it may break off, and must be seen to.
            self.results["broke off" if begun and streams and said != "ok" else said] += 1

    def __enter__(self) -> Load:
        for thread in self.threads:
            thread.start()
        time.sleep(1.0)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join()

    @property
    def failed(self) -> dict[str, int]:
        """Requests that were lost before a byte of their answer had come, and answers that were wrong."""
        return {what: count for what, count in self.results.items() if what.startswith("failed")}
