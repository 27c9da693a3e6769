"""The few calls we make to Docker's API, over its socket; no client library and no `docker` command needed."""

from __future__ import annotations

import http.client
import json
import os
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from specrig.host.errors import COULD_NOT_RUN, HostError

SOCKET = "/var/run/docker.sock"


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def socket_path() -> str:
    """The API socket: `DOCKER_HOST` when it names one, else the usual place."""
    host = os.environ.get("DOCKER_HOST", "")
    return host[len("unix://") :] if host.startswith("unix://") else SOCKET


def _request(method: str, url: str, headers: dict[str, str], timeout: float) -> http.client.HTTPResponse:
    connection = _Connection(socket_path(), timeout)
    try:
        connection.request(method, url, headers=headers)
        return connection.getresponse()
    except OSError as error:
        raise HostError(
            "DOCKER_UNREACHABLE",
            f"no answer on {socket_path()}: {error}",
            "systemctl status docker",
            COULD_NOT_RUN,
        ) from error


def get(url: str, timeout: float = 30) -> tuple[int, Any]:
    """GET `url`; return the status and the JSON body (None when it is not JSON)."""
    response = _request("GET", url, {}, timeout)
    body = response.read()
    try:
        return response.status, json.loads(body)
    except ValueError:
        return response.status, None


def call(method: str, url: str, timeout: float = 120) -> tuple[int, Any]:
    """POST or DELETE `url` without a body; return the status and the JSON body (None when it is not JSON)."""
    response = _request(method, url, {"Content-Length": "0"}, timeout)
    body = response.read()
    try:
        return response.status, json.loads(body)
    except ValueError:
        return response.status, None


def inspect_container(name: str, timeout: float = 30) -> dict[str, Any] | None:
    """`docker inspect` of a container, or None when there is none of that name."""
    status, body = get(f"/containers/{quote(name, safe='')}/json", timeout)
    return body if status == 200 and isinstance(body, dict) else None


def inspect_image(image: str) -> dict[str, Any] | None:
    """`docker image inspect`, or None when the image is not on the host."""
    status, body = get(f"/images/{quote(image, safe='/:@')}/json")
    return body if status == 200 and isinstance(body, dict) else None


def stream(method: str, url: str, headers: dict[str, str], timeout: float) -> Iterator[dict[str, Any]]:
    """Yield the JSON documents of a streamed answer. An HTTP error is yielded as `{"error": …, "status": …}`."""
    response = _request(method, url, headers, timeout)
    if response.status >= 400:
        body = response.read().decode(errors="replace")
        try:
            message = json.loads(body)["message"]
        except (ValueError, KeyError, TypeError):
            message = body.strip() or response.reason
        yield {"error": message, "status": response.status}
        return
    while text := response.readline():
        if text.strip():
            yield json.loads(text)
