"""`./rig gateway`: the rigs behind each gateway. `./rig drain RIG`, `undrain RIG`: no new requests for it, and again some."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from specrig import runner
from specrig.console import CannotRun
from specrig.verbs.answers import add_inventory, error_lines, exit_code, reports, result


def register(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verbs."""
    shared = argparse.ArgumentParser(add_help=False)
    add_inventory(shared)
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
    return reports(runner.playbook_json("gateway", inventory, ["-e", json.dumps({"gateway_argv": argv})]), gateways)


def lines(name: str, report: dict[str, Any]) -> list[str]:
    """A gateway's account for a person."""
    if "error" in report:
        return error_lines(name, report["error"])
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
    found = ask(runner.inventory_path(options.inventory), ["gateway"])
    result(options, {"gateways": found}, [line for name, report in found.items() for line in lines(name, report)])
    short = any("error" in r or any(u["up"] is False for u in r["upstreams"]) for r in found.values())
    return exit_code(found, short=short)


def drain(options: argparse.Namespace, on: bool) -> int:
    """Drain a rig on every gateway, or take that back; 1 when requests still run there, or a gateway did not answer."""
    wait = getattr(options, "wait", 0.0)
    if not 0 <= wait <= 86400:
        raise CannotRun(f"--wait {wait:g} is not a number of seconds", "--wait 600", "BAD_WAIT")
    argv = ["drain" if on else "undrain", "--wait", f"{wait:g}", "--", options.rig]
    found = ask(runner.inventory_path(options.inventory), argv)
    result(
        options, {"gateways": found}, [line for name, r in found.items() for line in drained(name, options.rig, r, on)]
    )
    return exit_code(found, short=any("error" in r or (on and wait and r["running"]) for r in found.values()))


def drained(name: str, rig: str, report: dict[str, Any], on: bool) -> list[str]:
    """What became of a drain, for a person."""
    if "error" in report:
        return error_lines(name, report["error"])
    if not on:
        return [f"{name}: {rig} gets requests again"]
    rest = f"{report['running']} still run there" if report["running"] else "nothing runs there"
    return [f"{name}: {rig} gets no new requests; {rest}"]
