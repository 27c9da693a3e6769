"""Builds the host program on the controller: one file, the same bytes for the same sources."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import specrig

_SHEBANG = b"#!/usr/bin/env python3\n"
# The oldest time a zip file can hold; any fixed one would do.
_TIME = (1980, 1, 1, 0, 0, 0)
# This module and nothing else stays behind: it is the controller's.
_LEFT_OUT = {"build.py", "__main__.py"}


def build() -> bytes:
    """The zipapp's bytes: a shebang line and a zip of `specrig.host`, entries sorted, times and modes fixed."""
    here = Path(__file__).parent
    # The package's own __init__ may grow imports that a rig has not; the version is all the program needs of it.
    entries = {"specrig/__init__.py": f'"""specrig, host part."""\n\n__version__ = "{specrig.__version__}"\n'.encode()}
    entries["__main__.py"] = (here / "__main__.py").read_bytes()
    for path in here.glob("*.py"):
        if path.name not in _LEFT_OUT:
            entries[f"specrig/host/{path.name}"] = path.read_bytes()
    out = io.BytesIO()
    out.write(_SHEBANG)
    with zipfile.ZipFile(out, "a", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name in sorted(entries):
            info = zipfile.ZipInfo(name, _TIME)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = 0o644 << 16
            info.create_system = 3
            archive.writestr(info, entries[name])
    return out.getvalue()


def write(path: Path) -> Path:
    """Write the program to `path`, executable; return `path`."""
    path.write_bytes(build())
    path.chmod(0o755)
    return path
