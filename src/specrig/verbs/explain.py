"""`./rig explain CODE`: what a refusal or warning means, and what to do."""

from __future__ import annotations

import argparse

from specrig.console import CannotRun, say
from specrig.plan import refusals


def register(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    verb = verbs.add_parser("explain", help="what a code means, and what to do about it")
    verb.add_argument("code", nargs="?", metavar="CODE", help="all codes are listed when none is given")
    verb.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print one code's page, or the list."""
    if options.code is None:
        for code, entry in sorted(refusals.CODES.items()):
            say(f"{code:<28} {entry.title}")
        return 0
    if options.code.upper() not in refusals.CODES:
        raise CannotRun(f"no code is called {options.code}", "./rig explain lists them all", "UNKNOWN_CODE")
    say(refusals.explain(options.code.upper()))
    return 0
