#!/usr/bin/env python3
"""STAND-IN for an inference engine: it answers what an engine is asked, and takes as long for it as it is told.

`image NAME` makes a container image of it from this machine's own Python; `serve PORT` is what runs in the container.
A completion takes `seconds` of its request. On SIGTERM no new request is taken, and the running ones are finished.
"""

import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PROGRAMS = (sys.executable, "/bin/sh", "/bin/cat", "/usr/bin/head")


class Engine(BaseHTTPRequestHandler):
    """Two paths."""

    def do_GET(self) -> None:
        """/health."""
        self.answer({"ok": True})

    def do_POST(self) -> None:
        """/v1/completions."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(body.get("seconds", 0))
        self.answer({"choices": [{"text": "stand-in"}], "usage": {"completion_tokens": 1}})

    def answer(self, document: dict[str, Any]) -> None:
        """A JSON document."""
        data = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def serve(port: int) -> None:
    """Until SIGTERM, and then until the last answer is given."""
    server = ThreadingHTTPServer(("", port), Engine)
    server.daemon_threads = False
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    server.serve_forever()
    server.server_close()
    print("stand-in: all answers given", flush=True)


def image(
    name: str,
    programs: Sequence[str] = PROGRAMS,
    more: Sequence[tuple[str | Path, str]] = ((__file__, "engine.py"),),
    changes: Sequence[str] = (),
) -> None:
    """Python, a shell, and this file (or `more`: files and their places); `docker import` makes an image of them."""
    files = {Path(program) for program in programs} | {path.resolve() for path in map(Path, programs)}
    for program in programs:
        said = subprocess.run(["ldd", program], check=True, capture_output=True, text=True).stdout
        files |= {Path(word) for word in said.split() if word.startswith("/")}
    library = Path(os.__file__).parent
    options = [word for change in changes for word in ("--change", change)]
    docker = subprocess.Popen(["docker", "import", *options, "-", name], stdin=subprocess.PIPE)
    with docker, tarfile.open(fileobj=docker.stdin, mode="w|", dereference=True) as out:
        for path in sorted({file.parent.resolve() / file.name for file in files}):
            if library not in path.parents:  # it comes whole
                out.add(path, str(path).lstrip("/"))
        for link in ("bin", "lib", "lib64", "sbin"):
            entry = tarfile.TarInfo(link)
            entry.type, entry.linkname = tarfile.SYMTYPE, f"usr/{link}"
            out.addfile(entry)
        out.add(
            library,
            str(library).lstrip("/"),
            filter=lambda i: None if "__pycache__" in i.name or "/test" in i.name else i,
        )
        for source, place in more:
            out.add(source, place)
    sys.exit(docker.returncode)


if __name__ == "__main__":
    {"serve": lambda: serve(int(sys.argv[2])), "image": lambda: image(sys.argv[2])}[sys.argv[1]]()
