"""`./rig gateway`: the rigs behind each gateway. `./rig drain RIG`, `undrain RIG`: no new requests for it, and again some."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from specrig import runner
from specrig.console import CannotRun, say
from specrig.verbs.status import host_reports


def register(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verbs."""
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("-i", "--inventory", help="inventory file or directory (default: inventory/hosts.yml)")
    shared.add_argument("--json", action="store_true", help="print one JSON object")
    verb = verbs.add_parser(
        "gateway", parents=[shared], help="the rigs behind each gateway: up, down or drained, and what runs"
    )
    verb.set_defaults(run=show)
    verb = verbs.add_parser(
        "drain", parents=[shared], help="send a rig no new requests through the gateways; what runs there ends"
    )
    verb.add_argument("rig", metavar="RIG")
    verb.add_argument("--wait", type=float, default=0.0, metavar="SECONDS", help="return when no request runs there")
    verb.set_defaults(run=lambda options: drain(options, on=True))
    verb = verbs.add_parser("undrain", parents=[shared], help="send a drained rig requests again")
    verb.add_argument("rig", metavar="RIG")
    verb.set_defaults(run=lambda options: drain(options, on=False))


def ask(inventory: Path, argv: list[str]) -> dict[str, dict[str, Any]]:
    """Each gateway's answer to a verb of the host program, or {"error": why there is none}."""
    gateways = runner.load_hosts(inventory, group="gateways")
    reports = host_reports(runner.playbook_json("gateway", inventory, ["-e", json.dumps({"gateway_argv": argv})]))
    return {name: reports.get(name, {"error": "no answer"}) for name in gateways}


def lines(name: str, report: dict[str, Any]) -> list[str]:
    """A gateway's account for a person."""
    if "error" in report:
        return [f"{name}: {report['error']}"]
    asked = ", ".join(f"{client} {count}" for client, count in sorted(report["clients"].items())) or "none yet"
    text = [f"{name}: requests by client since the relay started: {asked}"]
    for row in report["upstreams"]:
        probe = f"probe {row['probe_s'] * 1000:.0f} ms" if row["probe_s"] is not None else "no probe yet"
        text.append(
            f"  {row['rig']}/{row['service']:<20} {row['model']:<24} {row['state']:<8} for {row['for_s']:.0f} s"
            f"  running {row['running']}  answered {row['answered']}  lost {row['lost']}  {probe}"
            + (f"  {row['why']}" if row["why"] else "")
        )
    return text


def show(options: argparse.Namespace) -> int:
    """Print what each gateway sees; 1 when one does not answer or has a rig down."""
    reports = ask(runner.inventory_path(options.inventory), ["gateway"])
    if options.json:
        say(json.dumps({"gateways": reports}, indent=2))
    else:
        say("\n".join(line for name, report in reports.items() for line in lines(name, report)))
    return 1 if any("error" in r or any(u["up"] is False for u in r["upstreams"]) for r in reports.values()) else 0


def drain(options: argparse.Namespace, on: bool) -> int:
    """Drain a rig on every gateway, or take that back; 1 when requests still run there, or a gateway did not answer."""
    wait = getattr(options, "wait", 0.0)
    if not 0 <= wait <= 86400:
        raise CannotRun(f"--wait {wait:g} is not a number of seconds", "--wait 600", "BAD_WAIT")
    argv = ["drain" if on else "undrain", "--wait", f"{wait:g}", "--", options.rig]
    reports = ask(runner.inventory_path(options.inventory), argv)
    if options.json:
        say(json.dumps({"gateways": reports}, indent=2))
        return 1 if any("error" in r or (on and r["running"]) for r in reports.values()) else 0
    for name, report in reports.items():
        if "error" in report:
            say(f"{name}: {report['error']}")
        elif on:
            rest = f"; {report['running']} still run there" if report["running"] else "; nothing runs there"
            say(f"{name}: {options.rig} gets no new requests{rest}")
        else:
            say(f"{name}: {options.rig} gets requests again")
    return 1 if any("error" in r or (on and wait and r["running"]) for r in reports.values()) else 0
