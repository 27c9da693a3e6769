"""`./rig init`: an inventory from a few questions, or from what a machine says of itself."""

from __future__ import annotations

import argparse
import io
import itertools
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from specrig import runner
from specrig.console import CannotRun, confirm
from specrig.faults import slip
from specrig.files import write_atomically
from specrig.plan import catalog
from specrig.verbs.answers import add_json, result, tell, with_inventory

# Neither part begins with a dash: ssh would take it for an option.
HOST = re.compile(r"(?:(?P<user>[A-Za-z0-9._][A-Za-z0-9._-]*)@)?(?P<address>[A-Za-z0-9:][A-Za-z0-9:._-]*)")

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}")
# Ansible's own: a host of that name would hide the others, or be the controller itself.
RESERVED = {"all", "ungrouped", "localhost", "rigs", "gateways"}


def register(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    verb = verbs.add_parser(
        "init", help="write an inventory: --host user@rig looks at its cards and proposes a profile"
    )
    verb.add_argument("--host", metavar="USER@RIG", help="machine to provision, as ssh names it")
    verb.add_argument("--name", help="its name in the inventory (default: from --host)")
    verb.add_argument("--profile", help="profile to use (default: the first that fits the cards)")
    verb.add_argument("-i", "--inventory", help="file to write or extend (default: inventory/hosts.yml)")
    verb.add_argument("--yes", action="store_true", help="do not ask")
    add_json(verb)
    verb.set_defaults(run=run)


def cards_of(lspci: str) -> Counter[str]:
    """Catalog names of the NVIDIA cards in `lspci -d 10de:` output; unknown cards count under their own description."""
    cards: Counter[str] = Counter()
    for line in lspci.splitlines():
        if re.search(r"VGA|3D controller", line):
            cards[catalog.gpu_from_lspci(line) or line.partition(": ")[2]] += 1
    return cards


def look_at(host: str) -> Counter[str]:
    """Ask the machine for its cards over ssh."""
    command = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", host, "lspci -d 10de:"]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
        failure = f"{done.stderr.strip() or done.returncode}" if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        failure = str(error)
    if failure:
        raise CannotRun(
            f"ssh {host} lspci failed: {failure}",
            f"ssh {host} once by hand (its key must be known, yours on it, and pciutils installed), or give --profile",
            "SSH",
        )
    return cards_of(done.stdout)


def ask(question: str) -> str:
    """One line from the person; no terminal is a clear error instead of a hang."""
    if not sys.stdin.isatty():
        raise CannotRun(f"{question} cannot be asked: this is no terminal", "give --host and --profile", "NO_TERMINAL")
    return input(f"{question}: ").strip()


def round_trip() -> YAML:
    """A reader and writer of YAML that keeps comments, order, quotes and tags."""
    kept = YAML()
    kept.preserve_quotes = True
    kept.width = 4096
    kept.indent(mapping=2, sequence=4, offset=2)
    return kept


def read_inventory(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The document in `path` and, within it, the hosts of `rigs`; what cannot be written back unchanged is not touched."""
    try:
        data = (round_trip().load(path) if path.exists() else None) or {}
        data["rigs"] = data.get("rigs") or {}
        hosts = data["rigs"]["hosts"] = data["rigs"].get("hosts") or {}
        hosts.keys()
    except (OSError, ValueError, TypeError, AttributeError, YAMLError) as error:
        # A YAML error's own text repeats the line, and a secret may stand in it.
        why = (slip(path) or "no YAML") if isinstance(error, YAMLError) else " ".join(str(error).split())
        raise CannotRun(
            f"{path} is no plain YAML inventory with rigs and hosts: {why}",
            "add the host by hand (see inventory/example.yml), or give another file with -i",
            "BAD_INVENTORY",
        ) from error
    return data, hosts


def back_up(path: Path) -> Path | None:
    """A copy of `path` beside it, over no earlier copy; None when there is nothing to copy."""
    if not path.exists():
        return None
    names = (f"{path.name}.bak{number or ''}" for number in itertools.count())
    backup = next(place for name in names if not (place := path.with_name(name)).exists())
    shutil.copy2(path, backup)
    return backup


def run(options: argparse.Namespace) -> int:
    """Write the inventory; what is in the file already stays."""
    path = runner.given_path(options.inventory)
    host = options.host or ask("Machine, as ssh names it (user@rig)")
    matched = HOST.fullmatch(host)
    if matched is None:
        raise CannotRun(f"{host!r} is not user@machine", "./rig init --host user@rig", "BAD_HOST")
    profile = options.profile
    if profile is None:
        cards = look_at(host)
        tell(options, f"cards: {', '.join(f'{count} × {name}' for name, count in cards.items()) or 'none'}")
        fitting = catalog.profiles_for(dict(cards))
        if not fitting:
            raise CannotRun(
                f"no profile fits {dict(cards) or 'a machine without NVIDIA cards'}",
                "./rig plan -i inventory/example.yml shows them; give --profile",
                "NO_PROFILE",
            )
        profile = fitting[0]
    if profile not in catalog.profiles():
        raise CannotRun(
            f"no profile is called {profile!r} (known: {', '.join(sorted(catalog.profiles()))})",
            "give one of these",
            "PROFILE_UNKNOWN",
        )
    data, hosts = read_inventory(path)
    name = options.name or re.sub(r"[^a-z0-9-]", "-", matched["address"].lower())
    if not NAME.fullmatch(name):
        raise CannotRun(f"{name!r} is no name for a host", "--name with letters, digits, '.', '_' and '-'", "BAD_HOST")
    if name in RESERVED or name in data or name in (data["rigs"].get("children") or {}):
        why = "a group" if name != "localhost" else "this machine"
        raise CannotRun(f"{name!r} is {why} in Ansible's eyes", "give another --name, such as rig1", "BAD_HOST")
    if name in hosts and not confirm(f"{name} is in {path} already. Replace it?", yes=options.yes):
        raise CannotRun(f"{name} is in {path} already", "give another --name, or --yes to replace it", "HOST_EXISTS")
    backup = back_up(path)
    hosts[name] = (
        (hosts.get(name) or {})
        | {"ansible_host": matched["address"], "rig_profile": profile}
        | ({"ansible_user": matched["user"]} if matched["user"] else {})
    )
    text = io.StringIO()
    round_trip().dump(data, text)
    write_atomically(path, text.getvalue())
    more = with_inventory(options)
    result(
        options,
        {"host": name, "profile": profile, "inventory": str(path), "backup": str(backup) if backup else None},
        [
            f"wrote {name} ({profile}) to {path}" + (f"; as it was: {backup}" if backup else ""),
            f"next: ./rig models lock{more}, then ./rig plan{more}, then ./rig up{more}",
        ],
    )
    return 0
