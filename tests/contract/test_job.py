"""Detached jobs, with the real program as a file, as on a host (in a session of its own: no systemd here).

Here and not under unit because it starts the program some thirty times and waits for what it does: seconds.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specrig.host import build
from tests.unit.host.models import write_model
from tests.unit.host.program import PYTHON
from tests.unit.host.test_ready import TOKEN, Answer, engine

__all__ = ["engine"]
Host = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    program = build.write(tmp_path / "specrig-host")
    monkeypatch.setenv("SPECRIG_RUN_DIR", str(tmp_path / "run"))

    def call(*argv: str, stdin: str = "") -> tuple[int, dict[str, Any]]:
        done = subprocess.run(
            [PYTHON, str(program), *argv], input=stdin, capture_output=True, text=True, check=False, timeout=30
        )
        return done.returncode, json.loads(done.stdout.splitlines()[-1])

    return call


def wait_for(host: Host, name: str) -> tuple[int, dict[str, Any]]:
    for _ in range(100):
        code, answer = host("job", "poll", "--id", name, "--wait", "0.5")
        if answer.get("state") != "running":
            return code, answer
    raise AssertionError("still running")


def ready(url: str, timeout: float = 20) -> list[str]:
    return ["ready", "--url", url, "--model", "m", "--timeout", str(timeout)]


def test_nothing_to_do_is_one_round_trip_and_no_job(host: Host, tmp_path: Path) -> None:
    empty = json.dumps({"root": str(tmp_path / "m"), "endpoint": "http://x", "artefacts": []})
    code, answer = host("job", "run", "--id", "stage", "--", "stage", "-", stdin=empty)
    assert code == 0 and answer["state"] == "done" and answer["changed"] is False and answer["result"]["ok"]
    assert not (tmp_path / "run").exists()


def test_a_short_job_is_done_in_the_first_answer(host: Host, tmp_path: Path) -> None:
    write_model(tmp_path / "in")
    argv = ["pad", str(tmp_path / "in"), str(tmp_path / "out"), "--vocab-size", "20"]
    code, answer = host("job", "run", "--id", "pad", "--", *argv)
    assert (code, answer["state"], answer["changed"]) == (0, "done", True)
    assert answer["result"]["vocab_size"] == 20
    code, answer = host("job", "run", "--id", "pad", "--", *argv)  # the directory exists now
    assert code == 2 and answer["result"]["error"]["code"] == "PAD_DEST" and answer["ok"] is False


def test_check_does_nothing(host: Host, tmp_path: Path) -> None:
    code, answer = host("job", "run", "--id", "pad", "--check", "--", "pad", "/a", "/b", "--vocab-size", "20")
    assert code == 0 and answer["changed"] is False
    assert not (tmp_path / "run").exists()


def test_a_second_run_attaches_and_the_result_is_there_for_both(
    host: Host, engine: Callable[[Answer], str], tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    url = engine(lambda path, *_: (200, TOKEN) if gate.exists() else (503, {}))
    code, first = host("job", "run", "--id", "ready", "--", *ready(url))
    assert code == 0 and first["state"] == "running" and first["progress"]["phase"] == "loading"
    assert "loading" in first["line"]
    _, second = host("job", "run", "--id", "ready", "--", *ready(url))
    assert second["state"] == "running"
    code, other = host("job", "run", "--id", "ready", "--", *ready(url, timeout=21))
    assert code == 1 and other["error"]["code"] == "JOB_BUSY"
    gate.touch()
    code, answer = wait_for(host, "ready")
    assert code == 0 and answer["result"]["ready"] is True
    log = (tmp_path / "run/jobs/ready.log").read_text()
    assert log.count("specrig: ready") == 1, "it ran twice"
    assert oct((tmp_path / "run/jobs").stat().st_mode & 0o777) == "0o700"
    assert {oct(p.stat().st_mode & 0o077) for p in (tmp_path / "run/jobs").iterdir()} == {"0o0"}


def test_a_killed_job_is_lost_and_said_so(host: Host, tmp_path: Path) -> None:
    host("job", "run", "--id", "ready", "--", *ready("http://127.0.0.1:1"))
    pids = subprocess.run(
        ["pgrep", "-f", f"{tmp_path}/specrig-host job exec"], capture_output=True, text=True, check=True
    )
    os.kill(int(pids.stdout.split()[0]), signal.SIGKILL)
    time.sleep(0.1)
    code, answer = host("job", "poll", "--id", "ready")
    assert code == 1 and answer["error"]["code"] == "JOB_LOST"
    assert any("waiting for port" in line for line in answer["error"]["lines"])


def test_a_failed_verb_is_the_jobs_result(host: Host) -> None:
    host("job", "run", "--id", "ready", "--", *ready("http://127.0.0.1:1", timeout=0.7))
    code, answer = wait_for(host, "ready")
    assert code == 1 and answer["rc"] == 1 and answer["result"]["error"]["code"] == "READY_TIMEOUT"


@pytest.mark.parametrize("name", ["../x", "", "A", "a/b", "-a"])
def test_names_that_are_paths_are_refused(host: Host, name: str) -> None:
    code, answer = host("job", "poll", f"--id={name}")
    assert code == 2 and answer["error"]["code"] == "JOB_ID"


def test_usage_errors_are_documents_too(host: Host) -> None:
    for argv in (["nonsense"], ["job", "run", "--id", "a", "--", "job", "poll", "--id", "a"]):
        code, answer = host(*argv)
        assert code == 2 and answer["error"]["code"] == "HOST_USAGE", argv
