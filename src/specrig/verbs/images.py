"""`./rig images lock`: write down the digest of every image that the plans run; `list` and `prune`: what the rigs hold."""

from __future__ import annotations

import argparse
import datetime
from typing import Any

from specrig import runner
from specrig.console import CannotRun
from specrig.host.progress import amount
from specrig.plan import HostPlan
from specrig.plan.resolve import Lock
from specrig.staging.registry import Registry, changes, lock_image
from specrig.verbs import locks, models_store
from specrig.verbs.answers import add_host_arguments, tell
from specrig.verbs.plan import make_plans


def register(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    images = verbs.add_parser("images", help="lock, list and clean up engine images").add_subparsers(
        metavar="WHAT", required=True
    )
    verb = images.add_parser(
        "lock", help="resolve each planned image to its digest, in images.lock.yml beside the inventory"
    )
    locks.add_arguments(verb)
    verb.add_argument(
        "--at",
        action="append",
        default=[],
        metavar="REGISTRY=ADDRESS",
        help="ask this address for images of that registry",
    )
    verb.set_defaults(run=run)
    verb = images.add_parser("list", help="engine images on each host, who uses them, and the space left")
    verb.set_defaults(run=lambda options: ask(options, []))
    add_host_arguments(verb)
    verb = images.add_parser(
        "prune", help="images that neither the plan, nor what is proven, nor any container uses; --apply removes them"
    )
    verb.add_argument("--apply", action="store_true", help="remove them")
    verb.add_argument("--archives", action="store_true", help="the files of unused images too")
    add_host_arguments(verb)
    verb.set_defaults(run=lambda options: ask(options, prune_argv(options)))


def prune_argv(options: argparse.Namespace) -> list[str]:
    """The host program's words for `prune`."""
    flags = [flag for flag, on in (("--apply", options.apply), ("--archives", options.archives)) if on]
    return ["--prune", *flags]


def ask(options: argparse.Namespace, argv: list[str]) -> int:
    """Ask the rigs."""
    return models_store.ask(options, "images", {"images_argv": argv}, describe)


def describe(host: str, report: dict[str, Any]) -> list[str]:
    """Lines for a person."""
    if "images" not in report:
        return models_store.describe(host, report)
    lines = [f"{host}: {len(report['images'])} images; {amount(report['free_bytes'])} free for more"]
    for row in report["images"]:
        lines.append(
            f"  {(row['names'] or [row['id']])[0]}  {amount(row['bytes'])}  {', '.join(row['used']) or 'unused'}"
        )
    for row in report["archives"]:
        used = ", ".join(row["used"]) or "unused"
        lines.append(f"  {row['path']}  {amount(row['bytes'])}  {used}{'' if row['whole'] else ', NOT WHOLE'}")
    return lines


def wanted(plans: dict[str, HostPlan]) -> list[str]:
    """Every image of the plans, by the name it is declared with."""
    return sorted({str(image["declared"]) for plan in plans.values() for image in plan.images})


def without_tls(plans: dict[str, HostPlan]) -> set[str]:
    """Registries that the rigs' Docker reaches without TLS; the controller then does, too."""
    options = (plan.host.get("docker_daemon_options") or {} for plan in plans.values())
    return {str(name) for some in options for name in some.get("insecure-registries") or []}


def addresses(given: list[str]) -> dict[str, str]:
    """`--at` as {registry: address}. Raises CannotRun."""
    pairs = [text.partition("=") for text in given]
    if wrong := [text for text, (name, _, address) in zip(given, pairs, strict=True) if not (name and address)]:
        raise CannotRun(
            f"--at {wrong[0]} is not REGISTRY=ADDRESS", "--at registry.example:5000=127.0.0.1:5000", "USAGE"
        )
    return {name: address for name, _, address in pairs}


def run(options: argparse.Namespace) -> int:
    """Add what is missing to the lock; a locked image stays as it is unless --update."""
    inventory = runner.inventory_path(options.inventory)
    path = runner.lock_path(inventory, runner.IMAGES_LOCK_NAME)
    locked, plans = locks.read(path, "images"), make_plans(inventory, options.hosts)
    registry = Registry(addresses(options.at), without_tls(plans))
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    moved = failed = False
    told: dict[str, dict[str, Any]] = {}
    checked = Lock({"images": locked})
    for image in wanted(plans):
        for found in checked.image(image)[1] if image in locked else []:
            tell(options, f"{image}: {found.cause}: locked anew")
            locked.pop(image, None)
        before = locked.get(image, {})
        if before and not (options.update or options.check):
            tell(options, f"{image}: locked at {before['digest']}")
            told[image] = {"digest": before["digest"], "changes": []}
            continue
        try:
            entry = lock_image(image, registry, today)
        except CannotRun as error:
            if not options.check:
                raise
            tell(options, f"{image}: {error}")  # the other images are still to be looked at
            told[image] = {"error": error.as_json()}
            failed = True
            continue
        differences = changes(before, entry) if before else ["not locked yet"]
        moved = moved or bool(differences)
        tell(options, f"{image}: {entry['digest']}, {len(entry['layers'])} layers, {amount(entry['size'])} compressed")
        for line in differences if before else []:
            tell(options, f"  {line}")
        told[image] = {"digest": entry["digest"], "changes": differences}
        locked[image] = entry if differences else before
    short = locks.conclude(options, path, "images", locked, told, plans)
    return 1 if options.check and (moved or failed) else short
