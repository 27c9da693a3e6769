"""The stager against a real aria2c and a real HTTP server."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specrig.host import aria2, build, manifest, stage
from specrig.host.errors import HostError
from specrig.host.progress import Progress

from .hub import Hub
from .models import write_model
from .program import PYTHON

REVISION = "0123456789abcdef0123456789abcdef01234567"
QUIET = Progress(quiet=True)


def blob(size: int, seed: int = 1) -> bytes:
    return hashlib.shake_256(str(seed).encode()).digest(size)


FILES = {"config.json": b'{"a": 1}\n', "model.safetensors": blob(300_000), "sub dir/t.json": b"t" * 70}


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def files_of(files: dict[str, bytes]) -> list[dict[str, Any]]:
    return [
        {"path": p, "size": len(d)}
        | ({"git_sha1": git_sha1(d)} if len(d) < 100 else {"sha256": hashlib.sha256(d).hexdigest()})
        for p, d in files.items()
    ]


def hub_of(files: dict[str, bytes], repo: str = "org/name", **more: Any) -> Hub:
    return Hub({f"/{repo}/resolve/{REVISION}/{p.replace(' ', '%20')}": d for p, d in files.items()}, **more)


def document(
    root: Path, url: str, files: dict[str, bytes] = FILES, repo: str = "org/name", **more: Any
) -> dict[str, Any]:
    path = str(root / repo.replace("/", "--") / REVISION)
    artefact = {"id": "a", "repo": repo, "revision": REVISION, "files": files_of(files), "path": path, "derive": None}
    return {"root": str(root), "endpoint": url, "artefacts": [artefact], "token_file": None, **more}


def run(doc: dict[str, Any], check: bool = False) -> dict[str, Any]:
    return stage.stage(manifest.parse_job(doc), QUIET, check)


def refused(doc: Any, code: str) -> HostError:
    with pytest.raises(HostError) as caught:
        run(doc)
    assert caught.value.code == code, caught.value
    return caught.value


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "FIRST_WAIT_S", 0.05)
    monkeypatch.setattr(stage, "LONGEST_WAIT_S", 0.05)
    monkeypatch.setattr(stage, "LOCK_WAIT_S", 0.3)
    monkeypatch.setattr(aria2, "RETRY_WAIT_S", 0)
    monkeypatch.setattr(aria2, "TIMEOUT_S", 1)


def test_publishes_plain_verified_files_and_then_needs_no_network(tmp_path: Path) -> None:
    with hub_of(FILES) as hub:
        doc = document(tmp_path, hub.url)
        assert run(doc, check=True) == {"changed": True, "would_stage": ["a"], "bytes": 300_079, "unchanged": []}
        assert not list(tmp_path.iterdir()), "--check must not write"
        result = run(doc)
    assert result["changed"] and result["staged"][0]["bytes"] == 300_079
    final = tmp_path / "org--name" / REVISION
    assert {
        p.relative_to(final).as_posix(): p.read_bytes()
        for p in final.rglob("*")
        if p.is_file() and p.name != manifest.MANIFEST
    } == FILES
    assert {p.stat().st_mode & 0o7777 for p in final.rglob("*") if p.is_file()} == {0o644}
    assert {p.stat().st_mode & 0o7777 for p in [final, final / "sub dir"]} == {0o755}
    assert (tmp_path / "org--name/current").readlink() == Path(REVISION)
    assert [p.name for p in (tmp_path / ".partial").iterdir()] == [".lock"]
    start = time.monotonic()
    again = run(doc)  # the server is gone
    assert again["changed"] is False and time.monotonic() - start < 0.1


def test_a_second_run_reads_no_weights(tmp_path: Path) -> None:
    with hub_of(FILES) as hub:
        doc = document(tmp_path, hub.url)
        run(doc)
    weights = tmp_path / "org--name" / REVISION / "model.safetensors"
    os.utime(weights, ns=(1, 1))
    run(doc)
    assert weights.stat().st_atime_ns == 1


def test_wrong_bytes_of_the_right_size_are_thrown_away_and_nothing_is_published(tmp_path: Path) -> None:
    wrong = {**FILES, "model.safetensors": blob(300_000, seed=2)}
    with hub_of(wrong) as hub:
        error = refused(document(tmp_path, hub.url), "STAGE_CHECKSUM")
        assert "model.safetensors" in error.cause
        assert not (tmp_path / "org--name").exists()
        partial = tmp_path / ".partial/org--name" / REVISION
        assert not (partial / "model.safetensors").exists() and (partial / "config.json").exists()
        hub.files[f"/org/name/resolve/{REVISION}/model.safetensors"] = FILES["model.safetensors"]
        before = dict(hub.sent)
        assert run(document(tmp_path, hub.url))["changed"]
        assert (
            hub.sent[f"/org/name/resolve/{REVISION}/config.json"] == before[f"/org/name/resolve/{REVISION}/config.json"]
        )


@pytest.mark.parametrize("length", [299_999, 300_001])
def test_another_length_is_refused(tmp_path: Path, length: int) -> None:
    with hub_of({**FILES, "model.safetensors": blob(length)}) as hub:
        refused(document(tmp_path, hub.url), "STAGE_CHECKSUM")
    assert not (tmp_path / "org--name").exists()


def test_kill_9_of_the_stager_alone_keeps_the_lock_with_the_download(tmp_path: Path) -> None:
    data = {"model.safetensors": blob(3_000_000)}
    program = build.write(tmp_path / "specrig-host")
    with hub_of(data, rate=1_000_000) as hub:
        job = tmp_path / "job.json"
        job.write_text(json.dumps(document(tmp_path / "models", hub.url, data)))
        said = (tmp_path / "said").open("w")
        process = subprocess.Popen([PYTHON, program, "stage", job], stdout=said, stderr=subprocess.STDOUT)
        while not hub.sent:
            assert process.poll() is None, (tmp_path / "said").read_text()
            time.sleep(0.02)
        process.kill()
        process.wait()
        handle = os.open(tmp_path / "models/.partial/.lock", os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(handle)
        hub.rate = None
        done = subprocess.run([PYTHON, program, "stage", job], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "models/org--name" / REVISION / "model.safetensors").read_bytes() == data["model.safetensors"]


def test_a_hub_that_says_later_is_waited_for(tmp_path: Path) -> None:
    with hub_of({"a": b"x" * 200}) as hub:
        hub.faults = [429] * (stage.ATTEMPTS + 2) + [503] * 2
        assert run(document(tmp_path, hub.url, {"a": b"x" * 200}))["changed"]


@pytest.mark.parametrize("fault", ["reset", "stall"])
def test_a_transfer_that_breaks_off_is_resumed(tmp_path: Path, fault: str) -> None:
    data = {"model.safetensors": blob(3_000_000)}
    url = f"/org/name/resolve/{REVISION}/model.safetensors"
    with hub_of(data) as hub:
        hub.break_at[url] = (2_000_000, fault)
        assert run(document(tmp_path, hub.url, data))["changed"]
        assert hub.sent[url] < 4_500_000
        assert any("Range" in h for _, p, h in hub.requests if p == url)


def test_what_is_not_upstream_is_said_at_once(tmp_path: Path) -> None:
    with hub_of({}) as hub:
        assert f"/resolve/{REVISION}/" in refused(document(tmp_path, hub.url), "STAGE_NOT_FOUND").cause
        assert len(hub.requests) <= 6


def test_no_answer_is_coded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "ATTEMPTS", 1)
    monkeypatch.setattr("specrig.host.aria2.options", lambda *_: ["-i-", "--no-conf=true", "--max-tries=1"])
    refused(document(tmp_path, "http://127.0.0.1:1"), "STAGE_DOWNLOAD")


def test_the_token_reaches_the_hub_and_not_where_it_redirects(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("hf_secretsecret\n")
    big = f"/org/name/resolve/{REVISION}/model.safetensors"
    with hub_of({"model.safetensors": FILES["model.safetensors"]}) as cdn, hub_of(FILES) as hub:
        hub.token = "hf_secretsecret"
        hub.redirects[big] = cdn.url.replace("127.0.0.1", "localhost") + big
        assert run(document(tmp_path / "models", hub.url, token_file=str(token)))["changed"]
        assert cdn.sent[big] == 300_000
        assert not any("hf_secret" in str(headers) for _, _, headers in cdn.requests)
    left = [p for p in (tmp_path / "models").rglob("*") if p.is_file() and b"hf_secret" in p.read_bytes()]
    assert left == []


def test_a_wrong_token_is_coded(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("hf_wrong")
    with hub_of(FILES) as hub:
        hub.token = "hf_right"
        refused(document(tmp_path, hub.url, token_file=str(token)), "STAGE_DENIED")
        refused(document(tmp_path, hub.url), "STAGE_DENIED")
        token.write_text("two words")
        refused(document(tmp_path, hub.url, token_file=str(token)), "STAGE_TOKEN")


def test_two_stagers(tmp_path: Path) -> None:
    job = manifest.parse_job(document(tmp_path, "http://127.0.0.1:1"))
    with stage.locked(job.root):
        error = refused(document(tmp_path, "http://127.0.0.1:1"), "STAGE_BUSY")
        assert str(os.getpid()) in error.cause


def test_disk_budget_comes_before_the_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_of(FILES) as hub:
        monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=stage.RESERVE + 300_000))
        error = refused(document(tmp_path, hub.url), "STAGE_DISK")
        assert re.search(r"300 kB to write.*512 MB|513 MB", error.cause)
        assert hub.requests == []


def test_a_damaged_publication_is_repaired_from_what_it_still_has(tmp_path: Path) -> None:
    with hub_of(FILES) as hub:
        doc = document(tmp_path, hub.url)
        run(doc)
        sent = dict(hub.sent)
        config = tmp_path / "org--name" / REVISION / "config.json"
        config.write_text("short")
        assert run(doc)["changed"]
        assert config.read_bytes() == FILES["config.json"]
        big = f"/org/name/resolve/{REVISION}/model.safetensors"
        assert hub.sent[big] == sent[big], "the good file was fetched again"


def test_foreign_things_among_the_partials_are_swept(tmp_path: Path) -> None:
    partial = tmp_path / ".partial/org--name" / REVISION
    (partial / "x").mkdir(parents=True)
    (partial / "x/old.bin").write_text("old")
    (tmp_path / "outside").write_text("mine")
    (partial / "config.json").symlink_to(tmp_path / "outside")
    (partial / "model.safetensors").write_bytes(b"a half without its control file")
    with hub_of(FILES) as hub:
        assert run(document(tmp_path, hub.url))["changed"]
    assert (tmp_path / "outside").read_text() == "mine"
    assert not (tmp_path / "org--name" / REVISION / "x").exists()


@pytest.mark.parametrize("control", [b"", b"\0\1\0\0", b"\0\1" + b"\0" * 32, b"x" * 400])
def test_a_cut_off_control_file_does_not_stop_a_download_for_ever(tmp_path: Path, control: bytes) -> None:
    partial = tmp_path / ".partial/org--name" / REVISION
    partial.mkdir(parents=True)
    (partial / "model.safetensors").write_bytes(b"?" * 300_000)
    (partial / "model.safetensors.aria2").write_bytes(control)
    with hub_of(FILES) as hub:
        assert run(document(tmp_path, hub.url))["changed"]


def test_a_symbolic_link_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "root").mkdir()
    (tmp_path / "root/org--name").symlink_to(tmp_path / "elsewhere")
    refused(document(tmp_path / "root", "http://127.0.0.1:1"), "STAGE_PATH")
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize(
    "path",
    [
        *("../evil", "/etc/passwd", "a/../../b", "a//b", "./a", "a/", ""),
        *("a\nout=/etc/x", "a\0b", "a\\b", ".specrig-manifest.json", "x.aria2", "a" * 300, None, 7),
    ],
)
def test_hostile_paths(tmp_path: Path, path: Any) -> None:
    doc = document(tmp_path, "http://127.0.0.1:1")
    doc["artefacts"][0]["files"][0]["path"] = path
    refused(doc, "STAGE_MANIFEST")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("size", 0),
        ("size", -1),
        ("size", 10**15),
        ("size", "12"),
        ("size", True),
        ("size", None),
        ("git_sha1", "zz"),
        ("git_sha1", None),
    ],
)
def test_hostile_file_entries(tmp_path: Path, key: str, value: Any) -> None:
    doc = document(tmp_path, "http://127.0.0.1:1")
    doc["artefacts"][0]["files"][0][key] = value
    refused(doc, "STAGE_MANIFEST")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("repo", v) for v in ("name", "../x", "a/..", "a/b/c", "-a/b", "a/b c", "org/na..me")],
        *[("revision", v) for v in ("main", "0" * 39, "0" * 40 + "-pad", "0" * 40 + "-pad7", "../" + "0" * 40)],
        *[("path", "/etc"), ("files", []), ("files", "x"), ("derive", {"kind": "other"}), ("id", "")],
    ],
)
def test_hostile_artefacts(tmp_path: Path, key: str, value: Any) -> None:
    doc = document(tmp_path, "http://127.0.0.1:1")
    doc["artefacts"][0][key] = value
    refused(doc, "STAGE_MANIFEST")


@pytest.mark.parametrize(
    "change",
    [
        {"root": "models"},
        {"root": "/srv/../etc"},
        {"root": "/"},
        {"endpoint": "file:///etc"},
        {"endpoint": "http://user@host"},
        {"endpoint": "http://h/?q"},
        {"endpoint": ""},
        {"artefacts": None},
    ],
)
def test_hostile_jobs(tmp_path: Path, change: dict[str, Any]) -> None:
    refused({**document(tmp_path, "http://127.0.0.1:1"), **change}, "STAGE_MANIFEST")


def test_duplicates_and_a_file_as_directory_are_refused(tmp_path: Path) -> None:
    doc = document(tmp_path, "http://127.0.0.1:1")
    doc["artefacts"][0]["files"].append(dict(doc["artefacts"][0]["files"][0]))
    assert "twice" in refused(doc, "STAGE_MANIFEST").cause
    doc["artefacts"][0]["files"][-1]["path"] = "config.json/x"
    assert "directory" in refused(doc, "STAGE_MANIFEST").cause
    two = document(tmp_path, "http://127.0.0.1:1")
    two["artefacts"].append(two["artefacts"][0])
    refused(two, "STAGE_MANIFEST")


def padded_job(tmp_path: Path, url: str, files: dict[str, bytes], width: int = 24) -> dict[str, Any]:
    doc = document(tmp_path / "models", url, files)
    derive = {"kind": "pad_vocab", "source": "a", "vocab_size": width}
    path = f"{doc['artefacts'][0]['path']}-pad{width}"
    doc["artefacts"].append(
        {
            "id": "b",
            "repo": "org/name",
            "revision": f"{REVISION}-pad{width}",
            "files": [],
            "path": path,
            "derive": derive,
        }
    )
    return doc


def test_derives_a_padded_draft_once(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_model(source, vocab=16)
    files = {p.name: p.read_bytes() for p in source.iterdir()}
    with hub_of(files) as hub:
        doc = padded_job(tmp_path, hub.url, files)
        result = run(doc)
    assert [s["id"] for s in result["staged"]] == ["a", "b"]
    padded = Path(doc["artefacts"][1]["path"])
    assert json.loads((padded / "config.json").read_text())["vocab_size"] == 24
    found = json.loads((padded / manifest.MANIFEST).read_text())
    assert (
        found["derive"]["source"] == {"repo": "org/name", "revision": REVISION} and found["derive"]["vocab_size"] == 24
    )
    for entry in found["files"]:
        kind = "sha256" if "sha256" in entry else "git_sha1"
        assert manifest.digest(padded / entry["path"], kind) == entry[kind]
    assert {f["path"] for f in found["files"]} == set(files)
    assert str((tmp_path / "models/org--name/current").readlink()) == f"{REVISION}-pad24"
    assert run(doc)["changed"] is False
    assert run(padded_job(tmp_path, "http://127.0.0.1:1", files, width=32), check=True)["would_stage"] == ["b"]


def test_a_source_with_a_flipped_bit_is_not_derived_from_and_is_repaired(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_model(source, vocab=16)
    files = {p.name: p.read_bytes() for p in source.iterdir()}
    with hub_of(files) as hub:
        run(document(tmp_path / "models", hub.url, files))
        weights = tmp_path / "models/org--name" / REVISION / "model.safetensors"
        weights.write_bytes(files["model.safetensors"][:-1] + b"x")
        doc = padded_job(tmp_path, hub.url, files)
        refused(doc, "STAGE_CHECKSUM")
        assert not Path(doc["artefacts"][1]["path"]).exists()
        assert run(doc)["changed"]
    assert weights.read_bytes() == files["model.safetensors"]


def test_a_source_that_is_not_listed_is_refused(tmp_path: Path) -> None:
    doc = padded_job(tmp_path, "http://127.0.0.1:1", FILES)
    doc["artefacts"].reverse()
    refused(doc, "STAGE_MANIFEST")
