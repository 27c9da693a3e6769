"""The lab's images: a Debian base from a registry or from mmdebstrap, and what is built on it.

A tag carries a hash of everything that went into the image, so an image that is present is the right one.
"""

from __future__ import annotations

import atexit
import hashlib
import io
import os
import ssl
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
from docker.errors import DockerException, ImageNotFound

from specrig.lab import paths
from specrig.lab.apt import as_root, have
from specrig.lab.errors import LabError
from specrig.lab.progress import Progress

RECIPES = Path(__file__).parent / "images"
PREFIX = "specrig-lab/"
# A registry that does not answer within this is taken for out of reach: mmdebstrap needs less time than a long wait.
REGISTRY_TIMEOUT_S = 8
_MMDEBSTRAP = ["--variant=minbase", "--dpkgopt=force-unsafe-io"] + [
    f"--dpkgopt=path-exclude=/usr/share/{part}/*" for part in ("man", "doc", "locale", "info")
]


@dataclass(frozen=True)
class Distribution:
    """A Debian release as a registry and as its own archive call it."""

    image: str
    suite: str


DISTRIBUTIONS = {"debian-13": Distribution("debian:13", "trixie"), "debian-12": Distribution("debian:12", "bookworm")}


def digest(parts: Iterable[bytes | str]) -> str:
    """First 12 hex digits of a sha256 over `parts`, each prefixed with its length."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "big") + data)
    return total.hexdigest()[:12]


def controller_ca() -> bytes:
    """The certificate authorities that this machine trusts (PEM): SSL_CERT_FILE, else OpenSSL's own default file."""
    for name in (os.environ.get("SSL_CERT_FILE"), ssl.get_default_verify_paths().cafile):
        if name and Path(name).is_file():
            return Path(name).read_bytes()
    return b""


def recipe(*names: str) -> dict[str, bytes]:
    """The named files of `lab/images`, as a build context."""
    return {name: (RECIPES / name).read_bytes() for name in names}


def context(files: Mapping[str, bytes]) -> io.BytesIO:
    """`files` as a tar archive, scripts executable; the same bytes give the same archive."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o755 if name.endswith(".sh") else 0o644
            archive.addfile(entry, io.BytesIO(data))
    out.seek(0)
    return out


def present(client: Any, tag: str) -> bool:
    """Whether the Docker Engine has the image `tag`."""
    try:
        client.images.get(tag)
    except ImageNotFound:
        return False
    return True


def build(client: Any, tag: str, dockerfile: str, files: Mapping[str, bytes], base: str, say: Progress) -> None:
    """Build `tag` from `files` with the API's classic builder, which every Docker since 20.10 has. Raises LabError."""
    proxies = {k: v for k, v in os.environ.items() if k.lower() in ("http_proxy", "https_proxy", "no_proxy")}
    tail: list[str] = []
    stream = client.api.build(
        fileobj=context(files), custom_context=True, dockerfile=dockerfile, tag=tag, rm=True, forcerm=True, decode=True,
        buildargs={"BASE": base, **proxies}, labels={"specrig.image": "1"},
    )  # fmt: skip
    for event in stream:
        lines = str(event.get("stream", "")).strip().splitlines()
        if lines and lines[0].startswith("Step "):
            step, _, instruction = lines[0].removeprefix("Step ").partition(" : ")
            if instruction.startswith("RUN"):  # the others take no time
                say.phase(
                    f"step {step.replace('/', ' of ')}: {instruction.removeprefix('RUN ').partition(' && ')[0][:70]}"
                )
        elif lines:
            say.detail(lines[-1][:100])
            tail = [*tail, *lines][-14:]
        if "error" in event:
            raise LabError(
                "LAB_IMAGE_BUILD",
                f"{tag} did not build: {event['error']}\n    " + "\n    ".join(tail),
                "check that containers reach Debian's archive: docker run --rm debian:13 apt-get update",
            )


def ensure(client: Any, name: str, dockerfile: str, files: Mapping[str, bytes], base: str, label: str) -> str:
    """Return the tag `name`-<hash>, building it when it is not there."""
    tag = f"{PREFIX}{name}{digest([base, dockerfile, *(x for pair in sorted(files.items()) for x in pair)])}"
    with paths.exclusive(tag):
        if not present(client, tag):
            with Progress(label) as say:
                build(client, tag, dockerfile, files, base, say)
                say.done(f"built {tag}")
    return tag


def base_tag(os_name: str) -> str:
    """The tag of the plain Debian image of `os_name`. Raises LabError LAB_OS_UNKNOWN."""
    if os_name not in DISTRIBUTIONS:
        raise LabError("LAB_OS_UNKNOWN", f"no lab host runs {os_name!r}", f"use one of {', '.join(DISTRIBUTIONS)}")
    return f"{PREFIX}base:{os_name}-{digest([DISTRIBUTIONS[os_name].suite, *_MMDEBSTRAP])}"


def ensure_base(client: Any, os_name: str) -> str:
    """Return the tag of a plain Debian image: what is there, else from a registry, else made with mmdebstrap."""
    tag, distribution = base_tag(os_name), DISTRIBUTIONS[os_name]
    with paths.exclusive(tag):
        if present(client, tag):
            return tag
        with Progress(os_name) as say:
            had = present(client, distribution.image)
            if had or _pull(client, distribution.image, say):
                client.images.get(distribution.image).tag(tag)
                if not had:  # leave no tag behind that `lab down --all` would not know as ours
                    client.images.remove(distribution.image)
            else:
                _mmdebstrap(client, distribution.suite, tag, say)
            say.done(f"{tag} is ready")
    return tag


def _pull(client: Any, image: str, say: Progress) -> bool:
    say.phase(f"asking a registry for {image}")
    quick: Any = docker.from_env(timeout=REGISTRY_TIMEOUT_S)
    try:
        quick.api.inspect_distribution(image)
    except (DockerException, OSError):  # requests' time-outs and refusals are OSErrors
        say.phase(f"no registry answers for {image}")
        return False
    finally:
        quick.close()
    say.phase(f"pulling {image}")
    layers: dict[str, tuple[int, int]] = {}
    try:
        repository, _, version = image.rpartition(":")
        for event in client.api.pull(repository, version, stream=True, decode=True):
            if "error" in event:
                say.phase(f"{image}: {event['error']}")
                return False
            size = event.get("progressDetail") or {}
            if event.get("status") == "Downloading" and size.get("total"):
                layers[event["id"]] = size["current"], size["total"]
                say.update(sum(d for d, _ in layers.values()), sum(t for _, t in layers.values()))
    except (DockerException, OSError) as error:
        say.phase(f"{image}: {error}")
        return False
    return True


def _mmdebstrap(client: Any, suite: str, tag: str, say: Progress) -> None:
    have("mmdebstrap", ["mmdebstrap", "debian-archive-keyring"], say)
    with tempfile.TemporaryDirectory(prefix="specrig-base-") as folder:
        target = Path(folder) / "root.tar"
        say.phase(f"making {suite} with mmdebstrap")
        command = as_root(["mmdebstrap", *_MMDEBSTRAP, suite, str(target)])
        tail: list[str] = []
        # On ctrl-C mmdebstrap hangs up its whole process group: as root it gets one of its own (under sudo it must keep the
        # terminal, for a password, and sudo separates them), and is ended with this process.
        group = 0 if os.geteuid() == 0 else None
        with subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, process_group=group
        ) as process:
            atexit.register(process.terminate)
            for line in process.stderr or ():
                tail = [*tail[-9:], line.rstrip()]
                if line.startswith("I: "):
                    say.detail(line[3:].strip())
        atexit.unregister(process.terminate)
        if process.returncode != 0:
            raise LabError(
                "LAB_BASE_IMAGE",
                f"neither a registry nor mmdebstrap gave {suite}; mmdebstrap said:\n    " + "\n    ".join(tail),
                "check the way to Debian's archive (apt-get update), or docker load the base image yourself",
            )
        say.phase(f"importing {suite} ({target.stat().st_size / 1e6:.0f} MB)")
        repository, _, version = tag.rpartition(":")
        changes = ['CMD ["bash"]', "LABEL specrig.image=1"]
        with target.open("rb") as data:
            # A generator, because the SDK announces chunks and sends a file as it is.
            blocks = iter(lambda: data.read(1 << 20), b"")
            client.api.import_image_from_stream(blocks, repository=repository, tag=version, changes=changes)


def ensure_host(client: Any, os_name: str) -> str:
    """Return the tag of the image that lab hosts of `os_name` boot from."""
    base = ensure_base(client, os_name)
    files = recipe("host.Dockerfile", "host-entrypoint.sh") | {"controller-ca.crt": controller_ca()}
    return ensure(client, f"host:{os_name}-", "host.Dockerfile", files, base, f"host image {os_name}")
