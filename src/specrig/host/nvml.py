"""Fans and temperature of the cards, by NVIDIA's management library (libnvidia-ml.so.1, part of the driver), without a desktop.

Whoever sets a speed takes the control from the card and owes it the watch over its temperature; setting needs root (the driver
asks for CAP_SYS_ADMIN). The library tells what is asked of a fan, not whether it turns.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from specrig.host.cuda import bind
from specrig.host.errors import COULD_NOT_RUN, HostError

LIBRARY = "libnvidia-ml.so.1"
# Results (nvml.h) that the next try will not change: an argument, support, permission, no such card, no such function.
REFUSALS = (2, 3, 4, 6, 13)
NOT_SUPPORTED = 3
GPU_SENSOR, SLOWDOWN, MANUAL = 0, 1, 1
_DEVICE, _UINT, _P = ctypes.c_void_p, ctypes.c_uint, ctypes.POINTER
PROTOTYPES: dict[str, list[Any]] = {
    "nvmlInit_v2": [],
    "nvmlShutdown": [],
    "nvmlDeviceGetCount_v2": [_P(_UINT)],
    "nvmlDeviceGetHandleByIndex_v2": [_UINT, _P(_DEVICE)],
    "nvmlDeviceGetUUID": [_DEVICE, ctypes.c_char_p, _UINT],
    "nvmlDeviceGetName": [_DEVICE, ctypes.c_char_p, _UINT],
    "nvmlDeviceGetTemperature": [_DEVICE, _UINT, _P(_UINT)],
    "nvmlDeviceGetTemperatureThreshold": [_DEVICE, _UINT, _P(_UINT)],
    "nvmlDeviceGetNumFans": [_DEVICE, _P(_UINT)],
    "nvmlDeviceGetMinMaxFanSpeed": [_DEVICE, _P(_UINT), _P(_UINT)],
    "nvmlDeviceGetTargetFanSpeed": [_DEVICE, _UINT, _P(_UINT)],
    "nvmlDeviceGetFanControlPolicy_v2": [_DEVICE, _UINT, _P(_UINT)],
    "nvmlDeviceSetFanSpeed_v2": [_DEVICE, _UINT, _UINT],
    "nvmlDeviceSetDefaultFanSpeed_v2": [_DEVICE, _UINT],
}


class NvmlError(Exception):
    """A call that was not answered with success."""

    def __init__(self, call: str, result: int, words: str) -> None:
        super().__init__(f"{call}: {words} ({result})")
        self.result = result


@dataclass(frozen=True)
class Card:
    """A card, as the driver numbers it."""

    index: int
    uuid: str
    name: str
    handle: Any

    def __str__(self) -> str:
        return f"{self.name} ({self.uuid})"


class Nvml:
    """The library, open. Every method raises NvmlError."""

    def __init__(self, name: str = LIBRARY) -> None:
        """Raise HostError FANS_DRIVER where the driver does not answer."""
        fix = "nvidia-smi; after an update of the driver: reboot"
        try:
            self._library = bind(ctypes.CDLL(name), PROTOTYPES)
            self._library.nvmlErrorString.argtypes, self._library.nvmlErrorString.restype = (
                [ctypes.c_int],
                ctypes.c_char_p,
            )
            self._call("nvmlInit_v2")
        except (OSError, NvmlError) as error:
            raise HostError("FANS_DRIVER", str(error), fix) from None
        except AttributeError as error:  # fans came with branch 520
            raise HostError("FANS_DRIVER", f"{error}: the driver is too old", "a newer driver", COULD_NOT_RUN) from None

    def _call(self, name: str, *arguments: Any) -> None:
        if result := getattr(self._library, name)(*arguments):
            raise NvmlError(name, result, self._library.nvmlErrorString(result).decode(errors="replace"))

    def _number(self, name: str, *arguments: Any, kind: Any = _UINT) -> Any:
        answer = kind()
        self._call(name, *arguments, ctypes.byref(answer))
        return answer.value

    def _text(self, name: str, handle: Any) -> str:
        text = ctypes.create_string_buffer(96)
        self._call(name, handle, text, len(text))
        return text.value.decode(errors="replace")

    def cards(self) -> list[Card]:
        """All of them, in nvidia-smi's order."""
        found = []
        for index in range(self._number("nvmlDeviceGetCount_v2")):
            handle = self._number("nvmlDeviceGetHandleByIndex_v2", index, kind=_DEVICE)
            uuid, name = (self._text(f"nvmlDeviceGet{word}", handle) for word in ("UUID", "Name"))
            found.append(Card(index, uuid, name, handle))
        return found

    def fans(self, card: Card) -> int:
        """How many fans of the card software may set; 0 where it has none."""
        try:
            return int(self._number("nvmlDeviceGetNumFans", card.handle))
        except NvmlError as error:
            if error.result == NOT_SUPPORTED:
                return 0
            raise

    def bounds(self, card: Card) -> tuple[int, int]:
        """The least and the most that its fans can be set to, in %."""
        least, most = _UINT(), _UINT()
        self._call("nvmlDeviceGetMinMaxFanSpeed", card.handle, ctypes.byref(least), ctypes.byref(most))
        return least.value, most.value

    def celsius(self, card: Card) -> int:
        """The chip's temperature."""
        return int(self._number("nvmlDeviceGetTemperature", card.handle, GPU_SENSOR))

    def slowdown_c(self, card: Card) -> int | None:
        """Where the card slows itself down; None where it does not tell (cards newer than Ampere may not)."""
        try:
            return self._number("nvmlDeviceGetTemperatureThreshold", card.handle, SLOWDOWN) or None
        except NvmlError as error:
            if error.result in REFUSALS:
                return None
            raise

    def target(self, card: Card, fan: int) -> int:
        """What is asked of a fan, in %, by whomever."""
        return int(self._number("nvmlDeviceGetTargetFanSpeed", card.handle, fan))

    def manual(self, card: Card, fan: int) -> bool:
        """Whether software has the fan, and not the card itself."""
        return bool(self._number("nvmlDeviceGetFanControlPolicy_v2", card.handle, fan) == MANUAL)

    def set(self, card: Card, fan: int, percent: int) -> None:
        """Take the fan and set its speed."""
        self._call("nvmlDeviceSetFanSpeed_v2", card.handle, fan, percent)

    def automatic(self, card: Card, fan: int) -> None:
        """Give the fan back to the card."""
        self._call("nvmlDeviceSetDefaultFanSpeed_v2", card.handle, fan)

    def close(self) -> None:
        """Let go of the driver."""
        self._library.nvmlShutdown()
