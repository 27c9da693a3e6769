"""A registry that speaks the pull half of HTTP API V2: bearer tokens, an index of platforms, waits, redirects of blobs."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


class RegistryDouble:
    """`tags` {repository:tag -> digest}; `blobs` by digest. `user` makes tokens necessary; `busy` answers 429 so many times."""

    def __init__(self) -> None:
        self.tags: dict[str, str] = {}
        self.blobs: dict[str, tuple[bytes, str]] = {}
        self.token = ""
        self.login = ""
        self.busy = 0
        self.damage = False
        self.asked: list[tuple[str, str]] = []  # (path, Authorization)
        double = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: object) -> None:
                pass

            def reply(self, status: int, body: bytes = b"", **headers: str) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self) -> None:
                path, said = urlsplit(self.path), self.headers.get("Authorization", "")
                double.asked.append((self.path, said))
                if path.path == "/token":
                    if double.login and said != "Basic " + base64.b64encode(double.login.encode()).decode():
                        return self.reply(401)
                    assert parse_qs(path.query)["scope"] == ["repository:engine/vllm:pull"]
                    return self.reply(200, json.dumps({"token": double.token}).encode())
                if double.busy:
                    double.busy -= 1
                    return self.reply(429, b"toomanyrequests", Retry_After="0")
                if double.token and said != f"Bearer {double.token}":
                    challenge = (
                        f'Bearer realm="{double.url}/token",service="double",scope="repository:engine/vllm:pull"'
                    )
                    return self.reply(401, WWW_Authenticate=challenge)
                repository, _kind, name = path.path.removeprefix("/v2/").rsplit("/", 2)
                known = double.tags.get(f"{repository}:{name}", name)
                if known not in double.blobs:
                    return self.reply(404, b'{"errors": [{"code": "MANIFEST_UNKNOWN"}]}')
                body, media = double.blobs[known]
                if double.damage:
                    body += b" "
                return self.reply(200, body, Content_Type=media, Docker_Content_Digest=known)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_address[1]}"
        self.url = f"http://{self.address}"

    def __enter__(self) -> RegistryDouble:
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def add(self, value: Any, media: str) -> str:
        data = json.dumps(value).encode()
        self.blobs[digest(data)] = (data, media)
        return digest(data)

    def image(self, layers: list[tuple[int, str]], architecture: str = "amd64") -> str:
        """Publish an image of layers (compressed bytes, one hex digit that names the content); return its digest."""
        ids = [f"sha256:{digit * 64}" for _, digit in layers]
        config = {"os": "linux", "architecture": architecture, "rootfs": {"type": "layers", "diff_ids": ids}}
        rows = [{"size": size, "digest": f"sha256:{digit * 64}"} for size, digit in layers]
        return self.add({"config": {"digest": self.add(config, "json")}, "layers": rows}, MANIFEST)

    def index(self, **platforms: str) -> str:
        """Publish an index {architecture: digest}."""
        rows = [{"digest": d, "platform": {"os": "linux", "architecture": a}} for a, d in platforms.items()]
        return self.add({"mediaType": INDEX, "manifests": rows}, INDEX)
