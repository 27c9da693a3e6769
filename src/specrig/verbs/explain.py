"""`./rig explain CODE`: what a refusal or warning means, and what to do."""

from __future__ import annotations

import argparse

from specrig.console import CannotRun
from specrig.host import findings
from specrig.host.errors import CODES as HOST_CODES
from specrig.plan import refusals
from specrig.plan.declare import nearest_word
from specrig.verbs.answers import add_json, result

# The second part is said by a role, not by the host program.
RIG_CODES = HOST_CODES | {
    "DRIVER_REBOOT": "the installed driver is not the loaded one: a reboot is due (docs/driver.md)"
}


def register(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    verb = verbs.add_parser("explain", help="what a code means, and what to do about it")
    verb.add_argument("code", nargs="?", metavar="CODE", help="all codes are listed when none is given")
    add_json(verb)
    verb.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print one code's page, or the list."""
    if options.code is None:
        titles = {code: entry.title for code, entry in refusals.CODES.items()} | RIG_CODES
        titles |= {code: entry.title for code, entry in findings.CODES.items()}
        titles = dict(sorted(titles.items()))
        result(options, {"codes": titles}, [f"{code:<28} {title}" for code, title in titles.items()])
        return 0
    code = options.code.upper()
    if code in refusals.CODES:
        entry = refusals.CODES[code]
        document = {"level": entry.level, "title": entry.title, "why": entry.why, "fix": entry.fix}
        text = refusals.explain(code)
    elif code in findings.CODES:
        found = findings.CODES[code]
        document = {"level": found.level, "title": found.title, "fix": found.fix}
        text = f"{code} ({found.level} of preflight): {found.title}\n\nFix: {found.fix}"
    elif code in RIG_CODES:
        document = {"title": RIG_CODES[code]}
        beside = "Said by the program on the rig; the message beside it names the figures and the next step."
        text = f"{code}: {RIG_CODES[code]}\n{beside}"
    else:
        raise CannotRun(
            f"no code is called {options.code}{nearest_word(code, [*refusals.CODES, *findings.CODES, *RIG_CODES])}",
            "./rig explain lists those with a page; any other message says all it knows where it appears",
            "UNKNOWN_CODE",
        )
    result(options, {"code": code, **document}, [text])
    return 0
