"""Writes small models in safetensors format, and reads them back, by the format's own description."""

from __future__ import annotations

import hashlib
import json
import struct
from math import prod
from pathlib import Path
from typing import Any

WIDTH = 6


def data(name: str, size: int) -> bytes:
    return hashlib.shake_256(name.encode()).digest(size)


def write_safetensors(path: Path, tensors: dict[str, list[int]], dtype: str = "BF16", item: int = 2) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = b""
    for name, shape in tensors.items():
        size = prod(shape) * item
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + size]}
        body += data(name, size)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def read_safetensors(path: Path) -> tuple[dict[str, Any], dict[str, tuple[str, list[int], bytes]]]:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    body = raw[8 + length :]
    assert sum(t["data_offsets"][1] - t["data_offsets"][0] for t in header.values()) == len(body)
    return metadata, {n: (t["dtype"], t["shape"], body[slice(*t["data_offsets"])]) for n, t in header.items()}


def write_model(
    path: Path, vocab: int = 16, sharded: bool = False, tied: bool = False, dtype: str = "BF16", item: int = 2
) -> None:
    path.mkdir(parents=True)
    config = {"model_type": "llama", "vocab_size": vocab, "hidden_size": WIDTH, "tie_word_embeddings": tied, "x": "é"}
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text("{}" + " " * 200)
    first = {"model.embed_tokens.weight": [vocab, WIDTH], "model.layers.0.mlp.weight": [5, WIDTH]}
    last = {"model.norm.weight": [WIDTH], **({} if tied else {"lm_head.weight": [vocab, WIDTH]})}
    if not sharded:
        write_safetensors(path / "model.safetensors", {**first, **last}, dtype, item)
        return
    middle = {"model.layers.1.mlp.weight": [5, WIDTH]}
    shards = {f"model-0000{n}-of-00003.safetensors": t for n, t in enumerate((first, middle, last), 1)}
    for name, tensors in shards.items():
        write_safetensors(path / name, tensors, dtype, item)
    total = sum(prod(s) * item for t in shards.values() for s in t.values())
    index = {"metadata": {"total_size": total}, "weight_map": {t: n for n, ts in shards.items() for t in ts}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
