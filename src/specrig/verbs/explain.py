"""`./rig explain CODE`: what a refusal or warning means, and what to do."""

from __future__ import annotations

import argparse

from specrig.console import CannotRun, say
from specrig.host import findings
from specrig.host.errors import CODES as HOST_CODES
from specrig.plan import refusals

# The second part is said by a role, not by the host program.
RIG_CODES = HOST_CODES | {
    "DRIVER_REBOOT": "the installed driver is not the loaded one: a reboot is due (docs/driver.md)"
}


def register(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    verb = verbs.add_parser("explain", help="what a code means, and what to do about it")
    verb.add_argument("code", nargs="?", metavar="CODE", help="all codes are listed when none is given")
    verb.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print one code's page, or the list."""
    if options.code is None:
        titles = {code: entry.title for code, entry in refusals.CODES.items()} | RIG_CODES
        titles |= {code: entry.title for code, entry in findings.CODES.items()}
        for code, title in sorted(titles.items()):
            say(f"{code:<28} {title}")
        return 0
    code = options.code.upper()
    if code in refusals.CODES:
        say(refusals.explain(code))
    elif code in findings.CODES:
        found = findings.CODES[code]
        say(f"{code} ({found.level} of preflight): {found.title}\n\nFix: {found.fix}")
    elif code in RIG_CODES:
        say(
            f"{code}: {RIG_CODES[code]}\nSaid by the program on the rig; the message beside it names the figures and the next step."
        )
    else:
        raise CannotRun(
            f"no code is called {options.code}",
            "./rig explain lists those with a page; any other message says all it knows where it appears",
            "UNKNOWN_CODE",
        )
    return 0
