"""llama.cpp's options, from its own --help. `python -m tests.engines.help` writes src/specrig/plan/dialects/llama_cpp_options.yml."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence

from specrig.lab import Lab, llamaimage
from tests.contract.write_options import FOLDER, written

FILE = FOLDER / "llama_cpp_options.yml"


def options(text: str) -> set[str]:
    """Every spelling of every option that a help text lists and that is not removed: they begin its unindented lines."""
    found: set[str] = set()
    for line in text.splitlines():
        if line.startswith("-") and not line.startswith("-----") and "the argument has been removed" not in line:
            head = re.split(r" {2,}(?=[^-\s])", line, maxsplit=1)[0]
            found.update(re.findall(r"(?:^|[\s,])(--?[A-Za-z][A-Za-z0-9-]*)", head))
    return found


def server(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the cached llama-server, built if it is not there; it ends by itself."""
    binary = llamaimage.binary(Lab("engines").client)
    return subprocess.run([str(binary), *words], capture_output=True, text=True, timeout=120, check=False)


def accepts(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """What its parser says to `argv`: --help comes last, so it ends without a model when all before it was taken."""
    return server(*argv, "--help")


def text() -> str:
    """The file's content."""
    return written("llama.cpp", "python -m tests.engines.help", {llamaimage.VERSION: options(server("--help").stdout)})


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
    sys.exit(0)
