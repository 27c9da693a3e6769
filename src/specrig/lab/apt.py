"""Debian packages that the lab itself needs on this machine."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import threading

from specrig.lab.errors import LabError
from specrig.lab.progress import Progress

# The lab works in threads, and dpkg's own lock turns the second one away. Another program may hold it as well.
_ONE_AT_A_TIME = threading.Lock()
_PATIENCE = "-o DPkg::Lock::Timeout=300"


def as_root(command: list[str]) -> list[str]:
    """`command`, through sudo when this process is not root. Raises LabError LAB_ROOT where there is no sudo."""
    if os.geteuid() == 0:
        return command
    if which("sudo") is None:
        raise LabError("LAB_ROOT", f"{command[0]} needs root, and sudo is not here", "run the same command as root")
    return ["sudo", *command]


def which(program: str) -> str | None:
    """Where a program is, with the sbin folders that a user's PATH lacks on Debian."""
    return shutil.which(program, path=f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin:/sbin")


def have(program: str, packages: list[str], say: Progress) -> None:
    """Install the Debian packages that bring `program` where it is not there. Raises LabError LAB_APT."""
    with _ONE_AT_A_TIME:
        if which(program) is None:
            apt_install(packages, say)


def apt_install(packages: list[str], say: Progress) -> None:
    """Install Debian packages, with a refresh of the lists first. Raises LabError LAB_APT."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    steps = ["apt-get update", f"apt-get {_PATIENCE} install -y --no-install-recommends {' '.join(packages)}"]
    for step in steps:
        say.phase(step)
        command = as_root(["env", "DEBIAN_FRONTEND=noninteractive", *step.split()])
        done = subprocess.run(command, env=environment, check=False, text=True, capture_output=True)
        # A broken third-party list fails the refresh without making the packages unavailable: the install decides.
        if done.returncode != 0 and step != steps[0]:
            tail = "\n    ".join(done.stderr.strip().splitlines()[-6:])
            raise LabError(
                "LAB_APT", f"{step} failed:\n    {tail}", f"run it yourself: {shlex.join(as_root(step.split()))}"
            )
