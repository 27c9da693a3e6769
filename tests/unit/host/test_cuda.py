"""The CUDA check against a stand-in for the driver's library: C functions made by ctypes, which really keep the bytes.

The real library is not here; a real card runs the same check by hand (docs/evidence).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specrig.host import cuda

from .program import PYTHON

SOURCE = Path(str(cuda.__file__))
UUIDS = ["GPU-00000000-0000-0000-0000-000000000001", "GPU-00000000-0000-0000-0000-000000000002"]


class StandIn:
    """STAND-IN for libcuda.so.1 with `cards` cards. `refuse` {function: result}; `harm` changes bytes that are copied."""

    def __init__(
        self, cards: int = 2, refuse: dict[str, int] | None = None, harm: Callable[[str, bytes], bytes] | None = None
    ) -> None:
        self.memory: dict[int, bytearray] = {}
        self.retained = 0
        self._cards, self._refuse, self._harm = cards, refuse or {}, harm or (lambda _way, data: data)
        for name, arguments in cuda.PROTOTYPES.items():
            # A real C function for the caller: pointers arrive as a C library would get them.
            kinds = [ctypes.c_void_p if kind is ctypes.c_char_p else kind for kind in arguments]
            setattr(self, name, ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(self._function(name)))

    def _function(self, name: str) -> Callable[..., int]:
        body = getattr(self, f"_{name.split('_')[0]}", None)

        def call(*arguments: Any) -> int:
            if name in self._refuse:
                return self._refuse[name]
            if body is not None:
                body(*arguments)
            return 0

        return call

    def _cuDriverGetVersion(self, answer: Any) -> None:
        answer[0] = 13000

    def _cuGetErrorName(self, result: int, answer: Any) -> None:
        answer[0] = {100: b"CUDA_ERROR_NO_DEVICE", 803: b"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"}.get(result, b"CUDA_ERROR")

    def _cuDeviceGetCount(self, answer: Any) -> None:
        answer[0] = self._cards

    def _cuDeviceGet(self, answer: Any, index: int) -> None:
        answer[0] = 10 + index

    def _cuDeviceGetName(self, answer: int, size: int, _device: int) -> None:
        assert size > 20
        ctypes.memmove(answer, b"NVIDIA STAND-IN\0", 16)

    def _cuDeviceGetUuid(self, answer: int, device: int) -> None:
        ctypes.memmove(answer, bytes(15) + bytes([device - 9]), 16)

    def _cuDeviceTotalMem(self, answer: Any, _device: int) -> None:
        answer[0] = 24 << 30

    def _cuDevicePrimaryCtxRetain(self, answer: Any, device: int) -> None:
        self.retained += 1
        answer[0] = 0x7F00_0000_0000 + device

    def _cuDevicePrimaryCtxRelease(self, _device: int) -> None:
        self.retained -= 1

    def _cuMemAlloc(self, answer: Any, size: int) -> None:
        answer[0] = 0x7F_1234_5678_0000 + (len(self.memory) << 24)  # needs more than 32 bits
        self.memory[answer[0]] = bytearray(b"\xee" * size)

    def _cuMemFree(self, pointer: int) -> None:
        del self.memory[pointer]

    def _cuMemsetD8(self, pointer: int, value: int, size: int) -> None:
        self.memory[pointer][:size] = bytes([value]) * size

    def _cuMemcpyHtoD(self, to: int, source: int, size: int) -> None:
        self.memory[to][:size] = ctypes.string_at(source, size)

    def _cuMemcpyDtoD(self, to: int, source: int, size: int) -> None:
        self.memory[to][:size] = self._harm("card", bytes(self.memory[source][:size]))

    def _cuMemcpyDtoH(self, to: int, source: int, size: int) -> None:
        ctypes.memmove(to, bytes(self.memory[source][:size]), size)

    def _cuDeviceCanAccessPeer(self, answer: Any, _a: int, _b: int) -> None:
        answer[0] = 1

    def _cuMemcpyPeer(self, to: int, _there: int, source: int, _here: int, size: int) -> None:
        self.memory[to][:size] = self._harm("peer", bytes(self.memory[source][:size]))


def options(*words: str) -> argparse.Namespace:
    """The check's arguments."""
    parser = argparse.ArgumentParser()
    cuda.add_arguments(parser)
    return parser.parse_args(["--bytes", "4096", *words])


def refused(library: StandIn, *words: str) -> cuda.CudaError:
    """How a check ends that does not pass."""
    with pytest.raises(cuda.CudaError) as ended:
        cuda.cuda_check(options(*words), library)
    return ended.value


def test_cards_and_their_bytes() -> None:
    document = cuda.cuda_check(options("--cards", "2", *(w for uuid in UUIDS for w in ("--uuid", uuid))), StandIn())
    assert document["ok"] and document["cuda"] == "13.0"
    assert [(d["index"], d["uuid"], d["name"], d["memory_mib"]) for d in document["devices"]] == [
        (0, UUIDS[0], "NVIDIA STAND-IN", 24576),
        (1, UUIDS[1], "NVIDIA STAND-IN", 24576),
    ]
    assert all(device["round_trip_bytes"] == 4096 for device in document["devices"]) and "peers" not in document


def test_nothing_is_left_on_the_cards() -> None:
    library = StandIn()
    cuda.check(library, 100, peers=True)
    assert library.memory == {} and library.retained == 0


def test_each_pair_both_ways() -> None:
    peers = cuda.cuda_check(options("--peers"), StandIn())["peers"]
    assert peers == [
        {"from": 0, "to": 1, "claimed": True, "bytes_arrived": 4096},
        {"from": 1, "to": 0, "claimed": True, "bytes_arrived": 4096},
    ]


def test_writes_that_vanish_between_cards_are_seen() -> None:
    """The driver grants peer access, and the bytes never arrive."""
    library = StandIn(harm=lambda way, data: bytes(len(data)) if way == "peer" else data)
    assert cuda.cuda_check(options(), library)["ok"]
    error = refused(library, "--peers").error
    assert error["code"] == "CUDA_BYTES" and "from card 0 to card 1" in error["cause"]


def test_one_wrong_byte_is_seen() -> None:
    library = StandIn(1, harm=lambda _way, data: bytes([data[0] ^ 1]) + data[1:])
    error = refused(library)
    assert error.status == 1 and error.error["cause"].startswith("1 of 4096 bytes")


def test_a_refused_call_is_named_with_the_drivers_word() -> None:
    error = refused(StandIn(refuse={"cuInit": 803})).error
    assert error["code"] == "CUDA_CALL" and error["cause"] == "cuInit: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)"
    assert "specrig-cdi" in error["fix"]


def test_other_cards_than_expected() -> None:
    assert "sees 2 cards, 1 are expected" in refused(StandIn(), "--cards", "1").error["cause"]
    assert refused(StandIn(1), "--uuid", UUIDS[1]).error["code"] == "CUDA_CARDS"


def test_a_driver_that_hangs_or_crashes_does_not_take_us_with_it() -> None:
    def sleeps(_way: str, data: bytes) -> bytes:
        time.sleep(60)
        return data

    start = time.monotonic()
    assert refused(StandIn(1, harm=sleeps), "--timeout", "0.3").error["code"] == "CUDA_HANG"
    assert time.monotonic() - start < 10

    def crashes(_way: str, data: bytes) -> bytes:
        os.kill(os.getpid(), signal.SIGKILL)
        return data

    assert "wait status" in refused(StandIn(1, harm=crashes)).error["cause"]


def program(*words: str, path: str = "/usr/bin:/bin") -> tuple[int, dict[str, Any]]:
    """Exit status and document of `specrig-host cuda-check`."""
    done = subprocess.run(
        [PYTHON, "-m", "specrig.host", "cuda-check", *words],
        env={"PATH": path, "PYTHON": PYTHON, "PYTHONPATH": str(SOURCE.parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, json.loads((done.stdout.splitlines() or [done.stderr])[-1])


def test_without_the_library_it_could_not_run() -> None:
    with pytest.raises(cuda.CudaError) as ended:
        cuda.load("libcuda-that-is-not-here.so.1")
    assert ended.value.status == 2 and ended.value.error["code"] == "CUDA_LIBRARY"


DOCKER = """#!/bin/sh
# Stands in for `docker exec -i NAME python3 - …`: runs it here.
[ "$1 $2 $3 $4 $5" = "exec -i specrig-a python3 -" ] || { echo "Error response from daemon: No such container: $3" >&2; exit 1; }
shift 5
exec "$PYTHON" - "$@"
"""


def test_the_same_check_goes_into_a_container(tmp_path: Path) -> None:
    """The source travels by standard input and needs no other module of ours; arguments and status come through."""
    (tmp_path / "docker").write_text(DOCKER)
    (tmp_path / "docker").chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    # Same machine on both sides here: with or without the library, the answer is the same but for the way there.
    words = ["--cards", "0", "--uuid", UUIDS[0], "--bytes", "16"]
    assert program("--container", "specrig-a", *words, path=path) == program(*words, path=path)
    code, document = program("--container", "gone", path=path)
    assert code == 2 and document["error"]["code"] == "CUDA_CONTAINER"
    assert "No such container" in document["error"]["cause"]


def test_it_runs_alone(tmp_path: Path) -> None:
    done = subprocess.run(
        [PYTHON, "-", "--bytes", "16"],
        input=SOURCE.read_text(),
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert isinstance(json.loads(done.stdout.splitlines()[-1])["ok"], bool) and done.returncode in (0, 1, 2), (
        done.stderr
    )
