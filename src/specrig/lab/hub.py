"""A double of the model hub: the endpoints a stager uses, with faults on request. Standard library only.

    python3 hub.py ROOT [PORT]          serves ROOT/<org>/<name>/<40-hex revision>/… ; `main` is the newest revision

GET /api/models/{repo}/revision/{rev} · GET /api/models/{repo}/tree/{rev}?recursive=true · GET, HEAD
/{repo}/resolve/{rev}/{path} with Range, ETag, X-Repo-Commit, X-Linked-Etag, X-Linked-Size. As on the real hub, files of
1 MB and more are "lfs" (ETag = sha256) and smaller ones are git blobs (ETag = git's sha1).

GET /_stats gives {path: {"requests": n, "bytes": n}} since the start or the last DELETE /_stats. POST /_faults takes a
list of {"path": fnmatch pattern of <repo>/<file>, "kind": …, "times": n (default 1), "after": bytes (default half of
what is asked)}; an empty list clears them. Kinds: stall (sends `after` bytes, then nothing until the client goes),
reset (then a TCP reset), truncate (then an orderly end), wrong (the right size, one bit flipped), 503 and 429 (with
Retry-After: "retry_after", default 1), redirect (to the same path at the base URL "to"). In a test, `hub.rate` limits
each connection (bytes/s), `hub.token` gates the files, and `hub.with_token` lists what was asked with a token.
"""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import json
import os
import re
import socket
import struct
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LFS_FROM = 1_000_000
BLOCK = 1 << 18
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MODEL = re.compile(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?/?")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
KINDS = ("stall", "reset", "truncate", "wrong", "503", "429", "redirect")
_LICENCE = re.compile(r"\A---\n(?:.*\n)*?license: *(\S+)\n")


@functools.lru_cache(maxsize=1024)
def _oids(path: str, size: int, mtime_ns: int) -> tuple[str, str]:  # noqa: ARG001 - size and mtime make the key
    git = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    sha256 = hashlib.sha256()
    with Path(path).open("rb") as data:
        while block := data.read(BLOCK):
            git.update(block)
            sha256.update(block)
    return git.hexdigest(), sha256.hexdigest()


def oids(path: Path) -> tuple[str, str]:
    """(git blob sha1, sha256) of a file, 40 and 64 hex digits; remembered until the file changes."""
    stat = path.stat()
    return _oids(str(path), stat.st_size, stat.st_mtime_ns)


def entry(folder: Path, path: Path) -> dict[str, Any]:
    """What the hub's tree lists for one file."""
    git, sha256 = oids(path)
    size = path.stat().st_size
    found: dict[str, Any] = {"type": "file", "oid": git, "size": size, "path": path.relative_to(folder).as_posix()}
    if size >= LFS_FROM:
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()
        found["oid"] = hashlib.sha1(b"blob %d\0" % len(pointer) + pointer, usedforsecurity=False).hexdigest()
        found["lfs"] = {"oid": sha256, "size": size, "pointerSize": len(pointer)}
    return found


def byte_range(header: str | None, size: int) -> tuple[int, int] | None:
    """Half-open [start, end) that a Range header asks of `size` bytes, or None. Raises ValueError (416)."""
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", (header or "").strip())
    if match is None or match.groups() == ("", ""):
        return None
    first, last = match.groups()
    start = int(first) if first else max(size - int(last), 0)
    end = min(int(last) + 1, size) if first and last else size
    if start >= end:
        raise ValueError(f"bytes */{size}")
    return start, end


class Hub(ThreadingHTTPServer):
    """The server; `url` is where it listens. In a test: `hub = Hub(root); hub.start(); …; hub.stop()`."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, root: Path, address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        super().__init__(address, Handler)
        self.root = root
        self.lock = threading.Lock()
        self.stats: dict[str, dict[str, int]] = {}
        self.faults: list[dict[str, Any]] = []
        self.rate: int | None = None
        self.token: str | None = None
        self.with_token: list[str] = []
        self.url = f"http://{self.server_address[0]!s}:{self.server_address[1]}"

    def start(self) -> None:
        """Serve from a thread."""
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def stop(self) -> None:
        """Stop serving and close the socket."""
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go away in the middle are this server's daily bread."""

    def commit(self, repo: str, revision: str) -> tuple[str, Path] | None:
        """(40 hex, folder) of a revision of `repo`; `main` is the folder made last."""
        home = self.root / repo
        if ".." in repo or not home.is_dir():
            return None
        commits = {p.name: p for p in home.iterdir() if _COMMIT.fullmatch(p.name) and p.is_dir()}
        if revision == "main" and commits:
            revision = max(commits, key=lambda name: commits[name].stat().st_mtime_ns)
        return (revision, commits[revision]) if revision in commits else None

    def count(self, key: str, requests: int = 0, sent: int = 0) -> None:
        """Add to the statistics of `key`."""
        with self.lock:
            row = self.stats.setdefault(key, {"requests": 0, "bytes": 0})
            row["requests"] += requests
            row["bytes"] += sent

    def fault(self, key: str, method: str) -> dict[str, Any]:
        """Take the next fault that is due for `key`, or {}; HEAD meets redirects only."""
        with self.lock:
            for fault in self.faults:
                if method == "HEAD" and fault["kind"] != "redirect":
                    continue
                if fault["times"] > 0 and fnmatch.fnmatch(key, fault["path"]):
                    fault["times"] -= 1
                    return fault
        return {}


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Hub
    protocol_version = "HTTP/1.1"
    timeout = 300

    def log_message(self, format: str, *args: Any) -> None:
        """Silent: GET /_stats tells more."""

    def do_GET(self) -> None:
        """API, files, statistics."""
        path = unquote(urlsplit(self.path).path)
        if path == "/_stats":
            with self.server.lock:
                self._json(200, self.server.stats)
        elif match := _MODEL.fullmatch(path):
            self._model(*match.groups())
        elif match := _FILE.fullmatch(path):
            self._file(*match.groups())
        else:
            self._missing("EntryNotFound", path)

    do_HEAD = do_GET

    def do_DELETE(self) -> None:
        """DELETE /_stats starts counting anew."""
        with self.server.lock:
            self.server.stats.clear()
        self._json(200, {})

    def do_POST(self) -> None:
        """POST /_faults."""
        try:
            faults = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
            faults = [{"path": "*", "times": 1, "after": None, **fault} for fault in faults]
            if self.path != "/_faults" or any(fault["kind"] not in KINDS for fault in faults):
                raise ValueError(f"POST /_faults knows {KINDS}")
        except (ValueError, TypeError, KeyError) as error:
            self._json(400, {"error": str(error)})
            return
        with self.server.lock:
            self.server.faults = faults
        self._json(200, faults)

    def _json(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(data)),
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _missing(self, code: str, what: str) -> None:
        self._json(
            404, {"error": f"{what} is not here"}, {"X-Error-Code": code, "X-Error-Message": f"{what} is not here"}
        )

    def _model(self, repo: str, what: str | None, revision: str | None) -> None:
        self.server.count(f"{repo}/{what or 'info'}", requests=1)
        found = self.server.commit(repo, revision or "main")
        if found is None:
            home = (self.server.root / repo).is_dir()
            self._missing("RevisionNotFound" if home else "RepoNotFound", f"{repo}@{revision or 'main'}")
            return
        sha, folder = found
        files = sorted(p for p in folder.rglob("*") if p.is_file())
        if what == "tree":
            self._json(200, [entry(folder, p) for p in files])
            return
        siblings = [{"rfilename": p.relative_to(folder).as_posix()} for p in files]
        card = folder / "README.md"
        licence = _LICENCE.match(card.read_text()) if card.is_file() else None
        told = {"cardData": {"license": licence[1]}, "tags": [f"license:{licence[1]}"]} if licence else {}
        gated = "manual" if self.server.token else False
        about = {"id": repo, "modelId": repo, "sha": sha, "private": False, "gated": gated, "siblings": siblings}
        self._json(200, about | told)

    def _file(self, repo: str, revision: str, name: str) -> None:
        key = f"{repo}/{name}"
        self.server.count(key, requests=1)
        if given := self.headers.get("Authorization"):
            self.server.with_token.append(key)
        if self.server.token and given != f"Bearer {self.server.token}":
            self._json(401, {"error": "gated"}, {"X-Error-Code": "GatedRepo"})
            return
        found = self.server.commit(repo, revision)
        path = found[1] / name if found else None
        if found is None or path is None or ".." in Path(name).parts or not path.is_file():
            self._missing("EntryNotFound" if found else "RevisionNotFound", f"{key}@{revision}")
            return
        fault = self.server.fault(key, self.command)
        if (kind := fault.get("kind")) in ("503", "429"):
            self._json(int(kind), {"error": "the hub is busy"}, {"Retry-After": str(fault.get("retry_after", 1))})
            return
        if kind == "redirect":
            self._json(302, {}, {"Location": fault["to"] + self.path})
            return
        git, sha256 = oids(path)
        size = path.stat().st_size
        tag = f'"{sha256 if size >= LFS_FROM else git}"'
        try:
            part = byte_range(self.headers.get("Range"), size)
        except ValueError as error:
            self._json(416, {"error": "range"}, {"Content-Range": str(error)})
            return
        # A part of another file than the client began with is worth nothing: If-Range decides.
        if self.headers.get("If-Range", tag) != tag:
            part = None
        start, end = part or (0, size)
        self.send_response(206 if part else 200)
        if part:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
        for field, value in {
            "Content-Type": "application/octet-stream",
            "Content-Length": str(end - start),
            "Accept-Ranges": "bytes",
            "ETag": tag,
            "X-Repo-Commit": found[0],
            "X-Linked-Etag": tag,
            "X-Linked-Size": str(size),
        }.items():
            self.send_header(field, value)
        self.end_headers()
        if self.command == "GET":
            self._send(path, key, start, end, fault)

    def _send(self, path: Path, key: str, start: int, end: int, fault: dict[str, Any]) -> None:
        kind = fault.get("kind")
        stop = end
        if kind in ("stall", "reset", "truncate"):
            stop = start + min((end - start) // 2 if fault["after"] is None else fault["after"], end - start)
        flip, first, begin = kind == "wrong", start, time.monotonic()
        with path.open("rb") as data:
            data.seek(start)
            while start < stop and (
                block := data.read(min(BLOCK if not self.server.rate else BLOCK // 8, stop - start))
            ):
                if flip:
                    block, flip = bytes([block[0] ^ 1]) + block[1:], False
                self.server.count(key, sent=len(block))  # before: who has read it all finds it counted
                self.wfile.write(block)
                start += len(block)
                if self.server.rate:
                    time.sleep(max(0.0, (start - first) / self.server.rate - (time.monotonic() - begin)))
        if kind in ("stall", "reset", "truncate"):
            self.close_connection = True
            self.wfile.flush()
            if kind == "stall":
                self.connection.settimeout(600)
                self.connection.recv(1)  # returns when the client closes
            elif kind == "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                os.close(self.connection.detach())


if __name__ == "__main__":
    Hub(Path(sys.argv[1]), ("0.0.0.0", int(sys.argv[2]) if len(sys.argv) > 2 else 8081)).serve_forever()  # noqa: S104
