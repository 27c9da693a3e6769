"""The tiny target/draft pair of the lab: real Qwen2 checkpoints, made in seconds from nothing but a text.

What they are. A byte-pair tokeniser learnt from one text (this repository's licence), and a draft model that remembers which
token follows which three: each token has a random ±1 vector, one attention block that looks one and two tokens back, and output
rows that are sums of the contexts that a token was seen to follow. The target is the draft plus more layers of random weights
whose output is scaled by `epsilon`: 0 makes target and draft agree always, larger values less and less often. So the acceptance
rate is a dial, and the pair has the shape of the real one: same tokeniser, cheap draft, a target whose vocabulary is 128 rows
wider. They recite, badly, the one text they know; they exercise an engine.

Everything is integer arithmetic and a fixed pseudo-random stream, so the bytes are the same on every machine, and the revision
can be written down.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
import json
import math
import operator
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
WIDTH, KV_WIDTH = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
ROPE_THETA, SHARPNESS, AMPLITUDE = 100.0, 12.0, 8.0
RIVALS, LESSONS, MARGIN = 48, 2, 256
Pair = tuple[str, str]
Tensor = tuple[str, tuple[int, ...], bytes]  # name, shape, bfloat16 little endian


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
            for pair in itertools.pairwise(word):
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
        while pairs := [pair for pair in itertools.pairwise(word) if pair in rank]:
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


def layer(index: int, stream: random.Random, epsilon: float) -> Iterator[Tensor]:
    """One Qwen2 block of random weights; what it adds to the residual stream is proportional to `epsilon`."""
    at = f"model.layers.{index}."
    for name, (rows, columns), scale in (
        ("self_attn.q_proj", (WIDTH, HIDDEN), 0.25), ("self_attn.k_proj", (KV_WIDTH, HIDDEN), 0.25),
        ("self_attn.v_proj", (KV_WIDTH, HIDDEN), 0.1), ("self_attn.o_proj", (HIDDEN, WIDTH), 0.1 * epsilon),
        ("mlp.gate_proj", (INTERMEDIATE, HIDDEN), 0.1), ("mlp.up_proj", (INTERMEDIATE, HIDDEN), 0.1),
        ("mlp.down_proj", (HIDDEN, INTERMEDIATE), 0.1 * epsilon),
    ):  # fmt: skip
        yield f"{at}{name}.weight", (rows, columns), noise(stream, rows * columns, scale)
    for name, rows in (("q_proj", WIDTH), ("k_proj", KV_WIDTH), ("v_proj", KV_WIDTH)):
        yield f"{at}self_attn.{name}.bias", (rows,), bytes(2 * rows)
    yield from norms(at)


def norms(at: str) -> Iterator[Tensor]:
    """The two norms of a block, as they start out."""
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{at}{name}.weight", (HIDDEN,), bf16(1.0) * HIDDEN


def recall(index: int) -> Iterator[Tensor]:
    """The block that looks back: two heads attend to the token before, two to the one before that; each copies half a vector.

    Queries and keys are constant (their biases), so a score depends only on the distance, through the rotary embedding: a sum of
    cosines that peaks where the query's phases say.
    """
    at, half = f"model.layers.{index}.", HEAD_DIM // 2
    angles = [ROPE_THETA ** (-i / half) for i in range(half)]
    query = []
    for head in range(HEADS):
        back = 1 + head % 2
        query += [SHARPNESS * math.cos(back * a) for a in angles] + [-SHARPNESS * math.sin(back * a) for a in angles]
    key = ([SHARPNESS] * half + [0.0] * half) * KV_HEADS
    values = {(row, row): 1.0 for row in range(KV_WIDTH)}
    output = {(block(head) + d, head * HEAD_DIM + d): AMPLITUDE for head in range(HEADS) for d in range(HEAD_DIM)}
    for name, shape, cells in (
        ("self_attn.q_proj", (WIDTH, HIDDEN), {}), ("self_attn.k_proj", (KV_WIDTH, HIDDEN), {}), ("self_attn.v_proj", (KV_WIDTH, HIDDEN), values),
        ("self_attn.o_proj", (HIDDEN, WIDTH), output), ("mlp.gate_proj", (INTERMEDIATE, HIDDEN), {}), ("mlp.up_proj", (INTERMEDIATE, HIDDEN), {}),
        ("mlp.down_proj", (HIDDEN, INTERMEDIATE), {}),
    ):  # fmt: skip
        data = bytearray(2 * shape[0] * shape[1])
        for (row, column), value in cells.items():
            place = 2 * (row * shape[1] + column)
            data[place : place + 2] = bf16(value)
        yield f"{at}{name}.weight", shape, bytes(data)
    for name, bias in (("q_proj", query), ("k_proj", key), ("v_proj", [0.0] * KV_WIDTH)):
        yield f"{at}self_attn.{name}.bias", (len(bias),), b"".join(map(bf16, bias))
    yield from norms(at)


def block(head: int) -> int:
    """First dimension that a head of `recall` writes to: never where its values came from."""
    return {0: 64, 2: 128, 1: 192, 3: 0}[head]


def context(vectors: list[list[int]], now: int, before: int, earlier: int) -> list[int]:
    """What the residual stream holds after `recall`, in units of AMPLITUDE."""
    out = list(vectors[now])
    for head in range(HEADS):
        source, start = vectors[(before, earlier)[head % 2]], (head // 2) * HEAD_DIM
        for d in range(HEAD_DIM):
            out[block(head) + d] += source[start + d]
    return out


def memory_of(ids: list[int], vectors: list[list[int]]) -> list[list[int]]:
    """Output rows: each token's is the sum of the contexts that it was seen to follow, corrected where another would win.

    A perceptron, in integers: exact, so the same everywhere. Only frequent tokens are looked at as rivals: only their rows are
    large.
    """
    rows = [[0] * HIDDEN for _ in range(DRAFT_ROWS)]
    examples = {
        (now, before, earlier): after
        for earlier, before, now, after in zip(ids, ids[1:], ids[2:], ids[3:], strict=False)
    }
    lessons = [(context(vectors, *where), after) for where, after in examples.items()]
    for what, after in lessons:
        rows[after] = list(map(operator.add, rows[after], what))
    rivals = [token for token, _ in collections.Counter(ids).most_common(RIVALS)]
    for _ in range(LESSONS):
        for what, after in lessons:
            scores = {token: sum(map(operator.mul, rows[token], what)) for token in {*rivals, after}}
            best = max(scores, key=lambda token: (scores[token] + (0 if token == after else MARGIN), token))
            if best != after:
                rows[after] = list(map(operator.add, rows[after], what))
                rows[best] = list(map(operator.sub, rows[best], what))
    return rows


def random_vectors() -> list[list[int]]:
    """A ±1 vector for every token."""
    stream = random.Random("specrig tiny embedding")  # noqa: S311 - reproducible weights, not secrets
    bits = [f"{stream.getrandbits(HIDDEN):0{HIDDEN}b}" for _ in range(DRAFT_ROWS)]
    return [[1 if bit == "1" else -1 for bit in row] for row in bits]


def ends(vectors: list[list[int]], memory: list[list[int]], rows: int) -> Iterator[Tensor]:
    """Input vectors, output rows and final norm of a model whose vocabulary is `rows` wide."""
    for name, table, scale in (("model.embed_tokens", vectors, AMPLITUDE), ("lm_head", memory, 1 / 64)):
        # Ids that no text has get zeros: a logit of 0, under that of every follower that was seen.
        filled = [*table, *([[0] * HIDDEN] * (rows - DRAFT_ROWS))]
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


def build_pair(text: str, root: Path, *, epsilon: float = 1.4) -> tuple[TinyModel, TinyModel]:
    """Write target and draft under `root`; return them in that order. `text` is what the memory is of; `epsilon` ≥ 0 lowers acceptance."""
    merges = learn_merges(text, DRAFT_ROWS - 256 - len(SPECIAL) - UNUSED_ROWS)
    vocab = {piece: n for n, piece in enumerate([*byte_alphabet(), *("".join(m) for m in merges)])}
    special = {s: len(vocab) + i for i, s in enumerate(SPECIAL)}
    ids = [special["<|user|>"], special["<|end|>"], special["<|assistant|>"], *encode(text, merges, vocab)]
    vectors = random_vectors()
    memory = memory_of(ids, vectors)
    tokenizer = tokenizer_json(vocab, merges)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin|>", "eos_token": "<|end|>", "pad_token": "<|end|>",
        "model_max_length": CONTEXT, "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip

    def build(name: str, layers: int, rows: int) -> TinyModel:
        folder = root / name
        folder.mkdir(parents=True, exist_ok=True)
        # The same stream for both, so the target starts with the draft's own layers.
        stream = random.Random("specrig tiny layers")  # noqa: S311 - reproducible weights, not secrets
        tensors = list(ends(vectors, memory, rows))
        for n in range(layers):
            tensors += layer(n, stream, epsilon) if n else recall(n)
        write_safetensors(folder / "model.safetensors", tensors)
        config = {
            "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "hidden_size": HIDDEN,
            "intermediate_size": INTERMEDIATE, "num_hidden_layers": layers, "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "vocab_size": rows, "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 1e-6, "rope_theta": ROPE_THETA, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
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
