"""`./rig switch SERVICE [HOST…]`: of services that share their cards, run this one, now and at boot."""

from __future__ import annotations

import argparse
import json

from specrig import runner
from specrig.console import CannotRun
from specrig.verbs.answers import add_inventory, carry_out, tell
from specrig.verbs.plan import make_plans


def register(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    verb = verbs.add_parser("switch", help="of services that share their cards, run this one")
    verb.add_argument("service", metavar="SERVICE")
    # Without a default, argparse's own message names HOST among what is required.
    verb.add_argument("hosts", nargs="*", default=[], metavar="HOST", help="default: every host that has the service")
    add_inventory(verb)
    verb.add_argument("--check", action="store_true", help="change nothing, only say what would change")
    verb.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Refuse what is not planned, then switch each host; 1 when one of them did not."""
    inventory = runner.inventory_path(options.inventory)
    plans = make_plans(inventory, options.hosts)
    names = {host: [service.name for service in plan.services] for host, plan in plans.items()}
    having = [host for host, known in names.items() if options.service in known]
    if (lacking := [host for host in options.hosts or names if host not in having]) and (options.hosts or not having):
        host = lacking[0]
        raise CannotRun(
            f"no service {options.service!r:.60} is planned for {host}; there: {', '.join(names[host]) or 'none'}",
            "name one of them, or declare it in rig_services and ./rig up",
            "UNKNOWN_SERVICE",
        )
    for host in having:
        [service] = [one for one in plans[host].services if one.name == options.service]
        tell(
            options,
            f"{host}: {service.unit}" + (f" instead of {', '.join(service.conflicts)}" if service.conflicts else ""),
        )
    arguments = ["--limit", ",".join(having), "-e", json.dumps({"switch_service": options.service})]
    return carry_out(options, "switch", inventory, arguments + (["--check"] if options.check else []))
