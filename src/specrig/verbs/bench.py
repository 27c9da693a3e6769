"""`./rig bench converge|staging`: what a converge costs that changes nothing, and what staging a model costs."""

from __future__ import annotations

import argparse

from specrig import runner
from specrig.bench.converge import converge
from specrig.bench.staging import staging
from specrig.verbs.answers import add_json, result


def register(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    bench = verbs.add_parser("bench", help="measure").add_subparsers(metavar="WHAT", required=True)
    verb = bench.add_parser(
        "converge",
        help="tasks, round trips, wall and CPU of a converge that changes nothing, against stock Ansible settings",
    )
    verb.add_argument("-i", "--inventory", help="inventory of hosts that are up already (default: inventory/hosts.yml)")
    verb.add_argument("--repeats", type=int, default=3, help="interleaved runs of each kind (default 3)")
    add_json(verb)
    verb.set_defaults(run=run)
    verb = bench.add_parser(
        "staging", help="wall and CPU of staging, against `hf download` and a plain copy with sha256sum"
    )
    verb.add_argument(
        "--size", type=float, default=2.0, help="GB to stage (default 2; three times as much disk is used)"
    )
    verb.add_argument("--files", type=int, default=4, help="in so many files (default 4)")
    verb.add_argument("--repeats", type=int, default=3, help="interleaved runs of each kind (default 3)")
    verb.add_argument(
        "--hf", action="store_true", help="also `hf download`, installed into a virtual environment of its own"
    )
    add_json(verb)
    verb.set_defaults(run=run_staging)


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    inventory = runner.inventory_path(options.inventory)
    hosts = runner.load_hosts(inventory)
    measured = {"hosts": len(hosts)} | converge(inventory, options.repeats, runner.ROOT / ".rig" / "bench")
    lines = [f"{len(hosts)} host(s), median of {options.repeats} interleaved runs, nothing to change"]
    for kind in ("specrig", "stock"):
        row = measured[kind]
        counts = f"{row['tasks']:>3} tasks {row['round_trips']:>4} round trips"
        lines.append(f"  {kind:<8} {counts} {row['wall_s']:>7.2f} s wall {row['cpu_s']:>7.2f} s controller CPU")
    result(options, measured, [*lines, f"  wall ratio {measured['wall_ratio']}"])
    return 0


def run_staging(options: argparse.Namespace) -> int:
    """Measure and print."""
    state = runner.ROOT / ".rig" / "bench" / "staging"
    state.mkdir(parents=True, exist_ok=True)
    measured = staging(state, int(options.size * 1e9), options.files, options.repeats, options.hf)
    lines = [
        f"{options.size:g} GB in {options.files} files from loopback, median of {options.repeats} interleaved runs"
    ]
    for kind, what in (
        ("ours", "staged, verified, published"),
        ("ours_again", "a second run: nothing to do"),
        ("hf", "hf download: no checksum compared"),
        ("copy", "cp, sha256sum, sync"),
    ):
        if row := measured.get(kind):
            lines.append(
                f"  {kind:<10} {row['wall_s']:>7.2f} s wall {row['cpu_s']:>7.2f} s CPU {row['peak_mb']:>5} MB peak  {what}"
            )
    for kind in ("hf", "copy"):
        if f"speed_against_{kind}" in measured:
            lines.append(f"  ours against {kind}: {measured[f'speed_against_{kind}']:.2f} times as fast")
    result(options, measured, lines)
    return 0
