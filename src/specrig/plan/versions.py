"""Version numbers that compare: engines ("0.6.4.post1", build tags as "b11434") and drivers ("580.65.06")."""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

Key = tuple[int, ...]
_VERSION = re.compile(r"(?:b(?=\d+\Z))?(\d{1,6}(?:\.\d{1,6}){0,3})(?:\.post(\d{1,3}))?\Z", re.ASCII)


@lru_cache(maxsize=4096)
def parse(text: str) -> Key | None:
    """A key that sorts as the versions do (four numbers, then the post release), or None when `text` is no version."""
    match = _VERSION.match(text)
    if not match:
        return None
    numbers = [int(part) for part in match[1].split(".")]
    return (*numbers, *[0] * (4 - len(numbers)), int(match[2] or 0))


def key(text: str) -> Key:
    """`parse` for a version that is known to be one (catalog data). Raises ValueError otherwise."""
    parsed = parse(text)
    if parsed is None:
        raise ValueError(f"not a version: {text!r}")
    return parsed


def within(version: Key, window: Mapping[str, Any]) -> bool:
    """Is since <= version < until? A missing end is open."""
    since, until = window.get("since"), window.get("until")
    return (since is None or version >= key(since)) and (until is None or version < key(until))


def newest(versions: Iterable[str]) -> str | None:
    """The highest of `versions`, or None when there are none."""
    return max(versions, key=key, default=None)
