"""Resolves repositories on the hub into the model lock: commit, files with size and sha256, and the facts that the plan needs.

The hub is asked on the controller only. A rig is given the lock and needs no trust in where its bytes come from.
"""

from __future__ import annotations

import hashlib
import http.client
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
# What the facts are made of is fetched whole, also where it is kept in large file storage: a tokenizer.json often is.
READ = ("config.json", "tokenizer.json")
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
    except (OSError, http.client.HTTPException) as error:
        raise CannotRun(
            f"{url} cannot be reached: {getattr(error, 'reason', error)}",
            "check the network, or set HF_ENDPOINT to a mirror",
            "HUB_UNREACHABLE",
        ) from error


def fetch_json(url: str, token: str | None) -> Any:
    """The same for a JSON document; anything else, such as a portal's login page, is told as such."""
    try:
        return json.loads(fetch(url, token))
    except ValueError as error:
        raise CannotRun(
            f"{url} did not answer with JSON", "check that HF_ENDPOINT is a model hub", "HUB_DAMAGED"
        ) from error


def tokenizer_facts(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """Identity of a tokeniser by what it does: two models with equal fingerprints turn the same text into the same ids.

    Chat templates, padding and truncation are left out: they do not change ids.
    """
    model = tokenizer.get("model", {})
    vocab = model.get("vocab", {})
    if isinstance(vocab, list):  # Unigram: [token, score], and the place is the id
        vocab = {token: [number, score] for number, (token, score) in enumerate(vocab)}
        ids = {number for number, _ in vocab.values()}
    else:
        ids = set(vocab.values())
    merges = [m if isinstance(m, str) else " ".join(m) for m in model.get("merges", [])]
    added = sorted((t["id"], t["content"]) for t in tokenizer.get("added_tokens", []))
    what = [
        model.get("type"),
        sorted(vocab.items()),
        merges,
        added,
        tokenizer.get("normalizer"),
        tokenizer.get("pre_tokenizer"),
    ]
    text = json.dumps(what, sort_keys=True, ensure_ascii=False)
    ids |= {number for number, _ in added}
    return {"fingerprint": hashlib.sha256(text.encode()).hexdigest(), "size": max(ids) + 1 if ids else 0}


def config_facts(config: dict[str, Any]) -> dict[str, Any]:
    """The part of `config.json` that the plan reads."""
    facts = {name: config[name] for name in CONFIG_FACTS if name in config}
    facts.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    facts["quantization"] = (config.get("quantization_config") or {}).get("quant_method")
    return facts


def lock_model(repo: str, revision: str | None, hub: str, token: str | None = None) -> dict[str, Any]:
    """One entry of the lock. `revision` may be a branch here: what is written down is the commit it points to now."""
    name = urllib.parse.quote(repo)
    wanted = urllib.parse.quote(revision or "main", safe="")
    commit = fetch_json(f"{hub}/api/models/{name}/revision/{wanted}", token)["sha"]
    tree = fetch_json(f"{hub}/api/models/{name}/tree/{commit}?recursive=true", token)
    files, read = [], {}
    for entry in sorted(tree, key=lambda e: str(e["path"])):
        path = entry["path"]
        if entry["type"] != "file" or not path.endswith(NEEDED) or "/" in path:
            continue
        large = entry.get("lfs")
        if large and path not in READ:
            files.append({"path": path, "size": large["size"], "sha256": large["oid"]})
            continue
        content = fetch(f"{hub}/{name}/resolve/{commit}/{urllib.parse.quote(path)}", token)
        digest = hashlib.sha256(content).hexdigest()
        if large and digest != large["oid"]:
            raise CannotRun(f"{path} of {repo} is not what {hub} lists", "try again, or another mirror", "HUB_DAMAGED")
        read[path] = content
        files.append({"path": path, "size": len(content), "sha256": digest})
    if "config.json" not in read:
        raise CannotRun(
            f"{repo} at {commit} has no config.json", "name a repository that holds a model", "HUB_NO_MODEL"
        )
    try:
        entry = {"revision": commit, "files": files, "config": config_facts(json.loads(read["config.json"]))}
        if "tokenizer.json" in read:
            entry["tokenizer"] = tokenizer_facts(json.loads(read["tokenizer.json"]))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CannotRun(
            f"{repo} at {commit}: config.json or tokenizer.json is not as a text model has it ({error!r})",
            "name a repository that holds a plain causal language model",
            "HUB_NO_MODEL",
        ) from error
    return entry
