"""Padding, checked on files that are parsed back by the format's own description."""

from __future__ import annotations

import json
import os
import resource
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest

from specrig.host import build, pad
from specrig.host.errors import HostError
from specrig.host.progress import Progress

from .models import WIDTH, data, read_safetensors, write_model, write_safetensors
from .program import PYTHON

QUIET = Progress(quiet=True)
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def tensors_of(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    return {n: t for f in sorted(path.glob("*.safetensors")) for n, t in read_safetensors(f)[1].items()}


def refused(source: Path, dest: Path, width: int, code: str) -> HostError:
    with pytest.raises(HostError) as caught:
        pad.pad_vocab(source, dest, width, QUIET)
    assert caught.value.code == code
    assert not dest.exists()
    return caught.value


@pytest.mark.parametrize(("dtype", "item"), [("BF16", 2), ("F16", 2), ("F32", 4), ("F8_E4M3", 1)])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_rows_are_added_and_all_else_stays(tmp_path: Path, dtype: str, item: int, sharded: bool, tied: bool) -> None:
    write_model(tmp_path / "in", vocab=16, sharded=sharded, tied=tied, dtype=dtype, item=item)
    result = pad.pad_vocab(tmp_path / "in", tmp_path / "out", 21, QUIET)
    before, after = tensors_of(tmp_path / "in"), tensors_of(tmp_path / "out")
    padded = {EMBED} if tied else {EMBED, HEAD}
    row = WIDTH * item
    assert result == {"changed": True, "vocab_size": 21, "was": 16, "bytes_added": len(padded) * 5 * row}
    assert set(after) == set(before)
    for name, (kind, shape, raw) in before.items():
        if name in padded:
            assert after[name] == (kind, [21, WIDTH], raw + raw[-row:] * 5)
        else:
            assert after[name] == (kind, shape, raw)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config == {**json.loads((tmp_path / "in/config.json").read_text()), "vocab_size": 21}
    assert (tmp_path / "out/tokenizer.json").samefile(tmp_path / "in/tokenizer.json")
    if sharded:
        old, new = (json.loads((tmp_path / d / "model.safetensors.index.json").read_text()) for d in ("in", "out"))
        assert new["weight_map"] == old["weight_map"]
        assert new["metadata"]["total_size"] == sum(len(t[2]) for t in after.values())
        assert (tmp_path / "out/model-00002-of-00003.safetensors").samefile(
            tmp_path / "in/model-00002-of-00003.safetensors"
        )


def test_the_same_bytes_each_time(tmp_path: Path) -> None:
    write_model(tmp_path / "in", sharded=True)
    for name in ("one", "two"):
        pad.pad_vocab(tmp_path / "in", tmp_path / name, 99, QUIET)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_the_source_is_not_touched(tmp_path: Path) -> None:
    write_model(tmp_path / "in")
    before = {p.name: p.read_bytes() for p in (tmp_path / "in").iterdir()}
    pad.pad_vocab(tmp_path / "in", tmp_path / "out", 64, QUIET)
    assert before == {p.name: p.read_bytes() for p in (tmp_path / "in").iterdir()}


def test_metadata_and_order_survive_and_the_data_is_aligned(tmp_path: Path) -> None:
    write_model(tmp_path / "in")
    pad.pad_vocab(tmp_path / "in", tmp_path / "out", 20, QUIET)
    metadata, tensors = read_safetensors(tmp_path / "out/model.safetensors")
    assert metadata == {"format": "pt"}
    assert struct.unpack("<Q", (tmp_path / "out/model.safetensors").read_bytes()[:8])[0] % 8 == 0
    assert list(tensors) == list(read_safetensors(tmp_path / "in/model.safetensors")[1])


def test_a_narrower_width_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "in", vocab=16)
    error = refused(tmp_path / "in", tmp_path / "out", 15, "PAD_WIDTH")
    assert "15" in error.cause and "16" in error.cause


def test_an_existing_destination_is_refused_and_kept(tmp_path: Path) -> None:
    write_model(tmp_path / "in")
    (tmp_path / "out").mkdir()
    with pytest.raises(HostError, match="PAD_DEST"):
        pad.pad_vocab(tmp_path / "in", tmp_path / "out", 20, QUIET)
    assert (tmp_path / "out").is_dir()


def test_pickles_alone_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "in")
    (tmp_path / "in/model.safetensors").rename(tmp_path / "in/pytorch_model.bin")
    refused(tmp_path / "in", tmp_path / "out", 20, "PAD_FORMAT")


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "in", dtype="F4_X", item=1)
    refused(tmp_path / "in", tmp_path / "out", 20, "PAD_DTYPE")


@pytest.mark.parametrize(
    ("tensors", "tied"),
    [
        ({"model.norm.weight": [WIDTH]}, True),  # no embedding
        ({EMBED: [16, WIDTH]}, False),  # no output layer, and not tied
        ({EMBED: [17, WIDTH]}, True),  # other width than config.json says
        ({EMBED: [16]}, True),
        ({EMBED: [16, WIDTH], "lm_head.qweight": [16, 2]}, False),
        ({EMBED: [16, WIDTH], HEAD: [16, WIDTH], "lm_head.bias": [16]}, False),
    ],
)
def test_models_it_cannot_widen_are_refused(tmp_path: Path, tensors: dict[str, list[int]], tied: bool) -> None:
    write_model(tmp_path / "in", tied=tied)
    write_safetensors(tmp_path / "in/model.safetensors", tensors)
    refused(tmp_path / "in", tmp_path / "out", 20, "PAD_TENSOR")


def test_a_config_without_a_width_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "in")
    (tmp_path / "in/config.json").write_text("{}")
    refused(tmp_path / "in", tmp_path / "out", 20, "PAD_CONFIG")


def raw(header: Any, body: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


ROW = {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01\x02",
        raw(b"{}", length=2**63),
        raw(b"not json"),
        raw([1]),
        raw({"a": {"dtype": "BF16"}}),
        raw({"a": ROW}, b"xxx"),  # bytes that belong to no tensor
        raw({"a": ROW}, b"x"),  # cut off
        raw({"a": {**ROW, "data_offsets": [1, 3]}}, b"xxx"),  # a hole
        raw({"a": {**ROW, "shape": [5]}}, b"xx"),
        raw({"a": {**ROW, "shape": [-1]}}, b"xx"),
        raw({"a": ROW, "b": ROW}, b"xx"),  # overlap
    ],
)
def test_broken_files_are_refused(tmp_path: Path, content: bytes) -> None:
    write_model(tmp_path / "in")
    (tmp_path / "in/model.safetensors").write_bytes(content)
    refused(tmp_path / "in", tmp_path / "out", 20, "PAD_FORMAT")


def test_links_of_a_hub_cache_become_plain_files(tmp_path: Path) -> None:
    write_model(tmp_path / "blobs")
    (tmp_path / "in").mkdir()
    for path in (tmp_path / "blobs").iterdir():
        (tmp_path / "in" / path.name).symlink_to(path)
    pad.pad_vocab(tmp_path / "in", tmp_path / "out", 20, QUIET)
    assert not any(p.is_symlink() for p in (tmp_path / "out").iterdir())


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    program = build.write(tmp_path / "specrig-host")
    source = tmp_path / "in"
    source.mkdir()
    (source / "config.json").write_text('{"vocab_size": 100000, "tie_word_embeddings": true}')
    shape, size = [100_000, 500], 100_000 * 500 * 2
    header = json.dumps({EMBED: {"dtype": "BF16", "shape": shape, "data_offsets": [0, size]}}).encode()
    with (source / "model.safetensors").open("wb") as out:
        out.write(struct.pack("<Q", len(header)) + header)
        out.truncate(8 + len(header) + size - 1000)
        out.seek(0, os.SEEK_END)
        out.write(data("last row", 1000))
    command = [PYTHON, str(program), "pad", str(source), str(tmp_path / "out"), "--vocab-size", "150000"]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (64 << 20, 64 << 20))

    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=limit)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["bytes_added"] == 50_000 * 1000
    with (tmp_path / "out/model.safetensors").open("rb") as result:
        result.seek(-1000, os.SEEK_END)
        assert result.read() == data("last row", 1000)
