"""One engine after the other on a card: each measures the card's memory while it loads, and takes what another one loads for its own.

Held is a file per card, by `flock`: that goes with the process, whatever ends it. Without a place for the file nobody waits.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Callable, Iterable
from pathlib import Path

DIRECTORY = Path("/run/specrig/cards")
POLL_S = 1.0
_FIRST, _LAST = "waiting for ", " to start"


def waits(phase: str) -> bool:
    """Whether a service in this phase waits for another one, and its own start has not begun."""
    return phase.startswith(_FIRST) and phase.endswith(_LAST)


def take(
    cards: Iterable[str], name: str, pause: Callable[[float], object], say: Callable[[str], None]
) -> contextlib.ExitStack:
    """Hold `cards` for the service `name`; the stack that is returned gives them back when it is closed.

    In the order of their names: two services that need two cards each never wait for each other. `pause` may raise to end the wait.
    """
    with contextlib.ExitStack() as held:
        for card in sorted(cards):
            try:
                DIRECTORY.mkdir(mode=0o700, parents=True, exist_ok=True)
                file = held.enter_context((DIRECTORY / card).open("a+"))
            except OSError:
                continue
            while True:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                file.seek(0)
                say(f"{_FIRST}{file.read(200).strip() or 'another service'}{_LAST}")
                pause(POLL_S)
            file.truncate(0)
            file.write(name)
            file.flush()
        return held.pop_all()
    raise AssertionError  # an exit stack of files swallows nothing
