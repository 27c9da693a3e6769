"""Takes away what the lab has put on this machine's Docker: found by the lab's labels and names, and nothing else."""

from __future__ import annotations

import contextlib
import shutil
from typing import Any

from docker.errors import APIError

from specrig.lab import enginesimage, hosts, images, llamaimage, paths, webuiimage
from specrig.lab.hosts import ADDRESSES, LABEL, NETWORK


def idle(client: Any) -> None:
    """Remove what was interrupted, and after the last host of all labs hub and networks; volumes stay, as caches."""
    # An engine image being built counts as a user of the hub.
    building = (enginesimage.REPOSITORY, llamaimage.REPOSITORY, f"{llamaimage.REPOSITORY}-build", webuiimage.REPOSITORY)
    last = not hosts.find(client) and not any(paths.held(name) for name in building)
    for container in client.containers.list(all=True, filters={"label": LABEL}, ignore_removed=True):
        probe = not {"specrig.host", "specrig.hub", "specrig.build"} & container.labels.keys()
        if last or probe:
            hosts.remove(client, container.id)
    if not last:
        return
    for network in client.networks.list(names=[f"^{NETWORK}$", f"^{ADDRESSES}$"]):
        with contextlib.suppress(APIError):  # someone else's container is on it
            network.remove()


def everything(client: Any) -> dict[str, int]:
    """Remove all labs, the hub with its volumes, the networks, the lab's images and caches; return how much of each."""
    labs = {host.lab for host in hosts.find(client)}
    count = {"hosts": sum(len(hosts.down(client, lab)) for lab in labs)}
    idle(client)
    volumes = client.volumes.list(filters={"label": LABEL})
    for volume in volumes:
        volume.remove(force=True)
    count["volumes"] = len(volumes)
    # Twice: an image on which another was built goes only after it.
    count["images"] = sum(_remove_images(client) for _ in range(2))
    for name in ("wheels", "llama-cpp"):
        shutil.rmtree(paths.cache(name), ignore_errors=True)
    return count


def _remove_images(client: Any) -> int:
    removed = 0
    for image in client.images.list():
        for tag in image.tags:
            ours = tag.startswith(images.PREFIX) or (
                tag.startswith("127.0.0.1:")
                and any(
                    f"/{name}:" in tag
                    for name in (enginesimage.REPOSITORY, llamaimage.REPOSITORY, webuiimage.REPOSITORY)
                )
            )
            if ours:
                with contextlib.suppress(APIError):
                    client.images.remove(tag)
                    removed += 1
    return removed
