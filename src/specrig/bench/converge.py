"""What a converge costs that changes nothing: the play that users run every day.

Tasks and round trips come from one verbose run (each `SSH: EXEC` is a round trip, a file transfer's too); wall and controller CPU from runs that
alternate between this repository's settings and stock Ansible settings, so that a busy machine slows both alike.
"""

from __future__ import annotations

import re
import resource
import statistics
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrig import runner
from specrig.console import CannotRun

# Where things are is not a setting: without these the play would not be found. Everything else is as Ansible ships it.
STOCK = """[defaults]
roles_path = {root}/roles
collections_path = {root}/.venv/collections
action_plugins = {root}/src/specrig/ansible/action
filter_plugins = {root}/src/specrig/ansible/filter
library = {root}/src/specrig/ansible/modules
"""
# A transfer says PUT or FETCH, and then EXEC for the sftp that carries it: counted once.
TRIP = re.compile(r"^<[^>]+> SSH: EXEC ", re.MULTILINE)
TASK = re.compile(r"^TASK \[", re.MULTILINE)


@dataclass(frozen=True)
class Cost:
    """One run: wall and controller CPU in seconds."""

    wall: float
    cpu: float


def run_once(inventory: Path, settings: Mapping[str, str], arguments: tuple[str, ...] = ()) -> tuple[Cost, str]:
    """Run the site playbook quietly; it must change nothing."""
    command = [runner.tool("ansible-playbook"), "-i", str(inventory), "playbooks/site.yml", *arguments]
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(
        command, cwd=runner.ROOT, env=runner.environment(settings), check=False, capture_output=True, text=True
    )
    wall, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode or re.search(r"changed=[1-9]", done.stdout):
        raise CannotRun(
            f"the play failed or changed something: {done.stdout[-1500:]}{done.stderr[-500:]}",
            "./rig up first, then measure",
            "NOT_CONVERGED",
        )
    return Cost(wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime), done.stdout


def count(log: str) -> dict[str, int]:
    """Tasks and round trips that a `-vvv` log shows."""
    return {"tasks": len(TASK.findall(log)), "round_trips": len(TRIP.findall(log))}


def converge(inventory: Path, repeats: int, state: Path) -> dict[str, Any]:
    """Measure; `state` is a directory for the stock settings file. Returns medians and their ratio."""
    if repeats < 1:
        raise CannotRun(f"{repeats} runs measure nothing", "--repeats 3", "BAD_REPEATS")
    state.mkdir(parents=True, exist_ok=True)
    stock_file = state / "stock.cfg"
    stock_file.write_text(STOCK.format(root=runner.ROOT))
    kinds = {"specrig": {}, "stock": {"ANSIBLE_CONFIG": str(stock_file)}}
    counts = {}
    for kind, settings in kinds.items():
        _, log = run_once(inventory, settings, ("-vvv",))
        counts[kind] = count(log)
    runs: dict[str, list[Cost]] = {kind: [] for kind in kinds}
    for _ in range(repeats):
        for kind, settings in kinds.items():
            runs[kind].append(run_once(inventory, settings)[0])
    result: dict[str, Any] = {}
    for kind, costs in runs.items():
        result[kind] = counts[kind] | {
            "wall_s": round(statistics.median(c.wall for c in costs), 2), "wall_s_all": [round(c.wall, 2) for c in costs],
            "cpu_s": round(statistics.median(c.cpu for c in costs), 2),
        }  # fmt: skip
    ratios = [ours.wall / theirs.wall for ours, theirs in zip(runs["specrig"], runs["stock"], strict=True)]
    return result | {"wall_ratio": round(statistics.median(ratios), 2), "repeats": repeats}
