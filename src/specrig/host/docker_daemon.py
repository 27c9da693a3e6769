"""Docker's daemon: a restart that breaks off no answer and goes back where it must, and where its data is.

Our services are stopped first, in their own time, so that what they are answering is answered; afterwards they are started
again and waited for. They run in the foreground under systemd and need Docker (`Requires=`), so a restart takes them down in any case.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from pathlib import Path
from typing import Any

from specrig.host import docker_api, start, units
from specrig.host.errors import COULD_NOT_RUN, HostError
from specrig.host.machine import Machine
from specrig.host.progress import Progress

UNIT = "docker.service"
CONFIG = Path("/etc/docker/daemon.json")
DATA_ROOT = "/var/lib/docker"
# Each unit's own TimeoutStopSec ends its stop long before; this only bounds a systemd that does not come back.
STOP_TIMEOUT_S = 3600.0
# dockerd says that it is ready (Type=notify), and its unit sets no limit for that.
RESTART_TIMEOUT_S = 300.0
START_TIMEOUT_S = 7200.0
TAIL = 8


def served() -> list[str]:
    """Services of ours that run, or are on their way to, and need Docker."""
    said = units.run("systemctl", "show", "--property=RequiredBy", "--value", UNIT).stdout.split()
    names = [name for name in said if name.startswith("specrig-") and name.endswith(".service")]
    found = units.show(*names) if names else []
    return [unit["Id"] for unit in found if unit.get("ActiveState") in ("active", "activating", "reloading")]


def valid(config: Path = CONFIG) -> str:
    """Why dockerd does not take the file; empty when it does, or is too old (before 23) to be asked."""
    if "--validate" not in units.run("dockerd", "--help").stdout:
        return ""
    done = units.run("dockerd", "--validate", "--config-file", str(config))
    return "" if done.returncode == 0 else (done.stderr or done.stdout).strip()[-500:]


def _up(verb: str) -> bool:
    """`systemctl start|restart` Docker and wait until it answers."""
    # Three failures in a minute are all that the packaged units allow; those of an earlier file must not count.
    units.run("systemctl", "reset-failed", UNIT, "docker.socket")
    try:
        done = units.run("systemctl", verb, UNIT, timeout=RESTART_TIMEOUT_S)
        return done.returncode == 0 and docker_api.get("/_ping")[0] == 200
    except HostError:
        return False


def _words(since: float) -> list[str]:
    """What dockerd wrote about its failure, without the lines of an orderly start."""
    time.sleep(start.SETTLE_S)
    lines = [line.text for line in units.journal(UNIT, since)]
    telling = [line for line in lines if "level=info" not in line and "systemd" not in line.partition(":")[0]]
    return (telling or lines)[-TAIL:]


def _go_back(backup: Path | None, config: Path) -> str:
    """Put the older file back, or set this one aside when there was none; says which. Nothing is deleted."""
    aside = config.with_name(f"{config.name}.refused.specrig~")
    shutil.copy2(config, aside)
    if backup is None:
        config.unlink()
        return f"there was none before: it is aside as {aside.name}"
    part = config.with_name(f".{config.name}.specrig")
    shutil.copy2(backup, part)
    shutil.chown(part, backup.stat().st_uid, backup.stat().st_gid)
    part.replace(config)
    return f"the file of before is back, the refused one is aside as {aside.name}"


def _bring_back(names: list[str], progress: Progress) -> list[HostError]:
    """Start services and follow each until it is ready; the errors of those that are not."""
    if names:
        units.run("systemctl", "start", "--no-block", *names, timeout=120)
    errors = []
    for name in names:
        try:
            start.start(name, progress, timeout=START_TIMEOUT_S)
        except HostError as error:
            errors.append(error)
    return errors


def restart(
    progress: Progress,
    written: bool = False,
    backup: Path | None = None,
    leave_stopped: bool = False,
    config: Path = CONFIG,
) -> dict[str, Any]:
    """Drain, restart Docker, bring the services back. Returns {changed, services, drained_s, seconds}.

    `written`: the caller has just replaced `config` (a copy of the older one is `backup`, if there was one), so that it can
    be taken back when Docker does not start with it. Otherwise the file is somebody's, and is left as it is.
    `leave_stopped`: the caller starts the services itself. Raises HostError DOCKER_RESTART or DOCKER_SERVICE.
    """
    clock, begin = time.monotonic(), time.time()
    if not written and config.exists() and (refused := valid(config)):
        raise HostError(
            "DOCKER_RESTART",
            f"a restart of Docker is due, and it would not start with {config} as it is; nothing was stopped",
            f"correct {config}: {refused}",
        )
    start.reload_if_needed(UNIT)
    names = served()
    if names:
        progress.update("draining", message=", ".join(names))
        done = units.run("systemctl", "stop", *names, timeout=STOP_TIMEOUT_S)
        if done.returncode != 0:
            back = _bring_back(names, progress)
            raise HostError(
                "DOCKER_SERVICE",
                f"systemctl stop: {done.stderr.strip()[:300]}; Docker was not restarted"
                + (f", and {back[0].cause}" if back else ""),
                f"systemctl status {names[0]}",
            )
    drained = time.monotonic() - clock
    progress.update("restarting Docker")
    came_up, where, words = _up("restart"), "", list[str]()
    if not came_up:
        words = _words(begin)
        if written:
            where = _go_back(backup, config)
            if not _up("restart"):
                raise HostError(
                    "DOCKER_RESTART",
                    f"Docker started neither with {config} as it was written now nor without it; {where}",
                    f"journalctl --unit {UNIT}; services to start again: {', '.join(names) or 'none'}",
                    lines=words,
                )
        else:
            raise HostError(
                "DOCKER_RESTART",
                f"Docker does not start with {config} as it is; the file was left alone",
                f"correct it, then: systemctl start {' '.join([UNIT, *names])}",
                lines=words,
            )
    errors = [] if leave_stopped else _bring_back(names, progress)
    fate = f"{', '.join(names) or 'no service of ours'} {'not back' if errors else 'back' if names else 'was running'}"
    if not came_up:
        raise HostError(
            "DOCKER_RESTART",
            f"Docker did not start with {config} as it was written now; {where}; Docker runs, {fate}",
            "correct docker_daemon_options (rig_docker_daemon_options); the lines below name the key",
            lines=words,
        )
    if errors:
        cause = f"Docker was restarted, and {errors[0].cause}"
        raise HostError("DOCKER_SERVICE", cause, errors[0].fix, lines=errors[0].lines)
    seconds = time.monotonic() - clock
    return {"changed": True, "services": names, "drained_s": round(drained, 1), "seconds": round(seconds, 1)}


def _content(m: Machine, root: str) -> dict[str, set[str]]:
    """What lies in a data directory: ids of images and containers, names of volumes."""

    def names(pattern: str) -> set[str]:
        with contextlib.suppress(OSError):
            return {path.name for path in m.path(root).glob(pattern)}
        return set()

    volumes = {path.parent.name for path in m.path(root).glob("volumes/*/_data")}
    return {
        "images": names("image/*/imagedb/content/sha256/*"),
        "containers": names("containers/*"),
        "volumes": volumes,
    }


def _current_root(m: Machine, config: Path) -> str:
    """Where Docker's data is now: by its own word, else by its settings."""
    with contextlib.suppress(HostError, OSError):
        status, info = docker_api.get("/info", timeout=10)
        if status == 200 and isinstance(info, dict) and info.get("DockerRootDir"):
            return str(info["DockerRootDir"])
    try:
        settings = json.loads(m.text(str(config)) or "{}")
    except ValueError:
        settings = {}
    return str((settings.get("data-root") if isinstance(settings, dict) else None) or DATA_ROOT)


def data_root(wanted: str, leave: bool, m: Machine | None = None, config: Path = CONFIG) -> dict[str, Any]:
    """Whether Docker's data may be looked for in `wanted`. Returns {changed: False, moves, from}; changes nothing.

    It may when nothing is in the present place, when all of it is in `wanted` as well (somebody has copied it), or when
    `leave` says that it shall stay behind. Raises HostError DOCKER_DATA_ROOT.
    """
    m = m or Machine()
    now = _current_root(m, config)
    if m.path(now).resolve() == m.path(wanted).resolve():
        return {"changed": False, "moves": False, "from": now}
    there, behind = _content(m, wanted), {}
    for kind, found in _content(m, now).items():
        if found - there[kind]:
            behind[kind] = len(found - there[kind])
    if behind and not leave:
        counts = ", ".join(f"{count} {kind}" for kind, count in behind.items())
        raise HostError(
            "DOCKER_DATA_ROOT",
            f"Docker's data is in {now}, and docker_data_root is {wanted}: {counts} would no longer be found there",
            f"copy it (systemctl stop docker.socket docker; mkdir -p {wanted}; cp -a {now}/. {wanted}/) and run again, "
            "or say that it stays behind: docker_data_root_existing: leave",
            COULD_NOT_RUN,
        )
    return {"changed": False, "moves": True, "from": now}
