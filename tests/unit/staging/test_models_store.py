"""`./rig models list|verify|scrub|gc|bundle|import`: what the hosts are asked, and what a person reads of their answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specrig import cli, runner
from specrig.verbs import models_store

MODEL = {"repo": "org/name", "revision": "a" * 40, "bytes": 2_000_000_000, "path": "/srv/models/x", "derived": False}


class Playbooks:
    """What the verbs run, and what the hosts answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.asked: list[tuple[str, dict[str, Any], str]] = []
        self.answers: dict[str, dict[str, Any]] = {}
        self.inventory = folder / "hosts.yml"
        self.inventory.touch()
        monkeypatch.setattr(runner, "load_hosts", lambda _, names: {key: {} for key in names or ["alpha", "beta"]})
        monkeypatch.setattr(runner, "playbook_json", self.run)

    def run(self, name: str, _: Path, arguments: list[str]) -> dict[str, Any]:
        self.asked.append((name, json.loads(arguments[1]), arguments[3]))
        return {"plays": [{"tasks": [{"hosts": self.answers}]}]}

    def rig(self, *words: str) -> int:
        return cli.main(["models", *words, "-i", str(self.inventory)])


@pytest.fixture
def books(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Playbooks:
    return Playbooks(monkeypatch, tmp_path)


@pytest.mark.parametrize(
    ("words", "name", "variables", "limit"),
    [
        (["list"], "models", {"models_argv": ["models"]}, "alpha,beta"),
        (["verify", "beta"], "models", {"models_argv": ["verify"]}, "beta"),
        (["scrub", "--limit", "9"], "models", {"models_argv": ["scrub", "--limit", "9"]}, "alpha,beta"),
        (["gc"], "models", {"models_argv": ["gc", "--keep", "0"]}, "alpha,beta"),
        (["gc", "--apply", "--keep", "1"], "models", {"models_argv": ["gc", "--keep", "1", "--apply"]}, "alpha,beta"),
        (
            ["bundle", "/mnt/b.tar", "alpha", "--model", "o/n"],
            "models",
            {"models_argv": ["bundle", "/mnt/b.tar", "o/n"]},
            "alpha",
        ),
        (["import", "/mnt/b.tar"], "import", {"models_bundle": "/mnt/b.tar"}, "alpha,beta"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_what_is_asked(books: Playbooks, words: list[str], name: str, variables: dict[str, Any], limit: str) -> None:
    books.answers = {host: {"result": {"ok": True, "changed": False}} for host in limit.split(",")}
    assert books.rig(*words) == 0
    assert books.asked == [(name, variables, limit)]
    assert (runner.ROOT / "playbooks" / f"{name}.yml").exists()


def test_a_host_that_falls_short_or_is_silent_is_exit_1_or_2(
    books: Playbooks, capsys: pytest.CaptureFixture[str]
) -> None:
    error = {"code": "STORE_DAMAGED", "cause": "1 file", "fix": "./rig up", "lines": ["/srv/models/x/a"]}
    books.answers = {"alpha": {"failed": True, "msg": "STORE_DAMAGED: …", "result": {"error": error}}}
    assert books.rig("verify") == 1
    told = capsys.readouterr().out
    assert "alpha: STORE_DAMAGED: 1 file\n  /srv/models/x/a\n  next: ./rig up" in told
    assert "beta: NO_ANSWER: no answer" in told
    books.answers = {"alpha": {"unreachable": True, "msg": "no route"}}
    assert books.rig("list", "alpha", "--json") == 2, "nobody was reached"
    found = json.loads(capsys.readouterr().out)
    assert found["hosts"]["alpha"]["error"]["cause"] == "no route"


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (
            {
                "models": [MODEL | {"used": False, "damaged": True}],
                "root": "/m",
                "partial_bytes": 5,
                "free_bytes": 10**9,
            },
            [
                "1 models in /m; 1.0 GB free, 5 B half fetched",
                "2.0 GB  unused, DAMAGED",
            ],
        ),
        ({"models": [], "verified": 2, "bytes": 10**9}, ["2 models verified, 1.0 GB read"]),
        ({"would_remove": [{"path": "/m/x", "bytes": 7}], "bytes": 7}, ["would remove 7 B", "/m/x", "--apply"]),
        ({"removed": [{"path": "/m/x", "bytes": 7}], "bytes": 7}, ["removed 7 B"]),
        ({"path": "/mnt/b.tar", "bytes": 7, "models": ["o/n@1"]}, ["/mnt/b.tar, 7 B: o/n@1"]),
        ({"staged": [{"path": "/m/x", "bytes": 7}]}, ["staged", "/m/x"]),
        ({"would_remove": [], "bytes": 0}, ["nothing to do"]),
    ],
)
def test_what_a_person_reads(report: dict[str, Any], words: list[str]) -> None:
    text = "\n".join(models_store.describe("alpha", report))
    assert all(word in text for word in words), text


def test_a_damaged_model_in_the_list_is_exit_1(books: Playbooks) -> None:
    row = MODEL | {"used": True, "damaged": True}
    books.answers = {"alpha": {"result": {"models": [row], "root": "/m", "partial_bytes": 0, "free_bytes": 1}}}
    assert books.rig("list", "alpha") == 1
