"""What stands between Caddy and the rigs: keys, the model's name, the least busy rig, another one when it fails before the first byte.

Caddy terminates TLS, lets nothing but /v1 through and keeps slow or malformed clients off; this does what Debian's Caddy (2.6) cannot:
compare keys in constant time, route by the model in a JSON body, send a request again with its body, and call a rig dead or alive by
a real completion. One thread per request; it listens on a socket that only Caddy and root may connect to.

    /v1/models, /v1/models/<name>       answered here: all models of all rigs
    POST /v1/…                          PATHS, passed on as they are, with the rig's own key in place of the client's
    GET /_specrig/state                 what `specrig-host gateway status` shows; Caddy passes no such path
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import http.client
import json
import os
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from specrig.host import upstreams
from specrig.host.errors import COULD_NOT_RUN, HostError
from specrig.host.upstreams import Fleet, Upstream

CLIENTS = Path("/etc/specrig/gateway/clients")
SOCKET = Path("/run/specrig-gateway-relay.sock")
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings")
# A rig that was sent a request and fails may have been killed by that request: it must not take every other rig along.
ATTEMPTS = 3
RETRIED = (500, 502, 503, 504)
MAX_BODY = 32 << 20
# An answer that says its length is held back up to this size, so that a rig's death in its middle goes unnoticed.
MAX_HELD = 8 << 20
MAX_HEAD = 64 << 10
# Of a request that is refused so much is read, for so long, before it is answered.
DROPPED, DROP_S = 64 << 20, 10.0
MAX_REQUESTS = 512
# Connections at once, each a thread and two descriptors (the unit allows 2048 and 16384). A client without a key is given the time to send
# what is then dropped; only so many of them at once, and the rest is cut short.
MAX_CONNECTIONS, MAX_STRANGERS = 1024, 64
CONNECT_S, BODY_S, GAP_S, CLIENT_S = 3.0, 60.0, 300.0, 120.0
TICK_S = 0.25
# What runs when the relay is told to end has so long; new requests wait in the socket that systemd holds.
GRACE_S = 20.0
_PASSED = ("content-type", "accept", "user-agent", "openai-beta", "anthropic-version")
_DROPPED = (
    "connection",
    "keep-alive",
    "server",
    "date",
    "transfer-encoding",
    "content-length",
    "upgrade",
    "set-cookie",
)


class Lost(Exception):
    """The rig failed before a byte was passed on. `sent`: it had the whole request."""

    def __init__(self, why: str, sent: bool) -> None:
        super().__init__(why)
        self.sent = sent


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


# -- keys ------------------------------------------------------------------------------------------------------------


class Keys:
    """The clients' keys: one file each, named as the client. Only digests stay in memory; files are read again when they change."""

    def __init__(self, folder: Path = CLIENTS) -> None:
        self._folder = folder
        self._stamps: Any = None
        self._digests: dict[str, bytes] = {}

    def _refresh(self) -> None:
        try:
            with os.scandir(self._folder) as entries:
                files = {e.name: e.stat() for e in entries if e.is_file() and not e.name.startswith(".")}
        except OSError:
            files = {}
        stamps = {name: (i.st_mtime_ns, i.st_size, i.st_ino) for name, i in files.items()}
        if stamps == self._stamps:
            return
        digests = {}
        for name in sorted(files):
            with contextlib.suppress(OSError):
                key = (self._folder / name).read_bytes().strip()
                if key:
                    digests[name] = digest(key)
        self._stamps, self._digests = stamps, digests

    def client(self, header: str | None) -> str | None:
        """Name of the client whose key an Authorization header carries, or None. Takes as long for any wrong key."""
        self._refresh()
        scheme, _, given = (header or "").partition(" ")
        asked, found = digest(given.strip().encode("latin-1", "replace")), None
        for name, known in self._digests.items():  # all of them, always: no answer comes sooner than another
            if hmac.compare_digest(asked, known):
                found = name
        return found if scheme.lower() == "bearer" else None


def digest(key: bytes) -> bytes:
    """SHA-256 of a key: what is compared has one length, and does not depend on how much of a key was right."""
    return hashlib.sha256(key).digest()


# -- the answer of a rig ---------------------------------------------------------------------------------------------


class Answer:
    """A rig's answer, as far as it has come: status, headers, and the bytes of its body that are here already."""

    def __init__(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    def get(self, name: str) -> str:
        """A header, empty when it is not there."""
        return next((value for key, value in self.headers if key.lower() == name), "")

    @property
    def length(self) -> int | None:
        """Bytes of the body when the rig said so."""
        text = self.get("content-length")
        return int(text) if text.isdigit() else None

    @property
    def broken(self) -> bool:
        """An error of the rig's own: another one may do better. Also when it comes as the first event of a stream."""
        if self.status in RETRIED:
            return True
        at = self.body.find(b"data: ")
        if self.status != 200 or at < 0 or not self.get("content-type").startswith("text/event-stream"):
            return False
        try:
            code = json.loads(self.body[at + 6 :].split(b"\n", 1)[0])["error"]["code"]
        except (ValueError, KeyError, TypeError):
            return False
        return isinstance(code, int) and code >= 500


def parse_head(data: bytes) -> Answer | None:
    """The answer that `data` begins with, or None while its headers are not complete. Raises ValueError when it is no HTTP."""
    head, found, rest = data.partition(b"\r\n\r\n")
    if not found:
        if len(data) > MAX_HEAD or (len(data) > 5 and not data.startswith(b"HTTP/")):
            raise ValueError("no HTTP answer")
        return None
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, status = first.partition(" ")
    if not version.startswith("HTTP/1.") or not status[:3].isdigit():
        raise ValueError(f"no HTTP answer: {first[:60]!r}")
    headers = [(name.strip(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    if status.startswith("1") and status[:3] != "101":  # 100 Continue and its like announce the answer
        return parse_head(rest)
    return Answer(int(status[:3]), headers, rest)


class Exchange:
    """One request at one rig, up to the first byte of its answer's body (or all of a short one)."""

    def __init__(self, upstream: Upstream, client: socket.socket) -> None:
        self.upstream, self.client = upstream, client
        self.cut = threading.Event()
        self.socket = socket.socket()

    def begin(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        """Send the request and wait. Raises Lost or ClientGone."""
        try:
            key = self.upstream.key()
            self.socket.close()
            self.socket = socket.create_connection(self.upstream.address, timeout=CONNECT_S)
        except HostError as error:
            raise Lost(error.cause, sent=False) from error
        except OSError as error:
            raise Lost(f"connection: {error}", sent=False) from error
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.upstream.address[0]}", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        lines += [f"Authorization: Bearer {key}"] if key else []
        lines += [f"Content-Length: {len(body)}"] if method == "POST" else []
        try:
            self.socket.settimeout(BODY_S)
            self.socket.sendall("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
            return self._await()
        except (OSError, ValueError) as error:
            raise Lost(str(error) or type(error).__name__, sent=True) from error

    def _await(self) -> Answer:
        data, answer = b"", None
        while True:
            piece = self._receive()
            if answer is None:
                data += piece
                answer = parse_head(data)
            else:
                answer.body += piece
            ended = not piece
            if answer is None:
                if ended:
                    raise OSError("it closed the connection before it answered")
                continue
            length = answer.length
            if length is None:
                if answer.body or ended:
                    if not answer.body and answer.status == 200:
                        raise OSError("it closed the connection before the first byte")
                    return answer
            elif len(answer.body) >= min(length, MAX_HELD):
                return answer
            elif ended:
                raise OSError(f"it sent {len(answer.body)} of {length} bytes")

    def _receive(self) -> bytes:
        """Bytes from the rig, waiting for as long as somebody waits and the rig is not known to be down."""
        watched = select.poll()  # not select(): that takes no descriptor from 1024 on
        for one in (self.socket, self.client):
            watched.register(one, select.POLLIN)
        while True:
            readable = {number for number, _ in watched.poll(TICK_S * 1000)}
            if self.socket.fileno() in readable:
                piece = self.socket.recv(65536)
                self.upstream.heard = time.monotonic()
                return piece
            if readable:
                if not self.client.recv(1, socket.MSG_PEEK):
                    raise ClientGone
                watched.unregister(self.client)  # bytes after the request: nothing that we would read
            if self.cut.is_set():
                raise OSError(f"the rig is down: {self.upstream.why}")

    def close(self) -> None:
        """Hang up: an engine stops generating for nobody."""
        self.socket.close()


# -- the server ------------------------------------------------------------------------------------------------------


class Relay:
    """What all requests share."""

    def __init__(self, fleet: Fleet, keys: Keys) -> None:
        self.fleet, self.keys = fleet, keys
        self.slots = threading.BoundedSemaphore(MAX_REQUESTS)
        self.strangers = threading.BoundedSemaphore(MAX_STRANGERS)
        self.requests: Counter[str] = Counter()
        self.began = int(time.time())

    def state(self) -> dict[str, Any]:
        """Upstreams, and how many requests each client has made."""
        return {**self.fleet.state(), "clients": dict(self.requests)}


class Handler(BaseHTTPRequestHandler):
    """One request; the connection ends with it."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "specrig", ""
    timeout = CLIENT_S
    relay: Relay
    # The peer is Caddy on a socket without addresses.
    client_address = ("caddy", 0)
    _whole = False  # the body has been read to its end
    _rest: Iterator[bytes] | None = None

    def log_message(self, format: str, *args: Any) -> None:
        """Paths and bodies are the clients' business: only rigs that come and go are logged."""

    def do_GET(self) -> None:
        """The list of models, and what root may ask."""
        path = self.path.split("?", 1)[0]
        if path == "/_specrig/state":
            return self._json(200, self.relay.state())
        if self._known() is None:
            return None
        with self.relay.fleet.changed:
            models = {name: self._model(name, pool) for name, pool in self.relay.fleet.models.items()}
        if path in ("/v1/models", "/v1/models/"):
            return self._json(200, {"object": "list", "data": list(models.values())})
        name = unquote(path[len("/v1/models/") :]) if path.startswith("/v1/models/") else ""
        if name in models:
            return self._json(200, models[name])
        return self._error(404, "not_found_error", "no such path" if not name else f"no model {name!r:.200}")

    def _model(self, name: str, pool: dict[str, Any]) -> dict[str, Any]:
        more = {"max_model_len": pool["max_model_len"]} if pool.get("max_model_len") else {}
        return {"id": name, "object": "model", "created": self.relay.began, "owned_by": "specrig", **more}

    def do_POST(self) -> None:
        """Pass a request on."""
        client = self._known()
        if client is None:
            return None
        path = self.path.split("?", 1)[0]
        if path not in PATHS:
            return self._error(404, "not_found_error", "no such path")
        try:
            body = self._body()
        except ValueError as error:
            return self._error(413 if "large" in str(error) else 400, "invalid_request_error", str(error))
        try:
            model = json.loads(body)["model"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return self._error(400, "invalid_request_error", "the body is no JSON object with a `model`")
        if not isinstance(model, str) or model not in self.relay.fleet.models:
            names = ", ".join(self.relay.fleet.models)
            return self._error(404, "not_found_error", f"no model {model!r:.200}; there is {names}")
        self.relay.requests[client] += 1
        if not self.relay.slots.acquire(blocking=False):
            return self._error(503, "overloaded_error", f"{MAX_REQUESTS} requests run already", retry=5)
        try:
            return self._pass_on(path, model, body)
        finally:
            self.relay.slots.release()

    def _known(self) -> str | None:
        """The client's name; without a known key the request is answered here."""
        client = self.relay.keys.client(self.headers.get("Authorization"))
        if client is None:
            patient = self.relay.strangers.acquire(blocking=False)
            try:
                self._error(401, "authentication_error", "no key, or one that is not known here", consume=patient)
            finally:
                if patient:
                    self.relay.strangers.release()
        return client

    def _pieces(self) -> Iterator[bytes]:
        """The request's body as it comes, up to its announced end. Raises ValueError when it breaks off or is none."""
        if "chunked" in self.headers.get("Transfer-Encoding", "").lower():
            while count := int(self.rfile.readline(1024).split(b";")[0].strip() or b"x", 16):
                yield from self._exactly(count)
                self.rfile.readline(1024)
            self.rfile.readline(1024)
        else:
            yield from self._exactly(int(self.headers.get("Content-Length") or 0))
        self._whole = True

    def _exactly(self, count: int) -> Iterator[bytes]:
        if count < 0:
            raise ValueError("the body has no length")
        while count:
            piece = self.rfile.read1(min(count, 65536))
            if not piece:
                raise ValueError("the body is shorter than announced")
            count -= len(piece)
            yield piece

    def _body(self) -> bytes:
        """The request's body. Raises ValueError."""
        parts, size = [], int(self.headers.get("Content-Length") or 0)
        if size <= MAX_BODY:
            size = 0
            self._rest = self._pieces()
            for piece in self._rest:
                parts.append(piece)
                size += len(piece)
                if size > MAX_BODY:
                    break
            else:
                return b"".join(parts)
        raise ValueError(f"the body is too large: {MAX_BODY} bytes are the most")

    def _consume(self) -> None:
        """Read what the client still sends, and drop it: Caddy gives an answer to a client only after the request's body has gone."""
        left, until = DROPPED, time.monotonic() + DROP_S
        self.connection.settimeout(DROP_S)
        with contextlib.suppress(OSError, ValueError):
            for piece in () if self._whole else self._rest or self._pieces():
                left -= len(piece)
                if left < 0 or time.monotonic() > until:
                    break

    def _pass_on(self, path: str, model: str, body: bytes) -> None:
        fleet, sent = self.relay.fleet, 0
        tried: list[Upstream] = []
        headers = {n.title(): v for n, v in self.headers.items() if n.lower() in _PASSED and v.isprintable()}
        wait_s = float(fleet.settings.get("wait_s", 20))
        until, why = time.monotonic() + wait_s, "no rig is up"
        last: Answer | None = None
        while sent < ATTEMPTS:
            upstream = fleet.take(model, tried, until)
            if upstream is None:
                break
            exchange = Exchange(upstream, self.connection)
            with fleet.changed:
                upstream.running.add(exchange.cut)
            try:
                answer = exchange.begin("POST", path, headers, body)
                if answer.broken:
                    last, why = answer, f"HTTP {answer.status}"
                    raise Lost(f"it answered HTTP {answer.status}", sent=True)
                upstream.answered += 1
                return self._send(exchange, answer)
            except ClientGone:
                self.close_connection = True
                return None
            except Lost as error:
                why = str(error)
                self._note(upstream, error)
                tried.append(upstream)
                sent += error.sent
            finally:
                with fleet.changed:
                    upstream.running.discard(exchange.cut)
                exchange.close()
        if last is not None and last.length is not None:  # the rig's own words are better than ours
            return self._reply(last.status, last.body, last.get("content-type") or "application/json")
        return self._error(503, "overloaded_error", f"no rig of {model} could answer: {why}", retry=5)

    def _note(self, upstream: Upstream, error: Lost) -> None:
        """A rig that cannot be reached is down at once; one that failed otherwise is probed now."""
        upstream.lost += 1
        print(f"specrig: {upstream.name}: a request goes elsewhere: {error}", flush=True)
        if not error.sent:
            self.relay.fleet.mark(upstream, False, str(error))
        upstream.kicked.set()

    def _send(self, exchange: Exchange, answer: Answer) -> None:
        """Pass the answer on, byte by byte as it comes: its own framing stays, so a stream that breaks off is seen to."""
        headers = [(name, value) for name, value in answer.headers if name.lower() not in _DROPPED]
        framing = answer.get("transfer-encoding")
        self.send_response(answer.status)
        for name, value in [*headers, ("X-Served-By", exchange.upstream.rig)]:
            self.send_header(name, value)
        if framing:
            self.send_header("Transfer-Encoding", framing)
        elif answer.length is not None:
            self.send_header("Content-Length", str(answer.length))
        self.send_header("Connection", "close")
        self.end_headers()
        exchange.socket.settimeout(GAP_S)
        # What a client may lag behind is its sockets' buffers; past them the rig waits, for CLIENT_S at most.
        piece, left, why = answer.body, answer.length, ""
        self.close_connection = True
        while piece:
            try:
                self.connection.sendall(piece)
            except OSError:  # the client hung up, or reads nothing
                return
            tail, left = piece[-5:], None if left is None else left - len(piece)
            if left is not None and left <= 0:
                return
            try:
                piece = exchange.socket.recv(65536)
            except OSError as error:
                piece, why = b"", str(error)
            exchange.upstream.heard = time.monotonic()
        if why or left or (framing and tail != b"0\r\n\r\n"):
            print(f"specrig: {exchange.upstream.name}: a stream broke off {why}".rstrip(), flush=True)

    def _json(self, status: int, document: dict[str, Any], **headers: str) -> None:
        self._reply(status, json.dumps(document).encode(), "application/json", **headers)

    def _error(self, status: int, kind: str, message: str, retry: int = 0, consume: bool = True) -> None:
        """An error in the form that OpenAI's clients read; unless `consume`, without waiting for what the client still sends."""
        if consume:
            self._consume()
        more = {"Retry-After": str(retry)} if retry else {}
        more |= {"WWW-Authenticate": "Bearer"} if status == 401 else {}
        code = {401: "invalid_api_key", 404: "not_found"}.get(status)
        self._json(status, {"error": {"message": message, "type": kind, "param": None, "code": code}}, **more)

    def _reply(self, status: int, body: bytes, kind: str, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()
        self.close_connection = True


def inherited() -> socket.socket:
    """The socket that systemd hands over (sd_listen_fds(3))."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()) or os.environ.get("LISTEN_FDS") != "1":
        raise HostError(
            "GATEWAY_SOCKET",
            "no socket came from systemd",
            "systemctl start specrig-gateway-relay.socket",
            COULD_NOT_RUN,
        )
    return socket.socket(fileno=3)


def turn_away(connection: socket.socket) -> None:
    """Say that there is no room, without reading or waiting."""
    message = f"{MAX_CONNECTIONS} connections are open already"
    error = {"message": message, "type": "overloaded_error", "param": None, "code": None}
    body = json.dumps({"error": error}).encode()
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 5\r\nConnection: close\r\n"
    )
    with contextlib.suppress(OSError), connection:
        connection.setblocking(False)
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)


def serve(listener: socket.socket, fleet: Fleet, keys: Keys, stop: threading.Event | None = None) -> None:
    """Answer on `listener` until `stop`, then let what runs end within GRACE_S: a thread per request, a watcher per upstream."""
    stop = stop or threading.Event()
    relay = Relay(fleet, keys)
    handler = type("Bound", (Handler,), {"relay": relay})

    def answer(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            handler(connection, ("caddy", 0), None)

    def refresh() -> None:
        try:
            for upstream in fleet.refresh():
                threading.Thread(target=upstreams.watch, args=(fleet, upstream, stop), daemon=True).start()
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"specrig: {upstreams.CONFIG} cannot be read, the last one stays: {error!r}", flush=True)

    refresh()
    listener.settimeout(0.5)
    running: set[threading.Thread] = set()
    looked = time.monotonic()
    while not stop.is_set():
        try:
            connection, _ = listener.accept()
        except socket.timeout:
            connection = None
        if time.monotonic() - looked > 0.5:
            looked = time.monotonic()
            refresh()
        if connection is not None:
            running = {thread for thread in running if thread.is_alive()}
            if len(running) >= MAX_CONNECTIONS:
                turn_away(connection)
                continue
            connection.settimeout(CLIENT_S)
            running.add(thread := threading.Thread(target=answer, args=(connection,), daemon=True))
            thread.start()
    until = time.monotonic() + GRACE_S
    for thread in running:
        thread.join(max(0.0, until - time.monotonic()))


# -- what root asks --------------------------------------------------------------------------------------------------


class _Unix(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=10)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def status(path: Path = SOCKET) -> dict[str, Any]:
    """The relay's own account of itself."""
    connection = _Unix(path)
    try:
        connection.request("GET", "/_specrig/state")
        value = json.loads(connection.getresponse().read())
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise HostError(
            "GATEWAY_DOWN", f"the relay does not answer: {error}", "systemctl status specrig-gateway-relay.service"
        ) from error
    finally:
        connection.close()
    return {"changed": False, **value}


def drain(rig: str, on: bool, wait: float = 0.0, check: bool = False) -> dict[str, Any]:
    """Send `rig` no new requests (or again some), and wait up to `wait` seconds until none runs there. {changed, rig, running}."""
    found = status()
    rigs = sorted({row["rig"] for row in found["upstreams"]})
    if rig not in rigs:
        raise HostError(
            "GATEWAY_NO_RIG", f"no rig {rig!r:.80} behind this gateway; there is {', '.join(rigs)}", "name one of these"
        )
    if check:  # one that is drained already may still be waited for
        busy = on and wait > 0 and any(row["running"] for row in found["upstreams"] if row["rig"] == rig)
        return {
            "changed": (rig in upstreams.read_drained()) != on or busy,
            "rig": rig,
            "drained": on,
            "running": sum(row["running"] for row in found["upstreams"] if row["rig"] == rig),
        }
    changed = upstreams.set_drained(rig, on)
    until = time.monotonic() + wait
    while True:
        running = sum(row["running"] for row in found["upstreams"] if row["rig"] == rig)
        if not on or not running or time.monotonic() >= until:
            return {"changed": changed, "rig": rig, "drained": on, "running": running}
        time.sleep(0.5)
        found = status()
