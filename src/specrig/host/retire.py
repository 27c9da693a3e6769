"""Takes services off the rig that the plan has no more, before what it has starts: they hold cards, memory and ports.

Ours is a unit that runs `specrig-host run-service` under its own name: that is read from the units themselves, so that a run which was
interrupted is finished by the next one, and no other unit of specrig's or of a person's is meant. What is kept: key, compile cache, drop-ins,
diagnoses, models, images. What it proved is forgotten: else its models and image would count as used for ever.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from specrig.host import proven, units
from specrig.host.errors import COULD_NOT_RUN, HostError
from specrig.host.progress import Progress

# Above any TimeoutStopSec that a plan writes.
STOP_S = 600
RELOAD_S = 120


def installed(directory: Path | None = None) -> dict[str, Path]:
    """Our services on this host: name -> unit file."""
    found = {}
    for path in sorted((directory or proven.UNITS).glob("specrig-*.service")):
        name = path.name[len("specrig-") : -len(".service")]
        text = path.read_text(errors="replace") if path.is_file() and not path.is_symlink() else ""
        if re.search(rf"^ExecStart=\S*/specrig-host run-service --name {re.escape(name)}\s", text, re.MULTILINE):
            found[name] = path
    return found


def unplanned(planned: Collection[str], directory: Path | None = None) -> dict[str, Path]:
    """Those that are not among the names `planned`."""
    return {name: path for name, path in installed(directory).items() if name not in planned}


def retire(text: str, progress: Progress, check: bool = False) -> dict[str, Any]:
    """Stop, disable and remove every service of ours but those of the job {"services": [names]}.

    Returns {changed, retired: [names], told, diff}. Raises HostError RETIRE_JOB, RETIRE_FAILED.
    """
    try:
        planned = [str(name) for name in json.loads(text)["services"]]
    except (ValueError, KeyError, TypeError) as error:
        raise HostError("RETIRE_JOB", f"cannot read the job: {error!r}", "./rig up", COULD_NOT_RUN) from error
    if not planned:  # nobody declares a rig without a service: it is more likely that the list got lost
        raise HostError("RETIRE_JOB", "the job names no service that stays", "declare one: ./rig plan", COULD_NOT_RUN)
    going = unplanned(planned)
    diff = [
        {"before_header": str(path), "after_header": str(path), "before": path.read_text(errors="replace"), "after": ""}
        for path in going.values()
    ]
    told = []
    for name, path in going.items() if not check else []:
        progress.update("taking off what is planned no more", message=name)
        for words in (("stop",), ("disable", "--no-reload")):
            done = units.run("systemctl", *words, path.name, timeout=STOP_S)
            if done.returncode != 0:
                raise HostError(
                    "RETIRE_FAILED",
                    f"{name} is not in the plan any more, and systemctl {words[0]} {path.name} failed: {done.stderr.strip()[:300]}",
                    f"systemctl status {path.name}, then ./rig up",
                )
        units.run("systemctl", "reset-failed", path.name)
        proven.Home(name).forget()
        path.unlink(missing_ok=True)  # last: what is interrupted before is found again by it
        told.append(
            f"{name} is not in the plan any more: stopped and removed. Kept: /etc/specrig/services/{name} (its key),"
            f" /var/cache/specrig/{name}, drop-ins, models and image"
        )
    if told:
        units.run("systemctl", "daemon-reload", timeout=RELOAD_S)
    return {"changed": bool(going), "retired": list(going), "told": told, "diff": diff}
