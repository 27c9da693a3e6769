"""`./rig verify [HOST…]`: the same checks that Molecule runs, against real hosts. Changes nothing."""

from __future__ import annotations

import argparse
import subprocess
import sys

from specrig import runner
from specrig.verbs.plan import add_host_arguments


def register(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    verb = verbs.add_parser("verify", help="check each host against its applied plan (testinfra)")
    add_host_arguments(verb)
    verb.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run testinfra over `tests/host`; 1 when a check fails."""
    inventory = runner.inventory_path(options.inventory)
    hosts = runner.load_hosts(inventory, options.hosts)
    command = [
        sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/host",
        f"--ansible-inventory={inventory}", f"--hosts={','.join(f'ansible://{name}' for name in hosts)}",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=runner.ROOT, env=runner.environment(), check=False)
    return {0: 0, 1: 1}.get(done.returncode, 2)
