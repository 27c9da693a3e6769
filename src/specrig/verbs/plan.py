"""`./rig plan [HOST…]`: show what would be, or why not. Touches no host."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from specrig import runner
from specrig.console import CannotRun, say
from specrig.plan import HostPlan, render


def register(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    verb = verbs.add_parser("plan", help="show the plan of each host, or why it is refused; touches nothing")
    add_host_arguments(verb)
    verb.add_argument("--json", action="store_true", help="print the plans as one JSON object")
    verb.set_defaults(run=run)


def add_host_arguments(verb: argparse.ArgumentParser) -> None:
    """The arguments that all verbs share which act on hosts."""
    verb.add_argument("hosts", nargs="*", metavar="HOST", help="hosts of the inventory; all of them by default")
    verb.add_argument("-i", "--inventory", help="inventory file or directory (default: inventory/hosts.yml)")


def make_plans(inventory: Path, hosts: Sequence[str]) -> dict[str, HostPlan]:
    """Plans of the named hosts of `inventory` (all of them when none is named), made as the playbook makes them."""
    names = list(runner.load_hosts(inventory, hosts))
    result = runner.playbook_json("plan", inventory, ["-e", json.dumps({"plan_hosts": names})])
    outcome = result["plays"][0]["tasks"][0]["hosts"]["localhost"]
    if "plans" not in outcome:
        raise CannotRun(f"the plan could not be made: {outcome.get('msg')}", "correct what it names", "PLAN_FAILED")
    return {name: HostPlan.from_json(outcome["plans"][name]) for name in names}


def run(options: argparse.Namespace) -> int:
    """Print the plans; 1 when one of them is refused."""
    plans = make_plans(runner.inventory_path(options.inventory), options.hosts)
    say(
        json.dumps({"hosts": {name: plan.as_json() for name, plan in plans.items()}}, indent=2)
        if options.json
        else render.table(plans)
    )
    return 0 if all(plan.ok for plan in plans.values()) else 1
