"""The question that spares the module: run by a real shell over real files, and never more lenient than the module itself."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from specrig.ansible.action.managed_files import in_place, probe
from specrig.ansible.modules import managed_files as module

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="files of root are compared")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Files as they are found on hosts, some of them awkward."""
    before = os.umask(0o022)
    root = tmp_path / "it's a $(tree) %n"
    (root / "dir").mkdir(parents=True)
    (root / "plain").write_text("content\n")
    (root / "with spaces & 'quotes'").write_text("é\n")
    (root / "pipe|and*glob").write_text("x")
    (root / "back\\slash\\n").write_text("x")
    (root / "empty").write_text("")
    (root / "binary").write_bytes(bytes(range(256)))
    (root / "secret").write_text("s3cret")
    (root / "secret").chmod(0o600)
    (root / "program").write_text("#!/bin/sh\n")
    (root / "program").chmod(0o755)
    (root / "setgid").mkdir()
    (root / "setgid").chmod(0o2755)
    (root / "others").write_text("content\n")
    os.chown(root / "others", 1, 1)
    (root / "daemon.json").write_text('{"data-root": "/big",   "log-driver": "local"}')
    (root / "list.json").write_text("[1]")
    (root / "broken.json").write_text("{")
    (root / "link").symlink_to("plain")
    (root / "dangling").symlink_to("nowhere")
    (root / "dirlink").symlink_to("dir")
    os.umask(before)
    return root


def ask(payload: dict[str, Any]) -> str:
    return subprocess.run(["sh", "-c", probe(payload)], capture_output=True, text=True, check=True).stdout


def judge(files: Any = (), directories: Any = (), absent: Any = ()) -> tuple[bool, bool]:
    """What the probe says is in place, and whether the module would leave it alone; the first implies the second."""
    payload = {"files": list(files), "directories": list(directories), "absent": [str(path) for path in absent]}
    payload = json.loads(json.dumps(payload, default=str))
    said = in_place(payload, ask(payload))
    try:
        kept = not module.apply(payload, check=True, diff=True)["changed"]
    except module.Refused:
        kept = False
    assert kept or not said, f"the probe would skip what the module has to do: {payload}"
    return said, kept


SAME: list[dict[str, Any]] = [
    {"dest": "plain", "content": "content\n"},
    {"dest": "plain", "content": "content\n", "mode": "0644", "owner": "root", "group": "root"},
    {"dest": "plain", "content": "content\n", "mode": "644", "validate": ["false", "%s"]},
    {"dest": "with spaces & 'quotes'", "content": "é\n"},
    {"dest": "pipe|and*glob", "content": "x"},
    {"dest": "empty", "content": ""},
    {"dest": "binary", "base64": base64.b64encode(bytes(range(256))).decode()},
    {"dest": "secret", "content": "s3cret", "secret": True},
    {"dest": "secret", "content": "another", "secret": True, "if_missing": True},
    {"dest": "program", "content": "#!/bin/sh\n", "mode": "0755"},
    {"dest": "others", "content": "content\n", "owner": "daemon", "group": "daemon"},
    {"dest": "daemon.json", "content": '{"log-driver": "local"}', "merge": True},
    {"dest": "daemon.json", "content": "{}", "merge": True},
]
OTHER: list[dict[str, Any]] = [
    {"dest": "plain", "content": "other\n"},
    {"dest": "plain", "content": "content"},
    {"dest": "plain", "content": "content\n", "mode": "0600"},
    {"dest": "plain", "content": "content\n", "mode": "0664"},
    {"dest": "plain", "content": "content\n", "owner": "daemon"},
    {"dest": "plain", "content": "content\n", "group": "daemon"},
    {"dest": "plain", "content": "content\n", "secret": True},
    {"dest": "plain", "content": "content\n", "mode": "rw"},
    {"dest": "plain", "content": "content\n", "mode": "0888"},
    {"dest": "plain", "content": "content\n", "owner": "no-such-user"},
    {"dest": "others", "content": "content\n"},
    {"dest": "secret", "content": "s3cret", "mode": "0640", "if_missing": True},
    {"dest": "none", "content": ""},
    {"dest": "none", "content": "", "if_missing": True},
    {"dest": "dir/none", "content": "x"},
    {"dest": "plain/below", "content": "x"},
    {"dest": "dir", "content": ""},
    {"dest": "link", "content": "content\n"},
    {"dest": "dangling", "content": ""},
    {"dest": "daemon.json", "content": '{"log-driver": "journald"}', "merge": True},
    {"dest": "daemon.json", "content": '{"new": 1}', "merge": True},
    {"dest": "daemon.json", "content": '{"log-driver": "local"}'},
    {"dest": "list.json", "content": '{"a": 1}', "merge": True},
    {"dest": "broken.json", "content": '{"a": 1}', "merge": True},
    {"dest": "empty", "content": '{"a": 1}', "merge": True},
    {"dest": "none", "content": '{"a": 1}', "merge": True},
]


def placed(tree: Path, item: dict[str, Any]) -> dict[str, Any]:
    return {**item, "dest": tree / item["dest"]}


@pytest.mark.parametrize("item", SAME, ids=lambda item: item["dest"])
def test_what_is_in_place_costs_one_question(tree: Path, item: dict[str, Any]) -> None:
    assert judge(files=[placed(tree, item)]) == (True, True)


@pytest.mark.parametrize("item", OTHER, ids=lambda item: item["dest"])
def test_what_differs_goes_to_the_module(tree: Path, item: dict[str, Any]) -> None:
    assert judge(files=[placed(tree, item)]) == (False, False)


def test_a_whole_set_is_in_place_or_none_of_it(tree: Path) -> None:
    best = {item["dest"]: placed(tree, item) for item in SAME}
    there = {"directories": [{"path": tree / "dir", "mode": "0755"}, {"path": tree / "setgid", "mode": "2755"}]}
    gone = [tree / "none", tree / "plain/none", tree / "nowhere/at/all"]
    assert judge(best.values(), there["directories"], gone) == (True, True)
    for item in OTHER:
        assert judge([*best.values(), placed(tree, item)][-3:], there["directories"], gone) == (False, False)


@pytest.mark.parametrize(
    ("name", "mode", "same"),
    [
        ("dir", "0755", True),
        ("dir", None, True),
        ("dir", "0700", False),
        ("setgid", "0755", False),
        ("none", "0755", False),
    ],
)
def test_directories(tree: Path, name: str, mode: str | None, same: bool) -> None:
    item = {"path": tree / name} | ({"mode": mode} if mode else {})
    assert judge(directories=[item]) == (same, same)


@pytest.mark.parametrize("name", ["plain", "link", "dangling", "dir"])
def test_what_is_to_be_absent_and_is_not(tree: Path, name: str) -> None:
    assert judge(absent=[tree / name]) == (False, False)


@pytest.mark.parametrize("name", ["dirlink", "plain"])
def test_a_doubt_is_a_no(tree: Path, name: str) -> None:
    said, _ = judge(directories=[{"path": tree / name}])
    assert not said


@pytest.mark.parametrize("answer", ["", "garbage\n", "regular file|644\n", "sh: stat: not found\n"])
def test_an_answer_that_is_none_is_a_no(tree: Path, answer: str) -> None:
    file = {"dest": str(tree / "plain"), "content": "content\n"}
    assert not in_place({"files": [file], "directories": [], "absent": []}, answer)
    assert not in_place({"files": [], "directories": [], "absent": ["/none/here"]}, answer)


def test_awkward_names_are_never_taken_for_others(tree: Path) -> None:
    for name in ("back\\slash\\n", "line\nbreak", "tab\there"):
        path = tree / name
        judge(absent=[path])
        path.write_text("x")
        judge(files=[{"dest": path, "content": "x"}])
        assert judge(absent=[path]) == (False, False)


def test_no_content_leaves_the_host_but_what_is_merged(tree: Path) -> None:
    files = [placed(tree, item) for item in SAME if not item.get("merge")]
    answer = ask(json.loads(json.dumps({"files": files, "directories": [], "absent": []}, default=str)))
    for content in ("s3cret", base64.b64encode(b"s3cret").decode()):
        assert content not in answer


def test_an_empty_payload_is_in_place() -> None:
    assert judge() == (True, True)
