"""Runs independent pieces of long work side by side, so that ctrl-C ends all of them at once."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

MOST = 16
T = TypeVar("T")


def parallel(jobs: Iterable[Callable[[], T]], finished: Callable[[int], None] | None = None) -> list[T]:
    """Run `jobs` in up to 16 threads; return their results in order. `finished` hears how many are done.

    The first error is raised when all have ended. The threads are daemons, unlike an executor's: a KeyboardInterrupt
    leaves at once, and what a job had begun on the Engine is found again by its label.
    """
    work = list(enumerate(jobs))
    waiting: queue.SimpleQueue[tuple[int, Callable[[], T]]] = queue.SimpleQueue()
    ended: queue.SimpleQueue[tuple[int, T | None, BaseException | None]] = queue.SimpleQueue()
    for item in work:
        waiting.put(item)

    def run() -> None:
        while True:
            try:
                number, job = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                ended.put((number, job(), None))
            except BaseException as error:
                ended.put((number, None, error))

    for _ in range(min(MOST, len(work))):
        threading.Thread(target=run, daemon=True).start()
    results: dict[int, T] = {}
    failures: list[BaseException] = []
    for count in range(1, len(work) + 1):
        number, result, error = ended.get()
        if error is not None:
            failures.append(error)
        else:
            results[number] = result  # type: ignore[assignment]
        if finished:
            finished(count)
    if failures:
        raise failures[0]
    return [results[number] for number, _ in work]
