"""Widens a draft model's vocabulary to its target's, on safetensors files, without torch and in little memory.

vLLM refuses a pair whose vocabularies differ in width, although the extra ids are often unused padding of the
embedding. The new rows copy the last existing one: that row is itself such an unused id, so a new id is as unlikely as
those, and its scores are of the model's own scale, which zero rows (logit 0) do not promise. Correctness does not hang
on it: whatever the draft proposes, the target verifies, so a padded id can be drafted in vain, never accepted wrongly.

The output depends on the input bytes and the width alone: it is the same on every host.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from specrig.host.errors import COULD_NOT_RUN, HostError
from specrig.host.manifest import MANIFEST
from specrig.host.progress import Progress

_WIDTHS = {
    **{"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1},
    **{"I16": 2, "U16": 2, "F16": 2, "BF16": 2},
    **{"I32": 4, "U32": 4, "F32": 4},
    **{"I64": 8, "U64": 8, "F64": 8},
}
_ROWS = re.compile(r"(^|\.)(embed_tokens|lm_head)\.weight$")
_HEAD = re.compile(r"(^|\.)lm_head\.")
_EMBED = re.compile(r"(^|\.)embed_tokens\.weight$")
# A draft of a thousand tensors has 0.1 MB; the bound keeps our memory small whatever the file says.
_MAX_HEADER = 4 << 20
_CHUNK = 4 << 20


def _bad(
    code: str, cause: str, fix: str = "choose a draft in safetensors format, or speculation with the same vocabulary"
) -> HostError:
    return HostError(code, cause, fix, COULD_NOT_RUN)


@dataclass
class _Tensor:
    name: str
    dtype: str
    shape: list[int]
    begin: int
    end: int


@dataclass
class _Weights:
    """One safetensors file: where its data starts, its metadata, and its tensors in the order of their bytes."""

    path: Path
    start: int
    metadata: dict[str, str] | None
    tensors: list[_Tensor] = field(default_factory=list)


def read_weights(path: Path) -> _Weights:
    """Parse a safetensors header and check that the tensors fill the file exactly. Raises PAD_FORMAT or PAD_DTYPE."""
    size = path.stat().st_size
    with path.open("rb") as handle:
        raw = handle.read(8)
        length = struct.unpack("<Q", raw)[0] if len(raw) == 8 else size
        if length > min(size - 8, _MAX_HEADER):
            raise _bad("PAD_FORMAT", f"{path.name}: header of {length} bytes in a file of {size}")
        try:
            header = json.loads(handle.read(length))
            metadata = header.pop("__metadata__", None)
            tensors = [
                _Tensor(
                    name, t["dtype"], [int(n) for n in t["shape"]], int(t["data_offsets"][0]), int(t["data_offsets"][1])
                )
                for name, t in header.items()
            ]
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise _bad("PAD_FORMAT", f"{path.name}: not a safetensors header ({error!r})") from error
    tensors.sort(key=lambda t: (t.begin, t.end, t.name))
    at = 0
    for t in tensors:
        if t.dtype not in _WIDTHS:
            raise _bad(
                "PAD_DTYPE", f"{path.name}: {t.name} has dtype {t.dtype!r:.40}, which this version does not know"
            )
        if t.begin != at or min(t.shape, default=1) < 0 or t.end - t.begin != prod(t.shape) * _WIDTHS[t.dtype]:
            raise _bad(
                "PAD_FORMAT", f"{path.name}: {t.name} at bytes {t.begin}-{t.end} does not fit its shape {t.shape}"
            )
        at = t.end
    if 8 + length + at != size:
        raise _bad("PAD_FORMAT", f"{path.name}: tensors end at byte {8 + length + at}, the file at {size}")
    return _Weights(path, 8 + length, metadata, tensors)


def _copy(source: BinaryIO, out: BinaryIO, count: int, tick: Callable[[int], None]) -> None:
    while count:
        data = source.read(min(_CHUNK, count))
        if not data:
            raise _bad("PAD_FORMAT", f"{source.name} became shorter while it was read")
        out.write(data)
        count -= len(data)
        tick(len(data))


def _write_padded(weights: _Weights, dest: Path, width: int, tick: Callable[[int], None]) -> int:
    """Write `weights` with the vocabulary's rows widened to `width`. Returns the bytes added to the tensors."""
    header: dict[str, Any] = {} if weights.metadata is None else {"__metadata__": weights.metadata}
    at = 0
    for t in weights.tensors:
        rows = _ROWS.search(t.name) is not None
        shape = [width, *t.shape[1:]] if rows else t.shape
        size = prod(shape) * _WIDTHS[t.dtype]
        header[t.name] = {"dtype": t.dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # readers map the tensors: keep them aligned
    added = 0
    with weights.path.open("rb") as source, dest.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        source.seek(weights.start)
        for t in weights.tensors:
            if not _ROWS.search(t.name):
                _copy(source, out, t.end - t.begin, tick)
                continue
            row = (t.end - t.begin) // t.shape[0]
            _copy(source, out, t.end - t.begin - row, tick)
            last = source.read(row)
            more = width - t.shape[0]
            block = last * max(1, _CHUNK // row)
            out.write(last)
            for begin in range(0, more * row, len(block)):
                out.write(block[: more * row - begin])
            added += more * row
            tick(row)
    return added


def _vocab(config: Path) -> tuple[dict[str, Any], int]:
    try:
        value = json.loads(config.read_text())
        return value, int(value["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _bad("PAD_CONFIG", f"{config}: no readable vocab_size ({error!r})") from error


def _check_rows(files: list[_Weights], vocab: int, tied: bool) -> None:
    tensors = [t for weights in files for t in weights.tensors]
    names = {t.name for t in tensors}
    if not any(_EMBED.search(name) for name in names):
        raise _bad("PAD_TENSOR", "no embed_tokens.weight among the tensors")
    heads = {name for name in names if _HEAD.search(name)}
    if strange := sorted(name for name in heads if not _ROWS.search(name)):
        raise _bad("PAD_TENSOR", f"{strange[0]}: an output layer that is quantised or biased cannot be widened")
    if not heads and not tied:
        raise _bad("PAD_TENSOR", "no lm_head.weight, and config.json does not say tie_word_embeddings")
    for t in tensors:
        if _ROWS.search(t.name) and (len(t.shape) != 2 or t.shape[0] != vocab or not t.shape[1]):
            raise _bad("PAD_TENSOR", f"{t.name} has shape {t.shape}, config.json says vocab_size {vocab}")


def _link(source: Path, dest: Path) -> None:
    dest.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    try:
        os.link(source.resolve(), dest)
    except OSError:  # another filesystem, or one without hard links
        shutil.copyfile(source, dest)


def pad_vocab(source: Path, dest: Path, width: int, progress: Progress) -> dict[str, Any]:
    """Write to `dest` (which must not exist) the model in `source` with `vocab_size` `width`.

    Files that do not change are hard links. Returns {changed, vocab_size, was, bytes_added}. Raises HostError PAD_*;
    `dest` is then removed.
    """
    config, vocab = _vocab(source / "config.json")
    if width < vocab:
        raise _bad(
            "PAD_WIDTH",
            f"vocab_size {width} is less than the model's {vocab}",
            "a draft can only be widened: swap the pair",
        )
    paths = sorted(
        p for p in source.rglob("*") if p.is_file() and p.name != MANIFEST and not p.name.startswith(".specrig")
    )
    shards = [p for p in paths if p.suffix == ".safetensors"]
    if not shards:
        raise _bad("PAD_FORMAT", f"{source}: no .safetensors file")
    files = [read_weights(p) for p in shards]
    _check_rows(files, vocab, bool(config.get("tie_word_embeddings", False)))
    touched = [w for w in files if any(_ROWS.search(t.name) for t in w.tensors)]
    total, done = sum(w.path.stat().st_size for w in touched), [0]

    def tick(count: int) -> None:
        done[0] += count
        progress.update("pad", done[0], total)

    try:
        dest.mkdir(mode=0o755)
    except OSError as error:
        raise _bad("PAD_DEST", f"cannot create {dest}: {error}", "name a directory that does not exist yet") from error
    try:
        rewritten = {w.path for w in touched} | {source / "config.json"}
        added = 0
        for path in paths:
            target = dest / path.relative_to(source)
            if path.name == "model.safetensors.index.json" or path in rewritten:
                target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            else:
                _link(path, target)
        for weights in touched:
            added += _write_padded(weights, dest / weights.path.relative_to(source), width, tick)
        config["vocab_size"] = width
        _dump(dest / "config.json", config)
        for path in (p for p in paths if p.name == "model.safetensors.index.json"):
            index = json.loads(path.read_text())
            if isinstance(index.get("metadata"), dict) and isinstance(index["metadata"].get("total_size"), int):
                index["metadata"]["total_size"] += added
            _dump(dest / path.relative_to(source), index)
    except BaseException:
        with contextlib.suppress(OSError):
            shutil.rmtree(dest)
        raise
    return {"changed": True, "vocab_size": width, "was": vocab, "bytes_added": added}


def _dump(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
