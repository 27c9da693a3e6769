"""The container `specrig-lab-hub`: registry on :5000, hub double on :8081; one for all labs of a machine."""

from __future__ import annotations

import json
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docker.errors import APIError, NotFound

from specrig.lab import images, paths
from specrig.lab.errors import LabError
from specrig.lab.hosts import LABEL, NETWORK, ensure_network
from specrig.lab.progress import Progress

NAME = "specrig-lab-hub"
REGISTRY = f"{NAME}:5000"
HUB_URL = f"http://{NAME}:8081"
VOLUMES = {"specrig-lab-registry": "/var/lib/docker-registry", "specrig-lab-models": "/srv/hub"}
_PORTS = {"5000/tcp": "registry", "8081/tcp": "hub"}


@dataclass(frozen=True)
class HubHost:
    """Where the hub container answers: names for lab hosts, loopback addresses (host:port) for this machine."""

    registry_local: str
    hub_local: str
    registry: str = REGISTRY
    hub_url: str = HUB_URL


def ensure(client: Any) -> HubHost:
    """Return the running hub container, made or started when it is not there; replaced when its recipe changed."""
    with paths.exclusive(NAME):
        base = images.ensure_base(client, "debian-13")
        files = images.recipe("hub.Dockerfile", "hub-entrypoint.sh", "registry.yml")
        files["hub.py"] = (Path(__file__).parent / "hub.py").read_bytes()
        image = images.ensure(client, "hub:", "hub.Dockerfile", files, base, "hub image")
        ensure_network(client)
        try:
            container = client.containers.get(NAME)
            if image not in container.image.tags:
                container.remove(force=True)
                container = _create(client, image)
        except NotFound:
            container = _create(client, image)
        if container.status != "running":
            container.start()
        return _wait(container)


def _create(client: Any, image: str) -> Any:
    labels = {LABEL: "", "specrig.hub": "1"}
    for volume in VOLUMES:
        client.volumes.create(volume, labels=labels)
    return client.containers.create(
        image,
        name=NAME,
        hostname=NAME,
        network=NETWORK,
        labels=labels,
        volumes={volume: {"bind": target, "mode": "rw"} for volume, target in VOLUMES.items()},
        # Loopback only, on ports of Docker's choice: an Engine takes a registry on 127.0.0.1 without TLS.
        ports=dict.fromkeys(_PORTS, ("127.0.0.1", None)),
        init=True,
    )


def _wait(container: Any, timeout: float = 30) -> HubHost:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        container.reload()
        bound = container.attrs["NetworkSettings"]["Ports"]
        if all(bound.get(port) for port in _PORTS):
            registry, hub = (f"127.0.0.1:{bound[port][0]['HostPort']}" for port in _PORTS)
            if _answers(f"http://{registry}/v2/") and _answers(f"http://{hub}/_stats"):
                return HubHost(registry, hub)
        if container.status == "exited":
            break
        time.sleep(0.2)
    log = container.logs(tail=8).decode(errors="replace").strip()
    raise LabError("LAB_HUB", f"{NAME} does not answer ({container.status})\n    {log}", f"docker logs {NAME}")


def _answers(url: str) -> bool:
    try:
        with local(urllib.request.Request(url), timeout=2):  # noqa: S310
            return True
    except OSError:
        return False


def local(request: urllib.request.Request, timeout: float = 30) -> Any:
    """Open a loopback URL, past any proxy that the environment names."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=timeout)


def publish_model(client: Any, repo: str, revision: str, directory: Path) -> str:
    """Put `directory` on the hub double as `repo` at `revision` (40 hex), unless it is there; return the hub's URL."""
    where = ensure(client)
    files = sorted(p for p in directory.rglob("*") if p.is_file())
    if _listing(where, repo, revision) == {p.relative_to(directory).as_posix(): p.stat().st_size for p in files}:
        return where.hub_url
    size = sum(p.stat().st_size for p in files)
    with Progress("hub") as say, tempfile.TemporaryFile() as spool:
        say.phase(f"publishing {repo} ({size / 1e6:.0f} MB)")
        with tarfile.open(fileobj=spool, mode="w") as archive:
            parents = [Path(repo).parts[0], repo, f"{repo}/{revision}"]
            for parent in parents:
                entry = tarfile.TarInfo(parent)
                entry.type, entry.mode, entry.mtime = tarfile.DIRTYPE, 0o755, time.time()
                archive.addfile(entry)
            for path in files:
                archive.add(path, f"{repo}/{revision}/{path.relative_to(directory).as_posix()}")
        spool.seek(0)
        try:
            client.containers.get(NAME).put_archive("/srv/hub", spool)
        except APIError as error:
            raise LabError(
                "LAB_PUBLISH", f"{repo} could not be put on the hub: {error}", f"docker logs {NAME}"
            ) from error
        say.done(f"{repo}@{revision[:8]} is on the hub")
    return where.hub_url


def _listing(where: HubHost, repo: str, revision: str) -> dict[str, int]:
    url = f"http://{where.hub_local}/api/models/{repo}/tree/{revision}?recursive=true"
    try:
        with local(urllib.request.Request(url)) as answer:
            return {entry["path"]: entry["size"] for entry in json.load(answer)}
    except urllib.error.HTTPError:
        return {}
