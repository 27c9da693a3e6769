"""Rigs help each other: each may serve its published models, read only, and asks the others before it asks the hub.

A sibling is just another base URL, and needs no trust: what comes from it is verified like what comes from the hub.

    GET, HEAD /<org>/<name>/resolve/<revision>/<file>    as on the hub; only files that a published manifest lists
    GET /_state/<org>/<name>/<revision>                  {"state": published | fetching | claimed | none, "bytes": n}

So that N rigs take one copy over the WAN when all of them start at once, a stager claims a model before it looks around,
and lets a sibling of lower rank, or one that fetches already, go first (see `turn`).
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import ipaddress
import json
import os
import re
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

from specrig.host.errors import COULD_NOT_RUN, HostError
from specrig.host.manifest import DAMAGED, Artefact, Job, check_path, has_size, read_manifest
from specrig.host.progress import Progress, amount, write_json

STATE = ".state.json"
ASK_TIMEOUT_S = 3.0
POLL_S = 2.0
# A sibling that fetches gets no further for so long: we go ourselves. Verifying 40 GB from a slow disk takes minutes.
PATIENCE_S = 300.0
CONNECTIONS = 64
PRIVATE = (
    "127.0.0.0/8",
    "::1/128",
    "10.0.0.0/8",
    "172.16.0.0/12",
    "192.168.0.0/16",
    "169.254.0.0/16",
    "fc00::/7",
    "fe80::/10",
)
_FILE = re.compile(r"/([^/]+)/([^/]+)/resolve/([0-9a-f]{40})/(.+)")
_STATE = re.compile(r"/_state/([^/]+)/([^/]+)/([0-9a-f]{40})")
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


# -- what this rig is doing ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def claimed(artefact: Artefact, job: Job) -> Iterator[Callable[[str], None]]:
    """Tell siblings that this rig wants `artefact`, until it is published; yields what changes the phase (claimed, fetching)."""
    path = job.root / ".partial" / STATE

    def tell(phase: str) -> None:
        write_json(path, {"repo": artefact.repo, "revision": artefact.revision, "phase": phase}, mode=0o644)

    tell("claimed")
    try:
        yield tell
    finally:
        path.unlink(missing_ok=True)


def _at_work(root: Path) -> bool:
    """Whether a stager holds the root's lock: a state that a killed one left behind says nothing."""
    try:
        handle = os.open(root / ".partial" / ".lock", os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def state_of(root: Path, repo: str, revision: str) -> dict[str, Any]:
    """{state, bytes} of a model on this rig."""
    directory = root / repo.replace("/", "--") / revision
    # The claim first: it is taken back after the publication, so that there is no moment between the two.
    try:
        told = json.loads((root / ".partial" / STATE).read_text())
    except (OSError, ValueError):
        told = {}
    wanted = (told.get("repo"), told.get("revision")) == (repo, revision) and _at_work(root)
    if read_manifest(directory) is not None and not (directory / DAMAGED).exists():
        return {"state": "published", "bytes": 0}
    if not wanted:
        return {"state": "none", "bytes": 0}
    partial = root / ".partial" / directory.parent.name / revision
    count = 0
    for base, _, names in os.walk(partial):
        for name in names:
            with contextlib.suppress(OSError):
                count += Path(base, name).lstat().st_blocks * 512
    return {"state": str(told.get("phase")), "bytes": count}


# -- what the others are doing ---------------------------------------------------------------------------------------


def ask(base: str, artefact: Artefact) -> dict[str, Any]:
    """What the sibling at `base` says of `artefact`; one that does not answer has nothing."""
    url = f"{base}/_state/{artefact.repo}/{artefact.revision}"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a sibling is on the LAN
    try:
        with opener.open(url, timeout=ASK_TIMEOUT_S) as answer:
            value = json.loads(answer.read(10_000))
            return {"state": str(value["state"]), "bytes": int(value.get("bytes") or 0)}
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
        return {"state": "none", "bytes": 0}


def turn(artefact: Artefact, job: Job, progress: Progress, tell: Callable[[str], None], waits: bool) -> list[str]:
    """Siblings to fetch `artefact` from, once it is this rig's turn; an empty list means: elsewhere.

    Of several rigs that want it at once one goes, and the others wait for it: a rig waits for whoever fetches, and for a
    lower rank that has claimed. Having said `fetching` it looks at the lower ranks again: of two that did not see each
    other's claim the higher one steps back. A sibling that dies lets go of its lock, and one that hangs is left alone.
    """
    if not job.siblings:
        tell("fetching")
        return []
    seen, since = 0, time.monotonic()
    with ThreadPoolExecutor(min(16, len(job.siblings))) as pool:

        def look(bases: tuple[str, ...]) -> list[tuple[int, str, dict[str, Any]]]:
            return [(i, b, s) for i, (b, s) in enumerate(zip(bases, pool.map(lambda b: ask(b, artefact), bases)))]

        while True:
            found = look(job.siblings)
            holders = [base for _, base, state in found if state["state"] == "published"]
            if holders:
                # Each rig begins with another one, so that the first copy's owner is not everybody's server.
                first = sum(socket.gethostname().encode()) % len(holders)
                return holders[first:] + holders[:first]
            busy = [
                (base, state)
                for i, base, state in found
                if state["state"] == "fetching" or (state["state"] == "claimed" and i < job.rank)
            ]
            if not busy or not waits:
                tell("fetching")
                lower = look(job.siblings[: job.rank]) if waits else []
                if not any(state["state"] in ("claimed", "fetching", "published") for _, _, state in lower):
                    return []
                tell("claimed")
            else:
                base, state = max(busy, key=lambda item: int(item[1]["bytes"]))
                if state["bytes"] > seen:
                    seen, since = state["bytes"], time.monotonic()
                if time.monotonic() - since > PATIENCE_S:
                    tell("fetching")
                    return []
                where = f"{urlsplit(base).netloc} brings {artefact.id}, {amount(state['bytes'])} so far"
                progress.update("wait", message=where)
            time.sleep(POLL_S)


# -- the server ------------------------------------------------------------------------------------------------------


def networks(allow: list[str]) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    """Parse networks. Raises HostError SHARE_ALLOW."""
    try:
        return [ipaddress.ip_network(text) for text in allow]
    except ValueError as error:
        raise HostError("SHARE_ALLOW", str(error), "write networks as 192.0.2.0/24", COULD_NOT_RUN) from error


class Server(ThreadingHTTPServer):
    """Serves the published models under `root`, to clients in `allow` only."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, root: Path, address: tuple[str, int], allow: list[str]) -> None:
        self.root = root
        self.networks = networks(allow)
        self.slots = threading.BoundedSemaphore(CONNECTIONS)
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler)

    def verify_request(
        self,
        request: Any,  # noqa: ARG002
        client_address: Any,
    ) -> bool:
        """Whether a client may talk to us at all."""
        client = ipaddress.ip_address(str(client_address[0]).partition("%")[0])
        client = getattr(client, "ipv4_mapped", None) or client
        return any(client in network for network in self.networks)

    def process_request(self, request: Any, client_address: Any) -> None:
        """A thread per connection, and not more of them than a rig can bear."""
        if self.slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """One connection, from its first request to its end."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away in the middle is no event."""


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    server_version = "specrig"
    sys_version = ""
    timeout = 60

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _plain(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if match := _STATE.fullmatch(path):
            org, name, revision = match.groups()
            if _PART.fullmatch(org) and _PART.fullmatch(name):
                state = state_of(self.server.root, f"{org}/{name}", revision)
                return self._plain(200, json.dumps(state).encode(), Content_Type="application/json")
        elif match := _FILE.fullmatch(path):
            return self._file(*match.groups())
        return self._plain(404)

    do_HEAD = do_GET

    def _file(self, org: str, name: str, revision: str, path: str) -> None:
        directory = self.server.root / f"{org}--{name}" / revision
        if not (_PART.fullmatch(org) and _PART.fullmatch(name)) or (directory / DAMAGED).exists():
            return self._plain(404)
        listed = {f.get("path"): f for f in (read_manifest(directory) or {}).get("files") or []}
        try:
            entry = listed[check_path(path)]
            size = int(entry["size"])
            if not has_size(directory / path, size):
                return self._plain(404)
            handle = os.open(directory / path, os.O_RDONLY | os.O_NOFOLLOW)
        except (HostError, KeyError, TypeError, OSError):
            return self._plain(404)
        with os.fdopen(handle, "rb") as source:
            begin, end, status = 0, size, 200
            if match := _RANGE.fullmatch(self.headers.get("Range", "").strip()):
                begin, end, status = int(match[1]), min(int(match[2] or size - 1) + 1, size), 206
                if begin >= end:
                    return self._plain(416, Content_Range=f"bytes */{size}")
            self.send_response(status)
            if status == 206:
                self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{size}")
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("ETag", f'"{entry.get("sha256") or entry.get("git_sha1")}"')
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(end - begin))
            self.end_headers()
            if self.command == "GET":
                self._send(source, begin, end)
        return None

    def _send(self, source: BinaryIO, begin: int, end: int) -> None:
        self.wfile.flush()
        try:
            sent = self.connection.sendfile(source, begin, end - begin)
        except OSError:
            sent = 0
        if sent != end - begin:
            self.close_connection = True


def serve(root: Path, listen: str, allow: list[str]) -> None:
    """Serve until stopped. `listen` is address:port; port 0 takes a free one. Raises HostError SHARE_LISTEN."""
    host, _, port = listen.rpartition(":")
    try:
        address = (host.strip("[]"), int(port))
        ipaddress.ip_address(address[0])
        server = Server(root, address, allow or list(PRIVATE))
    except (OSError, ValueError, OverflowError) as error:
        raise HostError(
            "SHARE_LISTEN",
            f"cannot listen on {listen}: {error}",
            "name an address of this host and a free port",
            COULD_NOT_RUN,
        ) from error
    # Stopped is not failed; from a thread, because shutdown() waits for the loop that this handler interrupts.
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # a client that goes away must not take the server with it
    print(f"serving {root} on {server.server_address[0]!s}:{server.server_address[1]}", flush=True)
    with server:
        server.serve_forever()
