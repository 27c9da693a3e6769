"""`./rig test [PART…]`: lint, unit, contract, Molecule, end to end. `.ci/run` runs all of it."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable

from specrig import runner
from specrig.console import CannotRun, confirm, say
from specrig.lab import apt
from specrig.lab.progress import Progress

Command = list[str]


def register(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    verb = verbs.add_parser(
        "test", help="run the tests: " + ", ".join(PARTS) + "; on request: " + ", ".join(ON_REQUEST)
    )
    verb.add_argument("parts", nargs="*", metavar="PART", help="default: all of them, in this order")
    verb.set_defaults(run=run)


def python(*words: str) -> Command:
    """A module of this virtual environment."""
    return [sys.executable, "-m", *words]


def lint() -> list[Command]:
    """Every file is held to its tool."""
    return [
        python("ruff", "check", "."),
        python("ruff", "format", "--check", "."),
        python("mypy"),
        python("yamllint", "--strict", "."),
        [runner.tool("ansible-lint"), "--offline", "--profile", "production", "--strict"],
        ["sh", "-n", "rig"],
    ]


def unit() -> list[Command]:
    """Seconds, no Docker."""
    return [python("pytest", "--numprocesses=auto", "tests/unit")]


def contract() -> list[Command]:
    """The real engines' own argument parsers."""
    return [python("pytest", "tests/contract")]


# Scenarios that take longer than a change should wait for: `./rig test nightly`.
NIGHTLY = {
    "docker_lifecycle",
    "gateway_lifecycle",
    "nvidia_container_toolkit_lifecycle",
    "nvidia_driver_lifecycle",
    "nvidia_driver_ubuntu",
    "whole_site",
}


def scenarios() -> list[str]:
    """All Molecule scenarios, by name."""
    return sorted(p.parent.name for p in (runner.ROOT / "molecule").glob("*/molecule.yml"))


def molecule() -> list[Command]:
    """Each role on throw-away hosts; a scenario without hosts fails."""
    return [[runner.tool("molecule"), "test", "-s", name] for name in scenarios() if name not in NIGHTLY]


def nightly() -> list[Command]:
    """The long scenarios."""
    molecule = [[runner.tool("molecule"), "test", "-s", name] for name in scenarios() if name in NIGHTLY]
    return [*molecule, python("pytest", "-s", "-m", "nightly", "tests/e2e")]


def e2e() -> list[Command]:
    """The demo, and what must hold on its host."""
    return [python("pytest", "-s", "-m", "not nightly", "tests/e2e")]


def engines() -> list[Command]:
    """What is not vLLM for real: llama.cpp's server, built once (a quarter of an hour) and kept; Open WebUI before a stand-in."""
    return [python("pytest", "-s", "tests/engines")]


PARTS: dict[str, Callable[[], list[Command]]] = {
    "lint": lint,
    "unit": unit,
    "contract": contract,
    "molecule": molecule,
    "e2e": e2e,
}
ON_REQUEST: dict[str, Callable[[], list[Command]]] = {"nightly": nightly, "engines": engines}
# Programs of this machine that parts need, and the Debian packages that bring them; Docker is the lab's own affair.
NEEDS = {
    "unit": {"aria2c": ["aria2"], "cc": ["gcc", "libc6-dev"]},
    "contract": {"aria2c": ["aria2"]},
    "molecule": {"cc": ["gcc", "libc6-dev"]},
    "nightly": {"cc": ["gcc", "libc6-dev"]},
}


def provide(part: str) -> None:
    """Install what `part` lacks, when a person or CI agrees: a test that is skipped for want of a program proves nothing. Raises CannotRun."""
    for program, packages in NEEDS.get(part, {}).items():
        if apt.which(program):
            continue
        words = f"apt-get install {' '.join(packages)}"
        if not confirm(f"The {part} tests need {program}. {words}?", yes=bool(os.environ.get("CI"))):
            raise CannotRun(f"the {part} tests need {program}, which is not here", f"sudo {words}", "TEST_NEEDS")
        with Progress(program) as progress:
            apt.have(program, packages, progress)


def run(options: argparse.Namespace) -> int:
    """Run the parts; go on after a failure, say at the end what failed and how long each took."""
    known = PARTS | ON_REQUEST
    unknown = [part for part in options.parts if part not in known]
    if unknown:
        raise CannotRun(
            f"no part of the tests is called {unknown[0]}", f"name one of {', '.join(known)}", "UNKNOWN_PART"
        )
    for part in options.parts or PARTS:
        provide(part)
    results: list[tuple[str, bool, float]] = []
    for part in options.parts or PARTS:
        for command in known[part]():
            title = f"{part}: {' '.join(word.rpartition('/')[2] or word for word in command)}"
            say(f"\n══ {title}")
            begin = time.monotonic()
            done = subprocess.run(command, cwd=runner.ROOT, env=runner.environment(), check=False)
            results.append((title, done.returncode == 0, time.monotonic() - begin))
    say("")
    for title, fine, seconds in results:
        say(f"  {'pass' if fine else 'FAIL'} {seconds:6.0f} s  {title}")
    failed = sum(not fine for _, fine, _ in results)
    say(f"{len(results) - failed} passed, {failed} failed")
    return 1 if failed else 0
