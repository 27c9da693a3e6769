"""Brings an engine image to the host through Docker's API, with bytes and a rate; `docker pull` in a pipe has none."""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from specrig.host import docker_api, images
from specrig.host.errors import COULD_NOT_RUN, HostError
from specrig.host.progress import Progress

ATTEMPTS = 4
FIRST_WAIT_S = 2.0
# No event for this long, while downloading or extracting, is a stall.
SILENCE_S = 300.0
_REFERENCE = re.compile(
    r"(?P<name>[a-z0-9.:/_-]+?)(:(?P<tag>\w[\w.-]{0,127}))?(@(?P<digest>sha256:[0-9a-f]{64}))?", re.IGNORECASE
)
_PASSING = re.compile(
    r"unexpected EOF|connection reset|TLS handshake|toomanyrequests|temporar|server misbehaving"
    r"|50[0234]",
    re.I,
)


def parse(image: str) -> tuple[str, str]:
    """Split a reference into (name, tag or digest); a digest wins over a tag, as in Docker. Raises PULL_REFERENCE."""
    match = _REFERENCE.fullmatch(image)
    version = match and (match["digest"] or match["tag"])
    if not match or not version or version == "latest":
        raise HostError(
            "PULL_REFERENCE",
            f"{image!r:.200} has no tag or digest that stays the same",
            "write repo:tag@sha256:…",
            COULD_NOT_RUN,
        )
    return match["name"], version


def registry(name: str) -> str:
    """The registry a name belongs to, as Docker's configuration spells it."""
    first, slash, _ = name.partition("/")
    return first if slash and ("." in first or ":" in first or first == "localhost") else "https://index.docker.io/v1/"


def auth_header(name: str, config: Path = Path("/root/.docker/config.json")) -> dict[str, str]:
    """What `docker login` stored for the registry of `name`, as the API wants it; empty when there is nothing."""
    try:
        stored = json.loads(config.read_text())["auths"][registry(name)]["auth"]
        user, _, password = base64.b64decode(stored).decode().partition(":")
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    value = json.dumps({"username": user, "password": password, "serveraddress": registry(name)})
    return {"X-Registry-Auth": base64.urlsafe_b64encode(value.encode()).decode()}


class Layers:
    """Adds up the daemon's events, layer by layer."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.done: dict[str, int] = {}
        self.extracted: set[str] = set()
        self.known: set[str] = set()

    def feed(self, event: dict[str, Any]) -> tuple[str, int | None, int | None, str]:
        """Take one event; return (phase, bytes done, bytes known, message)."""
        layer, status = str(event.get("id") or ""), str(event.get("status") or "")
        detail = event.get("progressDetail") or {}
        if status in ("Pulling fs layer", "Waiting", "Already exists", "Downloading"):
            self.known.add(layer)
        if status == "Downloading" and detail.get("total"):
            self.sizes[layer] = int(detail["total"])
            self.done[layer] = max(self.done.get(layer, 0), int(detail.get("current") or 0))
        elif (
            status in ("Download complete", "Verifying Checksum", "Extracting", "Pull complete") and layer in self.sizes
        ):
            self.done[layer] = self.sizes[layer]
        if status in ("Pull complete", "Already exists"):
            self.extracted.add(layer)
        count = f"{len(self.extracted)}/{len(self.known)} layers" if self.known else ""
        done, total = sum(self.done.values()), sum(self.sizes.values())
        if total and done < total:
            return "download", done, total, count
        if status == "Extracting" or self.extracted:
            return "extract", None, None, count
        return ("download", done, total, count) if total else ("resolve", None, None, status)


def _once(image: str, progress: Progress) -> None:
    name, version = parse(image)
    query = urlencode({"fromImage": name, "tag": version})
    layers = Layers()
    try:
        for event in docker_api.stream("POST", f"/images/create?{query}", auth_header(name), SILENCE_S):
            if event.get("error"):
                raise _failed(
                    image,
                    str(event["error"]),
                    int(event.get("status") or 0) if isinstance(event.get("status"), int) else 0,
                )
            phase, done, total, message = layers.feed(event)
            progress.update(phase, done, total, message)
    except TimeoutError:
        raise HostError(
            "PULL_STALLED",
            f"{image}: Docker was silent for {SILENCE_S:.0f} s",
            "check the network, then run this again",
        ) from None
    except (OSError, ValueError) as error:
        raise HostError(
            "PULL_BROKEN",
            f"{image}: Docker's answer broke off: {error!r}",
            "systemctl status docker, then run this again",
        ) from error


def _failed(image: str, message: str, status: int) -> HostError:
    if re.search(r"unauthorized|authentication required|denied|forbidden", message, re.I):
        return HostError("PULL_DENIED", f"{image}: {message}", "docker login on the host, or correct the image's name")
    if re.search(r"no such host|connection refused|network is unreachable|i/o timeout", message, re.I):
        return HostError(
            "PULL_UNREACHABLE", f"{image}: {message}", "check the host's network and DNS, or name a mirror"
        )
    if status == 404 or re.search(r"not found|manifest unknown", message, re.I):
        return HostError(
            "PULL_NOT_FOUND", f"{image}: {message}", "correct the image's tag or digest, or the registry's name"
        )
    if "no space left" in message:
        return HostError("PULL_DISK", f"{image}: {message}", "free space under Docker's data-root: docker system df")
    return HostError(
        "PULL_BROKEN" if _PASSING.search(message) else "PULL_FAILED",
        f"{image}: {message}",
        "read the cause; then run this again",
    )


def pull(
    image: str,
    progress: Progress,
    check: bool = False,
    layers: Sequence[Mapping[str, Any]] = (),
    archive: Path | None = None,
) -> dict[str, Any]:
    """Make `image` present, from its registry, else from its file in `archive`; and, with `archive`, write that file.

    `layers` [{size, diff_id}] are the lock's: with them the disk is looked at first. Returns {changed, image, runs, id,
    digests, told}: `runs` is the name under which Docker finds it here. Raises HostError PULL_*, ARCHIVE_*.
    """
    parse(image)
    try:
        here = images.found(image)
    except HostError:
        if not check:
            raise
        here = None  # before Docker is there, the image is not either
    told: list[str] = []
    kept = here is not None and (not images.keeper(image) or images.keeper(image) in (here[1].get("RepoTags") or []))
    filed = archive is None or (file := images.archive_file(archive, image)) is None or images.about(file) is not None
    changed = here is None or not kept or not filed
    if changed and not check:
        if here is None:
            told = _bring(image, progress, layers, archive)
            here = images.found(image)
        if here is not None and here[0] == image and not kept:
            images.keep(image)
        if archive is not None and not filed:
            images.save(image, archive, progress)
    if here is None and not check:
        raise HostError(
            "PULL_FAILED", f"{image}: Docker reported success and does not have it", "docker images --digests"
        )
    name, found = here or (image, {})
    answer = {"changed": changed, "image": image, "runs": name, "id": found.get("Id"), "told": told}
    return {**answer, "digests": found.get("RepoDigests") or []}


def _bring(image: str, progress: Progress, layers: Sequence[Mapping[str, Any]], archive: Path | None) -> list[str]:
    """Pull, or load what the registry does not give any more; says where from when it is not the registry."""
    images.room(image, layers)
    try:
        _patiently(image, progress)
    except HostError as error:
        gone = error.code in ("PULL_NOT_FOUND", "PULL_DENIED", "PULL_UNREACHABLE", "PULL_BROKEN", "PULL_STALLED")
        if not (gone and archive is not None and images.load(image, archive, progress)):
            raise
        return [f"{image} comes from {archive}: {error.code}"]
    return []


def _patiently(image: str, progress: Progress) -> None:
    for attempt in range(ATTEMPTS):
        try:
            _once(image, progress)
            break
        except HostError as error:
            if error.code not in ("PULL_BROKEN", "PULL_STALLED", "PULL_UNREACHABLE") or attempt == ATTEMPTS - 1:
                raise
            pause = FIRST_WAIT_S * 2**attempt
            progress.update("retry", message=f"in {pause:.0f} s: {error.cause}")
            time.sleep(pause)


def job(text: str) -> tuple[list[dict[str, Any]], Path | None]:
    """(layers, archive) of a job {"layers": […], "archive": directory or ""}. Raises HostError PULL_JOB."""
    try:
        document = json.loads(text or "{}")
        layers = [{"size": int(row["size"]), "diff_id": str(row["diff_id"])} for row in document.get("layers") or []]
        archive = str(document.get("archive") or "")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise HostError("PULL_JOB", f"cannot read the job: {error!r}", "./rig up", COULD_NOT_RUN) from error
    return layers, Path(archive) if archive else None
