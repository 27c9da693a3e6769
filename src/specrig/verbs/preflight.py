"""`./rig preflight [HOST…]`: is each machine what the inventory claims, and can it carry its plan? Changes nothing."""

from __future__ import annotations

import argparse
import json
from typing import Any

from specrig import runner
from specrig.console import say
from specrig.verbs.plan import add_host_arguments


def register(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    verb = verbs.add_parser("preflight", help="look at each host, changing nothing: can it carry its plan?")
    add_host_arguments(verb)
    verb.add_argument("--json", action="store_true", help="print facts and findings as one JSON object")
    verb.set_defaults(run=run)


def reports_of(result: dict[str, Any], hosts: list[str]) -> dict[str, dict[str, Any]]:
    """Each host's {facts, findings}, or {error}: why there is none."""
    reports: dict[str, dict[str, Any]] = {}
    for play in result.get("plays", []):
        for task in play["tasks"]:
            for host, outcome in task["hosts"].items():
                found = outcome.get("result") or {}
                if "findings" in found:
                    reports[host] = {"facts": found["facts"], "findings": found["findings"]}
                elif (outcome.get("failed") or outcome.get("unreachable")) and host not in reports:
                    reports[host] = {"error": outcome.get("msg", "no answer")}
    return {host: reports.get(host, {"error": "no answer"}) for host in hosts}


def describe(host: str, report: dict[str, Any], accepted: list[str]) -> list[str]:
    """Lines for a person."""
    if "error" in report:
        return [f"{host}: {report['error']}"]
    facts = report["facts"]
    cards = ", ".join(card["name"] or card["id"] for card in facts["cards"]) or "no NVIDIA card"
    driver = facts["driver_version"] or "none"
    lines = [f"{host}: {facts['os']['name']}, kernel {facts['kernel']['running']}, cards: {cards}, driver: {driver}"]
    for one in report["findings"]:
        level = "accepted" if one["code"] in accepted else one["level"]
        lines += [f"  {level:<8} {one['code']}: {one['cause']}", f"           next: {one['fix']}"]
    return lines if report["findings"] else [*lines, "  nothing stands against it"]


def run(options: argparse.Namespace) -> int:
    """Look at each host; 1 when a refusal stands, 2 is for hosts that could not be looked at."""
    inventory = runner.inventory_path(options.inventory)
    hosts = runner.load_hosts(inventory, options.hosts)
    limit = ["--limit", ",".join(hosts)]
    result = runner.playbook_json("preflight", inventory, [*limit, "-e", json.dumps({"preflight_only": True})])
    reports = reports_of(result, list(hosts))
    accepted = {host: list(variables.get("rig_preflight_ignore") or []) for host, variables in hosts.items()}
    if options.json:
        say(json.dumps({"hosts": reports}, indent=2))
    else:
        say("\n".join(line for host, report in reports.items() for line in describe(host, report, accepted[host])))
    if any("error" in report for report in reports.values()):
        return 2
    standing = [
        one
        for host, report in reports.items()
        for one in report["findings"]
        if one["level"] == "refusal" and one["code"] not in accepted[host]
    ]
    return 1 if standing else 0
