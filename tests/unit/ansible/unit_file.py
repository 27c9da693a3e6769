"""How systemd reads a unit, from its own manual: systemd.syntax(7), systemd.service(5) "Command lines", systemd.unit(5) "Specifiers"."""

from __future__ import annotations

import re

ESCAPES = {"a": 7, "b": 8, "f": 12, "n": 10, "r": 13, "t": 9, "v": 11, "\\": 92, '"': 34, "'": 39, "s": 32}
HEX = {"x": 2, "u": 4, "U": 8}


def lines(text: str) -> list[tuple[str, str, str]]:
    """(section, name, value) of each assignment. A backslash before the end of a line joins it to the next, less comments."""
    found, section, pending = [], "", ""
    for line in re.split(r"\r\n|[\n\r\0]", text):
        if line.lstrip().startswith(("#", ";")):
            continue
        if line.endswith("\\"):
            pending += line[:-1] + " "
            continue
        whole, pending = (pending + line).strip(), ""
        if head := re.fullmatch(r"\[(.*)\]", whole):
            section = head[1]
        elif whole:
            name, equals, value = whole.partition("=")
            assert equals, f"no assignment: {whole!r}"
            found.append((section, name.strip(), value.strip()))
    assert not pending
    return found


def unescape(text: str, at: int) -> tuple[bytes, int]:
    """What the escape after the backslash at `at` stands for, and where the text goes on."""
    kind = text[at + 1]
    if kind in ESCAPES:
        return bytes([ESCAPES[kind]]), at + 2
    if kind in HEX:
        end = at + 2 + HEX[kind]
        number = int(text[at + 2 : end], 16)
        assert number, "systemd refuses NUL"
        return bytes([number]) if kind == "x" else chr(number).encode(), end
    number = int(text[at + 1 : at + 4], 8)
    return bytes([number]), at + 4


def words(value: str) -> list[str]:
    """The arguments of a command line: unquoted, unescaped, specifiers and variables resolved (each must be a doubled sign)."""
    found: list[bytes] = []
    word: bytes | None = None
    quote, i = "", 0
    while i < len(value):
        c = value[i]
        if c == "\\":
            part, i = unescape(value, i)
            word = (word or b"") + part
            continue
        if quote and c == quote:
            quote = ""
        elif quote:
            word = (word or b"") + c.encode()
        elif c in "\"'":
            quote, word = c, word or b""
        elif c in " \t\n\r":
            if word is not None:
                found.append(word)
            word = None
        else:
            assert not (c == ";" and word is None and value[i + 1 : i + 2] in ("", " ")), "a second command"
            word = (word or b"") + c.encode()
        i += 1
    assert not quote, "unbalanced quotes"
    return [expanded(w.decode()) for w in [*found, *([word] if word is not None else [])]]


def expanded(word: str) -> str:
    """`word` after specifiers (%) and variables ($)."""
    for sign in "%$":
        assert not re.search(rf"(?<!\{sign})(?:\{sign}\{sign})*\{sign}(?!\{sign})", word), (
            f"{sign} is expanded in {word!r}"
        )
        word = word.replace(sign * 2, sign)
    return word
