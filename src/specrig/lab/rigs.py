"""Lab hosts that are ready for `./rig up`: declared as rigs of a profile, their models and engine where they will look for them."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from pathlib import Path

import yaml

from specrig import runner
from specrig.files import write_atomically
from specrig.lab import Lab, gguf, tiny
from specrig.lab.parallel import parallel
from specrig.staging.lock import lock_model
from specrig.staging.registry import Registry, changes, lock_image
from specrig.verbs import locks


def up(lab: Lab, hosts: Mapping[str, str], *, engine: bool = True, profile: str = "cpu_demo") -> Path:
    """Bring up hosts {name: os} with all that their converge needs; return the inventory. `engine=False` leaves the engine image out.

    `profile` is cpu_demo (vLLM) or cpu_demo_llama_cpp.

    The slow parts run side by side: the engine image is CPU work, the hosts are mostly waiting.
    """
    hub = lab.ensure_hub()

    def rigs() -> str:
        inventory = lab.up(hosts)
        declare(inventory, hub.hub_url, hub.registry, profile)
        publish_pair(lab, inventory, f"http://{hub.hub_local}", gguf_too=profile == "cpu_demo_llama_cpp")
        return str(inventory)

    image = lab.ensure_llama_image if profile == "cpu_demo_llama_cpp" else lab.ensure_engine_image
    made = parallel([rigs, image] if engine else [rigs])
    inventory = Path(made[0])
    if engine:
        lock_engine(inventory, made[1], Registry(at={hub.registry: f"http://{hub.registry_local}"}))
    return inventory


def lock_engine(inventory: Path, image: str, registry: Registry) -> None:
    """Lock the engine's image beside the inventory; an entry that is still right keeps its date."""
    path = runner.lock_path(inventory, runner.IMAGES_LOCK_NAME)
    locked = locks.read(path, "images")
    entry = lock_image(image, registry, datetime.datetime.now(tz=datetime.UTC).date().isoformat())
    if changes(locked.get(image, {}), entry):
        locks.save(path, "images", {**locked, image: entry})


def declare(inventory: Path, hub_url: str, registry: str, profile: str = "cpu_demo") -> None:
    """Write what a person would write for these hosts."""
    declaration = {
        "rig_profile": profile,
        "rig_hub_endpoint": hub_url,
        # The lab's registry has no TLS; a real rig pulls from one that has.
        "rig_docker_daemon_options": {"insecure-registries": [registry]},
    }
    text = yaml.safe_dump(declaration, sort_keys=False)
    write_atomically(inventory.parent / "group_vars" / "rigs.yml", f"# Written by ./rig lab up.\n{text}")


def publish_pair(lab: Lab, inventory: Path, hub: str, *, gguf_too: bool = False) -> None:
    """Make the tiny pair, put it on the hub double at `hub` and lock it beside the inventory; as GGUF files as well if asked."""
    text = (runner.ROOT / "LICENSE").read_text()
    locked: dict[str, object] = {}
    for model in tiny.build_pair(text, inventory.parent / "models"):
        lab.publish_model(model.repo, model.revision, model.directory)
        locked[model.repo] = lock_model(model.repo, model.revision, hub)
        if gguf_too:
            one = gguf.publishable(model, inventory.parent / "models-gguf")
            lab.publish_model(one.repo, one.revision, one.directory)
            file = next(one.directory.glob("*.gguf")).name
            locked[one.repo] = lock_model(one.repo, one.revision, hub, only=[file])
    locks.save(runner.lock_path(inventory), "models", locked)
