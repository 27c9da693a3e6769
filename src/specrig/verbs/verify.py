"""`./rig verify [HOST…]`: the same checks that Molecule runs, against real hosts. Changes nothing."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from specrig import runner
from specrig.console import complain
from specrig.verbs.answers import add_host_arguments, error_lines, reports, result


def register(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    verb = verbs.add_parser("verify", help="check each host against its applied plan (testinfra)")
    add_host_arguments(verb)
    verb.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run testinfra over `tests/host`; 1 when a check fails, 2 when a host does not answer (the others are checked).

    A gateway that is no rig gets the gateway's checks alone.
    """
    inventory = runner.inventory_path(options.inventory)
    rigs = set(runner.load_hosts(inventory))
    hosts = runner.load_hosts(inventory, options.hosts, also="gateways")
    away = absent(inventory, list(hosts))
    for host, error in away.items():
        complain("\n".join(error_lines(host, error)))
    runs = [
        ("tests/host", [name for name in hosts if name in rigs and name not in away]),
        ("tests/host/gateway", [name for name in hosts if name not in rigs and name not in away]),
    ]
    counts: dict[str, dict[str, Any]] = {}
    codes = [check(inventory, checks, names, counts, options.json) for checks, names in runs if names]
    if options.json:
        result(options, {"hosts": counts | {host: {"error": error} for host, error in away.items()}})
    return 2 if away else max({0: 0, 1: 1}.get(code, 2) for code in codes)


def absent(inventory: Path, hosts: list[str]) -> dict[str, dict[str, Any]]:
    """{host: {code, cause, fix}} of those that do not answer. Every check of such a host would be an error of its own."""
    recorded = runner.module_json("ansible.builtin.ping", inventory, hosts)
    return {host: report["error"] for host, report in reports(recorded).items() if "error" in report}


def check(inventory: Path, checks: str, hosts: list[str], counts: dict[str, dict[str, Any]], quiet: bool) -> int:
    """Run the checks of one folder on `hosts` and add up what came out of each host; pytest's exit code."""
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        command = [
            sys.executable, "-m", "pytest", "-p", "no:cacheprovider", checks, f"--junit-xml={report.name}",
            f"--ansible-inventory={inventory}", f"--hosts={','.join(f'ansible://{name}' for name in hosts)}",
        ]  # fmt: skip
        # With --json the document alone is printed; pytest's own words go beside it.
        out = sys.stderr if quiet else None
        done = subprocess.run(command, cwd=runner.ROOT, env=runner.environment(), check=False, stdout=out)
        counts |= {host: {"passed": 0, "skipped": 0, "failed": []} for host in hosts}
        if Path(report.name).stat().st_size:
            count(ElementTree.parse(report.name).getroot(), counts)  # noqa: S314  # pytest wrote it
    return done.returncode


def count(suites: ElementTree.Element, counts: dict[str, dict[str, Any]]) -> None:
    """Add each check's outcome to its host's counts."""
    for case in suites.iter("testcase"):
        name = case.get("name", "")
        # pytest's name of a check: test_x[ansible://HOST] or test_x[ansible://HOST-parameter]; the longest name that fits.
        said = name.partition("[ansible://")[2]
        fitting = [host for host in counts if said.startswith((f"{host}]", f"{host}-"))]
        told = counts[max(fitting, key=len)] if fitting else None
        if told is None:
            continue
        if case.find("failure") is not None or case.find("error") is not None:
            told["failed"].append(f"{case.get('classname')}.{name}")
        else:
            told["skipped" if case.find("skipped") is not None else "passed"] += 1
