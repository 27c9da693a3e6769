"""Reads what a GGUF file says of itself: the beginning of the file is enough. Standard library only."""

from __future__ import annotations

import hashlib
import json
import struct
from typing import Any

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
NORMAL, UNUSED = 1, 5  # types of tokens
MAX_ITEMS = 10_000_000


class NeedMore(Exception):
    """The bytes end before the header does."""


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        if self.at + size > len(self.data):
            raise NeedMore
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self.take(self.number("Q")).decode(errors="replace")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            inner, count = self.number("I"), self.number("Q")
            if count > MAX_ITEMS:
                raise ValueError(f"an array of {count} items")
            if inner in SCALARS:
                size = struct.calcsize("<" + SCALARS[inner])
                return list(struct.unpack(f"<{count}{SCALARS[inner]}", self.take(size * count)))
            return [self.value(inner) for _ in range(count)]
        if kind not in SCALARS:
            raise ValueError(f"a value of type {kind}")
        return self.number(SCALARS[kind])


def header(data: bytes) -> tuple[dict[str, Any], list[str]]:
    """Metadata, and the tensors' names. Raises NeedMore when `data` is too short, ValueError when it is no GGUF file."""
    reader = _Reader(data)
    if reader.take(4) != b"GGUF" or (version := reader.number("I")) not in (2, 3):
        raise ValueError("it does not begin as a GGUF file of version 2 or 3 does")
    tensors, entries = reader.number("Q"), reader.number("Q")
    if max(tensors, entries) > MAX_ITEMS:
        raise ValueError(f"version {version} with {tensors} tensors and {entries} entries")
    about = {}
    for _ in range(entries):
        key = reader.string()
        about[key] = reader.value(reader.number("I"))
    names = []
    for _ in range(tensors):
        names.append(reader.string())
        reader.take(8 * reader.number("I") + 4 + 8)  # dimensions, type, offset
    return about, names


def config_facts(about: dict[str, Any], tensors: list[str]) -> dict[str, Any]:
    """The plan's facts, under the names that a config.json has for them. Raises KeyError when one is missing."""
    kind = about["general.architecture"]

    def of(name: str) -> Any:
        return about[f"{kind}.{name}"]

    heads, hidden = of("attention.head_count"), of("embedding_length")
    return {
        "architectures": [kind],
        "vocab_size": about.get(f"{kind}.vocab_size") or len(about["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": of("feed_forward_length"),
        "num_hidden_layers": of("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": about.get(f"{kind}.attention.head_count_kv") or heads,
        "head_dim": about.get(f"{kind}.attention.key_length") or hidden // heads,
        "max_position_embeddings": of("context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "quantization": "gguf",
    }


def tokenizer_facts(about: dict[str, Any]) -> dict[str, Any]:
    """Identity of the tokeniser inside, comparable between GGUF files; rows that no token has do not count."""
    texts = about["tokenizer.ggml.tokens"]
    kinds = about.get("tokenizer.ggml.token_type") or [NORMAL] * len(texts)
    used = [[text, kind] for text, kind in zip(texts, kinds, strict=True) if kind != UNUSED]
    what = [
        about.get("tokenizer.ggml.model"),
        about.get("tokenizer.ggml.pre"),
        used,
        about.get("tokenizer.ggml.merges"),
    ]
    facts = {
        "fingerprint": hashlib.sha256(json.dumps(what, ensure_ascii=False).encode()).hexdigest(),
        "size": len(used),
    }
    template = about.get("tokenizer.chat_template")
    return facts | ({"chat_template": hashlib.sha256(template.encode()).hexdigest()} if template else {})
