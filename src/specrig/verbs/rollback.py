"""`./rig rollback [HOST…] [SERVICE]`: go back to what was proven before what runs now."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from specrig import runner
from specrig.console import CannotRun
from specrig.host.switch import words
from specrig.verbs.answers import add_inventory, error_lines, exit_code, reports, result


def register(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    verb = verbs.add_parser("rollback", help="go back to the image and settings that were proven before")
    verb.add_argument(
        "words", nargs="*", metavar="HOST|SERVICE", help="hosts (default: all), then a service where a host has several"
    )
    add_inventory(verb)
    verb.set_defaults(run=run)


def split(given: Sequence[str], known: Sequence[str]) -> tuple[list[str], str]:
    """(hosts, service or ""): a last word that is no host is the service. Raises CannotRun UNKNOWN_HOST."""
    hosts = [word for word in given if word in known]
    others = [word for word in given if word not in known]
    if len(others) > 1 or (others and given[-1] != others[0]):
        raise CannotRun(
            f"{others[0]} is no host of the inventory (it has {', '.join(known)})",
            "hosts first, then at most one service",
            "UNKNOWN_HOST",
        )
    return hosts or list(known), others[0] if others else ""


def describe(host: str, report: dict[str, Any]) -> list[str]:
    """Lines for a person: what was done, and how to stay there."""
    if error := report.get("error"):
        return error_lines(host, error)
    down = report.get("downtime_s")
    runs = "is not chosen, and will run" if report.get("alternate") else "runs"
    lines = [
        f"{host}: {report['service']} {runs} {report['to']} again"
        + ("" if down is None else f"; nothing answered for {down:.0f} s")
    ]
    lines.append(f"  {words(report['speculation'])}")
    stay = ", ".join(f"{name}: {value}" for name, value in report["stay"].items())
    lines.append(
        f"  The inventory would move it forward again with the next ./rig up. To stay: declare for {report['service']}: "
        + (stay or "what it had before (./rig status shows the difference)")
    )
    return lines


def run(options: argparse.Namespace) -> int:
    """Roll back; 1 when a host could not."""
    inventory = runner.inventory_path(options.inventory)
    hosts, service = split(options.words, list(runner.load_hosts(inventory)))
    arguments = ["--limit", ",".join(hosts), "-e", json.dumps({"rollback_service": service})]
    found = reports(runner.playbook_json("rollback", inventory, arguments), hosts)
    result(options, {"hosts": found}, [line for host, report in found.items() for line in describe(host, report)])
    return exit_code(found, short=any("error" in report for report in found.values()))
