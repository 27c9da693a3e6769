#!/usr/bin/env python3
"""STAND-IN for Open WebUI, and no web interface: it reads the same variables, writes where Open WebUI writes, and is started in the same way.

`image NAME` makes a container image of it from this machine's own Python. Beside it lies stand_in_engine.py, which knows how.
/health; /api/models and /api/chat/completions ask the endpoints that the variables name, with their keys.
"""

import _ssl
import json
import os
import sys
import urllib.request
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import stand_in_engine


def endpoints() -> list[tuple[str, str]]:
    """(URL, key) in the order of the variables."""
    urls, keys = (os.environ[name].split(";") for name in ("OPENAI_API_BASE_URLS", "OPENAI_API_KEYS"))
    return list(zip(urls, keys, strict=True))


def ask(url: str, key: str, body: bytes | None = None) -> dict[str, Any]:
    """What an endpoint says."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=10) as answer:  # noqa: S310
        found: dict[str, Any] = json.load(answer)
        return found


class Interface(stand_in_engine.Engine):
    """Three paths."""

    def do_GET(self) -> None:
        """Health, models."""
        models = (
            [one for url, key in endpoints() for one in ask(f"{url}/models", key)["data"]]
            if self.path != "/health"
            else []
        )
        self.answer({"status": True, "data": models})

    def do_POST(self) -> None:
        """A completion by the first endpoint."""
        url, key = endpoints()[0]
        self.answer(ask(f"{url}/chat/completions", key, self.rfile.read(int(self.headers["Content-Length"]))))


def serve() -> None:
    """As Open WebUI begins: a session key is a must, static files are copied, the database is in DATA_DIR."""
    if not os.environ.get("WEBUI_SECRET_KEY"):
        sys.exit("stand-in: WEBUI_SECRET_KEY is not set")
    static = Path(os.environ["STATIC_DIR"])
    static.mkdir(parents=True)
    (static / "favicon.png").write_bytes(b"")
    (Path(os.environ["DATA_DIR"]) / "webui.db").touch()
    ThreadingHTTPServer((os.environ["HOST"], int(os.environ["PORT"])), Interface).serve_forever()


def image(name: str) -> None:
    """Python, bash and this file, as Open WebUI's image has them."""
    start = Path("/run/stand-in-start.sh")
    start.write_text(f"exec {sys.executable} /app/backend/stand_in_webui.py serve\n")
    stand_in_engine.image(
        name,
        # An endpoint may speak TLS: OpenSSL's libraries are this module's.
        ("/bin/bash", _ssl.__file__, *stand_in_engine.PROGRAMS),
        (
            (__file__, "app/backend/stand_in_webui.py"),
            (stand_in_engine.__file__, "app/backend/stand_in_engine.py"),
            (start, "app/backend/start.sh"),
        ),
        ("WORKDIR /app/backend", 'CMD ["bash", "start.sh"]'),
    )


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
    else:
        image(sys.argv[2])
