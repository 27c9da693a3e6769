"""The hub double: what a stager may rely on, and the faults that it must survive."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from specrig.lab.hub import Hub, byte_range

OLD, NEW = "a" * 40, "b" * 40
REPO = "acme/tiny"
BIG = os.urandom(3_000_000)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    for age, commit in ((100, OLD), (200, NEW)):
        folder = tmp_path / REPO / commit
        (folder / "sub").mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"v": commit[0]}))
        (folder / "sub" / "model.safetensors").write_bytes(BIG)
        os.utime(folder, (age, age))
    server = Hub(tmp_path)
    server.start()
    yield server
    server.stop()


def ask(
    hub: Hub, path: str, method: str = "GET", body: Any = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(urlsplit(hub.url).netloc, timeout=2)
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, json.dumps(body) if body is not None else None, fields)
    answer = connection.getresponse()
    try:
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def weights(commit: str = NEW) -> str:
    return f"/{REPO}/resolve/{commit}/sub/model.safetensors"


def test_main_is_the_newest_revision(hub: Hub) -> None:
    assert json.loads(ask(hub, f"/api/models/{REPO}/revision/main")[2])["sha"] == NEW
    assert json.loads(ask(hub, f"/api/models/{REPO}/revision/{OLD}")[2])["sha"] == OLD
    assert json.loads(ask(hub, f"/api/models/{REPO}")[2])["sha"] == NEW


def test_tree_gives_lfs_sha256_to_large_files_and_git_oids_to_small_ones(hub: Hub) -> None:
    config, model = json.loads(ask(hub, f"/api/models/{REPO}/tree/{NEW}?recursive=true")[2])
    text = b'{"v": "b"}'
    assert config == {
        "type": "file",
        "path": "config.json",
        "size": 10,
        "oid": hashlib.sha1(b"blob 10\0" + text).hexdigest(),
    }
    assert model["path"] == "sub/model.safetensors"
    assert model["lfs"]["oid"] == hashlib.sha256(BIG).hexdigest()
    assert model["lfs"]["size"] == model["size"] == len(BIG)


def test_head_names_commit_etag_and_size(hub: Hub) -> None:
    status, headers, body = ask(hub, weights(), "HEAD")
    assert (status, body) == (200, b"")
    assert headers["x-repo-commit"] == NEW
    assert headers["etag"] == headers["x-linked-etag"] == f'"{hashlib.sha256(BIG).hexdigest()}"'
    assert headers["x-linked-size"] == headers["content-length"] == str(len(BIG))
    assert headers["accept-ranges"] == "bytes"


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("bytes=0-9", (0, 10)),
        ("bytes=90-", (90, 100)),
        ("bytes=-5", (95, 100)),
        ("bytes=90-999", (90, 100)),
        (None, None),
    ],
)
def test_byte_range(header: str | None, expected: tuple[int, int] | None) -> None:
    assert byte_range(header, 100) == expected


def test_range_resumes(hub: Hub) -> None:
    status, headers, body = ask(hub, weights(), Range="bytes=1000000-")
    assert (status, body) == (206, BIG[1_000_000:])
    assert headers["content-range"] == f"bytes 1000000-{len(BIG) - 1}/{len(BIG)}"


def test_range_past_the_end_is_416(hub: Hub) -> None:
    status, headers, _ = ask(hub, weights(), Range=f"bytes={len(BIG)}-")
    assert (status, headers["content-range"]) == (416, f"bytes */{len(BIG)}")


def test_if_range_of_another_file_sends_it_all(hub: Hub) -> None:
    assert ask(hub, weights(), Range="bytes=5-", If_Range='"other"')[0] == 200


@pytest.mark.parametrize(
    ("path", "code"),
    [
        (f"/api/models/{REPO}/revision/{'c' * 40}", "RevisionNotFound"),
        ("/api/models/acme/none/revision/main", "RepoNotFound"),
        (f"/{REPO}/resolve/{NEW}/absent.json", "EntryNotFound"),
        (f"/{REPO}/resolve/{NEW}/../{OLD}/config.json", "EntryNotFound"),
        (f"/../tiny/resolve/{NEW}/config.json", "RevisionNotFound"),
    ],
)
def test_what_is_not_there_is_404_with_the_hubs_code(hub: Hub, path: str, code: str) -> None:
    status, headers, _ = ask(hub, path)
    assert (status, headers["x-error-code"]) == (404, code)


def test_statistics_count_requests_and_bytes_per_file(hub: Hub) -> None:
    ask(hub, weights(), "HEAD")
    ask(hub, weights(), Range="bytes=0-99")
    ask(hub, f"/{REPO}/resolve/{NEW}/config.json")
    expected = {
        f"{REPO}/sub/model.safetensors": {"requests": 2, "bytes": 100},
        f"{REPO}/config.json": {"requests": 1, "bytes": 10},
    }
    for _ in range(100):  # what was sent is counted a moment after it arrived
        stats = json.loads(ask(hub, "/_stats")[2])
        if stats == expected:
            break
        time.sleep(0.01)
    assert stats == expected
    ask(hub, "/_stats", "DELETE")
    assert json.loads(ask(hub, "/_stats")[2]) == {}


def fault(hub: Hub, **what: Any) -> None:
    assert ask(hub, "/_faults", "POST", [what])[0] == 200


def test_503_n_times_then_well(hub: Hub) -> None:
    fault(hub, kind="503", times=2, path="*.safetensors")
    assert ask(hub, f"/{REPO}/resolve/{NEW}/config.json")[0] == 200
    assert [ask(hub, weights())[0] for _ in range(3)] == [503, 503, 200]


def test_wrong_bytes_have_the_right_size(hub: Hub) -> None:
    fault(hub, kind="wrong")
    body = ask(hub, weights())[2]
    assert len(body) == len(BIG)
    assert body != BIG
    assert ask(hub, weights())[2] == BIG


def test_truncate_ends_early(hub: Hub) -> None:
    fault(hub, kind="truncate", after=1000)
    with pytest.raises(http.client.IncompleteRead) as seen:
        ask(hub, weights())
    assert seen.value.partial == BIG[:1000]


def test_reset_resets(hub: Hub) -> None:
    fault(hub, kind="reset", after=1000)
    with pytest.raises(ConnectionResetError):
        ask(hub, weights())


def test_stall_sends_a_part_and_then_nothing(hub: Hub) -> None:
    fault(hub, kind="stall", after=1000)
    with socket.create_connection(hub.server_address[:2], timeout=0.5) as client:  # type: ignore[arg-type]
        client.sendall(f"GET {weights()} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        seen = b""
        with pytest.raises(TimeoutError):
            while True:
                seen += client.recv(65536)
    assert seen.endswith(BIG[900:1000])


def test_an_unknown_fault_is_refused(hub: Hub) -> None:
    assert ask(hub, "/_faults", "POST", [{"kind": "explode"}])[0] == 400
