"""The lab installs what it needs once, however many of its threads ask for it."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from specrig.lab import apt
from specrig.lab.parallel import parallel
from specrig.lab.progress import Progress


def test_two_threads_that_lack_the_same_program_install_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a blank machine, where both base images need mmdebstrap: the second apt met the first one's lock."""
    lock, installs = threading.Lock(), []
    both = threading.Barrier(2)

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        free = lock.acquire(blocking=False)
        if "install" in command:
            installs.append(command)
            threading.Event().wait(0.2)
            (tmp_path / "mmdebstrap").touch(mode=0o755)
        if free:
            lock.release()
        return subprocess.CompletedProcess(command, 0 if free else 100, "", "" if free else "E: Could not get lock")

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(apt, "which", lambda name: str(tmp_path / name) if (tmp_path / name).exists() else None)
    monkeypatch.setattr(apt, "as_root", lambda command: command)
    monkeypatch.setattr(subprocess, "run", run)

    def one() -> str:
        both.wait()
        with Progress("test") as say:
            apt.have("mmdebstrap", ["mmdebstrap"], say)
        return ""

    parallel([one, one])
    assert len(installs) == 1
