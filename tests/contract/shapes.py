"""Model folders that hold only a configuration, with the real models' shapes: enough for an engine's own checks."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

# hidden, intermediate, layers, heads, KV heads, vocabulary, AWQ; as published (the padded draft as we make it)
SHAPES: dict[str, tuple[int, int, int, int, int, int, bool]] = {
    "r1-1.5b": (1536, 8960, 28, 12, 2, 151936, False),
    "r1-1.5b-padded": (1536, 8960, 28, 12, 2, 152064, False),
    "r1-1.5b-awq": (1536, 8960, 28, 12, 2, 151936, True),
    "r1-1.5b-awq-padded": (1536, 8960, 28, 12, 2, 152064, True),
    "r1-7b-awq": (3584, 18944, 28, 28, 4, 152064, True),
    "r1-14b-awq": (5120, 13824, 48, 40, 8, 152064, True),
    "r1-32b-awq": (5120, 27648, 64, 40, 8, 152064, True),
}


def config(name: str) -> dict[str, Any]:
    """The `config.json` of one shape."""
    hidden, intermediate, layers, heads, kv_heads, vocab, awq = SHAPES[name]
    quantized = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "max_window_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": 131072,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000 if hidden == 1536 else 1000000.0,
        "sliding_window": None,
        "use_sliding_window": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "tie_word_embeddings": False,
        "torch_dtype": "float16" if awq else "bfloat16",
        "use_cache": True,
        **({"quantization_config": quantized} if awq else {}),
    }


def tokenizer() -> dict[str, Any]:
    """A `tokenizer.json` with next to no words: the engine looks up where a reasoning model's thought begins and ends."""
    names = ["<|end|>", "<think>", "</think>"]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": 2 + i, "content": name, "special": i == 0, **flags} for i, name in enumerate(names)]
    return {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True},
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
    }


def make(root: Path) -> dict[str, Path]:
    """Write every shape below `root`; returns name -> folder."""
    for name in SHAPES:
        (root / name).mkdir(parents=True, exist_ok=True)
        for file, content in {
            "config.json": config(name),
            "tokenizer.json": tokenizer(),
            "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"},
        }.items():
            path, text = root / name / file, json.dumps(content, indent=1)
            if not path.exists() or path.read_text() != text:  # an engine may be reading it
                fresh = path.with_name(f".{file}.{os.getpid()}.{threading.get_ident()}")
                fresh.write_text(text)
                fresh.replace(path)
    return {name: root / name for name in SHAPES}
