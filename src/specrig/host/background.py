"""A call that may take long, beside one that must not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Background:
    """Runs a call in a thread of its own, which ends with the process at the latest."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self.result: Any = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._call()
        except Exception as error:  # who asked decides what it means
            self.result = error

    def wait(self, seconds: float) -> bool:
        """Whether the call has ended within `seconds`."""
        self._thread.join(seconds)
        return self.done

    @property
    def done(self) -> bool:
        """Whether the call has ended; then `result` is its value or its exception."""
        return not self._thread.is_alive()
