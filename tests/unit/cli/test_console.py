"""What the terminal and the disk see: questions, exit codes, files that are whole or untouched."""

from __future__ import annotations

import argparse
import builtins
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specrig import cli
from specrig.console import CannotRun, confirm
from specrig.files import write_atomically
from specrig.verbs import plan


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("answer", "meant"),
    [("y\n", True), (" YES \n", True), ("n\n", False), ("\n", False), ("yep\n", False), ("", False)],
)
def test_confirm_at_a_terminal(monkeypatch: pytest.MonkeyPatch, answer: str, meant: bool) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    assert confirm("Sure?", yes=False) is meant


def test_confirm_asks_nobody_without_need(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(_: str) -> str:
        raise AssertionError("asked")

    monkeypatch.setattr(builtins, "input", never)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert confirm("Sure?", yes=True) is True
    assert confirm("Sure?", yes=False) is False, "no terminal means no"


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (CannotRun("the disk is full", "make room", "DISK"), 2, "DISK: the disk is full\n  next: make room\n"),
        (KeyboardInterrupt(), 130, "\ninterrupted; run the same command again to go on\n"),
        (EOFError(), 130, "\ninterrupted; run the same command again to go on\n"),
    ],
)
def test_errors_are_two_lines_and_a_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], raised: BaseException, code: int, said: str
) -> None:
    def run(_: argparse.Namespace) -> int:
        raise raised

    monkeypatch.setattr(plan, "run", run)
    assert cli.main(["plan"]) == code
    assert capsys.readouterr() == ("", said)


def test_with_json_the_refusal_is_the_document(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_: argparse.Namespace) -> int:
        raise CannotRun("the disk is full", "make room", "DISK")

    monkeypatch.setattr(plan, "run", run)
    assert cli.main(["plan", "--json"]) == 2
    told = capsys.readouterr()
    assert json.loads(told.out) == {
        "ok": False,
        "error": {"code": "DISK", "cause": "the disk is full", "fix": "make room"},
    }
    assert told.err.startswith("DISK: ")


@pytest.mark.parametrize("words", [["explain"], ["explain", "--json"], ["explain", "K_ZERO_WITH_DRAFT"]])
def test_a_full_disk_is_told_in_two_lines(words: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "specrig", *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 2 and done.stderr.startswith("OS_ERROR: No space left on device\n  next: ")
    assert len(done.stderr.splitlines()) == 2


def test_a_place_that_cannot_be_written_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    profile = ["--host", "a@b", "--profile", "rtx4090_r1_14b"]
    assert cli.main(["init", *profile, "-i", "/proc/nope/hosts.yml"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("OS_ERROR: /proc/nope") and len(told.splitlines()) == 2


def test_an_interrupt_while_python_still_imports_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "argparse.py").write_text("raise KeyboardInterrupt\n")  # stand-in for ctrl-C at that moment
    done = subprocess.run(
        [sys.executable, "-m", "specrig", "plan"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (130, "")


def test_write_makes_folders_and_a_readable_file(tmp_path: Path) -> None:
    path = tmp_path / "a/b/hosts.yml"
    write_atomically(path, "é\n")
    assert path.read_bytes() == "é\n".encode() and path.stat().st_mode & 0o777 == 0o644
    assert os.listdir(path.parent) == ["hosts.yml"]  # noqa: PTH208 - hidden files too


def test_write_keeps_mode_and_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("old")
    real.chmod(0o600)
    link.symlink_to("real")
    write_atomically(link, "new")
    assert link.is_symlink() and real.read_text() == "new" and real.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "lock.yml"
    path.write_text("old")
    monkeypatch.setattr(os, step, full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["lock.yml"]  # noqa: PTH208
