"""Sharing between rigs: only published files leave, siblings take turns, and none of it needs trust."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specrig.host import aria2, manifest, share, stage
from specrig.host.errors import HostError
from specrig.host.progress import Progress

from .hub import Hub
from .test_stage import FILES, QUIET, REVISION, blob, document, files_of, hub_of, refused, run

STATE = f"/_state/org/name/{REVISION}"
BIG = f"/org/name/resolve/{REVISION}/model.safetensors"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "FIRST_WAIT_S", 0.05)
    monkeypatch.setattr(share, "POLL_S", 0.05)
    monkeypatch.setattr(share, "ASK_TIMEOUT_S", 0.5)


class Rig:
    """A root that is served on loopback."""

    def __init__(self, root: Path, allow: list[str] | None = None) -> None:
        root.mkdir(exist_ok=True)
        self.root = root
        self.server = share.Server(root, ("127.0.0.1", 0), allow or ["127.0.0.0/8"])
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=2)
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        try:
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def state(self) -> str:
        return str(json.loads(self.ask(STATE)[2])["state"])

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def hub() -> Iterator[Hub]:
    with hub_of(FILES) as server:
        yield server


@pytest.fixture
def alpha(tmp_path: Path, hub: Hub) -> Iterator[Rig]:
    """A rig that has the model."""
    run(document(tmp_path / "alpha", hub.url))
    hub.sent.clear()
    rig = Rig(tmp_path / "alpha")
    yield rig
    rig.close()


def test_serves_what_is_published_whole_and_in_parts(alpha: Rig) -> None:
    status, headers, body = alpha.ask(BIG)
    assert (status, body) == (200, FILES["model.safetensors"]) and headers["accept-ranges"] == "bytes"
    status, headers, body = alpha.ask(BIG, Range="bytes=100-199")
    assert (status, body) == (206, FILES["model.safetensors"][100:200])
    assert headers["content-range"] == "bytes 100-199/300000"
    assert alpha.ask(BIG, Range="bytes=300000-")[0] == 416
    status, headers, body = alpha.ask(BIG, "HEAD")
    assert (status, headers["content-length"], body) == (200, "300000", b"")
    assert alpha.ask(f"/org/name/resolve/{REVISION}/sub%20dir/t.json")[2] == FILES["sub dir/t.json"]
    assert alpha.state() == "published"


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/etc/passwd",
        f"/org/name/resolve/{REVISION}/../../secret",
        f"/org/name/resolve/{REVISION}/%2e%2e/%2e%2e/secret",
        f"/org/name/resolve/{REVISION}/.specrig-manifest.json",
        f"/org/name/resolve/{REVISION}/unlisted.txt",
        f"/org/name/resolve/{REVISION}/link",
        f"/../org/name/resolve/{REVISION}/config.json",
        f"/.partial/x/resolve/{REVISION}/config.json",
        "/org/name/resolve/main/config.json",
        f"/org/none/resolve/{REVISION}/config.json",
        f"/_state/../{REVISION}/x",
    ],
)
def test_serves_nothing_else(alpha: Rig, path: str) -> None:
    (alpha.root / "secret").write_text("secret")
    home = alpha.root / "org--name" / REVISION
    (home / "unlisted.txt").write_text("not in the manifest")
    (home / "link").symlink_to("/etc/passwd")
    assert alpha.ask(path)[0] == 404


def test_writes_nothing(alpha: Rig) -> None:
    for method in ("POST", "PUT", "DELETE"):
        assert alpha.ask(BIG, method)[0] == 501


def test_a_stranger_gets_no_answer(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "a", ["192.0.2.0/24"])
    try:
        with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
            rig.ask(STATE)
    finally:
        rig.close()


@pytest.mark.parametrize(
    ("listen", "allow", "code"),
    [
        ("rig:80", [], "SHARE_LISTEN"),
        ("127.0.0.1:x", [], "SHARE_LISTEN"),
        ("127.0.0.1:99999", [], "SHARE_LISTEN"),
        ("127.0.0.1:0", ["10.0.0.0/99"], "SHARE_ALLOW"),
    ],
)
def test_a_bad_address_is_coded(tmp_path: Path, listen: str, allow: list[str], code: str) -> None:
    with pytest.raises(HostError) as caught:
        share.serve(tmp_path, listen, allow)
    assert caught.value.code == code and caught.value.status == 2


def test_a_sibling_comes_before_the_hub(tmp_path: Path, hub: Hub, alpha: Rig) -> None:
    result = run(document(tmp_path / "beta", hub.url, siblings=["http://127.0.0.1:1", alpha.url], rank=2))
    assert result["staged"][0]["from"] == {alpha.url: 300_079} and hub.sent == {}
    assert not (tmp_path / "beta/.partial" / share.STATE).exists()


def test_a_lying_sibling_costs_time_and_nothing_else(tmp_path: Path, hub: Hub, alpha: Rig) -> None:
    weights = alpha.root / "org--name" / REVISION / "model.safetensors"
    weights.write_bytes(blob(300_000, seed=9))
    result = run(document(tmp_path / "beta", hub.url, siblings=[alpha.url]))
    assert result["staged"][0]["from"]["hub"] == 300_000
    assert (tmp_path / "beta/org--name" / REVISION / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert list(hub.sent) == [BIG], "the good files of the sibling are kept"


def test_a_lying_sibling_and_no_hub_is_coded(tmp_path: Path, alpha: Rig) -> None:
    (alpha.root / "org--name" / REVISION / "model.safetensors").write_bytes(blob(300_000, seed=9))
    error = refused(document(tmp_path / "beta", "", siblings=[alpha.url]) | {"endpoint": None}, "STAGE_OFFLINE")
    assert "model.safetensors" in error.cause
    assert not (tmp_path / "beta/org--name").exists()


def test_a_damaged_model_is_not_passed_on(alpha: Rig) -> None:
    (alpha.root / "org--name" / REVISION / manifest.DAMAGED).write_text("{}")
    assert alpha.ask(BIG)[0] == 404 and alpha.state() == "none"


def test_without_a_hub_the_sibling_is_enough_and_the_token_stays(tmp_path: Path, alpha: Rig) -> None:
    doc = document(tmp_path / "beta", "", siblings=[alpha.url], token_file=str(tmp_path / "none")) | {"endpoint": None}
    assert run(doc)["changed"]


def test_a_state_without_a_stager_says_nothing(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "a")
    job = manifest.parse_job(document(rig.root, "http://127.0.0.1:1"))
    try:
        with stage.locked(rig.root), share.claimed(job.artefacts[0], job) as tell:
            assert rig.state() == "claimed"
            tell("fetching")
            assert rig.state() == "fetching"
            left = (rig.root / ".partial" / share.STATE).read_bytes()
        assert rig.state() == "none"
        (rig.root / ".partial" / share.STATE).write_bytes(left)  # as after kill -9
        assert rig.state() == "none"
    finally:
        rig.close()


def turn(job: manifest.Job, said: list[str], waits: bool = True) -> list[str]:
    return share.turn(job.artefacts[0], job, QUIET, said.append, waits)


def answers(monkeypatch: pytest.MonkeyPatch, script: dict[str, list[str]]) -> None:
    """Each sibling gives its states in turn; the last one stays."""

    def ask(base: str, _: Any) -> dict[str, Any]:
        states = script[base]
        return {"state": states.pop(0) if len(states) > 1 else states[0], "bytes": 0}

    monkeypatch.setattr(share, "ask", ask)


def job_with(tmp_path: Path, rank: int) -> manifest.Job:
    return manifest.parse_job(document(tmp_path, "http://hub", siblings=["http://a", "http://b"], rank=rank))


def test_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    answers(monkeypatch, {"http://a": ["claimed"], "http://b": ["none"]})
    assert turn(job_with(tmp_path, 0), said) == [] and said == ["fetching"], "the lowest rank does not wait for a claim"
    answers(monkeypatch, {"http://a": ["claimed", "fetching", "published"], "http://b": ["none"]})
    assert turn(job_with(tmp_path, 1), said := []) == ["http://a"] and said == []
    answers(monkeypatch, {"http://a": ["none"], "http://b": ["fetching", "published"]})
    assert turn(job_with(tmp_path, 0), said := []) == ["http://b"], "whoever fetches already is waited for"
    answers(monkeypatch, {"http://a": ["none", "claimed", "fetching", "published"], "http://b": ["none"]})
    assert turn(job_with(tmp_path, 1), said := []) == ["http://a"]
    assert said == ["fetching", "claimed"], "two that did not see each other: the higher rank steps back"
    answers(monkeypatch, {"http://a": ["fetching", "none"], "http://b": ["none"]})
    assert turn(job_with(tmp_path, 1), said := []) == [] and said == ["fetching"], (
        "a sibling that died is not waited for"
    )
    answers(monkeypatch, {"http://a": ["fetching"], "http://b": ["none"]})
    assert turn(job_with(tmp_path, 1), [], waits=False) == []
    monkeypatch.setattr(share, "PATIENCE_S", 0.1)
    begin = time.monotonic()
    assert turn(job_with(tmp_path, 1), said := []) == [] and said == ["fetching"], "nor one that gets no further"
    assert time.monotonic() - begin < 1


@pytest.mark.parametrize(
    "change",
    [
        {"siblings": ["file:///srv"]},
        {"siblings": ["http://user@a"]},
        {"siblings": ["http://a"], "rank": 2},
        {"rank": -1},
        {"siblings": [f"http://a{n}" for n in range(300)]},
        {"limit": 10},
        {"limit": "1M"},
        {"bundle": "relative.tar"},
    ],
)
def test_hostile_sources(tmp_path: Path, change: dict[str, Any]) -> None:
    refused({**document(tmp_path, "http://127.0.0.1:1"), **change}, "STAGE_MANIFEST")


def test_the_limit_is_the_hubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: Hub, alpha: Rig) -> None:
    seen = []
    real = aria2.fetch

    def fetch(*args: Any, **more: Any) -> Any:
        seen.append(more["limit"])
        return real(*args, **more)

    monkeypatch.setattr(aria2, "fetch", fetch)
    run(document(tmp_path / "b", hub.url, limit=10_000_000))
    run(document(tmp_path / "c", hub.url, limit=10_000_000, siblings=[alpha.url]))
    assert seen == [10_000_000, None]
    options = aria2.options(1, False, 100_000)
    assert "--max-overall-download-limit=100000" in options and "--lowest-speed-limit=1562" in options


def test_progress_names_the_sibling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, {"http://a": ["fetching", "fetching", "published"], "http://b": ["none"]})
    progress = Progress(quiet=True)
    job = job_with(tmp_path, 1)
    told: list[str] = []
    monkeypatch.setattr(progress, "update", lambda *a, **more: told.append(more["message"]))
    share.turn(job.artefacts[0], job, progress, lambda _: None, True)
    assert told[0] == "a brings a, 0 B so far"
    assert files_of(FILES)
