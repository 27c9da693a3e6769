"""Does CUDA work here? The driver API itself, by ctypes: cuInit, cards with their UUIDs, known bytes to each card and back.

nvidia-smi answers also where no program can compute: with a device list of an older driver, without /dev/nvidia-uvm, or
after systemd has taken a container's devices away. This file needs nothing but Python and the driver's libcuda.so.1, also no
other module of specrig, so that `specrig-host cuda-check --container NAME` can send it into a container (`python3 -`).

The document: {ok, changed: false, cuda: "13.0", devices: [{index, uuid, name, memory_mib, round_trip_bytes}],
peers: [{from, to, claimed, bytes_arrived}] (with --peers), seconds}, or {ok: false, error: {code, cause, fix}}.
Exit: 0 it works, 1 it does not, 2 there is no libcuda.so.1.
"""

from __future__ import annotations

import argparse
import ctypes
import inspect
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

LIBRARY = "libcuda.so.1"
DEFAULT_BYTES = 8 << 20
DEFAULT_TIMEOUT_S = 60.0

# Names of the driver API's results that a person meets (cuda.h); the driver is asked for all others.
ADVICE = {
    3: "run it again; if it stays, reboot",
    100: "the driver sees no card: nvidia-smi --list-gpus; in a container: is a device list (CDI) given to it?",
    101: "look at the kernel's log: journalctl --dmesg --grep NVRM",
    802: "the fabric manager is not running: systemctl status nvidia-fabricmanager",
    803: "library and kernel module are of different versions: reboot, and write the device list again (systemctl restart specrig-cdi)",
    804: "the library is newer than the driver can run: use an older image or a newer driver",
    999: "/dev/nvidia-uvm is missing or stale: nvidia-modprobe -c 0 -u, then systemctl restart specrig-cdi",
}
_DEVICE, _POINTER, _CONTEXT = ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p
_P = ctypes.POINTER
# Explicit, because ctypes would pass a device pointer of 64 bits as an int of 32.
PROTOTYPES: dict[str, list[Any]] = {
    "cuInit": [ctypes.c_uint],
    "cuDriverGetVersion": [_P(ctypes.c_int)],
    "cuGetErrorName": [ctypes.c_int, _P(ctypes.c_char_p)],
    "cuDeviceGetCount": [_P(ctypes.c_int)],
    "cuDeviceGet": [_P(_DEVICE), ctypes.c_int],
    "cuDeviceGetName": [ctypes.c_char_p, ctypes.c_int, _DEVICE],
    "cuDeviceGetUuid": [ctypes.c_char_p, _DEVICE],
    "cuDeviceTotalMem_v2": [_P(ctypes.c_size_t), _DEVICE],
    "cuDevicePrimaryCtxRetain": [_P(_CONTEXT), _DEVICE],
    "cuDevicePrimaryCtxRelease_v2": [_DEVICE],
    "cuCtxSetCurrent": [_CONTEXT],
    "cuCtxSynchronize": [],
    "cuMemAlloc_v2": [_P(_POINTER), ctypes.c_size_t],
    "cuMemFree_v2": [_POINTER],
    "cuMemsetD8_v2": [_POINTER, ctypes.c_ubyte, ctypes.c_size_t],
    "cuMemcpyHtoD_v2": [_POINTER, ctypes.c_char_p, ctypes.c_size_t],
    "cuMemcpyDtoD_v2": [_POINTER, _POINTER, ctypes.c_size_t],
    "cuMemcpyDtoH_v2": [ctypes.c_char_p, _POINTER, ctypes.c_size_t],
    "cuDeviceCanAccessPeer": [_P(ctypes.c_int), _DEVICE, _DEVICE],
    "cuCtxEnablePeerAccess": [_CONTEXT, ctypes.c_uint],
    "cuMemcpyPeer": [_POINTER, _CONTEXT, _POINTER, _CONTEXT, ctypes.c_size_t],
}


class CudaError(Exception):
    """The check ends: `status` 1 fell short, 2 could not run."""

    def __init__(self, code: str, cause: str, fix: str, status: int = 1) -> None:
        super().__init__(f"{code}: {cause}")
        self.status = status
        self.error = {"code": code, "cause": cause, "fix": fix}


def bind(library: Any, prototypes: dict[str, list[Any]]) -> Any:
    """The library, its functions told what they take; each answers a result. Raises AttributeError where one is missing."""
    for name, arguments in prototypes.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, ctypes.c_int
    return library


class Driver:
    """The driver API; a call that does not answer CUDA_SUCCESS raises CudaError CUDA_CALL."""

    def __init__(self, library: Any) -> None:
        self._library = bind(library, PROTOTYPES)

    def __call__(self, name: str, *arguments: Any) -> None:
        """Call `name`."""
        if result := getattr(self._library, name)(*arguments):
            word = ctypes.c_char_p()
            self._library.cuGetErrorName(result, ctypes.byref(word))
            said = (word.value or b"unknown result").decode(errors="replace")
            fix = ADVICE.get(
                result, "compare driver, container toolkit and image; journalctl --dmesg --grep 'NVRM|Xid'"
            )
            raise CudaError("CUDA_CALL", f"{name}: {said} ({result})", fix)

    def number(self, name: str, kind: Any, *arguments: Any) -> Any:
        """Call `name`, whose first argument is where its answer goes."""
        answer = kind()
        self(name, ctypes.byref(answer), *arguments)
        return answer.value


def load(name: str = LIBRARY) -> Any:
    """The driver's library. Raises CudaError CUDA_LIBRARY."""
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        fix = "install the driver; in a container: give it the cards (--device nvidia.com/gpu=all, or --gpus all)"
        raise CudaError("CUDA_LIBRARY", str(error), fix, status=2) from None


def uuid_text(raw: bytes) -> str:
    """16 bytes as nvidia-smi writes them."""
    digits = raw.hex()
    return "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def _round_trip(cuda: Driver, size: int, seed: int) -> int:
    """Bytes to the card, on the card, and back; how many came back right. Raises CudaError CUDA_BYTES."""
    sent = random.Random(seed).randbytes(size)  # noqa: S311  a pattern, no secret
    there = [cuda.number("cuMemAlloc_v2", _POINTER, size) for _ in range(2)]
    try:
        cuda("cuMemsetD8_v2", there[1], 0, size)  # what an earlier owner left there must not pass for ours
        cuda("cuMemcpyHtoD_v2", there[0], sent, size)
        cuda("cuMemcpyDtoD_v2", there[1], there[0], size)
        cuda("cuCtxSynchronize")
        return _arrived(cuda, there[1], sent, "on the card and back")
    finally:
        for pointer in there:
            cuda("cuMemFree_v2", pointer)


def _arrived(cuda: Driver, pointer: int, sent: bytes, way: str) -> int:
    back = ctypes.create_string_buffer(len(sent))
    cuda("cuMemcpyDtoH_v2", back, pointer, len(sent))
    if back.raw != sent:
        wrong = sum(a != b for a, b in zip(sent, back.raw))
        cause = f"{wrong} of {len(sent)} bytes are wrong after their way {way}"
        raise CudaError(
            "CUDA_BYTES", cause, "do not use this card or this way between cards: memory or bus is at fault"
        )
    return len(sent)


def _peer(cuda: Driver, contexts: Sequence[Any], devices: Sequence[int], a: int, b: int, size: int) -> dict[str, Any]:
    """Known bytes from card `a` to card `b`, directly where the driver claims that it can."""
    claimed = bool(cuda.number("cuDeviceCanAccessPeer", ctypes.c_int, devices[a], devices[b]))
    sent = random.Random(a * 64 + b).randbytes(size)  # noqa: S311
    pointers = []
    for card in (a, b):
        cuda("cuCtxSetCurrent", contexts[card])
        pointers.append(cuda.number("cuMemAlloc_v2", _POINTER, size))
    try:
        cuda("cuMemsetD8_v2", pointers[1], 0, size)
        cuda("cuCtxSetCurrent", contexts[a])
        if claimed:
            cuda("cuCtxEnablePeerAccess", contexts[b], 0)
        cuda("cuMemcpyHtoD_v2", pointers[0], sent, size)
        cuda("cuMemcpyPeer", pointers[1], contexts[b], pointers[0], contexts[a], size)
        cuda("cuCtxSynchronize")
        cuda("cuCtxSetCurrent", contexts[b])
        count = _arrived(cuda, pointers[1], sent, f"from card {a} to card {b}")
    finally:
        for card, pointer in zip((a, b), pointers):
            cuda("cuCtxSetCurrent", contexts[card])
            cuda("cuMemFree_v2", pointer)
    return {"from": a, "to": b, "claimed": claimed, "bytes_arrived": count}


def check(library: Any, size: int = DEFAULT_BYTES, peers: bool = False) -> dict[str, Any]:
    """The check itself, in this process. Raises CudaError."""
    cuda = Driver(library)
    cuda("cuInit", 0)
    version = cuda.number("cuDriverGetVersion", ctypes.c_int)
    handles = [
        cuda.number("cuDeviceGet", _DEVICE, index) for index in range(cuda.number("cuDeviceGetCount", ctypes.c_int))
    ]
    devices, contexts = [], []
    try:
        for index, handle in enumerate(handles):
            name, raw = ctypes.create_string_buffer(96), ctypes.create_string_buffer(16)
            cuda("cuDeviceGetName", name, len(name), handle)
            cuda("cuDeviceGetUuid", raw, handle)
            memory = cuda.number("cuDeviceTotalMem_v2", ctypes.c_size_t, handle)
            contexts.append(cuda.number("cuDevicePrimaryCtxRetain", _CONTEXT, handle))
            cuda("cuCtxSetCurrent", contexts[-1])
            devices.append(
                {
                    "index": index,
                    "uuid": uuid_text(raw.raw),
                    "name": name.value.decode(errors="replace"),
                    "memory_mib": memory >> 20,
                    "round_trip_bytes": _round_trip(cuda, size, index),
                }
            )
        document: dict[str, Any] = {"cuda": f"{version // 1000}.{version % 1000 // 10}", "devices": devices}
        if peers:
            pairs = [(a, b) for a in range(len(handles)) for b in range(len(handles)) if a != b]
            document["peers"] = [_peer(cuda, contexts, handles, a, b, size) for a, b in pairs]
    finally:
        for handle in handles[: len(contexts)]:
            cuda("cuDevicePrimaryCtxRelease_v2", handle)
    return document


def _expected(document: dict[str, Any], cards: int | None, uuids: Sequence[str]) -> None:
    """Raise CudaError CUDA_CARDS when the cards are not those expected."""
    there = [device["uuid"] for device in document["devices"]]
    fix = "which cards the container gets: docker inspect (DeviceRequests, or CDI devices); on the host: nvidia-smi --list-gpus"
    if cards is not None and len(there) != cards:
        raise CudaError("CUDA_CARDS", f"CUDA sees {len(there)} cards, {cards} are expected", fix)
    if uuids and sorted(there) != sorted(uuids):
        cause = f"CUDA sees {', '.join(there)}; expected {', '.join(uuids)}"
        raise CudaError("CUDA_CARDS", cause, fix)


def in_time(work: Any, seconds: float) -> dict[str, Any]:
    """`work()` in a child process. Raises its CudaError, or CUDA_HANG: a call into a sick driver may never come back."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            answer = {"document": work()}
        except CudaError as error:
            answer = {"error": error.error, "status": error.status}
        except BaseException as error:
            cause = f"{type(error).__name__}: {error}"
            answer = {
                "error": {"code": "CUDA_CALL", "cause": cause, "fix": "is libcuda.so.1 the driver's own?"},
                "status": 1,
            }
        with os.fdopen(writer, "w") as out:
            json.dump(answer, out)
        os._exit(0)
    os.close(writer)
    text, deadline = b"", time.monotonic() + seconds
    with os.fdopen(reader, "rb", buffering=0) as source:
        while select.select([source], [], [], max(0.0, deadline - time.monotonic()))[0]:
            if not (data := source.read(65536)):
                break
            text += data
        else:
            os.kill(child, signal.SIGKILL)  # not waited for: in the kernel's hands it may outlive us
            fix = "journalctl --dmesg --grep 'NVRM|Xid'; between two cards: leave peer-to-peer off"
            raise CudaError("CUDA_HANG", f"no answer from the driver within {seconds:.0f} s", fix)
    ended = os.waitpid(child, 0)[1]
    if not text:
        cause = f"the process that called the driver ended with wait status {ended}"
        raise CudaError("CUDA_CALL", cause, "journalctl --dmesg --grep 'NVRM|Xid|segfault'")
    answer = json.loads(text)
    if "error" in answer:
        raise CudaError(status=answer["status"], **answer["error"])
    document: dict[str, Any] = answer["document"]
    return document


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the check can be told."""
    parser.add_argument("--cards", type=int, help="how many cards there must be")
    parser.add_argument("--uuid", action="append", default=[], help="a card that must be there, and no other (repeat)")
    parser.add_argument("--bytes", type=int, default=DEFAULT_BYTES, help="size of the round trip on each card")
    parser.add_argument("--peers", action="store_true", help="also from each card to each other one")
    parser.add_argument("--timeout", type=float, default=DEFAULT_TIMEOUT_S, help="seconds")


def cuda_check(args: argparse.Namespace, library: Any = None) -> dict[str, Any]:
    """The document of a check that passed. Raises CudaError."""
    start = time.monotonic()
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # nvidia-smi's order

    def work() -> dict[str, Any]:
        return check(load() if library is None else library, max(1, args.bytes), args.peers)

    document = in_time(work, args.timeout)
    _expected(document, args.cards, args.uuid)
    return {"ok": True, "changed": False, **document, "seconds": round(time.monotonic() - start, 2)}


def in_container(args: argparse.Namespace) -> dict[str, Any]:
    """The same check within a running container whose image has python3. Raises CudaError."""
    source = inspect.getsource(sys.modules[__name__])  # also out of the one file that the program is on a rig
    options = ["--bytes", str(args.bytes), "--timeout", str(args.timeout)]
    options += ["--cards", str(args.cards)] if args.cards is not None else []
    options += [word for uuid in args.uuid for word in ("--uuid", uuid)]
    options += ["--peers"] if args.peers else []
    fix = f"docker ps; docker exec {args.container} python3 --version"
    command = ["docker", "exec", "-i", args.container, "python3", "-", *options]
    try:
        # A file, not a pipe: docker may end before it has read it, and nobody is to die of SIGPIPE then.
        with tempfile.TemporaryFile("w+") as program:
            program.write(source)
            program.seek(0)
            done = subprocess.run(
                command, stdin=program, capture_output=True, text=True, check=False, timeout=args.timeout + 60
            )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CudaError("CUDA_CONTAINER", str(error), fix, status=2) from None
    try:
        document: dict[str, Any] = json.loads((done.stdout.splitlines() or [""])[-1])
    except ValueError:
        words = " ".join((done.stderr or done.stdout).split())[-300:]
        cause = f"docker exec {args.container} ended with status {done.returncode}: {words}"
        raise CudaError("CUDA_CONTAINER", cause, fix, status=2) from None
    if "error" in document:
        raise CudaError(status=done.returncode, **document["error"])
    return document


def main(argv: Sequence[str] | None = None) -> int:
    """As a program of its own, in a container."""
    parser = argparse.ArgumentParser(prog="cuda-check", description=__doc__)
    add_arguments(parser)
    try:
        code, document = 0, cuda_check(parser.parse_args(argv))
    except CudaError as error:
        code, document = error.status, {"ok": False, "changed": False, "error": error.error}
    print(json.dumps(document, sort_keys=True), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
