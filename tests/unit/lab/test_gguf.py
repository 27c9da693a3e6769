"""The lab's GGUF writer and the stager's reader agree, and both say what the safetensors pair says."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from specrig.lab import gguf as writer
from specrig.lab import tiny
from specrig.staging import gguf

TOKENIZER = {
    "model": {"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]},
    "added_tokens": [{"id": 3, "content": "<|end|>"}, {"id": 4, "content": "<|begin|>"}],
}
CONFIG = {
    "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 8,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 100.0, "bos_token_id": 4, "eos_token_id": 3,
}  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    tensors = [
        ("model.embed_tokens.weight", (8, 8), b"".join(tiny.bf16(n) for n in range(64))),
        ("lm_head.weight", (8, 8), bytes(128)),
        ("model.norm.weight", (8,), tiny.bf16(1.0) * 8),
        ("model.layers.0.self_attn.q_proj.bias", (8,), tiny.bf16(-2.5) * 8),
    ]
    tiny.write_safetensors(folder / "model.safetensors", tensors)
    for name, content in (
        ("config", CONFIG),
        ("tokenizer", TOKENIZER),
        ("tokenizer_config", {"chat_template": "{{ x }}"}),
    ):
        (folder / f"{name}.json").write_text(json.dumps(content))
    return writer.convert(folder, tmp_path / "out" / "tiny.gguf")


def test_what_was_written_is_read(file: Path) -> None:
    about, names = gguf.header(file.read_bytes())
    assert names == ["token_embd.weight", "output.weight", "output_norm.weight", "blk.0.attn_q.bias"]
    facts = gguf.config_facts(about, names)
    assert facts == {
        "architectures": ["qwen2"], "vocab_size": 8, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 4, "max_position_embeddings": 64, "tie_word_embeddings": False, "quantization": "gguf",
    }  # fmt: skip
    assert about["tokenizer.ggml.tokens"] == ["a", "b", "ab", "<|end|>", "<|begin|>", "[PAD5]", "[PAD6]", "[PAD7]"]
    assert about["tokenizer.ggml.merges"] == ["a b"]


def test_numbers_are_widened_and_aligned(file: Path) -> None:
    data = file.read_bytes()
    end = data.rindex(struct.pack("<f", 1.0) * 8)
    assert end % 32 == 0 and struct.unpack_from("<8f", data, end) == (1.0,) * 8
    start = data.index(struct.pack("<4f", 0, 1, 2, 3))
    assert start % 32 == 0 and struct.unpack_from("<64f", data, start) == tuple(map(float, range(64)))
    assert data[-32:] == struct.pack("<f", -2.5) * 8


def test_the_same_model_gives_the_same_bytes(file: Path, tmp_path: Path) -> None:
    again = writer.convert(tmp_path / "tiny", tmp_path / "again.gguf")
    assert again.read_bytes() == file.read_bytes()


@pytest.mark.parametrize("cut", [3, 20, 200])
def test_a_beginning_that_is_too_short_asks_for_more(file: Path, cut: int) -> None:
    with pytest.raises(gguf.NeedMore):
        gguf.header(file.read_bytes()[:cut])


@pytest.mark.parametrize(
    "data", [b"PK\3\4" + bytes(64), b"GGUF" + struct.pack("<IQQ", 9, 1, 1), b"GGUF" + b"\xff" * 64]
)
def test_something_else_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"GGUF|version"):
        gguf.header(data)


def test_a_fingerprint_is_of_the_tokens_in_use(file: Path) -> None:
    about, _ = gguf.header(file.read_bytes())

    def changed(**over: Any) -> str:
        return str(gguf.tokenizer_facts({**about, **over})["fingerprint"])

    wider = {
        "tokenizer.ggml.tokens": [*about["tokenizer.ggml.tokens"], "[PAD8]"],
        "tokenizer.ggml.token_type": [*about["tokenizer.ggml.token_type"], gguf.UNUSED],
    }
    assert changed(**wider) == changed()
    assert gguf.tokenizer_facts(about)["size"] == 5
    assert changed(**{"tokenizer.ggml.merges": []}) != changed()
