"""Runs the words that a rig runs in an image (host/arguments.py) on one release's own code. Snippet on stdin.

python -m tests.contract.ask_image TREE VERSION ENGINE ENTRY_POINT_AS_JSON ARGV… < snippet
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.contract import driver

if __name__ == "__main__":
    tree, version, engine, *words = sys.argv[1:]
    driver.package[0] = engine
    snippet = compile(sys.stdin.read(), "snippet", "exec")
    driver.enter(Path(tree), version)
    sys.argv = ["-c", *words]
    exec(snippet, {"__name__": "__main__"})
