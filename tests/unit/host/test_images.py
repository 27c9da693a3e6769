"""Room for images, their keepers, their files, and what may go. Docker's API and `docker save|load` are played."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specrig.host import images, proven, pull
from specrig.host.errors import HostError

from .docker import Docker
from .test_pull import Recorder

DIGEST = "sha256:" + "ab" * 32
IMAGE = f"registry.test:5000/engine/vllm:1@{DIGEST}"
KEEPER = "specrig/vllm:" + "ab" * 8
NOT_FOUND = [{"error": "manifest unknown"}]
CLI = """#!{python}
import socket, sys
if sys.argv[1] == "save":
    sys.stdout.buffer.write(sys.argv[2].encode() + b"\\0" * 100000)
else:
    name, _, tag = sys.stdin.buffer.read().rstrip(b"\\0").decode().partition(":")
    with socket.socket(socket.AF_UNIX) as docker:
        docker.connect("{socket}")
        docker.sendall(f"POST /images/create?fromImage={name}&tag={tag} HTTP/1.0\\r\\n\\r\\n".encode())
        docker.recv(1000)
"""


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Docker]:
    monkeypatch.setattr(pull, "FIRST_WAIT_S", 0.0)
    monkeypatch.setattr(proven, "ROOT", tmp_path / "services")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(shutil, "which", lambda name: None)  # without zstd
    text = CLI.replace("{python}", sys.executable).replace("{socket}", str(tmp_path / "docker.sock"))
    (tmp_path / "docker").write_text(text)
    (tmp_path / "docker").chmod(0o755)
    with Docker(tmp_path, monkeypatch) as one:
        yield one


def refused(code: str, action: Any, *args: Any, **more: Any) -> HostError:
    with pytest.raises(HostError) as caught:
        action(*args, **more)
    assert caught.value.code == code, caught.value
    return caught.value


def layers(*rows: tuple[int, str]) -> list[dict[str, Any]]:
    return [{"size": size, "diff_id": f"sha256:{digit * 64}"} for size, digit in rows]


# `docker pull name:tag@digest` makes the image known as name@digest; Docker finds it under the longer name too.
def known(docker: Docker) -> None:
    docker.images[IMAGE] = {"Id": "sha256:1", "RepoDigests": []}


def test_what_is_run_by_digest_gets_a_name_that_prune_leaves(docker: Docker) -> None:
    known(docker)
    assert pull.pull(IMAGE, Recorder(), check=True)["changed"] is True
    assert pull.pull(IMAGE, Recorder())["runs"] == IMAGE
    assert docker.images[IMAGE]["RepoTags"] == [KEEPER]
    assert pull.pull(IMAGE, Recorder())["changed"] is False


@pytest.mark.parametrize(
    ("here", "missing"),
    [([], 700), ([["a"]], 600), ([["a", "b"]], 400), ([["b", "c"]], 700), ([["a", "x"], ["a", "b", "c"]], 0)],
)
def test_layers_are_shared_from_the_bottom_up(here: list[list[str]], missing: int) -> None:
    images_here = [[f"sha256:{digit * 64}" for digit in one] for one in here]
    assert images.missing_bytes(layers((100, "a"), (200, "b"), (400, "c")), images_here) == missing


def test_a_pull_that_does_not_fit_is_refused_with_both_numbers(docker: Docker, tmp_path: Path) -> None:
    error = refused("PULL_DISK", pull.pull, IMAGE, Recorder(), layers=layers((10**15, "a")))
    assert "3000.0 TB" in error.cause and "free" in error.cause and docker.pulls == []
    docker.images["base:1"] = {"Id": "sha256:2", "RootFS": {"Layers": ["sha256:" + "a" * 64]}}
    docker.events = [[]]
    with pytest.raises(
        HostError, match="PULL_FAILED"
    ):  # the double names it without its tag; it was pulled, and that is the point
        pull.pull(IMAGE, Recorder(), layers=layers((10**15, "a"), (1000, "b")))
    assert len(docker.pulls) == 1


def test_an_image_is_archived_whole_or_not_at_all(
    docker: Docker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known(docker)
    archive = tmp_path / "archive"
    assert pull.pull(IMAGE, Recorder(), archive=archive)["changed"] is True
    file = archive / f"registry.test--5000--engine--vllm@sha256-{'ab' * 32}.tar"
    told = images.about(file)
    assert told and told["image"] == IMAGE and told["size"] == file.stat().st_size
    assert sorted(p.name for p in archive.iterdir()) == [file.name, file.name + ".json"]
    assert pull.pull(IMAGE, Recorder(), archive=archive)["changed"] is False
    file.write_bytes(b"cut off")
    assert images.about(file) is None and pull.pull(IMAGE, Recorder(), archive=archive, check=True)["changed"] is True
    (tmp_path / "docker").write_text("#!/bin/sh\necho half\nexit 1\n")
    refused("ARCHIVE_FAILED", pull.pull, IMAGE, Recorder(), archive=archive)
    assert not list(archive.glob(".*"))


def test_no_room_for_the_file_is_told(docker: Docker, tmp_path: Path) -> None:
    known(docker)
    docker.images[IMAGE]["Size"] = 10**16
    refused("ARCHIVE_DISK", pull.pull, IMAGE, Recorder(), archive=tmp_path / "archive")


def test_the_file_is_loaded_when_the_registry_has_it_no_more(docker: Docker, tmp_path: Path) -> None:
    known(docker)
    archive = tmp_path / "archive"
    pull.pull(IMAGE, Recorder(), archive=archive)
    docker.images.clear()
    docker.events = [NOT_FOUND]
    found = pull.pull(IMAGE, Recorder(), archive=archive)
    assert (found["runs"], found["id"]) == (KEEPER, "sha256:1")
    assert "PULL_NOT_FOUND" in found["told"][0]
    docker.images[KEEPER]["RepoTags"] = [KEEPER]
    assert pull.pull(IMAGE, Recorder(), archive=archive)["changed"] is False


def test_a_file_that_rotted_is_not_loaded(docker: Docker, tmp_path: Path) -> None:
    known(docker)
    archive = tmp_path / "archive"
    pull.pull(IMAGE, Recorder(), archive=archive)
    docker.images.clear()
    file = next(archive.glob("*.tar"))
    data = bytearray(file.read_bytes())
    data[50] ^= 1
    file.write_bytes(data)
    docker.events = [NOT_FOUND]
    assert f"rm {file}" in refused("ARCHIVE_DAMAGED", pull.pull, IMAGE, Recorder(), archive=archive).fix
    docker.events = [NOT_FOUND]
    refused("PULL_NOT_FOUND", pull.pull, IMAGE, Recorder(), archive=tmp_path / "nothing")


def test_an_image_without_a_digest_has_no_keeper_and_no_file(docker: Docker, tmp_path: Path) -> None:
    docker.images["registry.test/engine:1"] = {"Id": "sha256:1"}
    assert pull.pull("registry.test/engine:1", Recorder(), archive=tmp_path / "archive")["changed"] is False
    assert images.keeper("registry.test/engine:1") == ""


@pytest.fixture
def used(docker: Docker, tmp_path: Path) -> Path:
    """A plan with one service, a previous generation, a container of something old, and images of strangers."""
    archive = tmp_path / "archive"
    archive.mkdir()
    for number, name in enumerate(
        ["r/vllm:new", "r/vllm:old", "r/vllm:older", "r/vllm:running", "debian:13", "specrig/gone:1"]
    ):
        docker.images[name] = {"Id": f"sha256:{number}", "Size": 10}
    docker.running = [{"Names": ["/mine"], "ImageID": "sha256:3"}]
    for text, image in (("1", "r/vllm:old"), ("2", "r/vllm:new")):
        proven.Home("chat").keep({Path("/unit"): text.encode()}, {"image": image, "service": {}})
    for image in ("r/vllm:old", "r/vllm:older"):
        file = archive / f"{image.rpartition(':')[2]}.tar"
        file.write_bytes(b"1234")
        file.with_name(file.name + ".json").write_text(json.dumps({"image": image, "size": 4}))
    plan = tmp_path / "plan.json"
    service = {"name": "chat", "image": "r/vllm:new"}
    plan.write_text(json.dumps({"services": [service], "host": {"images_archive": str(archive)}}))
    return plan


def test_a_web_interfaces_image_is_used_also_while_it_is_stopped(used: Path) -> None:
    plan = json.loads(used.read_text())
    plan["host"]["webui"] = {"state": "present", "image": "r/vllm:older"}
    used.write_text(json.dumps(plan))
    told = {row["names"][0]: row["used"] for row in images.images(plan_file=used)["images"]}
    assert told["r/vllm:older"] == ["planned for webui"]


def test_list_says_who_uses_what(used: Path) -> None:
    found = images.images(plan_file=used)
    told = {row["names"][0]: row["used"] for row in found["images"]}
    assert told == {
        "r/vllm:new": ["planned for chat", "proven of chat"],
        "r/vllm:old": ["previous of chat"],
        "r/vllm:older": [],
        "r/vllm:running": ["container mine"],
        "specrig/gone:1": [],
    }
    assert [(Path(a["path"]).name, a["used"], a["whole"]) for a in found["archives"]] == [
        ("old.tar", ["previous of chat"], True),
        ("older.tar", [], True),
    ]


def test_prune_says_first_and_takes_only_what_nothing_uses(used: Path, docker: Docker) -> None:
    before = dict(docker.images)
    found = images.images(prune=True, plan_file=used)
    assert [row["path"] for row in found["would_remove"]] == [
        "r/vllm:older",
        "specrig/gone:1",
    ] and docker.images == before
    images.images(prune=True, apply=True, plan_file=used)
    assert set(before) - set(docker.images) == {"r/vllm:older", "specrig/gone:1"}
    assert len(list((used.parent / "archive").glob("*.tar"))) == 2
    images.images(prune=True, apply=True, archives=True, plan_file=used)
    assert [p.name for p in (used.parent / "archive").glob("*.tar")] == ["old.tar"]


def test_without_a_plan_nothing_is_removed(docker: Docker, tmp_path: Path) -> None:
    refused("GC_NO_PLAN", images.images, prune=True, apply=True, plan_file=tmp_path / "none.json")


@pytest.mark.parametrize("text", ["[]", "x", '{"layers": [1]}', '{"layers": [{"size": "x", "diff_id": ""}]}'])
def test_a_broken_job_is_refused(text: str) -> None:
    refused("PULL_JOB", pull.job, text)
