"""`./rig up [HOST…]`: bring each host to its plan. The same as `ansible-playbook -i INVENTORY playbooks/site.yml`."""

from __future__ import annotations

import argparse

from specrig import runner
from specrig.verbs.answers import add_host_arguments, carry_out


def register(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    verb = verbs.add_parser("up", help="bring each host to its plan")
    add_host_arguments(verb)
    verb.add_argument("--check", action="store_true", help="change nothing, only say what would change")
    verb.add_argument("--diff", action="store_true", help="show the lines that change")
    verb.add_argument("--retry", action="store_true", help="try also what was tried before and taken back")
    verb.add_argument(
        "-e", "--extra-vars", action="append", default=[], metavar="NAME=VALUE", help="as in ansible-playbook"
    )
    verb.set_defaults(run=run)


def ansible_arguments(options: argparse.Namespace) -> list[str]:
    """What `up`'s options are in Ansible's own words."""
    limit = ["--limit", ",".join(options.hosts)] if options.hosts else []
    flags = [flag for flag, on in (("--check", options.check), ("--diff", options.diff)) if on]
    flags += ["-e", '{"rig_retry": true}'] if options.retry else []
    return [*limit, *flags, *(word for value in options.extra_vars for word in ("-e", value))]


def run(options: argparse.Namespace) -> int:
    """Run the site playbook; 1 when it did not end well."""
    inventory = runner.inventory_path(options.inventory)
    runner.load_hosts(inventory, options.hosts, also="gateways")
    return carry_out(options, "site", inventory, ansible_arguments(options))
