"""What staging costs: ours, `hf download` and a plain copy with sha256sum, of the same files, in turn.

All bytes come from one double on this machine's loopback, so a network that is slower than this machine's disk and CPU hides
every difference that is measured here. Ours and the copy end with checksums compared and data on the disk; `hf download`
compares no checksum and waits for no disk. Each run starts without what the one before it left, and reads warm sources.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrig.console import CannotRun, say
from specrig.host import build
from specrig.lab.hub import Hub

REPO, COMMIT = "bench/model", "b" * 40
HF_PACKAGE = "huggingface_hub==2.4.0"


@dataclass(frozen=True)
class Cost:
    """One run: wall and CPU in seconds (all its processes), and the largest process's peak memory in bytes."""

    wall: float
    cpu: float
    peak: int


def measure(command: list[str], env: dict[str, str] | None = None) -> Cost:
    """Run a command to its end. Raises CannotRun when it fails."""
    begin = time.monotonic()
    with Path(os.devnull).open("wb") as nowhere:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=nowhere, env={**os.environ, **(env or {})})
        said = process.stdout.read() if process.stdout else b""
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.monotonic() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.stdout:
            process.stdout.close()
    if process.returncode:
        raise CannotRun(
            f"{' '.join(command[:3])} ended with {process.returncode}: {said[-500:].decode(errors='replace')}",
            "run it by hand",
            "BENCH_FAILED",
        )
    return Cost(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def make_model(folder: Path, size: int, shards: int) -> list[dict[str, Any]]:
    """Files of `size` bytes in all, of random content, made once; returns them as the lock lists them."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for number in range(shards):
        path = folder / f"model-{number + 1:05}-of-{shards:05}.safetensors"
        wanted = size // shards
        if not path.exists() or path.stat().st_size != wanted:
            with path.open("wb") as out:
                for begin in range(0, wanted, 1 << 22):
                    out.write(os.urandom(min(1 << 22, wanted - begin)))
        with path.open("rb") as source:
            digest = hashlib.file_digest(source, "sha256").hexdigest()
        files.append({"path": path.name, "size": wanted, "sha256": digest})
    return files


def hf_tool(state: Path) -> Path:
    """`hf` in a virtual environment of its own below `state`, made on first use. Raises CannotRun."""
    tool = state / "hf" / "bin" / "hf"
    if not tool.exists():
        say(f"installing {HF_PACKAGE} into {state / 'hf'}")
        venv.create(state / "hf", with_pip=True, clear=True)
        done = subprocess.run(
            [str(state / "hf" / "bin" / "pip"), "install", "-q", HF_PACKAGE],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            shutil.rmtree(state / "hf")
            raise CannotRun(f"{HF_PACKAGE}: {done.stderr.strip()[-400:]}", "leave --hf out", "BENCH_NO_HF")
    return tool


def staging(state: Path, size: int, shards: int, repeats: int, with_hf: bool) -> dict[str, Any]:
    """Measure; returns medians, and ratios > 1 where ours is faster. `state` holds the files (3 × size)."""
    if shutil.disk_usage(state.parent).free < 3 * size + 10**9:
        raise CannotRun(f"{3 * size / 1e9:.0f} GB are needed in {state}", "choose a smaller --size", "BENCH_DISK")
    folder = state / "hub" / REPO / COMMIT
    files = make_model(folder, size, shards)
    program = build.write(state / "specrig-host")
    hub = Hub(state / "hub")
    hub.start()
    root, plain = state / "ours", state / "other"
    job, sums = state / "job.json", state / "sums"
    artefact = {"id": "bench", "repo": REPO, "revision": COMMIT, "files": files}
    job.write_text(json.dumps({"root": str(root), "endpoint": hub.url, "artefacts": [artefact]}))
    sums.write_text("".join(f"{f['sha256']}  {plain}/{f['path']}\n" for f in files))
    stage = [sys.executable, str(program), "stage", str(job)]
    copy = f"mkdir -p {plain} && cp {folder}/* {plain}/ && sha256sum --check --quiet {sums} && sync {plain}/*"
    arms: dict[str, Callable[[], Cost]] = {"ours": lambda: measure(stage)}
    if with_hf:
        tool = hf_tool(state)
        words = [str(tool), "download", REPO, "--revision", COMMIT, "--local-dir", str(plain)]
        env = {
            "HF_ENDPOINT": hub.url,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HOME": str(state / "home"),
        }
        arms["hf"] = lambda: measure(words, env)
    arms["copy"] = lambda: measure(["sh", "-c", copy])
    costs: dict[str, list[Cost]] = {name: [] for name in arms}
    again: list[Cost] = []
    try:
        for _ in range(repeats):
            for name, arm in arms.items():
                for left in (root, plain):
                    shutil.rmtree(left, ignore_errors=True)
                costs[name].append(arm())
                if name == "ours":
                    again.append(measure(stage))
    finally:
        hub.stop()
        for left in (root, plain):
            shutil.rmtree(left, ignore_errors=True)
    result: dict[str, Any] = {"bytes": size, "files": shards, "repeats": repeats}
    for name, runs in {**costs, "ours_again": again}.items():
        result[name] = {
            "wall_s": round(statistics.median(c.wall for c in runs), 2),
            "wall_s_all": [round(c.wall, 2) for c in runs],
            "cpu_s": round(statistics.median(c.cpu for c in runs), 2),
            "peak_mb": round(max(c.peak for c in runs) / 1e6),
        }
    for name in costs:
        if name != "ours":
            pairs = zip(costs[name], costs["ours"], strict=True)
            result[f"speed_against_{name}"] = round(statistics.median(t.wall / o.wall for t, o in pairs), 2)
    return result
