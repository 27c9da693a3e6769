"""What verbs share: `--json`, the hosts they act on, what hosts answered, and a playbook that changes things."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specrig import runner
from specrig.console import CannotRun, complain, say

Report = dict[str, Any]
_UNREACHABLE = 4  # ansible-playbook's own exit code


def add_host_arguments(verb: argparse.ArgumentParser) -> None:
    """The arguments that all verbs share which act on hosts."""
    verb.add_argument("hosts", nargs="*", default=[], metavar="HOST", help="hosts of the inventory (default: all)")
    add_inventory(verb)


def add_inventory(verb: argparse.ArgumentParser) -> None:
    """`-i` and `--json`."""
    verb.add_argument("-i", "--inventory", help="inventory file or directory (default: inventory/hosts.yml)")
    add_json(verb)


def with_inventory(options: argparse.Namespace) -> str:
    """The words that name the inventory in a command to type next; none for the default."""
    return f" -i {shlex.quote(options.inventory)}" if options.inventory else ""


def add_json(verb: argparse.ArgumentParser) -> None:
    """`--json`: what the verb found or did, as one document."""
    verb.add_argument("--json", action="store_true", help="print one JSON document")


def tell(options: argparse.Namespace, text: str) -> None:
    """A line on the way to the result; with --json it does not stand in the document's way."""
    (complain if options.json else say)(text)


def result(options: argparse.Namespace, document: Mapping[str, Any], lines: Iterable[str] = ()) -> None:
    """What came of it: `document` with --json, else `lines` for a person."""
    text = json.dumps(document, indent=2) if options.json else "\n".join(lines)
    if text:
        say(text)


def outcomes(recorded: Mapping[str, Any]) -> Iterable[tuple[str, dict[str, Any]]]:
    """(host, outcome) of each task of a recorded run, in order."""
    for play in recorded.get("plays", []):
        for task in play["tasks"]:
            yield from task["hosts"].items()


def failures(host: str, outcome: Mapping[str, Any]) -> list[dict[str, Any]]:
    """{code, cause, fix} of an outcome that is none, several where a plan is refused: the host program's own words, else Ansible's."""
    said = outcome.get("result")
    if isinstance(said, Mapping) and (error := said.get("error")):
        return [dict(error)]
    cause = str(outcome.get("msg") or "no answer").strip()
    if outcome.get("unreachable"):
        return [{"code": "UNREACHABLE", "cause": cause, "fix": f"ssh to {host} as the inventory says, by hand"}]
    other = {"code": "NO_ANSWER", "cause": cause, "fix": f"correct what it names, or ./rig up {host}"}
    return [refusal.as_json() for refusal in CannotRun.all_in(cause)] or [other]


def failure(host: str, outcome: Mapping[str, Any]) -> dict[str, Any]:
    """The first of its `failures`."""
    return failures(host, outcome)[0]


def exit_code(found: Mapping[str, Report], *, short: bool) -> int:
    """2 when no host could be reached, 1 when something falls short, else 0."""
    away = [(report.get("error") or {}).get("code") == "UNREACHABLE" for report in found.values()]
    return 2 if away and all(away) else int(short)


def reports(recorded: Mapping[str, Any], hosts: Iterable[str] = ()) -> dict[str, Report]:
    """Each host's own document; {"error": {code, cause, fix}} where it has none, also for `hosts` that nothing is recorded of.

    The last task that ran on a host speaks.
    """
    found: dict[str, Report] = {}
    for host, outcome in outcomes(recorded):
        failed = outcome.get("failed") or outcome.get("unreachable")
        document = dict(outcome.get("result") or {})
        found[host] = {**document, "error": failure(host, outcome)} if failed else document
    for host in hosts:
        found.setdefault(host, {"error": failure(host, {})})
    return found


def error_lines(host: str, error: Mapping[str, Any]) -> list[str]:
    """An error for a person: code and cause, what the host said, the next step."""
    fix = [f"  next: {error['fix']}"] if error.get("fix") else []
    return [f"{host}: {error['code']}: {error['cause']}", *(f"  {line}" for line in error.get("lines") or []), *fix]


def carry_out(options: argparse.Namespace, name: str, inventory: Path, arguments: Sequence[str]) -> int:
    """Run a playbook that changes things: its output is the person's, or one document with --json.

    1 when it did not end well, 2 when a host could not be reached, whatever else: as Ansible has it.
    """
    if not options.json:
        code = runner.playbook(name, inventory, arguments)
        return 2 if code == _UNREACHABLE else int(code != 0)
    recorded = runner.playbook_json(name, inventory, arguments)
    hosts: dict[str, Report] = {
        host: {word: counts[word] for word in ("ok", "changed", "failures", "unreachable")}
        for host, counts in recorded.get("stats", {}).items()
    }
    for host, outcome in outcomes(recorded):
        if host in hosts and (outcome.get("failed") or outcome.get("unreachable")):
            hosts[host].setdefault("errors", []).extend(failures(host, outcome))
    result(options, {"hosts": hosts})
    if any(row["unreachable"] for row in hosts.values()):
        return 2
    return 1 if not hosts or any(row["failures"] for row in hosts.values()) else 0
