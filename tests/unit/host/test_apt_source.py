"""Package sources on a directory, with a recorded apt. Real apt and real signatures: molecule/docker_lifecycle."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from specrig.host import apt_source
from specrig.host.errors import HostError
from specrig.host.machine import Answer, Machine

from .test_pull import Recorder

URI = "https://download.example/linux/debian"
KEY = b"a key"
OURS = "etc/apt/sources.list.d/docker.sources"


@pytest.fixture
def rig(tmp_path: Path) -> Machine:
    (tmp_path / "etc/apt/sources.list.d").mkdir(parents=True)
    (tmp_path / "etc/apt/keyrings").mkdir()
    (tmp_path / "key").write_bytes(KEY)
    answers: dict[str, Answer] = {}

    def run(*command: str) -> Answer:
        return answers.get(command[1], Answer(1 if command[0] == "dpkg-query" else 0, "", ""))

    machine = Machine(tmp_path, run)
    machine.answers = answers  # type: ignore[attr-defined]
    return machine


def job(rig: Machine, **changed: Any) -> str:
    key = {"url": rig.path("key").as_uri(), "sha256": hashlib.sha256(KEY).hexdigest()}
    return json.dumps(
        {"name": "docker", "uri": URI, "suite": "trixie", "components": ["stable"], "key": key, **changed}
    )


def put(rig: Machine, name: str, text: str) -> Path:
    path = rig.path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def apply(rig: Machine, **options: Any) -> dict[str, Any]:
    check = options.pop("check", False)
    return apt_source.apply(job(rig, **options), Recorder(), check, rig)


def test_a_source_is_written_with_its_key_and_then_left_alone(rig: Machine) -> None:
    assert apply(rig, check=True)["changed"] and not rig.path(OURS).exists()
    assert apply(rig)["changed"]
    text = rig.path(OURS).read_text()
    assert f"URIs: {URI}\nSuites: trixie\nComponents: stable\nSigned-By: /etc/apt/keyrings/docker.asc\n" in text
    assert rig.path("etc/apt/keyrings/docker.asc").read_bytes() == KEY
    assert not apply(rig)["changed"]


@pytest.mark.parametrize("uri", [URI, URI + "/", URI.replace("https", "http"), URI.replace("download", "Download")])
def test_older_entries_of_the_address_go_aside_with_their_keys(rig: Machine, uri: str) -> None:
    line = f"deb [arch=amd64 signed-by=/usr/share/keyrings/old.gpg] {uri} trixie stable\n"
    old = put(rig, "etc/apt/sources.list.d/docker.list", line)
    key = put(rig, "usr/share/keyrings/old.gpg", "old")
    other = put(
        rig,
        "etc/apt/sources.list.d/dl.sources",
        f"Types: deb\nURIs:\n {uri}\nSuites: trixie\nComponents: stable\nSigned-By:\n -----BEGIN PGP\n .\n abc\n",
    )
    done = apply(rig)
    assert done["aside"] == [
        "/etc/apt/sources.list.d/dl.sources",
        "/etc/apt/sources.list.d/docker.list",
        "/usr/share/keyrings/old.gpg",
    ]
    for path in (old, key, other):
        assert not path.exists() and path.with_name(path.name + ".specrig~").exists()
    assert not apply(rig)["changed"]


def test_a_file_with_other_entries_loses_only_ours_and_a_shared_key_stays(rig: Machine) -> None:
    text = (
        "deb http://deb.example/debian trixie main\n"
        f"  deb-src [signed-by=/usr/share/keyrings/all.gpg] {URI} trixie stable\n"
        "deb [signed-by=/usr/share/keyrings/all.gpg] http://other.example/ ./\n"
    )
    mixed, key = put(rig, "etc/apt/sources.list", text), put(rig, "usr/share/keyrings/all.gpg", "all")
    done = apply(rig)
    assert done["commented"] == ["/etc/apt/sources.list"] and key.exists()
    lines = mixed.read_text().splitlines()
    assert [line.startswith("#") for line in lines] == [False, True, False]
    assert mixed.with_name("sources.list.specrig~").read_text() == text
    assert not apply(rig)["changed"]


def test_one_of_two_blocks_is_commented_out(rig: Machine) -> None:
    blocks = f"Types: deb\nURIs: http://a.example\nSuites: x\n\nTypes: deb\nURIs: {URI}\nSuites: trixie\n"
    mixed = put(rig, "etc/apt/sources.list.d/two.sources", blocks)
    apply(rig)
    left = apt_source.deb822(mixed.read_text())
    assert [entry.uris for entry in left] == [("http://a.example",)]


def test_older_names_go_aside_whatever_they_hold(rig: Machine) -> None:
    put(rig, "etc/apt/sources.list.d/nvidia-docker.list", "deb https://gone.example/ /\n")
    put(rig, "etc/apt/sources.list.d/mine.list", "deb https://gone.example/ /\n")
    done = apply(rig, legacy=["/etc/apt/sources.list.d/nvidia-docker.list"])
    assert done["aside"] == ["/etc/apt/sources.list.d/nvidia-docker.list"]


def test_a_persons_own_file_of_our_name_and_its_key_are_copied_first(rig: Machine) -> None:
    text = f"Types: deb\nURIs: {URI}\nSuites: bookworm\n"
    put(rig, OURS, text)
    put(rig, "etc/apt/keyrings/docker.asc", "theirs")
    apply(rig)
    assert rig.path(OURS + ".specrig~").read_text() == text
    assert rig.path("etc/apt/keyrings/docker.asc.specrig~").read_text() == "theirs"


def test_another_copy_is_never_overwritten(rig: Machine) -> None:
    put(rig, "etc/apt/sources.list.d/docker.list.specrig~", "older still")
    put(rig, "etc/apt/sources.list.d/docker.list", f"deb {URI} trixie stable\n")
    apply(rig)
    assert rig.path("etc/apt/sources.list.d/docker.list.specrig~").read_text() == "older still"
    assert URI in rig.path("etc/apt/sources.list.d/docker.list.1.specrig~").read_text()


@pytest.mark.parametrize(
    ("verb", "answer"),
    [
        ("update", Answer(100, "Err:1 http://x InRelease\n", "E: The repository does not have a Release file.\n")),
        ("update", Answer(0, "", "W: GPG error: http://x InRelease: NO_PUBKEY 1\n")),
        ("indextargets", Answer(100, "", "E: Conflicting values set for option Signed-By regarding source x\n")),
    ],
)
def test_what_apt_cannot_work_with_is_taken_back(rig: Machine, verb: str, answer: Answer) -> None:
    old = put(rig, "etc/apt/sources.list.d/docker.list", f"deb {URI} trixie stable\n")
    before = sorted(path for path in rig.root.rglob("*") if path.is_file())
    rig.answers[verb] = answer  # type: ignore[attr-defined]
    with pytest.raises(HostError) as found:
        apply(rig)
    assert found.value.code == "APT_SOURCE" and URI in found.value.cause
    assert (answer.err + answer.out).split()[1] in found.value.cause
    assert sorted(path for path in rig.root.rglob("*") if path.is_file()) == before and old.read_text().count(URI)


def test_another_key_than_the_expected_one_is_not_taken(rig: Machine) -> None:
    before = sorted(rig.root.rglob("*"))
    with pytest.raises(HostError, match="checksum") as found:
        apply(rig, key={"url": rig.path("key").as_uri(), "sha256": "0" * 64})
    assert found.value.code == "APT_SOURCE_KEY" and sorted(rig.root.rglob("*")) == before


@pytest.mark.parametrize(
    "changed", [{"name": "../x"}, {"uri": "http://a b"}, {"uri": ""}, {"key": {"url": "x", "sha256": ""}}]
)
def test_an_incomplete_source_is_refused(rig: Machine, changed: dict[str, Any]) -> None:
    with pytest.raises(HostError, match="APT_SOURCE_JOB"):
        apply(rig, **changed)
