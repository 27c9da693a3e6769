"""`./rig explain CODE`: what a refusal or warning means, and what to do."""

from __future__ import annotations

import argparse

from specrig.console import CannotRun, say
from specrig.host import findings
from specrig.plan import refusals


def register(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    verb = verbs.add_parser("explain", help="what a code means, and what to do about it")
    verb.add_argument("code", nargs="?", metavar="CODE", help="all codes are listed when none is given")
    verb.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print one code's page, or the list."""
    if options.code is None:
        titles = {code: entry.title for code, entry in refusals.CODES.items()}
        titles |= {code: entry.title for code, entry in findings.CODES.items()}
        for code, title in sorted(titles.items()):
            say(f"{code:<28} {title}")
        return 0
    if entry := findings.CODES.get(options.code.upper()):
        say(f"{options.code.upper()} ({entry.level} of preflight): {entry.title}\n\nFix: {entry.fix}")
        return 0
    if options.code.upper() not in refusals.CODES:
        raise CannotRun(f"no code is called {options.code}", "./rig explain lists them all", "UNKNOWN_CODE")
    say(refusals.explain(options.code.upper()))
    return 0
