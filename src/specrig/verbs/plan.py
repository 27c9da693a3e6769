"""`./rig plan [HOST…]`: show what would be, or why not. Touches no host."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specrig import runner
from specrig.console import CannotRun
from specrig.plan import GatewayPlan, HostPlan, render
from specrig.verbs.answers import add_host_arguments, result


def register(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    verb = verbs.add_parser("plan", help="show the plan of each host, or why it is refused; touches nothing")
    add_host_arguments(verb)
    verb.set_defaults(run=run)


def make_plans(inventory: Path, hosts: Sequence[str]) -> dict[str, HostPlan]:
    """Plans of the named hosts of `inventory` (all of them when none is named), made as the playbook makes them."""
    return make_all_plans(inventory, hosts)[0]


def make_all_plans(inventory: Path, hosts: Sequence[str] = ()) -> tuple[dict[str, HostPlan], dict[str, GatewayPlan]]:
    """(plans of the named hosts, plans of all gateways of `inventory`)."""
    names = list(runner.load_hosts(inventory, hosts))
    recorded = runner.playbook_json("plan", inventory, ["-e", json.dumps({"plan_hosts": names})])
    outcomes = [task["hosts"]["localhost"] for task in recorded["plays"][0]["tasks"]]
    for outcome in outcomes:
        if "plans" not in outcome:
            said = str(outcome.get("msg"))
            why = CannotRun(f"the plan could not be made: {said}", "correct what it names", "PLAN_FAILED")
            raise next(iter(CannotRun.all_in(said)), why)
    gateways = {name: GatewayPlan.from_json(plan) for name, plan in outcomes[1]["plans"].items()}
    return {name: HostPlan.from_json(outcomes[0]["plans"][name]) for name in names}, gateways


def run(options: argparse.Namespace) -> int:
    """Print the plans; 1 when one of them is refused."""
    plans, gateways = make_all_plans(runner.inventory_path(options.inventory), options.hosts)
    document: dict[str, Any] = {"hosts": {name: plan.as_json() for name, plan in plans.items()}}
    document |= {"gateways": {name: plan.as_json() for name, plan in gateways.items()}} if gateways else {}
    result(options, document, [render.table(plans) + render.gateways(gateways)])
    fine = [plan.ok for plan in plans.values()] + [plan.ok for plan in gateways.values()]
    return 0 if all(fine) else 1
