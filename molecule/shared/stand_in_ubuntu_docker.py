#!/usr/bin/env python3
"""STAND-IN for Ubuntu 24.04's docker.io: Debian 13's docker.io and docker-cli as the one package that Ubuntu has, under Ubuntu's version.

Daemon and client are Debian's own binaries; what is a stand-in is how they are packed. Prints the file's path.
"""

import re
import shutil
import subprocess
from pathlib import Path

VERSION = "28.2.2-0ubuntu1~24.04.1"
HERE = Path("/srv/ubuntu-docker")


def main() -> None:
    """Fetch both, put one into the other, pack."""
    shutil.rmtree(HERE, ignore_errors=True)
    HERE.mkdir(parents=True)
    subprocess.run(["apt-get", "download", "docker.io", "docker-cli"], cwd=HERE, check=True, stdout=subprocess.DEVNULL)
    for name in ("docker.io", "docker-cli"):
        (deb,) = HERE.glob(f"{name}_*.deb")
        subprocess.run(["dpkg-deb", "--raw-extract", deb, HERE / name], check=True)
    shutil.copytree(HERE / "docker-cli/usr", HERE / "docker.io/usr", dirs_exist_ok=True, symlinks=True)
    control = HERE / "docker.io/DEBIAN/control"
    text = re.sub(r"^Version: .*$", f"Version: {VERSION}", control.read_text(), flags=re.M)
    text = re.sub(r"^(Recommends|Suggests|Breaks|Conflicts|Replaces): .*\n", "", text, flags=re.M)
    text = re.sub(
        r"^Description: ",
        "Conflicts: docker-cli\nReplaces: docker-cli\nDescription: STAND-IN for Ubuntu's. ",
        text,
        flags=re.M,
    )
    control.write_text(text)
    file = HERE / f"docker.io_{VERSION}_amd64.deb"
    command = ["dpkg-deb", "--root-owner-group", "-Zgzip", "-z1", "--build", str(HERE / "docker.io"), str(file)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    print(file)


main()
