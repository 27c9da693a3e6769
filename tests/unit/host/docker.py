"""Docker's API on a UNIX socket: the calls that the host program makes."""

from __future__ import annotations

import json
import socketserver
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest


class Docker:
    """`images` and `containers` by name; a pull plays `events` (a float is a pause), then adds the image."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.containers: dict[str, Any] = {}
        self.images: dict[str, Any] = {}
        self.pulls: list[dict[str, list[str]]] = []
        self.headers: list[dict[str, str]] = []
        self.events: list[list[Any]] = []
        self.status = 200
        self.info: dict[str, Any] = {"DockerRootDir": str(directory)}
        self.running: list[dict[str, Any]] = []
        docker, path = self, str(directory / "docker.sock")
        monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: object) -> None:
                pass

            def address_string(self) -> str:
                return "socket"

            def reply(self, status: int, value: Any) -> None:
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self) -> None:
                if self.path == "/info":
                    return self.reply(200, docker.info)
                if self.path.startswith("/images/json"):
                    return self.reply(200, docker.listing())
                if self.path.startswith("/containers/json"):
                    return self.reply(200, docker.running)
                kind, name = unquote(self.path).removesuffix("/json").split("/", 2)[1:]
                known = getattr(docker, kind)
                found = known.get(name) or next((one for one in known.values() if one.get("Id") == name), None)
                return self.reply(200 if found else 404, found or {"message": f"No such thing: {name}"})

            def do_DELETE(self) -> None:
                name = unquote(self.path).removeprefix("/images/")
                gone = docker.images.pop(name, None)
                self.reply(200 if gone else 404, [])

            def do_POST(self) -> None:
                query = parse_qs(urlsplit(self.path).query)
                if urlsplit(self.path).path.endswith("/tag"):
                    image = unquote(urlsplit(self.path).path).removeprefix("/images/").removesuffix("/tag")
                    return self.reply(*docker.tag(image, f"{query['repo'][0]}:{query['tag'][0]}"))
                docker.pulls.append(query)
                docker.headers.append(dict(self.headers))
                if docker.status != 200:
                    return self.reply(docker.status, {"message": "pull access denied"})
                self.send_response(200)
                self.end_headers()
                events = docker.events.pop(0) if docker.events else []
                for event in events:
                    if isinstance(event, float):
                        time.sleep(event)
                        continue
                    self.wfile.write(json.dumps(event).encode() + b"\r\n")
                if not any(isinstance(e, dict) and e.get("error") for e in events):
                    name, tag = query["fromImage"][0], query["tag"][0]
                    joined = f"{name}@{tag}" if tag.startswith("sha256:") else f"{name}:{tag}"
                    docker.images[joined] = {"Id": "sha256:1", "RepoDigests": []}
                return None

        class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
            daemon_threads = True

        self.server = Server(path, Handler)

    def tag(self, image: str, name: str) -> tuple[int, Any]:
        """Another name for an image: both are found, as one image."""
        if image not in self.images:
            return 404, {"message": f"No such image: {image}"}
        found = self.images[image]
        found["RepoTags"] = [*found.get("RepoTags", []), name]
        self.images[name] = found
        return 201, None

    def listing(self) -> list[dict[str, Any]]:
        """Every image once, with all names."""
        rows: dict[str, dict[str, Any]] = {}
        for name, found in self.images.items():
            row = rows.setdefault(
                found["Id"], {"Id": found["Id"], "Size": found.get("Size", 0), "RepoTags": [], "RepoDigests": []}
            )
            row["RepoDigests" if "@" in name else "RepoTags"].append(name)
        return list(rows.values())

    def __enter__(self) -> Docker:
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
