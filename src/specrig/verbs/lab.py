"""`rig lab`: throw-away hosts to converge against, and the hub and registry that they use."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict

from specrig.console import complain
from specrig.lab import Lab, LabError, cards, cleanup, engine, hosts, rigs
from specrig.lab.images import DISTRIBUTIONS
from specrig.verbs.answers import add_json, result


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb `lab` and what it can do."""
    parser = subparsers.add_parser(
        "lab", help="throw-away hosts: containers that boot systemd and are reached over SSH"
    )
    parser.set_defaults(run=run)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--lab", default="lab", metavar="NAME", help="which lab (default: lab)")
    shared.add_argument("--yes", action="store_true", help="install and start a Docker Engine without asking")
    answering = argparse.ArgumentParser(add_help=False, parents=[shared])
    add_json(answering)

    up = actions.add_parser(
        "up", parents=[answering], help="bring hosts up, ready for ./rig up; prints the inventory's path"
    )
    up.add_argument("names", nargs="*", default=["alpha"], metavar="NAME[=OS]", help="host names (default: alpha)")
    up.add_argument("--os", default="debian-13", choices=list(DISTRIBUTIONS), help="of hosts that name none")
    less = up.add_mutually_exclusive_group()
    less.add_argument("--bare", action="store_true", help="hosts only: no hub, no models, no engine image")
    less.add_argument("--no-engine", action="store_true", help="hosts, hub and models, without the engine image")

    ssh = actions.add_parser("ssh", parents=[shared], help="a shell on a host, or one command")
    ssh.add_argument("name", metavar="NAME")
    ssh.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND")

    plug = actions.add_parser(
        "cards", parents=[answering], help="let a host look as if it had these cards: lspci sees them, no driver does"
    )
    plug.add_argument("name", metavar="NAME")
    plug.add_argument(
        "cards", nargs="*", metavar="CARD", help="names of src/specrig/plan/catalog/gpus.yml; none takes them out"
    )

    listing = actions.add_parser("list", parents=[shared], help="all hosts of all labs")
    add_json(listing)

    down = actions.add_parser("down", parents=[answering], help="remove hosts, and the hub after the last one")
    down.add_argument("names", nargs="*", metavar="NAME", help="host names (default: all of the lab)")
    down.add_argument("--all", action="store_true", help="all labs, with their images, models and caches")


def run(args: argparse.Namespace) -> int:
    """Carry out one action; 0 fine, 1 a named host was not there. Raises LabError."""
    done: int = {"up": _up, "ssh": _ssh, "cards": _cards, "list": _list, "down": _down}[args.action](args)
    return done


def _up(args: argparse.Namespace) -> int:
    pairs = [name.partition("=") for name in args.names]
    wanted = {name: os_name or args.os for name, _, os_name in pairs}
    lab = Lab(args.lab, args.yes)
    inventory = str(lab.up(wanted) if args.bare else rigs.up(lab, wanted, engine=not args.no_engine))
    result(args, {"inventory": inventory}, [inventory])
    return 0


def _running(lab: Lab, name: str) -> hosts.Host:
    found = [host for host in lab.hosts() if host.name == name]
    if not found or found[0].status != "running":
        state = found[0].status if found else "not there"
        raise LabError("LAB_HOST_ABSENT", f"{name} is {state}", f"./rig lab up {name}")
    return found[0]


def _ssh(args: argparse.Namespace) -> int:
    command = hosts.ssh_command(_running(Lab(args.lab, args.yes), args.name), args.command)
    os.execvp(command[0], command)  # noqa: S606 - a list, no shell


def _cards(args: argparse.Namespace) -> int:
    lab = Lab(args.lab, args.yes)
    cards.plug(lab.client.containers.get(_running(lab, args.name).container), args.cards)
    told = f"{args.name} looks like a machine with {', '.join(args.cards) or 'no cards'}"
    result(args, {"host": args.name, "cards": args.cards}, [told])
    return 0


def _list(args: argparse.Namespace) -> int:
    client = engine.connect()
    found = hosts.find(client) if client else []
    lines = [f"{host.lab:12} {host.name:20} {host.os:10} {host.status:8} {host.address}" for host in found]
    result(args, {"hosts": [asdict(host) for host in found]}, lines)
    return 0


def _down(args: argparse.Namespace) -> int:
    client = engine.connect()
    if client is None:
        complain("no Docker Engine answers, so no lab host is here")
        result(args, {"removed": []})
        return 0
    if args.all:
        counts = cleanup.everything(client)
        result(args, {"removed": counts}, [", ".join(f"{n} {what}" for what, n in counts.items()) + " removed"])
        return 0
    gone = Lab(args.lab, client=client).down(args.names)
    result(args, {"removed": gone}, [f"removed: {', '.join(gone) or 'nothing'}"])
    return 1 if set(args.names) - set(gone) else 0
