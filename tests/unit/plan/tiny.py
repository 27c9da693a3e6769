"""The demo pair's lock and shorthands for declarations."""

from typing import Any

REVISION = {"specrig-lab/tiny-target": "1" * 40, "specrig-lab/tiny-draft": "2" * 40}
CONFIG = {
    "vocab_size": 1152,
    "num_hidden_layers": 24,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "quantization": None,
    "torch_dtype": "bfloat16",
}


def tiny_lock(draft: dict[str, Any] | None = None, fingerprints: tuple[str, str] = ("a", "a")) -> dict[str, Any]:
    """The demo pair's lock; `draft` overrides its config, `fingerprints` are target's, draft's."""
    configs = {
        "specrig-lab/tiny-target": CONFIG,
        "specrig-lab/tiny-draft": {**CONFIG, "vocab_size": 1024, "num_hidden_layers": 2, **(draft or {})},
    }
    return {
        "models": {
            repo: {
                "revision": REVISION[repo],
                "files": [
                    {"path": "config.json", "size": 612, "sha1": "3" * 40},
                    {
                        "path": "model.safetensors",
                        "size": 51_000_000 if "target" in repo else 3_000_000,
                        "sha256": "4" * 64,
                    },
                ],
                "config": configs[repo],
                "tokenizer": {"fingerprint": fingerprint * 64, "size": 1024},
            }
            for (repo, fingerprint) in zip(REVISION, fingerprints, strict=True)
        }
    }


def service(profile: str, name: str, host: dict[str, Any] | None = None, **over: Any) -> dict[str, Any]:
    """A host of `profile` whose service `name` has `over` merged over it; `host` adds rig_ variables."""
    return {"rig_profile": profile, **(host or {}), "rig_services": [{"name": name, **over}]}


def r1(host: dict[str, Any] | None = None, **over: Any) -> dict[str, Any]:
    """The 4090 host with its service changed."""
    return service("rtx4090_r1_14b", "r1-14b", host, **over)


def tiny(**over: Any) -> dict[str, Any]:
    """The demo host with its service changed."""
    return service("cpu_demo", "tiny", **over)
