"""Finds a Docker Engine on this machine; installs and starts one when none answers and the person agrees."""

from __future__ import annotations

import grp
import os
import pwd
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import docker
from docker.errors import DockerException

from specrig.console import complain, confirm
from specrig.lab import paths
from specrig.lab.apt import apt_install, as_root, which
from specrig.lab.errors import LabError
from specrig.lab.progress import Progress

PACKAGES = ["docker.io", "iptables"]
START_TIMEOUT_S = 90
_AGAIN = "SPECRIG_IN_DOCKER_GROUP"


def connect(timeout: int = 600) -> Any | None:
    """Return a client of the Engine that answers a ping (DOCKER_HOST or the usual socket), or None.

    A user who is of the group docker, but not in this session, is put into it by running the command again with sg(1).
    Raises LabError LAB_DOCKER_DENIED when there is an Engine that this user may not talk to.
    """
    try:
        client = docker.from_env(timeout=timeout, max_pool_size=32)
        client.ping()
    except (DockerException, OSError) as error:
        if "Permission denied" in str(error):
            _enter_group()
            raise LabError(
                "LAB_DOCKER_DENIED",
                "a Docker Engine is running, but this user may not use its socket",
                'sudo usermod -aG docker "$USER", then log in again',
            ) from error
        return None
    return client


def ensure(assume_yes: bool = False) -> Any:
    """Return a client of a running Docker Engine.

    When none answers: say what would be installed and started, ask (not with `assume_yes` or in CI), do it, wait.
    Raises LabError: LAB_DOCKER_DENIED, LAB_DOCKER_ABSENT (refused, or no apt here), LAB_DOCKER_START, LAB_APT.
    """
    client = connect()
    if client is not None:
        return client
    if os.environ.get("DOCKER_HOST"):
        raise LabError(
            "LAB_DOCKER_ABSENT", f"nothing answers at DOCKER_HOST={os.environ['DOCKER_HOST']}", "unset DOCKER_HOST"
        )
    absent = [] if which("dockerd") and which("iptables") else PACKAGES
    if absent and which("apt-get") is None:
        raise LabError(
            "LAB_DOCKER_ABSENT", "no Docker Engine answers, and apt-get is not here", "install Docker Engine >= 20.10"
        )
    _consent(absent, assume_yes or bool(os.environ.get("CI")))
    with Progress("docker") as say:
        if absent:
            apt_install(absent, say)
        _start(say)
        if os.geteuid() != 0:
            user = pwd.getpwuid(os.geteuid()).pw_name
            subprocess.run(["sudo", "usermod", "-aG", "docker", user], check=False)
        say.done("the Docker Engine answers")
    client = connect()
    if client is None:
        raise LabError("LAB_DOCKER_START", "the Docker Engine stopped answering", "journalctl -u docker")
    return client


def _consent(absent: list[str], given: bool) -> None:
    what = [f"install {' '.join(absent)} with apt-get"] if absent else []
    what += ["start dockerd"] + (
        [] if os.geteuid() == 0 else ["add you to the group docker (which is as good as root)"]
    )
    complain(f"No Docker Engine answers. The lab would {', '.join(what)}.")
    if not confirm("Do this now?", yes=given):
        raise LabError(
            "LAB_DOCKER_ABSENT", "no Docker Engine answers, and none was to be installed", "the same command with --yes"
        )


def _enter_group() -> None:
    """Run this very command again inside the group docker: a new membership counts only for new sessions."""
    try:
        member = pwd.getpwuid(os.geteuid()).pw_name in grp.getgrnam("docker").gr_mem
    except KeyError:
        member = False
    if member and _AGAIN not in os.environ and which("sg"):
        os.environ[_AGAIN] = "1"
        command = shlex.join([sys.executable, "-m", "specrig", *sys.argv[1:]])
        os.execvp("sg", ["sg", "docker", "-c", command])  # noqa: S606


def systemd_is_init() -> bool:
    """Whether PID 1 is systemd (sd_booted(3))."""
    return Path("/run/systemd/system").is_dir()


def _listens() -> bool:
    """Whether something accepts, or would for another user, at the usual socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(5)
        try:
            probe.connect("/var/run/docker.sock")
        except PermissionError:
            return True
        except OSError:
            return False
    return True


def _start(say: Progress) -> None:
    log = paths.cache("log") / "dockerd.log"
    if systemd_is_init():
        say.phase("systemctl start docker")
        subprocess.run(as_root(["systemctl", "start", "docker"]), check=False, capture_output=True)
        where = "journalctl -u docker -n 30"
    else:
        say.phase(f"starting dockerd by hand (log: {log})")
        script = f"exec setsid dockerd >{shlex.quote(str(log))} 2>&1 </dev/null &"
        subprocess.run(as_root(["sh", "-c", script]), check=False)
        where = f"tail {log}"
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if _listens():
            return
        time.sleep(0.5)
    raise LabError("LAB_DOCKER_START", f"dockerd did not answer within {START_TIMEOUT_S} s", where)
