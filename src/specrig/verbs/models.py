"""`./rig models lock`: write down the exact bytes of every model that the inventory's plans need."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any

from specrig import runner
from specrig.plan import HostPlan
from specrig.plan.resolve import Lock, gguf_parts
from specrig.staging import lock
from specrig.verbs import locks, models_store
from specrig.verbs.answers import tell
from specrig.verbs.plan import make_plans


def register(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    models = verbs.add_parser("models", help="lock, verify, carry and clean up models").add_subparsers(
        metavar="WHAT", required=True
    )
    verb = models.add_parser(
        "lock", help="resolve each model to a commit and a manifest, in models.lock.yml beside the inventory"
    )
    verb.add_argument("--endpoint", help="hub to ask (default: HF_ENDPOINT, or Hugging Face's own)")
    locks.add_arguments(verb)
    verb.add_argument(
        "--allow-unsafe",
        action="append",
        default=[],
        metavar="FILE",
        help="lock this file although loading it runs code",
    )
    verb.set_defaults(run=run)
    models_store.register(models)


def run(options: argparse.Namespace) -> int:
    """Add what is missing to the lock; a locked model stays as it is unless --update."""
    inventory = runner.inventory_path(options.inventory)
    path = runner.lock_path(inventory)
    locked = locks.read(path, "models")
    plans = make_plans(inventory, options.hosts)
    wanted = {a["repo"]: a for plan in plans.values() for a in plan.models if not a["derive"]}
    files, checked = gguf_files(plans), Lock({"models": locked})
    changed = False
    told: dict[str, dict[str, Any]] = {}
    for repo in sorted(wanted):
        for found in checked.get(repo)[1] if repo in locked else []:
            tell(options, f"{repo}: {found.cause}: locked anew")
            locked.pop(repo, None)
        there = {file["path"] for file in locked.get(repo, {}).get("files", [])}
        if repo in locked and files.get(repo, set()) <= there and not (options.update or options.check):
            tell(options, f"{repo}: locked at {locked[repo]['revision']}")
            told[repo] = {"revision": locked[repo]["revision"], "changes": []}
            continue
        before = locked.get(repo, {})
        # What the inventory names; else what is locked, which --update asks to leave.
        revision = wanted[repo]["revision"]
        declared = None if revision == before.get("revision") else revision
        unsafe = sorted({*before.get("unsafe", []), *options.allow_unsafe})
        hub, token = lock.endpoint(options.endpoint), os.environ.get("HF_TOKEN")
        firsts = {gguf_parts(path)[0] for path in there if path.endswith(".gguf")}
        chosen = sorted(files.get(repo, set()) | firsts)
        entry = lock.lock_model(repo, declared, hub, token, unsafe, chosen)
        was = before.get("revision")
        change = "" if was in {None, entry["revision"]} else f" (upstream changed: was {was})"
        about = f"{len(entry['files'])} files, {entry['size'] / 1e9:.2f} GB, licence {entry['licence'] or 'not stated'}"
        tell(options, f"{repo}: {entry['revision']}, {about}{change}")
        differences = lock.changes(before, entry) if before else ["not locked yet"]
        changed = changed or bool(differences)
        for line in differences if before else []:
            tell(options, f"  {line}")
        told[repo] = {"revision": entry["revision"], "changes": differences}
        locked[repo] = entry
    short = locks.conclude(options, path, "models", locked, told, plans)
    return 1 if options.check and changed else short


def gguf_files(plans: Mapping[str, HostPlan]) -> dict[str, set[str]]:
    """The GGUF files that the plans' services name, by repository."""
    found: dict[str, set[str]] = {}
    for plan in plans.values():
        repos = {artefact["id"]: artefact["repo"] for artefact in plan.models}
        for model in (model for service in plan.services for model in service.models if model.get("file")):
            found.setdefault(repos[model["artefact"]], set()).add(model["file"])
        for unknown in (artefact for artefact in plan.models if artefact.get("file")):
            found.setdefault(unknown["repo"], set()).add(unknown["file"])
    return found
