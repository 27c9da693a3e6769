"""Brings the pinned Ansible collections into `.venv/collections`: from Galaxy, else from the `ansible` package.

Both sources must give the versions that `requirements.yml` pins; a collection already there at its version is left alone.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import yaml

DESTINATION = Path(".venv/collections")


def wanted(requirements: Path) -> tuple[dict[str, str], str]:
    """Return ({collection: version}, version of the `ansible` package that holds the same ones)."""
    text = requirements.read_text()
    package = re.search(r"^# ansible_package: (\S+)$", text, re.MULTILINE)
    if package is None:
        raise SystemExit(f"{requirements}: the line '# ansible_package: VERSION' is missing")
    return {c["name"]: c["version"] for c in yaml.safe_load(text)["collections"]}, package[1]


def installed(name: str) -> str | None:
    """Version of the collection that is in place, or None."""
    manifest = DESTINATION / "ansible_collections" / name.replace(".", "/") / "MANIFEST.json"
    return json.loads(manifest.read_text())["collection_info"]["version"] if manifest.exists() else None


def missing(versions: dict[str, str]) -> dict[str, str]:
    """Those of `versions` that are not installed at their pin."""
    return {name: version for name, version in versions.items() if installed(name) != version}


def from_galaxy(requirements: Path) -> None:
    """Ask Galaxy; quiet about failure, because the package is the second source."""
    galaxy = Path(sys.executable).with_name("ansible-galaxy")
    command = [str(galaxy), "collection", "install", "-r", str(requirements), "-p", str(DESTINATION), "--force"]
    env = os.environ | {"ANSIBLE_COLLECTIONS_PATH": str(DESTINATION), "ANSIBLE_GALAXY_SERVER_TIMEOUT": "15"}
    subprocess.run(command, env=env, check=False, capture_output=True)


def from_package(names: list[str], version: str) -> None:
    """Unpack only the named collections out of the `ansible` wheel that the ordinary pip finds."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, f"ansible=={version}"]
        subprocess.run(pip, check=True)
        wheel = next(Path(folder).glob("ansible-*.whl"))
        prefixes = tuple(f"ansible_collections/{name.replace('.', '/')}/" for name in names)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(DESTINATION, [m for m in archive.namelist() if m.startswith(prefixes)])


def main(requirements: str) -> int:
    """Install what is missing; exit 0 when every pin is in place, 1 with the names that are not."""
    versions, package = wanted(Path(requirements))
    if missing(versions):
        from_galaxy(Path(requirements))
    if missing(versions):
        from_package(list(missing(versions)), package)
    for name, version in missing(versions).items():
        print(f"collection {name}: wanted {version}, found {installed(name)}", file=sys.stderr)
    return 1 if missing(versions) else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
