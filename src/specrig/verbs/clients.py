"""`./rig clients [NAME]`: settings with which curl, the OpenAI SDKs, editors and agents use an endpoint."""

from __future__ import annotations

import argparse
import base64
import textwrap
from pathlib import Path

from specrig import runner
from specrig.clients import Endpoint, endpoints, settings
from specrig.console import CannotRun, confirm
from specrig.verbs.answers import add_inventory, result
from specrig.verbs.plan import make_all_plans


def register(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    verb = verbs.add_parser(
        "clients",
        help="settings for curl, the OpenAI SDKs, Cline, OpenHands, Continue, Cursor, Open WebUI; no key in them",
    )
    verb.add_argument("name", nargs="?", metavar="NAME", help="one client (default: all)")
    add_inventory(verb)
    verb.add_argument(
        "--endpoint", metavar="HOST/SERVICE", help="or gateway/HOST (default: the first; gateways come first)"
    )
    verb.add_argument("--client", help="whose key at a gateway (default: the first of its clients)")
    verb.add_argument("--show-key", action="store_true", help="print the key too, after asking")
    verb.add_argument("--yes", action="store_true", help="do not ask")
    verb.set_defaults(run=run)


def describe(chosen: Endpoint, others: list[str], name: str | None) -> list[str]:
    """Lines for a person."""
    lines = [f"{chosen.name}: {chosen.url}, models {', '.join(chosen.models)}"]
    lines += [f"  also: {', '.join(others)}  (--endpoint NAME)"] if others else []
    first = [line for line in (chosen.tunnel, chosen.fetch_ca, chosen.fetch_key) if line]
    why = {
        chosen.tunnel: "it listens on loopback: keep this open",
        chosen.fetch_ca: "its authority, which clients must trust",
    }
    lines += ["", "First"]
    lines += [f"  {line}" + (f"    # {why[line]}" if line in why else "") for line in first]
    for client, told in settings(chosen).items():
        if name in (None, client):
            lines += ["", client + (f"    {told['file']}" if "file" in told else "")]
            lines += textwrap.indent(told["how"], "  ").splitlines()
            lines += [f"  ({told['note']})"] if "note" in told else []
    return lines


def read_key(inventory: Path, endpoint: Endpoint) -> str:
    """The key, from its file on the host; it passes through no command line."""
    arguments = ["--become", "-a", f"src={endpoint.key_path}"]
    document = runner.module_json("ansible.builtin.slurp", inventory, [endpoint.host], arguments)
    try:
        content = document["plays"][0]["tasks"][0]["hosts"][endpoint.host]["content"]
    except (KeyError, IndexError):
        raise CannotRun(
            f"{endpoint.host}:{endpoint.key_path} could not be read", f"./rig up {endpoint.host}, then again", "NO_KEY"
        ) from None
    return base64.b64decode(content).decode().strip()


def run(options: argparse.Namespace) -> int:
    """Print the settings; 1 when nothing is planned that could be used, or the client cannot use it."""
    inventory = runner.inventory_path(options.inventory)
    variables = runner.load_hosts(inventory, also="gateways")
    plans, gateways = make_all_plans(inventory)
    found = list(endpoints(plans, gateways, variables, options.client))
    if not found:
        raise CannotRun("no service is planned that could be used", "./rig plan", "NO_ENDPOINT")
    if options.client and not any(options.client in gateway.clients for gateway in gateways.values()):
        raise CannotRun(f"no gateway has a client {options.client!r}", "rig_gateway: {clients: […]}", "UNKNOWN_CLIENT")
    chosen = next((e for e in found if options.endpoint in (None, e.name)), None)
    if chosen is None:
        names = ", ".join(e.name for e in found)
        raise CannotRun(
            f"there is no endpoint {options.endpoint!r} (there is {names})", "name one of these", "UNKNOWN_ENDPOINT"
        )
    known = settings(chosen)
    if options.name and options.name not in known:
        raise CannotRun(
            f"no settings for {options.name!r} (there are {', '.join(known)})",
            "most programs take those of env",
            "UNKNOWN_CLIENT",
        )
    key = ""
    if options.show_key and chosen.key_path and confirm("Print the key to this terminal?", yes=options.yes):
        key = read_key(inventory, chosen)
    document = {
        e.name: {
            "url": e.url, "base": e.base, "models": dict(e.models), "tunnel": e.tunnel, "ca": e.fetch_ca,
            "key": {"host": e.host, "path": e.key_path}, "clients": settings(e),
        }
        for e in found
    }  # fmt: skip
    lines = describe(chosen, [e.name for e in found if e is not chosen], options.name)
    lines += [f"\nkey: {key}"] if key else []
    result(options, {"endpoints": document} | ({"key": key} if key else {}), lines)
    return 1 if options.name and not known[options.name]["usable"] else 0
