"""Pulling an image, on Docker's API as it answers."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specrig.host import pull
from specrig.host.errors import HostError
from specrig.host.progress import Progress

from .docker import Docker

IMAGE = "registry.test:5000/engine/vllm:0.32.0"
DIGEST = "sha256:" + "a" * 64


class Recorder(Progress):
    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.seen: list[tuple[str, Any, Any, str]] = []

    def update(self, phase: str, done: float | None = None, total: float | None = None, message: str = "") -> None:
        self.seen.append((phase, done, total, message))


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Docker]:
    monkeypatch.setattr(pull, "FIRST_WAIT_S", 0.0)
    with Docker(tmp_path, monkeypatch) as one:
        yield one


def layer(name: str, status: str, current: int = 0, total: int = 0) -> dict[str, Any]:
    return {"id": name, "status": status, "progressDetail": {"current": current, "total": total} if total else {}}


def refused(image: str, code: str, progress: Progress | None = None) -> HostError:
    with pytest.raises(HostError) as caught:
        pull.pull(image, progress or Recorder())
    assert caught.value.code == code, caught.value
    return caught.value


def test_an_image_that_is_there_costs_one_question(docker: Docker) -> None:
    docker.images[IMAGE] = {"Id": "sha256:1", "RepoDigests": ["x"]}
    found = pull.pull(IMAGE, Recorder())
    assert (found["changed"], found["runs"], found["id"], found["digests"]) == (False, IMAGE, "sha256:1", ["x"])
    assert docker.pulls == []


def test_check_asks_and_does_not_pull(docker: Docker) -> None:
    assert pull.pull(IMAGE, Recorder(), check=True)["changed"] is True
    assert docker.pulls == []


def test_bytes_then_layers(docker: Docker) -> None:
    docker.events = [
        [
            {"status": "Pulling from engine/vllm", "id": "0.32.0"},
            layer("a", "Pulling fs layer"),
            layer("b", "Pulling fs layer"),
            layer("c", "Already exists"),
            layer("a", "Downloading", 10, 100),
            layer("b", "Downloading", 50, 300),
            layer("a", "Download complete"),
            layer("b", "Downloading", 300, 300),
            layer("a", "Extracting", 5, 100),
            layer("a", "Pull complete"),
            layer("b", "Pull complete"),
            {"status": "Digest: sha256:…"},
        ]
    ]
    progress = Recorder()
    assert pull.pull(IMAGE, progress)["changed"] is True
    assert docker.pulls == [{"fromImage": ["registry.test:5000/engine/vllm"], "tag": ["0.32.0"]}]
    assert ("download", 60, 400, "1/3 layers") in progress.seen
    assert ("download", 150, 400, "1/3 layers") in progress.seen
    assert progress.seen[-1] == ("extract", None, None, "3/3 layers")
    done = [d for phase, d, *_ in progress.seen if phase == "download"]
    assert done == sorted(done)


def test_a_digest_wins_over_the_tag(docker: Docker) -> None:
    docker.images.clear()
    with pytest.raises(HostError, match="reported success"):
        pull.pull(f"{IMAGE}@{DIGEST}", Recorder())  # our double stores it under name@digest only
    assert docker.pulls[0]["tag"] == [DIGEST]


def test_a_broken_transfer_is_tried_again(docker: Docker) -> None:
    docker.events = [[{"error": "unexpected EOF"}], [layer("a", "Pull complete")]]
    progress = Recorder()
    assert pull.pull(IMAGE, progress)["changed"] is True
    assert any(phase == "retry" and "unexpected EOF" in message for phase, _, _, message in progress.seen)


@pytest.mark.parametrize(
    ("message", "code", "tries"),
    [
        ("unauthorized: authentication required", "PULL_DENIED", 1),
        ("manifest unknown", "PULL_NOT_FOUND", 1),
        ("write /var/lib/x: no space left on device", "PULL_DISK", 1),
        ("dial tcp: lookup registry.test: no such host", "PULL_UNREACHABLE", pull.ATTEMPTS),
        ("net/http: TLS handshake timeout", "PULL_BROKEN", pull.ATTEMPTS),
        ("something else", "PULL_FAILED", 1),
    ],
)
def test_failures_have_codes(docker: Docker, message: str, code: str, tries: int) -> None:
    docker.events = [[{"error": message}] for _ in range(9)]
    assert message in refused(IMAGE, code).cause
    assert len(docker.pulls) == tries


def test_an_http_error_has_a_code(docker: Docker) -> None:
    docker.status = 404
    refused(IMAGE, "PULL_DENIED")


def test_a_silent_daemon_is_a_stall(docker: Docker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull, "SILENCE_S", 0.05)
    monkeypatch.setattr(pull, "ATTEMPTS", 1)
    docker.events = [[layer("a", "Downloading", 1, 9), 0.3]]
    refused(IMAGE, "PULL_STALLED")


def test_no_docker_is_coded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none")
    assert refused(IMAGE, "DOCKER_UNREACHABLE").status == 2
    assert pull.pull(IMAGE, Recorder(), check=True)["changed"] is True


@pytest.mark.parametrize("image", ["vllm", "vllm:latest", "", "a b:1", "x:1@sha256:12", "-x:1;rm", "x:1?y=2"])
def test_references_that_move_or_are_none_are_refused(image: str) -> None:
    refused(image, "PULL_REFERENCE")


def test_stored_login_is_sent_to_its_own_registry_only(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    auth = base64.b64encode(b"me:pw:d").decode()
    config.write_text(json.dumps({"auths": {"registry.test:5000": {"auth": auth}}}))
    header = pull.auth_header("registry.test:5000/engine/vllm", config)["X-Registry-Auth"]
    sent = json.loads(base64.urlsafe_b64decode(header))
    assert sent == {"username": "me", "password": "pw:d", "serveraddress": "registry.test:5000"}
    assert pull.auth_header("vllm/vllm-openai", config) == {}
    assert pull.registry("vllm/vllm-openai") == "https://index.docker.io/v1/"
