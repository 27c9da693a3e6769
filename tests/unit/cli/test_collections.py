"""Which collections are wanted, which are there, and what is done about the difference."""

from __future__ import annotations

import json
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from specrig import collections
from specrig.runner import ROOT

REQUIREMENTS = """\
# ansible_package: 12.3.0
collections:
  - {name: ansible.posix, version: 2.1.0}
  - {name: community.docker, version: 4.8.2}
"""


@pytest.fixture
def requirements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(collections, "DESTINATION", tmp_path / "collections")
    (tmp_path / "requirements.yml").write_text(REQUIREMENTS)
    return tmp_path / "requirements.yml"


def manifest(name: str, version: str) -> tuple[str, str]:
    path = f"ansible_collections/{name.replace('.', '/')}/MANIFEST.json"
    return path, json.dumps({"collection_info": {"name": name, "version": version}})


def put(name: str, version: str) -> None:
    path, text = manifest(name, version)
    (collections.DESTINATION / path).parent.mkdir(parents=True, exist_ok=True)
    (collections.DESTINATION / path).write_text(text)


def test_what_is_wanted(requirements: Path) -> None:
    assert collections.wanted(requirements) == ({"ansible.posix": "2.1.0", "community.docker": "4.8.2"}, "12.3.0")


def test_this_repositorys_own_are_exact_and_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    versions, package = collections.wanted(ROOT / "requirements.yml")
    assert all(part.isdigit() for version in [*versions.values(), package] for part in version.split("."))
    assert collections.missing(versions) == {}


def test_requirements_without_the_package_line_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "r.yml").write_text("collections: []\n")
    with pytest.raises(SystemExit, match="ansible_package"):
        collections.wanted(tmp_path / "r.yml")


def test_missing_is_what_is_absent_or_at_another_version(requirements: Path) -> None:
    versions, _ = collections.wanted(requirements)
    assert collections.missing(versions) == versions
    put("ansible.posix", "2.1.0")
    put("community.docker", "4.0.0")
    assert collections.missing(versions) == {"community.docker": "4.8.2"}
    put("community.docker", "4.8.2")
    assert collections.missing(versions) == {}


def test_nothing_is_asked_when_all_is_there(requirements: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("asked")

    monkeypatch.setattr(subprocess, "run", never)
    put("ansible.posix", "2.1.0")
    put("community.docker", "4.8.2")
    assert collections.main(str(requirements)) == 0


@pytest.mark.parametrize(("version", "code"), [("4.8.2", 0), ("9.9.9", 1)])
def test_the_package_is_the_second_source_and_its_versions_are_checked(
    requirements: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], version: str, code: int
) -> None:
    asked = []

    def run(command: list[str], **_: Any) -> None:
        asked.append(command[1:3] if "collection" in command else command[2:4])
        if "download" in command:
            assert command[-1] == "ansible==12.3.0"
            with zipfile.ZipFile(
                Path(command[command.index("--dest") + 1]) / "ansible-12.3.0-py3-none-any.whl", "w"
            ) as wheel:
                for name in ("ansible.posix", "community.docker", "community.dockerish"):
                    wheel.writestr(*manifest(name, "2.1.0" if name == "ansible.posix" else version))

    monkeypatch.setattr(subprocess, "run", run)
    assert collections.main(str(requirements)) == code
    assert asked == [["collection", "install"], ["pip", "download"]]
    assert collections.installed("community.dockerish") is None, "only the named ones are unpacked"
    wrong = "collection community.docker: wanted 4.8.2, found 9.9.9\n"
    assert capsys.readouterr().err == (wrong if code else "")
