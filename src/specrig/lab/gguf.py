"""Writes a tiny model as one GGUF file (version 3): what llama.cpp and Ollama read. Of the lab's own pair only.

All numbers become float32: the engine multiplies one row and several by different code, and with 16 bits the two round so
differently that a tiny model's text changes. The tokeniser goes inside: GPT-2 style byte-pair encoding; rows of the
vocabulary that no token has are called [PAD…], as the format's own converter does.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from specrig.lab.tiny import TinyModel

ALIGNMENT = 32
U32, I32, F32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9  # types of metadata values
TENSOR_F32 = 0
NORMAL, CONTROL, UNUSED = 1, 3, 5  # types of tokens
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def string(text: str) -> bytes:
    """A string: its length in 8 bytes, its bytes."""
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def value(kind: int, what: Any) -> bytes:
    """One metadata value without its type."""
    if kind == STRING:
        return string(what)
    return struct.pack({U32: "<I", I32: "<i", F32: "<f", BOOL: "<?"}[kind], what)


def entry(key: str, kind: int, what: Any) -> bytes:
    """One metadata entry; a list becomes an array of `kind`."""
    if isinstance(what, list):
        items = b"".join(value(kind, item) for item in what)
        return string(key) + struct.pack("<IIQ", ARRAY, kind, len(what)) + items
    return string(key) + struct.pack("<I", kind) + value(kind, what)


def tensor_name(name: str) -> str:
    """A tensor's name in this format. Raises KeyError for one that Qwen2 does not have."""
    if name in NAMES:
        return NAMES[name]
    _, _, number, rest = name.split(".", 3)
    part, _, kind = rest.rpartition(".")
    return f"blk.{number}.{PARTS[part]}.{kind}"


def tokens(tokenizer: Mapping[str, Any], rows: int) -> tuple[list[str], list[int]]:
    """Every row's text and type: the vocabulary, the added tokens, then rows that belong to none."""
    texts, kinds = [f"[PAD{row}]" for row in range(rows)], [UNUSED] * rows
    for text, row in tokenizer["model"]["vocab"].items():
        texts[row], kinds[row] = text, NORMAL
    for added in tokenizer["added_tokens"]:
        texts[added["id"]], kinds[added["id"]] = added["content"], CONTROL
    return texts, kinds


def metadata(
    name: str, config: Mapping[str, Any], tokenizer: Mapping[str, Any], template: str
) -> list[tuple[str, int, Any]]:
    """What the file says of itself: shape, rotary embedding, tokeniser, chat template."""
    texts, kinds = tokens(tokenizer, config["vocab_size"])
    return [
        ("general.architecture", STRING, "qwen2"),
        ("general.name", STRING, name),
        ("general.alignment", U32, ALIGNMENT),
        ("general.file_type", U32, 0),  # all float32
        ("qwen2.block_count", U32, config["num_hidden_layers"]),
        ("qwen2.context_length", U32, config["max_position_embeddings"]),
        ("qwen2.embedding_length", U32, config["hidden_size"]),
        ("qwen2.feed_forward_length", U32, config["intermediate_size"]),
        ("qwen2.attention.head_count", U32, config["num_attention_heads"]),
        ("qwen2.attention.head_count_kv", U32, config["num_key_value_heads"]),
        ("qwen2.attention.layer_norm_rms_epsilon", F32, config["rms_norm_eps"]),
        ("qwen2.rope.freq_base", F32, config["rope_theta"]),
        ("tokenizer.ggml.model", STRING, "gpt2"),
        ("tokenizer.ggml.pre", STRING, "gpt-2"),
        ("tokenizer.ggml.tokens", STRING, texts),
        ("tokenizer.ggml.token_type", I32, kinds),
        ("tokenizer.ggml.merges", STRING, [" ".join(pair) for pair in tokenizer["model"]["merges"]]),
        ("tokenizer.ggml.bos_token_id", U32, config["bos_token_id"]),
        ("tokenizer.ggml.eos_token_id", U32, config["eos_token_id"]),
        ("tokenizer.ggml.add_bos_token", BOOL, False),
        ("tokenizer.chat_template", STRING, template),
    ]


def read_safetensors(path: Path) -> Iterable[tuple[str, list[int], bytes]]:
    """Name, shape and bfloat16 bytes of every tensor of a file that `tiny` wrote."""
    data = path.read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    start = 8 + size
    for name, about in json.loads(data[8:start]).items():
        first, last = about["data_offsets"]
        yield name, about["shape"], data[start + first : start + last]


def widened(data: bytes) -> bytes:
    """bfloat16 as float32: two zero bytes below each."""
    wide = bytearray(2 * len(data))
    wide[2::4], wide[3::4] = data[0::2], data[1::2]
    return bytes(wide)


def convert(folder: Path, target: Path) -> Path:
    """Write the model in `folder` (config.json, tokenizer.json, model.safetensors) as the file `target`; the same bytes each time."""
    config, tokenizer, settings = (
        json.loads((folder / name).read_text()) for name in ("config.json", "tokenizer.json", "tokenizer_config.json")
    )
    about = metadata(folder.name, config, tokenizer, settings["chat_template"])
    infos, blobs, offset = [], [], 0
    for name, shape, data in read_safetensors(folder / "model.safetensors"):
        # Dimensions go from the fastest to the slowest.
        place = struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), TENSOR_F32, offset)
        infos.append(string(tensor_name(name)) + place)
        padded = widened(data) + bytes(-2 * len(data) % ALIGNMENT)
        blobs.append(padded)
        offset += len(padded)
    head = (
        b"GGUF"
        + struct.pack("<IQQ", 3, len(infos), len(about))
        + b"".join(entry(*row) for row in about)
        + b"".join(infos)
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(head + bytes(-len(head) % ALIGNMENT) + b"".join(blobs))
    return target


def publishable(model: TinyModel, root: Path) -> TinyModel:
    """`model` as a repository of one GGUF file below `root`; its revision follows from the file's bytes."""
    repo = f"{model.repo}-gguf"
    path = convert(model.directory, root / repo.partition("/")[2] / f"{model.directory.name}.gguf")
    digest = hashlib.sha1(path.name.encode() + b"\0" + path.read_bytes(), usedforsecurity=False)
    return TinyModel(repo, digest.hexdigest(), path.parent)
