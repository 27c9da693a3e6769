"""Leaves a file that says what a failed service looked like: what a person would type first, with secrets taken out."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from specrig.host import docker_api, units
from specrig.host.errors import COULD_NOT_RUN, HostError
from specrig.host.redact import redact

DIRECTORY = Path("/var/lib/specrig/diagnosis")
SERVICES = Path("/etc/specrig/services")
PLAN = Path("/etc/specrig/plan.json")
# Per service; a file holds at most so many characters, a line at most so many.
KEPT, MOST, LONGEST = 10, 200_000, 500
JOURNAL = 200
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
_KERNEL = re.compile(r"NVRM|Xid|out of memory|oom-kill|oom_reaper|killed process|I/O error|No space", re.IGNORECASE)


def _tool(*command: str) -> str:
    try:
        done = units.run(*command, timeout=20)
    except HostError as error:
        return error.cause
    return (done.stdout + done.stderr).strip()


def _start(unit: str) -> str:
    """Identity of the start that is meant: the failed one, which systemd names to its OnFailure= unit, else the last one."""
    try:
        return os.environ.get("MONITOR_INVOCATION_ID") or units.show(unit)[0].get("InvocationID", "")
    except (HostError, IndexError):
        return ""


def _journal(last: str) -> str:
    """The journal's lines of a start: systemd's own and the engine's."""
    if not last:
        return "never started"
    return _tool(
        "journalctl", "--no-pager", "--output=short-iso", f"--lines={JOURNAL}",
        f"_SYSTEMD_INVOCATION_ID={last}", "+", f"INVOCATION_ID={last}",
    )  # fmt: skip


def _container(name: str) -> str:
    found = docker_api.inspect_container(name)
    if found is None:
        return "no such container"
    kept = {key: found.get(key) for key in ("Id", "Created", "Image", "RestartCount", "State")}
    return json.dumps(kept, indent=1, sort_keys=True)


def _processes(name: str) -> str:
    """The container's processes, what they wait for, and since when: a stopped or hung one is seen here."""
    return _tool("docker", "top", name, "-eo", "pid,stat,wchan:24,etime,rss,args")


def _kernel() -> str:
    lines = _tool("journalctl", "--dmesg", "--no-pager", "--output=short-iso", "--lines=5000").splitlines()
    return "\n".join([line for line in lines if _KERNEL.search(line)][-50:]) or "nothing about cards, memory or disks"


def _plan() -> str:
    try:
        return str(json.loads(PLAN.read_text()).get("plan_hash"))
    except (OSError, ValueError, AttributeError):
        return "none applied"


def _keys() -> set[str]:
    """The services' own keys: they are taken out wherever they stand."""
    found = set()
    for path in SERVICES.glob("*/api-key"):
        try:
            found.add(path.read_text().strip())
        except OSError:
            continue
    return {key for key in found if key}


def clean(text: str, keys: Iterable[str]) -> str:
    """`text` without secrets, its lines and itself not longer than agreed; the end is what is kept."""
    for key in keys:
        text = text.replace(key, "***")
    lines = (line if len(line) <= LONGEST else line[:LONGEST] + " …" for line in redact(text).splitlines())
    return "\n".join(lines)


def diagnose(name: str) -> dict[str, Any]:
    """Write DIRECTORY/<name>-<time>.txt and drop the oldest ones. Returns {changed, path}; raises HostError DIAGNOSIS_FILE.

    One for each start: a hung engine's is written before it is killed, and the failure that follows has nothing to add.
    """
    if not _NAME.fullmatch(name):
        raise HostError(
            "DIAGNOSIS_FILE", f"{name!r:.80} is not a service's name", "specrig-host diagnose NAME", COULD_NOT_RUN
        )
    unit, container = f"specrig-{name}.service", f"specrig-{name}"
    start = _start(unit)
    title = f"== start {start}\n"
    newest = next(iter(files(name)), None)
    if start and newest and newest.read_text(errors="replace").startswith(title):
        return {"changed": False, "path": str(newest)}
    state = Path(f"/run/specrig/services/{name}/state.json")
    parts: list[tuple[str, Callable[[], str]]] = [
        ("unit", lambda: _tool("systemctl", "status", "--no-pager", "--full", "--lines=0", unit)),
        ("what it said last", lambda: state.read_text() if state.exists() else "nothing"),
        ("plan", _plan),
        ("container", lambda: _container(container)),
        ("processes in it", lambda: _processes(container)),
        ("cards", lambda: _tool("nvidia-smi")),
        ("kernel", _kernel),
        ("disks", lambda: _tool("df", "--human-readable", "--exclude-type=tmpfs", "--exclude-type=overlay")),
        ("memory", lambda: _tool("free", "--mebi")),
        (f"journal of this start, the last {JOURNAL} lines", lambda: _journal(start)),
    ]
    keys, text = _keys(), f"{title}\n"
    for heading, say in parts:
        try:
            said = say()
        except (HostError, OSError, ValueError) as error:  # one part that fails must not cost the others
            said = f"could not be read: {error}"
        text += f"== {heading}\n{clean(said, keys)[-MOST // 4 :]}\n\n"
    try:
        DIRECTORY.mkdir(mode=0o750, parents=True, exist_ok=True)
        path = DIRECTORY / f"{name}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.txt"
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o640)
        with os.fdopen(handle, "w") as out:
            out.write(text[:MOST])
    except OSError as error:
        raise HostError(
            "DIAGNOSIS_FILE", f"cannot write to {DIRECTORY}: {error}", f"df -h {DIRECTORY}", COULD_NOT_RUN
        ) from error
    finally:
        for old in files(name)[KEPT:]:
            old.unlink(missing_ok=True)
    return {"changed": True, "path": str(path)}


def files(name: str) -> list[Path]:
    """The service's diagnoses, the newest first."""
    pattern = re.compile(re.escape(name) + r"-\d{8}T\d{6}Z\.txt")
    return sorted((p for p in DIRECTORY.glob(f"{name}-*.txt") if pattern.fullmatch(p.name)), reverse=True)
