"""What is written down is true: pages are fresh, links lead somewhere, commands parse, update rules match the files they name."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from specrig import cli, docs
from specrig.runner import ROOT

PAPERS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAPERS += sorted((ROOT / "roles").glob("*/README.md"))
MANAGERS: list[dict[str, Any]] = json.loads((ROOT / "renovate.json").read_text())["customManagers"]
each_paper = pytest.mark.parametrize("path", PAPERS, ids=lambda path: str(path.relative_to(ROOT)))


@pytest.mark.parametrize("name", sorted(docs.pages()))
def test_role_pages_are_fresh(name: str) -> None:
    path = ROOT / "docs" / name
    assert path.exists() and path.read_text(encoding="utf-8") == docs.pages()[name], "python -m specrig.docs"


def test_no_page_of_a_role_that_is_gone() -> None:
    assert {f"roles/{path.name}" for path in (ROOT / "docs/roles").glob("*")} == {
        page for page in docs.pages() if "/" in page
    }


def test_markup_and_cells() -> None:
    assert docs.markdown("C(absent) keeps\n  a | b") == "`absent` keeps a \\| b"
    option = {"type": "list", "elements": "dict", "default": [], "description": ["One.", "Two."]}
    inner = {"x": {"type": "str", "required": True, "description": "X."}}
    assert list(docs.rows({"a": option | {"options": inner}})) == [
        "| `a` | list of dict | `[]` | One. Two. |",
        "| `a[].x` | str | required | X. |",
    ]
    with pytest.raises(ValueError, match="What it changes"):
        docs.handwritten("# role\n")


def anchors(path: Path) -> set[str]:
    """The anchors that headings get where Markdown is rendered."""
    heads = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head).strip().lower().replace(" ", "-") for head in heads}


@each_paper
def test_links_lead_somewhere(path: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if link.startswith("http"):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def commands(path: Path) -> Iterator[list[str]]:
    """The `./rig …` commands that a page prints, in blocks and in the text; templates with … or UPPER placeholders too."""
    text = path.read_text(encoding="utf-8")
    blocks = [
        line.partition("  #")[0]
        for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
        for line in block.splitlines()
    ]
    for words in [*blocks, *re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))]:
        found = re.match(r"(?:[A-Z_]+=\S+ )*\./rig ?(.*)", words.strip())
        if found:
            yield shlex.split(found[1].partition("&&")[0])


@each_paper
def test_commands_exist(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in commands(path):
        try:
            parsed = cli.parser().parse_args(words)
        except SystemExit:
            said = capsys.readouterr().err
            # A verb named without its arguments, as prose does, is fine; a word that does not exist is not.
            assert "the following arguments are required" in said, f"./rig {shlex.join(words)}: {said}"
        else:
            # `lab ssh` hands everything after the host's name to the host.
            assert not getattr(parsed, "command", None) or not parsed.command[0].startswith("-"), shlex.join(words)


def verbs() -> set[str]:
    found = cli.parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    assert found
    return set(found)


def test_readme_names_every_verb() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [verb for verb in verbs() if not re.search(rf"^\| `\./rig {verb}\b", text, re.MULTILINE)] == []


def test_messages_name_verbs_that_exist() -> None:
    files = [path for path in (ROOT / "src").rglob("*") if path.suffix in {".py", ".yml"}]
    told = {
        f"{path.relative_to(ROOT)}: ./rig {verb}"
        for path in files
        for verb in re.findall(r"\./rig ([a-z]+)", path.read_text(encoding="utf-8"))
        if verb not in verbs()
    }
    assert not told, "a fix that does not exist"
    swallowed = [path for path in files if re.search(r"lab ssh \w+ --", path.read_text(encoding="utf-8"))]
    assert not swallowed, "options of `lab ssh` come before the host's name"


def matches(manager: dict[str, Any]) -> list[tuple[Path, re.Match[str]]]:
    """What a Renovate regex manager finds; it writes named groups as JavaScript does."""
    files = [
        p
        for pattern in manager["managerFilePatterns"]
        for p in repository_files()
        if re.search(pattern.strip("/"), str(p))
    ]
    assert files, manager["managerFilePatterns"]
    return [
        (path, found)
        for path in files
        for wanted in manager["matchStrings"]
        for found in re.finditer(wanted.replace("(?<", "(?P<"), (ROOT / path).read_text(encoding="utf-8"))
    ]


def repository_files() -> list[Path]:
    tops = [path for path in ROOT.iterdir() if path.is_file()]
    deep = [path for folder in ("src", "requirements") for path in (ROOT / folder).rglob("*") if path.is_file()]
    return [path.relative_to(ROOT) for path in [*tops, *deep]]


@pytest.mark.parametrize("manager", MANAGERS, ids=lambda manager: manager["managerFilePatterns"][0])
def test_renovate_finds_what_it_updates(manager: dict[str, Any]) -> None:
    found = matches(manager)
    assert found, manager["matchStrings"]
    for _, match in found:
        assert re.match(r"\d+\.\d+\.\d+", match["currentValue"])
        assert match.groupdict().get("depName") or manager["depNameTemplate"]


def test_renovate_appends_an_engine_version() -> None:
    manager = next(m for m in MANAGERS if m["depNameTemplate"] == "vllm/vllm-openai")
    [(path, match)] = matches(manager)
    text = (ROOT / path).read_text(encoding="utf-8")
    before = yaml.safe_load(text)["engines"]["vllm"]
    assert match["currentValue"] == before["versions"][-1]
    new = (
        manager["autoReplaceStringTemplate"]
        .replace("{{{currentValue}}}", match["currentValue"])
        .replace("{{{newValue}}}", "99.0.0")
    )
    after = yaml.safe_load(text.replace(match[0], new))["engines"]["vllm"]
    assert after == before | {"versions": [*before["versions"], "99.0.0"]}
    version = re.match(manager["extractVersionTemplate"].replace("(?<", "(?P<"), f"v{before['versions'][-1]}")
    assert version and version["version"] == before["versions"][-1]


def test_locks_agree_where_they_share_a_package() -> None:
    pins = [
        dict(re.findall(r"^([a-z0-9._-]+)==(\S+)", (ROOT / "requirements" / name).read_text(), re.MULTILINE))
        for name in ("run.lock", "dev.lock")
    ]
    shared = set(pins[0]) & set(pins[1])
    assert shared and {name: pins[0][name] for name in shared} == {name: pins[1][name] for name in shared}
