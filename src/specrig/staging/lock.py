"""Resolves repositories on the hub into the model lock: commit, files with size and sha256, and the facts that the plan needs.

The hub is asked on the controller only. A rig is given the lock and needs no trust in where its bytes come from.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from specrig.console import CannotRun
from specrig.plan.planner import HUB_ENDPOINT
from specrig.plan.resolve import gguf_parts
from specrig.staging import gguf

# What an engine reads besides the weights.
NEEDED = (".json", ".jinja", "merges.txt", "tokenizer.model", "LICENSE", "LICENSE.txt", "LICENSE.md")
# Loading these runs code that came with them: pickled weights, and Python itself.
UNSAFE = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5", ".msgpack", ".py")
WEIGHTS = ".safetensors"
INDEX = "model.safetensors.index.json"
# What the facts are made of is fetched whole, also where it is kept in large file storage: a tokenizer.json often is.
READ = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", INDEX)
CONFIG_FACTS = (
    "architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "tie_word_embeddings", "torch_dtype",
)  # fmt: skip
TIMEOUT_S = 60
GGUF_FIRST, GGUF_MOST = (
    1 << 20,
    1 << 26,
)  # bytes of a GGUF file's beginning: a first try, and where a header must have ended


def endpoint(given: str | None = None) -> str:
    """The hub's base URL: given, or HF_ENDPOINT, or Hugging Face's own."""
    return (given or os.environ.get("HF_ENDPOINT") or HUB_ENDPOINT).rstrip("/")


class OwnHostOnly(urllib.request.HTTPRedirectHandler):
    """Follows redirects; the token goes on only where scheme, host and port stay the same."""

    def redirect_request(self, request: Any, *rest: Any) -> urllib.request.Request | None:
        """The next request, without the token where it leaves home."""
        new = super().redirect_request(request, *rest)
        token = request.unredirected_hdrs.get("Authorization")
        if new and token and urllib.parse.urlsplit(new.full_url)[:2] == urllib.parse.urlsplit(request.full_url)[:2]:
            new.add_unredirected_header("Authorization", token)
        return new


def _open(url: str, token: str | None, first: int = 0) -> tuple[bytes, str]:
    """GET: (body, Link header); with `first`, no more than so many bytes of the body."""
    if not url.startswith(("https://", "http://")):
        raise CannotRun(f"{url} is no http address", "set HF_ENDPOINT to the hub's base URL", "HUB_ENDPOINT")
    request = urllib.request.Request(url)  # noqa: S310 - scheme checked above
    if token:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    if first:
        request.add_header("Range", f"bytes=0-{first - 1}")
    try:
        with urllib.request.build_opener(OwnHostOnly).open(request, timeout=TIMEOUT_S) as response:
            return response.read(first or None), response.headers.get("Link", "")
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


def fetch(url: str, token: str | None) -> bytes:
    """GET one small thing from the hub; a failure says which URL and what to do."""
    return _open(url, token)[0]


def _json(url: str, body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError as error:
        raise CannotRun(
            f"{url} did not answer with JSON", "check that HF_ENDPOINT is a model hub", "HUB_DAMAGED"
        ) from error


def fetch_json(url: str, token: str | None) -> Any:
    """The same for a JSON document; anything else, such as a portal's login page, is told as such."""
    return _json(url, fetch(url, token))


def fetch_list(url: str, token: str | None) -> list[Any]:
    """A list that the hub may give in pages, each naming the next one in its Link header."""
    found: list[Any] = []
    for _ in range(1000):
        body, link = _open(url, token)
        found += _json(url, body)
        following = re.search(r"<([^>]+)>;\s*rel=\"?next", link)
        if not following:
            break
        url = urllib.parse.urljoin(url, following[1])
    return found


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
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    added = sorted((t["id"], t["content"], *(bool(t.get(f)) for f in flags)) for t in tokenizer.get("added_tokens", []))
    what = [
        [model.get(name) for name in ("type", "ignore_merges", "byte_fallback")],
        sorted(vocab.items()),
        merges,
        added,
        tokenizer.get("normalizer"),
        tokenizer.get("pre_tokenizer"),
    ]
    text = json.dumps(what, sort_keys=True, ensure_ascii=False)
    ids |= {number for number, *_ in added}
    return {"fingerprint": hashlib.sha256(text.encode()).hexdigest(), "size": max(ids) + 1 if ids else 0}


def chat_template(known: Mapping[str, bytes]) -> str | None:
    """The chat template of a model's small files {path: content}: a file of its own, else a field of tokenizer_config.json."""
    if "chat_template.jinja" in known:
        return known["chat_template.jinja"].decode()
    template = json.loads(known.get("tokenizer_config.json", b"{}")).get("chat_template")
    return template if isinstance(template, str) else None


def config_facts(config: dict[str, Any]) -> dict[str, Any]:
    """The part of `config.json` that the plan reads."""
    facts = {name: config[name] for name in CONFIG_FACTS if name in config}
    facts.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    facts["quantization"] = (config.get("quantization_config") or {}).get("quant_method")
    return facts


def licence_of(about: dict[str, Any]) -> str | None:
    """The licence that the hub names: its identifier, or the name that the model card gives for `other`."""
    card = about.get("cardData") or {}
    tagged = (t.partition(":")[2] for t in about.get("tags") or [] if str(t).startswith("license:"))
    licence = card.get("license") or next(tagged, None)
    if licence == "other":
        licence = card.get("license_name") or licence
    return str(licence) if licence else None


def needed(entries: Mapping[str, dict[str, Any]], index: bytes | None, unsafe: Sequence[str], repo: str) -> list[str]:
    """Paths of the files that an engine reads, of all that a repository has at its top.

    Weights are the index's shards, else model.safetensors, else every .safetensors: a second copy in another layout is left
    out. Raises CannotRun HUB_UNSAFE where the only weights are pickled and are not allowed by name, HUB_NO_MODEL.
    """
    if strange := sorted(set(unsafe) - set(entries)):
        raise CannotRun(f"{repo} has no file {strange[0]}", "name a file at the repository's top", "HUB_NO_MODEL")
    chosen = {path for path in entries if path.endswith(NEEDED)} | set(unsafe)
    if index is not None:
        weights = set(json.loads(index)["weight_map"].values())
        if lost := sorted(weights - set(entries)):
            raise CannotRun(
                f"{repo}: the index names {lost[0]}, which is not there", "another revision", "HUB_NO_MODEL"
            )
    else:
        every = {path for path in entries if path.endswith(WEIGHTS)}
        weights = {"model.safetensors"} & every or every
    if not weights | set(unsafe):
        pickled = sorted(path for path in entries if path.endswith(UNSAFE) and not path.endswith(".py"))
        if pickled:
            raise CannotRun(
                f"{repo} has no safetensors; its weights are pickled, and loading them runs code: {', '.join(pickled)}",
                f"take a repository with safetensors, or trust these files by name: --allow-unsafe {pickled[0]}",
                "HUB_UNSAFE",
            )
        raise CannotRun(f"{repo} has no weights", "name a repository that holds a model", "HUB_NO_MODEL")
    return sorted(chosen | weights)


def gguf_header(url: str, token: str | None) -> tuple[dict[str, Any], list[str]]:
    """What the GGUF file at `url` says of itself, from its first bytes. Raises CannotRun HUB_NO_MODEL."""
    size = GGUF_FIRST
    while True:
        try:
            return gguf.header(_open(url, token, size)[0])
        except gguf.NeedMore as error:
            if size >= GGUF_MOST:
                raise CannotRun(f"{url} has no end to its header", "name another file", "HUB_NO_MODEL") from error
            size *= 4
        except ValueError as error:
            raise CannotRun(f"{url} is no GGUF file: {error}", "name another file", "HUB_NO_MODEL") from error


def lock_model(
    repo: str,
    revision: str | None,
    hub: str,
    token: str | None = None,
    unsafe: Sequence[str] = (),
    only: Sequence[str] = (),
) -> dict[str, Any]:
    """One entry of the lock. `revision` may be a branch here: what is written down is the commit it points to now.

    `unsafe` names files to lock although loading them runs code. `only` are GGUF files: they hold all that an engine needs,
    so they (and the other parts of a split one) are taken alone, and the facts are read from the first one.
    """
    name = urllib.parse.quote(repo)
    wanted = urllib.parse.quote(revision or "main", safe="")
    about = fetch_json(f"{hub}/api/models/{name}/revision/{wanted}", token)
    commit = about["sha"]
    tree = fetch_list(f"{hub}/api/models/{name}/tree/{commit}?recursive=true", token)
    # An empty file holds nothing that an engine could need.
    entries = {str(e["path"]): e for e in tree if e["type"] == "file" and "/" not in e["path"] and e["size"]}

    def read(path: str) -> bytes:
        content = fetch(f"{hub}/{name}/resolve/{commit}/{urllib.parse.quote(path)}", token)
        large, oid = entries[path].get("lfs"), entries[path].get("oid")
        git = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
        if hashlib.sha256(content).hexdigest() != large["oid"] if large else git != oid:
            raise CannotRun(f"{path} of {repo} is not what {hub} lists", "try again, or another mirror", "HUB_DAMAGED")
        return content

    if only:
        parts = [part for file in sorted(only) for part in gguf_parts(file)]
        return _gguf_entry(repo, commit, f"{hub}/{name}/resolve/{commit}", entries, parts, about, token)
    if "config.json" not in entries:
        raise CannotRun(
            f"{repo} at {commit} has no config.json", "name a repository that holds a model", "HUB_NO_MODEL"
        )
    known = {path: read(path) for path in READ if path in entries}
    files: list[dict[str, Any]] = []
    try:
        for path in needed(entries, known.get(INDEX), unsafe, repo):
            large = entries[path].get("lfs")
            if large and path not in known:
                files.append({"path": path, "size": large["size"], "sha256": large["oid"]})
                continue
            content = known[path] if path in known else read(path)
            files.append({"path": path, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()})
        entry = {
            "revision": commit,
            "licence": licence_of(about),
            "size": sum(file["size"] for file in files),
            "files": files,
            "config": config_facts(json.loads(known["config.json"])),
        }
        if "tokenizer.json" in known:
            entry["tokenizer"] = tokenizer_facts(json.loads(known["tokenizer.json"]))
            if template := chat_template(known):
                entry["tokenizer"]["chat_template"] = hashlib.sha256(template.encode()).hexdigest()
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CannotRun(
            f"{repo} at {commit}: config.json, tokenizer.json or the index is not as a text model has it ({error!r})",
            "name a repository that holds a plain causal language model",
            "HUB_NO_MODEL",
        ) from error
    return entry | ({"unsafe": sorted(unsafe)} if unsafe else {})


def _gguf_entry(
    repo: str,
    commit: str,
    base: str,
    entries: Mapping[str, dict[str, Any]],
    files: Sequence[str],
    about: dict[str, Any],
    token: str | None,
) -> dict[str, Any]:
    rows = []
    for path in files:
        large = entries.get(path, {}).get("lfs")
        if not large:
            there = ", ".join(sorted(p for p in entries if p.endswith(".gguf"))[:8]) or "none"
            raise CannotRun(f"{repo} has no file {path}; its GGUF files: {there}", "file: one of these", "HUB_NO_MODEL")
        rows.append({"path": path, "size": large["size"], "sha256": large["oid"]})
    said, tensors = gguf_header(f"{base}/{urllib.parse.quote(files[0])}", token)
    try:
        facts = {"config": gguf.config_facts(said, tensors), "tokenizer": gguf.tokenizer_facts(said)}
    except (KeyError, TypeError, ValueError) as error:
        cause = f"{repo}: {files[0]} is not as a text model has it ({error!r})"
        raise CannotRun(cause, "name a file that holds a plain causal language model", "HUB_NO_MODEL") from error
    size = sum(row["size"] for row in rows)
    return {"revision": commit, "licence": licence_of(about), "size": size, "files": rows, **facts}


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What differs between two entries of one repository, for a person; empty when nothing does."""
    old, new = ({f["path"]: f for f in entry.get("files", [])} for entry in (before, after))
    told = []
    if before.get("revision") != after.get("revision"):
        told.append(f"commit {str(before.get('revision'))[:12]} -> {str(after.get('revision'))[:12]}")
    if before.get("licence", after.get("licence")) != after.get("licence"):
        told.append(f"licence {before.get('licence')} -> {after.get('licence')}")
    told += [f"{path} is new ({new[path]['size']} bytes)" for path in sorted(set(new) - set(old))]
    told += [f"{path} is gone" for path in sorted(set(old) - set(new))]
    for path in sorted(set(old) & set(new)):
        if old[path].get("sha256") != new[path].get("sha256"):
            told.append(f"{path} has other bytes ({old[path]['size']} -> {new[path]['size']})")
    return told
