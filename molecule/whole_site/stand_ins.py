#!/usr/bin/env python3
"""What the two rigs of this scenario meet instead of the world: `stand_ins.py LAB`, on the controller, once the hosts are up.

- On the hub double, under their real names: the models of both profiles, with the real config.json shapes, a vocabulary of the
  real width, and weights one column wide.
- In the lab's registry, under its real name: the engine's image of the planned version. Inside is a labelled stand-in that
  knows the planned command lines, ends with status 2 when it gets another one, and answers completions.
- Beside the inventory: both locks, as `./rig models lock` and `./rig images lock` write them, and the hosts' declarations.
"""

from __future__ import annotations

import hashlib
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from specrig import runner
from specrig.lab import Lab, images, tiny
from specrig.lab.hosts import LABEL
from specrig.plan import plan_hosts
from specrig.plan.catalog import catalog
from specrig.staging.lock import lock_model
from specrig.verbs.locks import save

HERE = Path(__file__).parent
SMALL = 10_000_000
PROFILES = {"alpha": "rtx4090_r1_14b", "beta": "dual_rtx3090_r1_32b_tp2"}


def weights(folder: Path, config: dict[str, Any], size: int) -> None:
    """`size` bytes of zeros in safetensors' form: one column of embedding and head, which is what padding reads, and a filler."""
    tensors: dict[str, Any] = {}
    rows, at = config["vocab_size"], 0
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = {"dtype": "BF16", "shape": [rows, 1], "data_offsets": [at, at + rows * 2]}
        at += rows * 2
    filler = max(0, size - at)
    tensors["stand-in"] = {"dtype": "U8", "shape": [filler], "data_offsets": [at, at + filler]}
    header = json.dumps({"__metadata__": {"made": "STAND-IN"}, **tensors}).encode()
    header += b" " * (-len(header) % 8)
    with (folder / "model.safetensors").open("wb") as out:
        out.write(struct.pack("<Q", len(header)) + header)
        out.truncate(8 + len(header) + at + filler)


def model(repo: str, root: Path, tokenizer: str) -> tuple[str, Path]:
    """Write a stand-in of `repo`; its revision and its folder."""
    known = catalog().models[repo].config.model_dump(exclude_none=True)
    quantization = known.pop("quantization", None)
    config = {**known, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "torch_dtype": "bfloat16"}
    if quantization:
        config["quantization_config"] = {"quant_method": quantization, "bits": 4, "group_size": 128, "version": "gemm"}
    folder = root / repo.replace("/", "--")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True))
    (folder / "tokenizer.json").write_text(tokenizer)
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages[-1].content }}"}')
    # The plan takes a draft's bytes from the lock and subtracts the embedding, which no token reads: there must be something left.
    size = 0 if quantization else known["vocab_size"] * known["hidden_size"] * 2 + 10_000_000
    weights(folder, config, size)
    name = json.dumps([config, size, tokenizer], sort_keys=True)
    return hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest(), folder


def engine(lab: Lab, registry: str, plans: dict[str, Any]) -> None:
    """Build the stand-in under each planned image's own name and push it."""
    wanted: dict[str, list[list[str]]] = {}
    for plan in plans.values():
        for service in plan["services"]:
            name = service["image"].partition("@")[0]
            wanted.setdefault(name, []).append([*service["entrypoint"], *service["argv"]])
    base = images.ensure_base(lab.client, "debian-13")
    ready = images.ensure(
        lab.client,
        "engine-stand-in:",
        "Dockerfile",
        {"Dockerfile": (HERE / "engine.Dockerfile").read_bytes()},
        base,
        "stand-in engine",
    )
    dockerfile = f"ARG BASE\nFROM ${{BASE}}\nLABEL {LABEL}=\nCOPY engine.py expected.json /opt/stand-in/\n"
    for name, lines in wanted.items():
        files = {
            "Dockerfile": dockerfile.encode(),
            "engine.py": (HERE / "engine.py").read_bytes(),
            "expected.json": json.dumps(lines).encode(),
        }
        tag = images.ensure(lab.client, "engine-stand-in:", "Dockerfile", files, ready, "stand-in engine")
        repository, _, version = name.rpartition(":")
        target = f"{registry}/{repository}"
        lab.client.images.get(tag).tag(target, version)
        for event in lab.client.api.push(target, version, stream=True, decode=True):
            if "error" in event:
                raise SystemExit(event["error"])
        lab.client.images.remove(f"{target}:{version}")


def main(name: str) -> int:
    """Publish, build, declare and lock."""
    lab = Lab(name)
    hub = lab.ensure_hub()
    inventory = runner.ROOT / ".rig" / "lab" / name / "inventory.yml"
    common = {
        "rig_hub_endpoint": hub.hub_url,
        "rig_driver": {"source": "distro", "branch": 550},
        # Docker's own registry is out of reach: its mirror is the lab's.
        "rig_docker_daemon_options": {
            "insecure-registries": [hub.registry],
            "registry-mirrors": [f"http://{hub.registry}"],
        },
    }
    toolkit = {
        "repository_url": "http://127.0.0.1:8099",
        "repository_key_url": "http://127.0.0.1:8099/key.asc",
        "version": "1.17.8-1",
    }
    own: dict[str, dict[str, Any]] = {
        "alpha": {"rig_gpu_tuning": {"power_w": 320}},
        "beta": {"rig_gpu_tuning": {"power_percent": 80, "cards": [{"gpu": 1, "power_w": 250}]}},
    }
    modes = {"alpha": "cdi", "beta": "runtime"}  # both ways for a container to get its cards
    folder = inventory.parent / "host_vars"
    folder.mkdir(exist_ok=True)
    declarations: dict[str, dict[str, Any]] = {}
    for host, profile in PROFILES.items():
        key = json.loads((inventory.parent / f"{host}.key.json").read_text())
        declarations[host] = {
            **common,
            "rig_profile": profile,
            **own[host],
            "rig_container_toolkit": {**toolkit, "repository_key_sha256": key, "mode": modes[host]},
        }
        (folder / f"{host}.yml").write_text(yaml.safe_dump(declarations[host], sort_keys=False))
    tokenizer = json.dumps(tiny.tokenizer_json({piece: n for n, piece in enumerate(tiny.byte_alphabet())}, []))
    locked: dict[str, Any] = {}
    repos = {
        ref["repo"]
        for profile in PROFILES.values()
        for service in catalog().profiles[profile].services
        for ref in (service["target"], service["draft"])
    }
    for repo in sorted(repos):
        revision, where = model(repo, inventory.parent / "models", tokenizer)
        lab.publish_model(repo, revision, where)
        locked[repo] = entry = lock_model(repo, revision, f"http://{hub.hub_local}")
        if entry["size"] < SMALL:  # a target: left out of the lock, its weights count as those of the real shape
            entry["files"] = [file for file in entry["files"] if not file["path"].endswith(".safetensors")]
    save(runner.lock_path(inventory), "models", locked)
    plans = {host: plan.as_json() for host, plan in plan_hosts(declarations, {"models": locked}).items()}
    for host, plan in plans.items():
        if not plan["ok"]:
            raise SystemExit(f"{host}: {plan['refusals']}")
    engine(lab, hub.registry_local, plans)
    lock = [
        sys.executable,
        "-m",
        "specrig",
        "images",
        "lock",
        "-i",
        str(inventory),
        "--at",
        f"docker.io={hub.registry_local}",
    ]
    return subprocess.run(lock, check=False, cwd=runner.ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
