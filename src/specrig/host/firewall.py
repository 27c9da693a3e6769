"""Has the rules of published ports follow the units that are installed; role docker brings the program that loads them."""

from __future__ import annotations

import contextlib
from pathlib import Path

from specrig.host import units
from specrig.host.errors import HostError

PROGRAM = Path("/usr/local/lib/specrig/firewall")
NOT_IN_FORCE = 3


def follow() -> None:
    """Load the rules again where a unit publishes another port than before.

    A failure is not told here: it must not end a service that comes up. `./rig up` and `./rig verify` look whether the rules are in force.
    """
    with contextlib.suppress(HostError):
        if PROGRAM.exists() and units.run(str(PROGRAM), "--check", timeout=60).returncode == NOT_IN_FORCE:
            units.run(str(PROGRAM), timeout=60)
