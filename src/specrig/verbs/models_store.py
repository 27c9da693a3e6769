"""`./rig models list|verify|scrub|gc|bundle|import`: what the rigs hold. Each is one verb of the host program, run through a playbook."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from specrig import runner
from specrig.host.progress import amount
from specrig.verbs.answers import Report, add_host_arguments, add_inventory, error_lines, exit_code, reports, result


def register(models: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verbs under `models`."""

    def verb(name: str, text: str, argv: Callable[[argparse.Namespace], list[str]]) -> argparse.ArgumentParser:
        one = models.add_parser(name, help=text)
        one.set_defaults(run=lambda options: ask(options, "models", {"models_argv": argv(options)}))
        return one

    add_host_arguments(
        verb("list", "models on each host, whether they are used, and the space left", lambda _: ["models"])
    )
    text = "read every published file again and compare checksums; minutes for a large model"
    add_host_arguments(verb("verify", text, lambda _: ["verify"]))
    one = verb("scrub", "the same slowly, as the host's timer does it", lambda o: ["scrub", "--limit", str(o.limit)])
    one.add_argument("--limit", type=int, default=50_000_000, help="bytes per second (default 50 MB/s)")
    add_host_arguments(one)
    one = verb("gc", "models that neither the applied plan nor a unit uses; --apply removes them", gc_argv)
    one.add_argument("--apply", action="store_true", help="remove them")
    one.add_argument("--keep", type=int, default=0, help="unused revisions to keep of each model, the newest")
    add_host_arguments(one)
    one = verb("bundle", "write a host's models to one file on that host", lambda o: ["bundle", o.path, *o.model])
    one.add_argument("path", help="tar file to write, on the host")
    one.add_argument("hosts", nargs=1, metavar="HOST", help="the host that has them")
    one.add_argument("--model", action="append", default=[], metavar="ORG/NAME", help="only this one (may be repeated)")
    add_inventory(one)
    one = models.add_parser("import", help="stage the planned models from a bundle on the host, without any network")
    one.add_argument("path", help="bundle on the host: tar file, or a directory laid out like the models' directory")
    add_host_arguments(one)
    one.set_defaults(run=lambda options: ask(options, "import", {"models_bundle": options.path}))


def gc_argv(options: argparse.Namespace) -> list[str]:
    """The host program's words for `gc`."""
    return ["gc", "--keep", str(options.keep), *(["--apply"] if options.apply else [])]


def describe(host: str, report: Report) -> list[str]:
    """Lines for a person."""
    if error := report.get("error"):
        return error_lines(host, error)
    if "partial_bytes" in report:
        free = f"{amount(report['free_bytes'])} free, {amount(report['partial_bytes'])} half fetched"
        return [f"{host}: {len(report['models'])} models in {report['root']}; {free}", *map(_model, report["models"])]
    if "verified" in report:
        return [
            f"{host}: {report['verified']} models verified, {amount(report['bytes'])} read, all as they were staged"
        ]
    if rows := report.get("would_remove"):
        return [f"{host}: would remove {amount(report['bytes'])}", *_paths(rows), "  next: --apply removes them"]
    if rows := report.get("removed"):
        return [f"{host}: removed {amount(report['bytes'])}", *_paths(rows)]
    if "path" in report:
        return [f"{host}: {report['path']}, {amount(report['bytes'])}: {', '.join(report['models'])}"]
    if staged := report.get("staged"):
        return [f"{host}: staged", *(f"  {row['path']}  {amount(row['bytes'])}" for row in staged)]
    return [f"{host}: nothing to do"]


def _model(row: dict[str, Any]) -> str:
    used = {True: "in use", False: "unused", None: "no plan applied"}[row.get("used")]
    notes = [used, *(["made here"] if row["derived"] else []), *(["DAMAGED"] if row.get("damaged") else [])]
    return f"  {row['repo']}  {row['revision']}  {amount(row['bytes'])}  {', '.join(notes)}"


def _paths(rows: list[dict[str, Any]]) -> list[str]:
    return [f"  {row['path']}  {amount(row['bytes'])}" for row in rows]


def ask(
    options: argparse.Namespace,
    playbook: str,
    variables: dict[str, Any],
    tell: Callable[[str, Report], list[str]] | None = None,
) -> int:
    """Run `playbook` on the hosts and print what they say (`tell`); 1 when one falls short or does not answer."""
    inventory = runner.inventory_path(options.inventory)
    names = list(runner.load_hosts(inventory, options.hosts))
    arguments = ["-e", json.dumps(variables), "--limit", ",".join(names)]
    found = reports(runner.playbook_json(playbook, inventory, arguments), names)
    result(
        options, {"hosts": found}, [line for host, report in found.items() for line in (tell or describe)(host, report)]
    )
    short = any(
        "error" in r or any(m.get("damaged") for m in r.get("models", []) if isinstance(m, dict))
        for r in found.values()
    )
    return exit_code(found, short=short)
