"""The zipapp: the same bytes each time, and nothing in it that an old host lacks."""

from __future__ import annotations

import ast
import io
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

from specrig.host import build
from specrig.host.errors import CODES

from .program import PYTHON

HOST = Path(build.__file__).parent
MODULES = HOST.parent / "ansible/modules"


def test_the_same_bytes_whatever_the_clock_and_the_umask(tmp_path: Path) -> None:
    code = "import sys; from specrig.host.build import build; sys.stdout.buffer.write(build())"
    old = os.umask(0o077)
    try:
        other = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            check=True,
            env={**os.environ, "TZ": "Asia/Tokyo", "PYTHONHASHSEED": "7"},
        )
    finally:
        os.umask(old)
    assert other.stdout == build.build()


def test_it_runs_as_a_file_without_our_package(tmp_path: Path) -> None:
    program = build.write(tmp_path / "specrig-host")
    done = subprocess.run(
        [PYTHON, "-I", "-S", str(program), "--version"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert done.stdout.strip() == "0.1.0"
    assert program.stat().st_mode & 0o777 == 0o755
    assert program.read_bytes().startswith(b"#!/usr/bin/env python3\n")


def test_python_3_9_can_read_it_and_finds_only_its_own_library() -> None:
    archive = zipfile.ZipFile(io.BytesIO(build.build()))
    sources = {name: archive.read(name).decode() for name in archive.namelist()}
    sources |= {path.name: path.read_text() for path in MODULES.glob("*.py")}
    ours = {"specrig", "ansible"}
    for name, text in sources.items():
        tree = ast.parse(text, filename=name, feature_version=(3, 9))
        for node in ast.walk(tree):
            assert not isinstance(node, ast.Match), name
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for module in names:
                assert module.split(".")[0] in ours | set(sys.stdlib_module_names), f"{name}: {module}"


def test_it_has_no_file_it_does_not_need() -> None:
    names = zipfile.ZipFile(io.BytesIO(build.build())).namelist()
    assert names == sorted(names) and "specrig/host/build.py" not in names and "__main__.py" in names


def test_every_code_is_in_the_table_and_every_entry_is_used() -> None:
    kinds = "|".join({code.split("_")[0] for code in CODES})
    used = {
        code
        for path in HOST.glob("*.py")
        if path.name not in {"errors.py", "findings.py"}  # findings have a table of their own
        for code in re.findall(rf'"((?:{kinds})_[A-Z0-9_]+)"', path.read_text())
    }
    assert used - {"DOCKER_HOST", "CUDA_DEVICE_ORDER"} == set(CODES)
