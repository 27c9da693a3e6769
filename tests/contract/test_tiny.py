"""The tiny pair: the same bytes everywhere, and the shape of the real pair. Here because building it takes seconds."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from specrig import runner
from specrig.lab import tiny

# Written down because a rig's lock may name it: other bytes from the same sources would be a fault, not a new model.
TARGET, DRAFT = "4b5435ff6f1d81295fe4da8f801b854b671f0556", "1026803888cecc684921e840a735986d5dbc9b82"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[tiny.TinyModel, tiny.TinyModel]:
    return tiny.build_pair((runner.ROOT / "LICENSE").read_text(), tmp_path_factory.mktemp("pair"))


def read(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    blob = path.read_bytes()
    (length,) = struct.unpack("<Q", blob[:8])
    return json.loads(blob[8 : 8 + length]), blob[8 + length :]


def test_the_same_bytes_everywhere(pair: tuple[tiny.TinyModel, tiny.TinyModel]) -> None:
    assert [model.revision for model in pair] == [TARGET, DRAFT]


def test_same_tokeniser_and_vocabularies_that_differ_as_the_real_ones_do(
    pair: tuple[tiny.TinyModel, tiny.TinyModel],
) -> None:
    target, draft = (json.loads((m.directory / "config.json").read_text()) for m in pair)
    assert target["vocab_size"] - draft["vocab_size"] == 152064 - 151936
    assert len({(m.directory / "tokenizer.json").read_bytes() for m in pair}) == 1


def test_tensors_fill_the_file_and_have_the_shapes_of_the_config(pair: tuple[tiny.TinyModel, tiny.TinyModel]) -> None:
    for model in pair:
        config = json.loads((model.directory / "config.json").read_text())
        header, data = read(model.directory / "model.safetensors")
        assert max(t["data_offsets"][1] for t in header.values()) == len(data)
        assert header["lm_head.weight"]["shape"] == [config["vocab_size"], config["hidden_size"]]
        assert len([n for n in header if n.endswith("q_proj.weight")]) == config["num_hidden_layers"]


def test_target_begins_with_the_draft(pair: tuple[tiny.TinyModel, tiny.TinyModel]) -> None:
    (target, target_data), (draft, draft_data) = (read(m.directory / "model.safetensors") for m in pair)

    def tensor(header: dict[str, Any], data: bytes, name: str) -> bytes:
        start, end = header[name]["data_offsets"]
        return data[start:end]

    for name in draft:
        ours, theirs = tensor(target, target_data, name), tensor(draft, draft_data, name)
        # The layer after the first is noise, scaled for the target's number of layers alike; ends are the draft's, then zeros.
        assert ours[: len(theirs)] == theirs, name
        assert not any(ours[len(theirs) :]), name


def test_epsilon_scales_what_the_extra_layers_add(tmp_path: Path) -> None:
    text = "the cat sat on the mat and the dog sat on the cat " * 20
    quiet, _ = tiny.build_pair(text, tmp_path / "a", epsilon=0.0)
    header, data = read(quiet.directory / "model.safetensors")
    start, end = header["model.layers.9.mlp.down_proj.weight"]["data_offsets"]
    assert not any(data[start + 1 : end : 2].replace(b"\x80", b"\x00")), "epsilon 0 still writes to the residual stream"
