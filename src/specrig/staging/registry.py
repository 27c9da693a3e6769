"""Resolves an image's tag at its registry (HTTP API V2) into the image lock: digest, compressed layers, platform.

The digest is what the tag points at: the index of a multi-platform image, else the manifest. It is what `docker pull` records, and
it covers the manifest of this platform, which is written down beside it.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specrig.console import CannotRun
from specrig.host import pull
from specrig.host.errors import HostError
from specrig.staging.lock import OwnHostOnly

INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
PLATFORM = ("linux", "amd64")
TIMEOUT_S = 60
TRIES = 3
LONGEST_WAIT_S = 30.0
LARGEST = 32 << 20  # of a manifest or a configuration, in bytes
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True)
class Place:
    """Where an image lies: registry as in its name, repository there, tag or digest."""

    registry: str
    repository: str
    reference: str


def place(image: str) -> Place:
    """Take a reference apart as Docker does. Raises CannotRun IMAGE_REFERENCE."""
    try:
        name, reference = pull.parse(image)
    except HostError as error:
        raise CannotRun(error.cause, error.fix, "IMAGE_REFERENCE") from error
    first, _, rest = name.partition("/")
    if pull.registry(name).startswith("https://"):  # no registry named: Docker's own
        return Place("docker.io", name if "/" in name else f"library/{name}", reference)
    return Place(first, rest, reference)


@dataclass
class Registry:
    """Asks registries. `at` {registry: address} sends a name elsewhere (a mirror, a tunnel); those in `plain` have no TLS."""

    at: Mapping[str, str] = field(default_factory=dict)
    plain: Collection[str] = ()
    config: Path = field(default_factory=lambda: Path.home() / ".docker" / "config.json")
    pause: float = 2.0
    _tokens: dict[tuple[str, str], str] = field(default_factory=dict)

    def base(self, registry: str) -> str:
        """Base URL of a registry."""
        address = self.at.get(registry) or {"docker.io": "registry-1.docker.io"}.get(registry, registry)
        if "://" in address:
            return address.rstrip("/")
        loopback = re.match(r"(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:|$)", address)
        return ("http://" if loopback or registry in self.plain else "https://") + address

    def _login(self, registry: str) -> str:
        """What `docker login` stored here for `registry`, as Basic credentials; empty when there is nothing."""
        key = "https://index.docker.io/v1/" if registry == "docker.io" else registry
        try:
            return str(json.loads(self.config.read_text())["auths"][key]["auth"])
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    def _authorize(self, where: Place, challenge: str, base: str) -> None:
        """Answer a 401: a bearer token of the realm that it names, or the stored login."""
        scheme, _, rest = challenge.partition(" ")
        said, login = dict(_CHALLENGE.findall(rest)), self._login(where.registry)
        known = (where.registry, where.repository)
        if scheme.lower() == "basic" and login:
            self._tokens[known] = f"Basic {login}"
            return
        realm = said.get("realm", "")
        if scheme.lower() != "bearer" or not realm.startswith(("https://", base)):
            raise CannotRun(
                f"{where.registry} wants a login for {where.repository}",
                f"docker login {where.registry}, then again",
                "REGISTRY_DENIED",
            )
        query = {"scope": said.get("scope") or f"repository:{where.repository}:pull"}
        query |= {"service": said["service"]} if said.get("service") else {}
        url = f"{realm}{'&' if '?' in realm else '?'}{urllib.parse.urlencode(query)}"
        body, _ = self._get(url, {"Authorization": f"Basic {login}"} if login else {}, where)
        answer = _json(url, body)
        token = str(answer.get("token") or answer.get("access_token") or "")
        if not token:
            raise CannotRun(
                f"{realm} gave no token for {where.repository}", f"docker login {where.registry}", "REGISTRY_DENIED"
            )
        self._tokens[known] = f"Bearer {token}"

    def _get(self, url: str, headers: Mapping[str, str], where: Place) -> tuple[bytes, Mapping[str, str]]:
        """GET with waits where the registry asks for them. HTTP 401 and 404 are raised as HTTPError."""
        for attempt in range(TRIES):
            request = urllib.request.Request(url)  # noqa: S310 - made by `base`, or a realm checked above
            for name, value in headers.items():
                request.add_unredirected_header(name, value)
            try:
                with urllib.request.build_opener(OwnHostOnly).open(request, timeout=TIMEOUT_S) as answer:
                    return answer.read(LARGEST), dict(answer.headers.items())
            except urllib.error.HTTPError as error:
                if error.code in (401, 404):
                    raise
                if error.code == 403:
                    raise CannotRun(
                        f"{where.registry} refuses {where.repository} (HTTP 403)",
                        f"docker login {where.registry}",
                        "REGISTRY_DENIED",
                    ) from error
                cause = f"HTTP {error.code}"
                wait = error.headers.get("Retry-After") or ""
                pause = float(wait) if wait.isdigit() else self.pause * 2**attempt
                busy = error.code == 429
            except (OSError, http.client.HTTPException) as error:
                cause, pause, busy = str(getattr(error, "reason", error)), self.pause * 2**attempt, False
            if attempt < TRIES - 1:
                time.sleep(min(pause, LONGEST_WAIT_S))
        if busy:
            raise CannotRun(
                f"{where.registry} answers too few requests a time ({cause}), {TRIES} times",
                f"wait, or docker login {where.registry}: accounts may ask more often",
                "REGISTRY_BUSY",
            )
        raise CannotRun(
            f"{url} cannot be read: {cause}",
            f"check the network; a mirror or tunnel: --at {where.registry}=HOST:PORT",
            "REGISTRY_UNREACHABLE",
        )

    def get(self, where: Place, path: str, accept: str = "") -> tuple[bytes, Mapping[str, str]]:
        """GET below /v2/<repository>/, with a token when one is asked for. Raises CannotRun REGISTRY_*."""
        base = self.base(where.registry)
        url = f"{base}/v2/{where.repository}/{path}"
        for last in (False, True):
            token = self._tokens.get((where.registry, where.repository))
            headers = {"Accept": accept or "*/*", **({"Authorization": token} if token else {})}
            try:
                return self._get(url, headers, where)
            except urllib.error.HTTPError as error:
                if error.code == 404:
                    cause = f"{where.registry} has no {where.repository} {where.reference} (HTTP 404)"
                    fix = "correct the image's name or tag; what was archived can still be loaded: docs/upgrade.md"
                    raise CannotRun(cause, fix, "REGISTRY_NO_IMAGE") from error
                challenge = error.headers.get("WWW-Authenticate") or ""
            if last:
                break
            try:
                self._authorize(where, challenge, base)
            except urllib.error.HTTPError:
                break
        raise CannotRun(
            f"{where.registry} refuses {where.repository} (HTTP 401)",
            f"docker login {where.registry}, then again",
            "REGISTRY_DENIED",
        )

    def manifest(self, where: Place, reference: str) -> tuple[str, dict[str, Any]]:
        """(digest, document) of a manifest or index; the digest is computed, and compared with what was asked or said."""
        body, headers = self.get(where, f"manifests/{reference}", ", ".join(INDEXES + MANIFESTS))
        digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
        said = next((v for k, v in headers.items() if k.lower() == "docker-content-digest"), digest)
        wanted = reference if _DIGEST.fullmatch(reference) else said
        if digest != wanted:
            raise CannotRun(
                f"{where.registry} sent a manifest with digest {digest} for {wanted}",
                "try again, or another mirror",
                "REGISTRY_DAMAGED",
            )
        return digest, _json(reference, body)

    def blob(self, where: Place, digest: str) -> bytes:
        """A small blob, verified."""
        body, _ = self.get(where, f"blobs/{digest}")
        if f"sha256:{hashlib.sha256(body).hexdigest()}" != digest:
            raise CannotRun(
                f"{where.registry} sent other bytes for {digest}", "try again, or another mirror", "REGISTRY_DAMAGED"
            )
        return body


def _json(what: str, body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except ValueError as error:
        raise CannotRun(
            f"{what}: the registry did not answer with JSON", "is it a registry?", "REGISTRY_DAMAGED"
        ) from error
    if not isinstance(value, dict):
        raise CannotRun(f"{what}: the registry's answer is no object", "is it a registry?", "REGISTRY_DAMAGED")
    return value


def lock_image(image: str, registry: Registry, today: str) -> dict[str, Any]:
    """One entry of the lock: {digest, manifest, size, layers: [{size, diff_id}], date}. Sizes are compressed bytes.

    `diff_id` is the digest of the unpacked layer: by it a host knows what it already has.
    """
    where = place(image)
    digest, document = registry.manifest(where, where.reference)
    chosen = digest
    if "manifests" in document:
        rows = [m for m in document["manifests"] if _platform(m) == PLATFORM]
        if not rows:
            had = ", ".join(sorted({"/".join(_platform(m)) for m in document["manifests"]})) or "none"
            raise CannotRun(
                f"{image} is not for {'/'.join(PLATFORM)} (it has {had})", "name another image", "REGISTRY_PLATFORM"
            )
        chosen, document = registry.manifest(where, str(rows[0]["digest"]))
    try:
        config = _json(image, registry.blob(where, str(document["config"]["digest"])))
        sizes = [int(layer["size"]) for layer in document["layers"]]
        ids = [str(one) for one in config["rootfs"]["diff_ids"]]
        built_for = (str(config.get("os", "linux")), str(config.get("architecture", "amd64")))
    except (KeyError, TypeError, ValueError) as error:
        raise CannotRun(f"{image}: no image manifest ({error!r})", "name an image", "REGISTRY_DAMAGED") from error
    if built_for != PLATFORM:
        raise CannotRun(
            f"{image} is for {'/'.join(built_for)}, not {'/'.join(PLATFORM)}", "name another image", "REGISTRY_PLATFORM"
        )
    if len(sizes) != len(ids):
        raise CannotRun(f"{image}: {len(sizes)} layers, {len(ids)} diff ids", "try again", "REGISTRY_DAMAGED")
    layers = [{"size": size, "diff_id": one} for size, one in zip(sizes, ids, strict=True)]
    return {"digest": digest, "manifest": chosen, "size": sum(sizes), "layers": layers, "date": today}


def _platform(row: Mapping[str, Any]) -> tuple[str, str]:
    told = row.get("platform") or {}
    return str(told.get("os")), str(told.get("architecture"))


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What moved upstream between two entries of one image, for a person; empty when nothing did."""
    if before.get("digest") == after["digest"]:
        return []
    same = before.get("manifest") == after["manifest"]
    told = [
        f"digest {_short(before.get('digest'))} -> {_short(after['digest'])}"
        + (", the same for linux/amd64" if same else "")
    ]
    had = {layer["diff_id"] for layer in before.get("layers", [])}
    new = [layer["size"] for layer in after["layers"] if layer["diff_id"] not in had]
    return told + ([] if same else [f"{len(new)} of {len(after['layers'])} layers are new ({sum(new)} bytes)"])


def _short(digest: Any) -> str:
    return str(digest).removeprefix("sha256:")[:12]
