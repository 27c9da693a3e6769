"""`./rig preflight [HOST…]`: is each machine what the inventory claims, and can it carry its plan? Changes nothing."""

from __future__ import annotations

import argparse
import json
from typing import Any

from specrig import runner
from specrig.verbs.answers import add_host_arguments, error_lines, failure, outcomes, result


def register(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    verb = verbs.add_parser("preflight", help="look at each host, changing nothing: can it carry its plan?")
    add_host_arguments(verb)
    verb.set_defaults(run=run)


def reports_of(recorded: dict[str, Any], hosts: list[str]) -> dict[str, dict[str, Any]]:
    """Each host's {facts, findings}, or {error}: why there is none."""
    reports: dict[str, dict[str, Any]] = {}
    for host, outcome in outcomes(recorded):
        found = outcome.get("result") or {}
        if "findings" in found:
            reports[host] = {"facts": found["facts"], "findings": found["findings"]}
        elif (outcome.get("failed") or outcome.get("unreachable")) and host not in reports:
            reports[host] = {"error": failure(host, outcome)}
    return {host: reports.get(host, {"error": failure(host, {})}) for host in hosts}


def describe(host: str, report: dict[str, Any], accepted: list[str]) -> list[str]:
    """Lines for a person."""
    if "error" in report:
        return error_lines(host, report["error"])
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
    recorded = runner.playbook_json("preflight", inventory, [*limit, "-e", json.dumps({"preflight_only": True})])
    reports = reports_of(recorded, list(hosts))
    accepted = {host: list(variables.get("rig_preflight_ignore") or []) for host, variables in hosts.items()}
    lines = [line for host, report in reports.items() for line in describe(host, report, accepted[host])]
    result(options, {"hosts": reports}, lines)
    if any("error" in report for report in reports.values()):
        return 2
    standing = [
        one
        for host, report in reports.items()
        for one in report["findings"]
        if one["level"] == "refusal" and one["code"] not in accepted[host]
    ]
    return 1 if standing else 0
