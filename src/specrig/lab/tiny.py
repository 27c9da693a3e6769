"""The tiny target/draft pair of the lab: real Qwen2 checkpoints, made in seconds from nothing but a text.

What they are. A byte-pair tokeniser learnt from one text (this repository's licence), and a draft model that is an associative memory of which token
follows which: each token has a random ±1 vector, and the output row of token v is the sum of the vectors of the tokens that v was seen to follow. The
target is the draft plus more layers of random weights whose output is scaled by `epsilon`: 0 makes target and draft agree always, larger values less
and less often. So the acceptance rate is a dial, and the pair has the shape of the real one: same tokeniser, cheap draft, a target whose vocabulary is
128 rows wider. They know no language; they exercise an engine.

Everything is integer arithmetic and a fixed pseudo-random stream, so the bytes are the same on every machine, and the revision can be written down.
"""

from __future__ import annotations

import collections
import hashlib
import json
import random
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HIDDEN, INTERMEDIATE, HEAD_DIM, HEADS, KV_HEADS = 256, 512, 64, 4, 2
DRAFT_ROWS, TARGET_ROWS = 1024, 1152  # 128 rows apart, as 151,936 and 152,064 are
UNUSED_ROWS = 16  # in the draft, too, the last rows belong to no token
DRAFT_LAYERS, TARGET_LAYERS = 2, 24
CONTEXT = 4096
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<|begin|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|user|>' if m.role == 'user' else '<|assistant|>' }}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
Pair = tuple[str, str]


# --- tokeniser -------------------------------------------------------------------------------------------------------


def byte_alphabet() -> list[str]:
    """The 256 printable stand-ins for bytes that GPT-2 style tokenisers use, by byte value."""
    keep = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(b) if b in keep else chr(next(spare)) for b in range(256)]


def learn_merges(text: str, count: int) -> list[Pair]:
    """Byte-pair merges, most frequent first, ties in alphabetical order; words as the ByteLevel pre-tokeniser splits them."""
    alphabet = byte_alphabet()
    words = collections.Counter(
        tuple(alphabet[b] for b in word.encode())
        for word in re.findall(r" ?[A-Za-z]+| ?\d+| ?[^\sA-Za-z\d]+|\s+(?!\S)|\s+", text)
    )
    merges: list[Pair] = []
    while len(merges) < count:
        pairs: collections.Counter[Pair] = collections.Counter()
        for word, times in words.items():
            for pair in zip(word, word[1:], strict=False):
                pairs[pair] += times
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        merged: collections.Counter[tuple[str, ...]] = collections.Counter()
        for word, times in words.items():
            merged[apply_merge(word, best)] += times
        words = merged
    return merges


def apply_merge(word: tuple[str, ...], pair: Pair) -> tuple[str, ...]:
    """`word` with every adjacent occurrence of `pair` joined, left to right."""
    if pair[0] not in word:
        return word
    out: list[str] = []
    for piece in word:
        if out and (out[-1], piece) == pair:
            out[-1] += piece
        else:
            out.append(piece)
    return tuple(out)


def tokenizer_json(vocab: dict[str, int], merges: list[Pair]) -> dict[str, object]:
    """`tokenizer.json` of the `tokenizers` library (byte-level BPE)."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    bpe = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": "",
        "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": vocab, "merges": [list(m) for m in merges],
    }  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [{"id": len(vocab) + i, "content": s} | flags for i, s in enumerate(SPECIAL)],
        "pre_tokenizer": level, "decoder": level, "model": bpe,
    }  # fmt: skip


def encode(text: str, merges: list[Pair], vocab: dict[str, int]) -> list[int]:
    """Token ids of `text`, as the tokeniser above gives them."""
    alphabet, rank = byte_alphabet(), {pair: n for n, pair in enumerate(merges)}
    ids: list[int] = []
    for part in re.findall(r" ?[A-Za-z]+| ?\d+| ?[^\sA-Za-z\d]+|\s+(?!\S)|\s+", text):
        word = tuple(alphabet[b] for b in part.encode())
        while pairs := [pair for pair in zip(word, word[1:], strict=False) if pair in rank]:
            word = apply_merge(word, min(pairs, key=rank.__getitem__))
        ids += [vocab[piece] for piece in word]
    return ids


# --- weights ---------------------------------------------------------------------------------------------------------


def bf16(value: float) -> bytes:
    """Round towards zero to bfloat16, little endian: the upper half of the float32."""
    return struct.pack("<f", value)[2:]


def noise(stream: random.Random, count: int, scale: float) -> bytes:
    """`count` bfloat16 values, uniform in [-scale, scale] on a grid of 256."""
    table = [bf16(scale * (b - 127.5) / 127.5) for b in range(256)]
    return b"".join(map(table.__getitem__, stream.randbytes(count)))


def layer(index: int, stream: random.Random, epsilon: float) -> Iterator[tuple[str, tuple[int, ...], bytes]]:
    """Tensors of one Qwen2 block; what it adds to the residual stream is proportional to `epsilon`."""
    at, kv = f"model.layers.{index}.", KV_HEADS * HEAD_DIM
    width = HEADS * HEAD_DIM
    one = bf16(1.0)
    for name, rows, columns, scale in (
        ("self_attn.q_proj", width, HIDDEN, 0.25), ("self_attn.k_proj", kv, HIDDEN, 0.25), ("self_attn.v_proj", kv, HIDDEN, 0.1),
        ("self_attn.o_proj", HIDDEN, width, 0.1 * epsilon), ("mlp.gate_proj", INTERMEDIATE, HIDDEN, 0.1),
        ("mlp.up_proj", INTERMEDIATE, HIDDEN, 0.1), ("mlp.down_proj", HIDDEN, INTERMEDIATE, 0.1 * epsilon),
    ):  # fmt: skip
        yield f"{at}{name}.weight", (rows, columns), noise(stream, rows * columns, scale)
    for name, rows in (("q_proj", width), ("k_proj", kv), ("v_proj", kv)):
        yield f"{at}self_attn.{name}.bias", (rows,), bytes(2 * rows)
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{at}{name}.weight", (HIDDEN,), one * HIDDEN


def embeddings(ids: list[int], rows: int) -> Iterator[tuple[str, tuple[int, ...], bytes]]:
    """Input vectors, output rows and final norm of the associative memory over the token sequence `ids`."""
    stream = random.Random("specrig tiny embedding")  # noqa: S311 - reproducible weights, not secrets
    vectors = [
        [1 if bit == "1" else -1 for bit in f"{stream.getrandbits(HIDDEN):0{HIDDEN}b}"] for _ in range(DRAFT_ROWS)
    ]
    memory = [[0] * HIDDEN for _ in range(DRAFT_ROWS)]
    followers = collections.Counter(zip(ids, ids[1:], strict=False))
    totals = collections.Counter(ids[:-1])
    for (before, after), times in sorted(followers.items()):
        # Share of the times that `after` came next, in 64ths: integers keep the sum exact, so the bytes do not depend on order.
        share = (64 * times + totals[before] // 2) // totals[before]
        memory[after] = [m + share * v for m, v in zip(memory[after], vectors[before], strict=True)]
    for name, table, scale in (("model.embed_tokens", vectors, 8.0), ("lm_head", memory, 1 / 512)):
        filled = [
            *table,
            *([[0] * HIDDEN] * (rows - DRAFT_ROWS)),
        ]  # ids that no text has: logit 0, under every seen follower
        yield f"{name}.weight", (rows, HIDDEN), b"".join(bf16(scale * x) for row in filled for x in row)
    yield "model.norm.weight", (HIDDEN,), bf16(1.0) * HIDDEN


def write_safetensors(path: Path, tensors: list[tuple[str, tuple[int, ...], bytes]]) -> None:
    """The safetensors format: 8 bytes of header length, a JSON header, the data."""
    header, offset = {}, 0
    for name, shape, data in tensors:
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, _, data in tensors:
            file.write(data)


# --- the pair --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TinyModel:
    """One checkpoint: where it lies, its repository name, and the revision that its content determines."""

    repo: str
    revision: str  # 40 hex digits: SHA-1 over every file's path and content
    directory: Path


def build_pair(text: str, root: Path, *, epsilon: float = 0.6) -> tuple[TinyModel, TinyModel]:
    """Write target and draft under `root`; return them in that order. `text` is what the memory is of; `epsilon` ≥ 0 lowers acceptance."""
    merges = learn_merges(text, DRAFT_ROWS - 256 - len(SPECIAL) - UNUSED_ROWS)
    vocab = {piece: n for n, piece in enumerate([*byte_alphabet(), *("".join(m) for m in merges)])}
    ids = encode(text, merges, vocab)
    tokenizer = tokenizer_json(vocab, merges)
    special = {s: len(vocab) + i for i, s in enumerate(SPECIAL)}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin|>", "eos_token": "<|end|>", "pad_token": "<|end|>",
        "model_max_length": CONTEXT, "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip

    def build(name: str, layers: int, rows: int) -> TinyModel:
        folder = root / name
        folder.mkdir(parents=True, exist_ok=True)
        stream = random.Random("specrig tiny layers")  # noqa: S311 - the same stream, so the target starts with the draft's own layers
        tensors = list(embeddings(ids, rows))
        for n in range(layers):
            tensors += layer(n, stream, 1.0 if n < DRAFT_LAYERS else epsilon)
        write_safetensors(folder / "model.safetensors", tensors)
        config = {
            "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE,
            "num_hidden_layers": layers, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "vocab_size": rows,
            "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "use_sliding_window": False, "attention_dropout": 0.0, "bos_token_id": special["<|begin|>"], "eos_token_id": special["<|end|>"],
        }  # fmt: skip
        for file, content in (
            ("config.json", config),
            ("tokenizer.json", tokenizer),
            ("tokenizer_config.json", settings),
        ):
            (folder / file).write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n")
        digest = hashlib.sha1(usedforsecurity=False)
        for path in sorted(folder.iterdir()):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
        return TinyModel(f"specrig-lab/{name}", digest.hexdigest(), folder)

    return build("tiny-target", TARGET_LAYERS, TARGET_ROWS), build("tiny-draft", DRAFT_LAYERS, DRAFT_ROWS)
