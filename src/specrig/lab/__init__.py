"""Throw-away hosts, a hub double and a registry: the lab in which a real converge runs without a rig."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specrig.lab import cleanup, engine, enginesimage, hubhost, llamaimage, webuiimage
from specrig.lab import hosts as lab_hosts
from specrig.lab.errors import LabError

__all__ = ["Lab", "LabError"]


class Lab:
    """One named lab. Every method can be called again: what is there is kept. Raises LabError."""

    def __init__(self, name: str = "lab", assume_yes: bool = False, client: Any = None) -> None:
        self.name = lab_hosts.check_name(name, "lab")
        self.client = client or engine.ensure(assume_yes)

    def up(self, wanted: Mapping[str, str]) -> Path:
        """Bring hosts {name: 'debian-13' | 'debian-12'} up; return the inventory file."""
        return lab_hosts.up(self.client, self.name, wanted)

    def hosts(self) -> list[lab_hosts.Host]:
        """The lab's lab_hosts."""
        return lab_hosts.find(self.client, self.name)

    def down(self, names: list[str] | None = None) -> list[str]:
        """Remove the lab's hosts (all without `names`) and their volumes; return who is gone.

        After the last host of all labs the hub container and the network go too; what makes a next time warm stays.
        """
        gone = lab_hosts.down(self.client, self.name, names)
        cleanup.idle(self.client)
        return gone

    def destroy(self) -> dict[str, int]:
        """Remove all labs of this machine with volumes, images and caches; return how many of each."""
        return cleanup.everything(self.client)

    def ensure_hub(self) -> hubhost.HubHost:
        """Bring the registry and the hub double up; return where they answer."""
        return hubhost.ensure(self.client)

    def ensure_engine_image(self) -> str:
        """Have the CPU vLLM image in the lab's registry; return its name as lab hosts pull it."""
        return enginesimage.ensure(self.client)

    def ensure_llama_image(self) -> str:
        """Have llama.cpp's server in the lab's registry; return its name as lab hosts pull it."""
        return llamaimage.ensure(self.client)

    def ensure_webui_image(self) -> str:
        """Have Open WebUI in the lab's registry; return its name as lab hosts pull it."""
        return webuiimage.ensure(self.client)

    def publish_model(self, repo: str, revision: str, directory: Path) -> str:
        """Put a model directory on the hub double under repo and revision (40 hex); return the hub's URL for hosts."""
        return hubhost.publish_model(self.client, repo, revision, directory)
