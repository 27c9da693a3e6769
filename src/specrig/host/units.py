"""What systemd and the journal say about a unit, without any secret that a line may carry."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrig.host.errors import COULD_NOT_RUN, HostError
from specrig.host.redact import redact

_PROPERTIES = (
    "Id,LoadState,ActiveState,SubState,Result,NRestarts,InvocationID,Job,StatusText,MainPID,ExecMainStatus,"
    "ActiveEnterTimestamp,StateChangeTimestamp,UnitFileState,ConditionResult,NeedDaemonReload,"
    "ExecMainStartTimestampMonotonic,Conflicts"
)
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def run(*command: str, timeout: float = 30) -> subprocess.CompletedProcess[str]:
    """Run a tool of the host. Raises HOST_TOOL when it is missing or does not come back."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, errors="replace")
    except FileNotFoundError as error:
        raise HostError(
            "HOST_TOOL", f"{command[0]} is not on this host", f"install {command[0]}", COULD_NOT_RUN
        ) from error
    except subprocess.TimeoutExpired as error:
        raise HostError(
            "HOST_TOOL", f"{command[0]} did not answer in {timeout:.0f} s", "systemctl --failed", COULD_NOT_RUN
        ) from error


def show(*units: str) -> list[dict[str, str]]:
    """`systemctl show` of units or patterns: one dictionary of properties each."""
    done = run("systemctl", "show", "--no-pager", f"--property={_PROPERTIES}", *units)
    if done.returncode != 0:
        raise HostError(
            "HOST_SYSTEMD",
            f"systemctl show: {done.stderr.strip()[:300]}",
            "is systemd PID 1 on this host?",
            COULD_NOT_RUN,
        )
    blocks = [b for b in done.stdout.split("\n\n") if b.strip()]
    return [dict(row.split("=", 1) for row in block.splitlines() if "=" in row) for block in blocks]


def older_than(properties: dict[str, str], files: Sequence[str]) -> bool:
    """Whether a unit's main process was started before one of `files` was written: then it runs with what was in it before.

    This is read from the machine, not remembered: a play that was interrupted between writing and restarting loses nothing.
    """
    if properties.get("ActiveState") not in ("active", "activating", "reloading"):
        return False
    started = float(properties.get("ExecMainStartTimestampMonotonic") or 0) / 1e6
    began = time.time() - time.monotonic() + started
    return bool(started) and any(path.exists() and path.stat().st_mtime > began for path in map(Path, files))


@dataclass(frozen=True)
class Line:
    """One line of the journal: its text (redacted), the start of the unit it belongs to, and where to go on reading."""

    text: str
    invocation: str
    cursor: str


def _message(value: Any) -> str:
    """A journal field: text, or a list of bytes when it holds control characters (coloured logs do)."""
    if isinstance(value, list):
        value = bytes(b for b in value if isinstance(b, int)).decode(errors="replace")
    return redact(_ANSI.sub("", str(value or "")).rstrip())


def journal(unit: str, since: float, cursor: str = "") -> list[Line]:
    """Lines of `unit` after `cursor`, else since the time `since` (seconds of the epoch)."""
    place = [f"--after-cursor={cursor}"] if cursor else [f"--since=@{since:.6f}"]
    done = run("journalctl", "--no-pager", "--output=json", f"--unit={unit}", *place)
    lines = []
    for row in done.stdout.splitlines():
        try:
            entry = json.loads(row)
        except ValueError:
            continue
        owner = str(entry.get("_SYSTEMD_INVOCATION_ID") or "") if entry.get("_PID") != "1" else ""
        owner = str(entry.get("INVOCATION_ID") or entry.get("OBJECT_SYSTEMD_INVOCATION_ID") or owner)
        lines.append(Line(_message(entry.get("MESSAGE")), owner, str(entry.get("__CURSOR") or "")))
    return lines
