"""Filters that write values into systemd units."""

from __future__ import annotations

import re
from collections.abc import Callable

PLAIN = re.compile(r"[A-Za-z0-9_@:,./=+-]+")


def systemd_quote(value: object) -> str:
    """One argument of an `Exec…=` line: systemd's own escapes, so that no value can end the argument, expand a variable or a specifier.

    Source: systemd.service(5) "Command lines", systemd.syntax(7) "Quoting", systemd.unit(5) "Specifiers".
    """
    text = str(value)
    if "\0" in text:
        raise ValueError("NUL cannot be in a command line")
    if PLAIN.fullmatch(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    escaped = "".join(f"\\x{ord(c):02x}" if ord(c) < 32 or ord(c) == 127 else c for c in escaped)
    return f'"{escaped}"'


class FilterModule:
    """Ansible's entry point."""

    def filters(self) -> dict[str, Callable[[object], str]]:
        """Names as templates use them."""
        return {"systemd_quote": systemd_quote}
