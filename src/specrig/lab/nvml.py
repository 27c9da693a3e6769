"""The stand-in for NVIDIA's management library: `python -m specrig.lab.nvml FILE` compiles it there, with the C compiler of this machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from specrig.lab.errors import LabError
from specrig.lab.images import RECIPES


def build(path: Path) -> Path:
    """Compile it to `path`. Raises LabError."""
    command = [
        "cc",
        "-std=gnu11",
        "-O1",
        "-Wall",
        "-Werror",
        "-shared",
        "-fPIC",
        "-o",
        str(path),
        str(RECIPES / "nvml.c"),
    ]
    fix = "sudo apt-get install gcc libc6-dev"
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise LabError(
            "LAB_COMPILER", "no C compiler here, which the stand-in for libnvidia-ml.so.1 needs", fix
        ) from None
    if done.returncode:
        raise LabError("LAB_COMPILER", done.stderr.strip()[-500:], fix)
    return path


if __name__ == "__main__":
    build(Path(sys.argv[1]))
