"""The stager where time itself is tested: kills, full disks and silence in mid-download. Seconds each, so not under unit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from specrig.host import build
from tests.unit.host.program import PYTHON
from tests.unit.host.test_stage import REVISION, blob, document, hub_of, quick_retries, refused, run

__all__ = ["quick_retries"]


def test_a_silent_server_is_left_and_the_transfer_resumed(tmp_path: Path) -> None:
    # aria2c itself gives up a silent connection, after ten seconds.
    data = {"model.safetensors": blob(3_000_000)}
    url = f"/org/name/resolve/{REVISION}/model.safetensors"
    with hub_of(data) as hub:
        hub.silence, hub.break_at[url] = 60, (2_000_000, "stall")
        start = time.monotonic()
        assert run(document(tmp_path, hub.url, data))["changed"]
        assert time.monotonic() - start < 45, "it waited for the server"
        assert any("Range" in headers for _, path, headers in hub.requests if path == url)


def test_kill_9_of_all_of_it_in_mid_download_resumes(tmp_path: Path) -> None:
    data = {"model.safetensors": blob(6_000_000)}
    url = f"/org/name/resolve/{REVISION}/model.safetensors"
    program = build.write(tmp_path / "specrig-host")
    with hub_of(data, rate=2_000_000) as hub:
        job = tmp_path / "job.json"
        job.write_text(json.dumps(document(tmp_path / "models", hub.url, data)))
        process = subprocess.Popen(
            [PYTHON, program, "stage", job],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        while hub.sent.get(url, 0) < 3_000_000:
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        before = hub.sent[url]
        hub.rate = 16_000_000
        done = subprocess.run([PYTHON, program, "stage", job], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        # The control file may lag behind by a second (2 MB here) and a piece of 1 MB; some is always on the wire.
        again = hub.sent[url] - 6_000_000
        assert before > 3_000_000 - 1 and again <= 3_000_000, (before, again)
        assert any("Range" in h for _, p, h in hub.requests if p == url)
    assert (tmp_path / "models/org--name" / REVISION / "model.safetensors").read_bytes() == data["model.safetensors"]


def test_a_disk_that_somebody_else_fills_stops_it_in_time_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {"model.safetensors": blob(6_000_000)}
    url = f"/org/name/resolve/{REVISION}/model.safetensors"
    with hub_of(data, rate=3_000_000) as hub:
        free = SimpleNamespace(free=10**10)
        with monkeypatch.context() as patch:
            full = SimpleNamespace(free=1000)
            patch.setattr("shutil.disk_usage", lambda _: full if hub.sent.get(url, 0) > 3_000_000 else free)
            assert "filled up" in refused(document(tmp_path, hub.url, data), "STAGE_DISK").cause
        assert run(document(tmp_path, hub.url, data))["changed"]
        assert hub.sent[url] < 7_500_000, "it was fetched again"
