"""Command line. Each verb is one module in `specrig.verbs` with `register(subparsers)`.

Exit codes: 0 fine, 1 something falls short, 2 could not run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence

from specrig import __version__
from specrig.console import CannotRun, complain, say
from specrig.verbs import (
    bench,
    clients,
    demo,
    explain,
    gateway,
    images,
    init,
    lab,
    models,
    plan,
    preflight,
    rollback,
    status,
    switch,
    test,
    up,
    verify,
)

VERBS = (
    init,
    plan,
    explain,
    models,
    images,
    preflight,
    up,
    rollback,
    switch,
    verify,
    status,
    gateway,
    clients,
    demo,
    lab,
    bench,
    test,
)


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        prog="rig", description="From a bare Linux machine to a measured speculative-decoding endpoint."
    )
    top.add_argument("--version", action="version", version=f"specrig {__version__}")
    verbs = top.add_subparsers(title="verbs", metavar="VERB", required=True)
    for verb in VERBS:
        verb.register(verbs)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; errors end in one line of cause and one of what to do, never a traceback."""
    options = parser().parse_args(arguments)
    try:
        code: int = options.run(options)
    except CannotRun as error:
        return refuse(options, error)
    except (KeyboardInterrupt, EOFError):  # EOFError: ctrl-D at a question
        complain("\ninterrupted; run the same command again to go on")
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 141
    except OSError as error:
        at = f"{error.filename}: " if error.filename else ""
        fix = "give a path that you can write, with room on its disk"
        return refuse(options, CannotRun(f"{at}{error.strerror or error}", fix, "OS_ERROR"))
    return code


def refuse(options: argparse.Namespace, error: CannotRun) -> int:
    """Say why there is no result: with --json that is the document, too."""
    complain(str(error))
    if getattr(options, "json", False):
        with contextlib.suppress(OSError):
            say(json.dumps({"ok": False, "error": error.as_json()}, indent=2))
    return 2
