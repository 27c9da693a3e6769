"""Filters that write values into a Caddyfile."""

from __future__ import annotations

import re
from collections.abc import Callable

PLAIN = re.compile(r"[A-Za-z0-9_@:,./=+-]+")


def caddy_quote(value: object) -> str:
    """One word of a Caddyfile. Anything that could be more than a word, a placeholder, a variable or an import is refused.

    A Caddyfile has quotes, but `{…}` and `{$…}` are replaced inside them too, so there is no way to write every text; the plan lets
    nothing through that needs one.
    """
    text = str(value)
    if not PLAIN.fullmatch(text):
        raise ValueError(f"{text[:60]!r} cannot be written into a Caddyfile")
    return text


class FilterModule:
    """Ansible's entry point."""

    def filters(self) -> dict[str, Callable[[object], str]]:
        """Names as templates use them."""
        return {"caddy_quote": caddy_quote}
