"""`./rig status [HOST…]`: what runs, since when, and whether it is what was planned."""

from __future__ import annotations

import argparse
import json
from typing import Any

from specrig import runner
from specrig.console import say
from specrig.verbs.plan import add_host_arguments, make_plans


def register(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    verb = verbs.add_parser("status", help="what runs on each host, and whether it is what was planned")
    add_host_arguments(verb)
    verb.add_argument("--json", action="store_true", help="print one JSON object")
    verb.set_defaults(run=run)


def host_reports(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Each host's own answer, or {"error": why there is none}."""
    reports: dict[str, dict[str, Any]] = {}
    for play in result.get("plays", []):
        for task in play["tasks"]:
            for host, outcome in task["hosts"].items():
                failed = outcome.get("failed") or outcome.get("unreachable")
                reports[host] = {"error": outcome.get("msg", "no answer")} if failed else outcome.get("result", {})
    return reports


def describe(host: str, report: dict[str, Any], planned: str) -> list[str]:
    """Lines for a person."""
    if "error" in report:
        return [f"{host}: {report['error']}"]
    applied = report.get("plan_hash")
    drift = (
        "no plan applied yet"
        if not applied
        else "as planned"
        if applied == planned
        else "the plan has changed since it was applied: ./rig up"
    )
    lines = [f"{host}: {drift}"]
    for service in report.get("services", []):
        health = "answers" if service.get("health") else "does not answer"
        lines.append(
            f"  {service['unit']:<32} {service['active']:<12} {health:<16} restarts {service.get('restarts', 0)}  {service.get('since', '')}"
        )
    lines += [f"  {model['path']}" for model in report.get("models", [])]
    return lines


def run(options: argparse.Namespace) -> int:
    """Ask each host; 1 when a service is not up or a host does not answer."""
    inventory = runner.inventory_path(options.inventory)
    plans = make_plans(inventory, options.hosts)
    limit = ["--limit", ",".join(options.hosts)] if options.hosts else []
    reports = host_reports(runner.playbook_json("status", inventory, limit))
    if options.json:
        say(json.dumps({"hosts": reports}, indent=2))
    else:
        for host, report in reports.items():
            say("\n".join(describe(host, report, plans[host].as_json()["plan_hash"])))
    fine = all(
        "error" not in r and all(s["active"] == "active" for s in r.get("services", [])) for r in reports.values()
    )
    return 0 if fine and reports else 1
