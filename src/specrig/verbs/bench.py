"""`./rig bench converge`: what a converge costs that changes nothing."""

from __future__ import annotations

import argparse
import json

from specrig import runner
from specrig.bench.converge import converge
from specrig.console import say


def register(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    bench = verbs.add_parser("bench", help="measure").add_subparsers(metavar="WHAT", required=True)
    verb = bench.add_parser(
        "converge",
        help="tasks, round trips, wall and CPU of a converge that changes nothing, against stock Ansible settings",
    )
    verb.add_argument("-i", "--inventory", help="inventory of hosts that are up already (default: inventory/hosts.yml)")
    verb.add_argument("--repeats", type=int, default=3, help="interleaved runs of each kind (default 3)")
    verb.add_argument("--json", action="store_true", help="print one JSON object")
    verb.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    inventory = runner.inventory_path(options.inventory)
    hosts = runner.load_hosts(inventory)
    result = {"hosts": len(hosts)} | converge(inventory, options.repeats, runner.ROOT / ".rig" / "bench")
    if options.json:
        say(json.dumps(result, indent=2))
        return 0
    say(f"{len(hosts)} host(s), median of {options.repeats} interleaved runs, nothing to change")
    for kind in ("specrig", "stock"):
        row = result[kind]
        counts = f"{row['tasks']:>3} tasks {row['round_trips']:>4} round trips"
        say(f"  {kind:<8} {counts} {row['wall_s']:>7.2f} s wall {row['cpu_s']:>7.2f} s controller CPU")
    say(f"  wall ratio {result['wall_ratio']}")
    return 0
