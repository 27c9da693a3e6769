"""Resolves repositories on the hub into the model lock: commit, files with size and sha256, and the facts that the plan needs.

The hub is asked on the controller only. A rig is given the lock and needs no trust in where its bytes come from.
"""

from __future__ import annotations

import hashlib
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from specrig.console import CannotRun
from specrig.plan.planner import HUB_ENDPOINT

# What an engine reads. Pickled weights (.bin, .pt) are left out: loading them runs code.
NEEDED = (".safetensors", ".json", ".jinja", "merges.txt", "tokenizer.model", "LICENSE", "LICENSE.txt")
CONFIG_FACTS = (
    "architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "tie_word_embeddings", "torch_dtype",
)  # fmt: skip
TIMEOUT_S = 60


def endpoint(given: str | None = None) -> str:
    """The hub's base URL: given, or HF_ENDPOINT, or Hugging Face's own."""
    return (given or os.environ.get("HF_ENDPOINT") or HUB_ENDPOINT).rstrip("/")


def fetch(url: str, token: str | None) -> bytes:
    """GET one small thing from the hub; a failure says which URL and what to do."""
    if not url.startswith(("https://", "http://")):
        raise CannotRun(f"{url} is no http address", "set HF_ENDPOINT to the hub's base URL", "HUB_ENDPOINT")
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})  # noqa: S310 - scheme checked above
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:  # noqa: S310
            content: bytes = response.read()
            return content
    except urllib.error.HTTPError as error:
        fix = (
            "for a gated model set HF_TOKEN; otherwise check the name"
            if error.code in {401, 403, 404}
            else "try again later"
        )
        raise CannotRun(f"{url} answered {error.code}", fix, "HUB_REFUSED") from error
    except (urllib.error.URLError, TimeoutError) as error:
        raise CannotRun(
            f"{url} cannot be reached: {getattr(error, 'reason', error)}",
            "check the network, or set HF_ENDPOINT to a mirror",
            "HUB_UNREACHABLE",
        ) from error


def tokenizer_facts(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """Identity of a tokeniser by what it does: two models with equal fingerprints turn the same text into the same ids.

    Chat templates, padding and truncation are left out: they do not change ids.
    """
    model = tokenizer.get("model", {})
    merges = [m if isinstance(m, str) else " ".join(m) for m in model.get("merges", [])]
    added = sorted((t["id"], t["content"]) for t in tokenizer.get("added_tokens", []))
    what = [
        model.get("type"),
        sorted(model.get("vocab", {}).items()),
        merges,
        added,
        tokenizer.get("normalizer"),
        tokenizer.get("pre_tokenizer"),
    ]
    text = json.dumps(what, sort_keys=True, ensure_ascii=False)
    ids = {*model.get("vocab", {}).values(), *(number for number, _ in added)}
    return {"fingerprint": hashlib.sha256(text.encode()).hexdigest(), "size": max(ids) + 1 if ids else 0}


def config_facts(config: dict[str, Any]) -> dict[str, Any]:
    """The part of `config.json` that the plan reads."""
    facts = {name: config[name] for name in CONFIG_FACTS if name in config}
    facts.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    facts["quantization"] = config.get("quantization_config", {}).get("quant_method")
    return facts


def lock_model(repo: str, revision: str | None, hub: str, token: str | None = None) -> dict[str, Any]:
    """One entry of the lock. `revision` may be a branch here: what is written down is the commit it points to now."""
    name = urllib.parse.quote(repo)
    wanted = urllib.parse.quote(revision or "main", safe="")
    commit = json.loads(fetch(f"{hub}/api/models/{name}/revision/{wanted}", token))["sha"]
    tree = json.loads(fetch(f"{hub}/api/models/{name}/tree/{commit}?recursive=true", token))
    files, small = [], {}
    for entry in sorted(tree, key=lambda e: str(e["path"])):
        path = entry["path"]
        if entry["type"] != "file" or not path.endswith(NEEDED) or "/" in path:
            continue
        if "lfs" in entry:
            files.append({"path": path, "size": entry["lfs"]["size"], "sha256": entry["lfs"]["oid"]})
            continue
        content = fetch(f"{hub}/{name}/resolve/{commit}/{urllib.parse.quote(path)}", token)
        small[path] = content
        files.append({"path": path, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()})
    if "config.json" not in small:
        raise CannotRun(
            f"{repo} at {commit} has no config.json", "name a repository that holds a model", "HUB_NO_MODEL"
        )
    entry = {"revision": commit, "files": files, "config": config_facts(json.loads(small["config.json"]))}
    if "tokenizer.json" in small:
        entry["tokenizer"] = tokenizer_facts(json.loads(small["tokenizer.json"]))
    return entry
