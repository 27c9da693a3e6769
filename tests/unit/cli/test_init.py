"""`./rig init`: cards from lspci, a profile that fits, an inventory that keeps what it has."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from specrig import cli
from specrig.verbs.init import cards_of

ONE_4090 = """\
01:00.0 VGA compatible controller: NVIDIA Corporation AD102 [GeForce RTX 4090] (rev a1)
01:00.1 Audio device: NVIDIA Corporation AD102 High Definition Audio Controller (rev a1)
"""
TWO_3090 = """\
21:00.0 VGA compatible controller: NVIDIA Corporation GA102 [GeForce RTX 3090] (rev a1)
21:00.1 Audio device: NVIDIA Corporation GA102 High Definition Audio Controller (rev a1)
4b:00.0 VGA compatible controller: NVIDIA Corporation GA102 [GeForce RTX 3090] (rev a1)
4b:00.1 Audio device: NVIDIA Corporation GA102 High Definition Audio Controller (rev a1)
"""
UNKNOWN = """\
02:00.0 3D controller: NVIDIA Corporation GK210GL [Tesla K80] (rev a1)
03:00.0 VGA compatible controller: NVIDIA Corporation TU106 [GeForce RTX 2060 Rev. A] (rev a1)
03:00.1 Audio device: NVIDIA Corporation TU106 High Definition Audio Controller (rev a1)
03:00.2 USB controller: NVIDIA Corporation TU106 USB 3.1 Host Controller (rev a1)
03:00.3 Serial bus controller: NVIDIA Corporation TU106 USB Type-C UCSI Controller (rev a1)
"""


@pytest.fixture
def inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RIG_CWD", str(tmp_path))
    return tmp_path / "hosts.yml"


def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """An `ssh` that answers with a shell script instead of a machine; it writes down how it was called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ssh").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n{script}\n')
    (folder / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def shows(lspci: str) -> str:
    return f"cat <<'END'\n{lspci}END"


def test_cards_are_counted_without_their_audio() -> None:
    assert cards_of(ONE_4090) == {"rtx_4090": 1}
    assert cards_of(TWO_3090) == {"rtx_3090": 2}
    assert cards_of("") == {}


def test_an_unknown_card_counts_under_its_own_name() -> None:
    assert cards_of(UNKNOWN) == {
        "NVIDIA Corporation GK210GL [Tesla K80] (rev a1)": 1,
        "NVIDIA Corporation TU106 [GeForce RTX 2060 Rev. A] (rev a1)": 1,
    }


@pytest.mark.parametrize(
    ("lspci", "profile"), [(ONE_4090, "rtx4090_r1_14b"), (TWO_3090, "dual_rtx3090_r1_32b_tp2")], ids=["4090", "2x3090"]
)
def test_a_profile_is_proposed(
    inventory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    lspci: str,
    profile: str,
) -> None:
    machine(inventory.parent, monkeypatch, shows(lspci))
    assert cli.main(["init", "--host", "me@192.0.2.7", "-i", "hosts.yml"]) == 0
    assert yaml.safe_load(inventory.read_text()) == {
        "rigs": {
            "hosts": {"192-0-2-7": {"ansible_host": "192.0.2.7", "rig_profile": profile, "ansible_user": "me"}},
        }
    }
    said = capsys.readouterr().out
    assert f"({profile})" in said and "./rig models lock -i hosts.yml" in said
    assert " me@192.0.2.7 lspci -d 10de:" in (inventory.parent / "asked").read_text()


@pytest.mark.parametrize("lspci", [UNKNOWN, ""], ids=["unknown", "none"])
def test_no_profile_fits(
    inventory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lspci: str
) -> None:
    machine(inventory.parent, monkeypatch, shows(lspci))
    assert cli.main(["init", "--host", "rig", "-i", "hosts.yml"]) == 2
    said = capsys.readouterr().err
    assert "NO_PROFILE" in said and "--profile" in said
    assert not inventory.exists()


def test_a_machine_that_does_not_answer(
    inventory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine(inventory.parent, monkeypatch, "echo 'Host key verification failed.' >&2; exit 255")
    assert cli.main(["init", "--host", "rig", "-i", "hosts.yml"]) == 2
    said = capsys.readouterr().err
    assert "Host key verification failed." in said and "ssh rig once by hand" in said


def init(*words: str) -> int:
    return cli.main(["init", "-i", "hosts.yml", "--profile", "rtx4090_r1_14b", *words])


def test_what_is_there_stays_and_is_backed_up(inventory: Path) -> None:
    before = "# mine\nall: {vars: {x: 1}}\nrigs:\n  vars: {y: 2}  # two\n  hosts:\n    old: {ansible_host: '192.0.2.1', key: !vault x}\n"
    inventory.write_text(before)
    inventory.chmod(0o600)
    assert init("--host", "192.0.2.2", "--name", "new") == 0
    text = inventory.read_text()
    assert text.startswith(before), "comments, quotes, tags"
    data = yaml.safe_load(text.replace("!vault ", ""))
    assert data["all"] == {"vars": {"x": 1}} and data["rigs"]["vars"] == {"y": 2}
    assert list(data["rigs"]["hosts"]) == ["old", "new"]
    assert "ansible_user" not in data["rigs"]["hosts"]["new"]
    assert (inventory.parent / "hosts.yml.bak").read_text() == before
    assert inventory.stat().st_mode & 0o777 == 0o600
    assert init("--host", "192.0.2.3", "--name", "newer") == 0
    assert (inventory.parent / "hosts.yml.bak").read_text() == before, "no copy goes over another"
    assert (inventory.parent / "hosts.yml.bak1").read_text() == text


@pytest.mark.parametrize("name", ["all", "localhost", "rigs", "home"])
def test_a_name_that_is_ansibles_own_or_a_group_is_refused(
    inventory: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    inventory.write_text("rigs: {hosts: {old: {}}}\nhome: {hosts: {old: {}}}\n")
    assert init("--host", "192.0.2.2", "--name", name) == 2
    said = capsys.readouterr().err
    assert "BAD_HOST" in said and name in said and "new" not in inventory.read_text()


@pytest.mark.parametrize("text", ["", "rigs:\n", "rigs: {hosts: }\n"])
def test_an_empty_inventory_is_filled(inventory: Path, text: str) -> None:
    inventory.write_text(text)
    assert init("--host", "rig") == 0
    assert list(yaml.safe_load(inventory.read_text())["rigs"]["hosts"]) == ["rig"]


@pytest.mark.parametrize(
    "text",
    [
        "rigs: [alpha]\n",
        "- alpha\n",
        "rigs: {hosts: [a]}\n",
        "rigs: {\n",
        "rigs: {hosts: {a: {k: 1, k: 2}}}\n",
        "[rigs]\na\n",
    ],
)
def test_an_inventory_that_can_not_be_kept_is_not_touched(
    inventory: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    inventory.write_text(text)
    assert init("--host", "rig") == 2
    assert "BAD_INVENTORY" in capsys.readouterr().err
    assert inventory.read_text() == text and [p.name for p in inventory.parent.iterdir()] == ["hosts.yml"]


def test_a_name_that_is_taken(inventory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert init("--host", "192.0.2.1", "--name", "alpha") == 0
    before = inventory.read_text()
    assert init("--host", "192.0.2.2", "--name", "alpha") == 2
    assert "HOST_EXISTS" in capsys.readouterr().err and inventory.read_text() == before
    assert init("--host", "192.0.2.2", "--name", "alpha", "--yes") == 0
    assert yaml.safe_load(inventory.read_text())["rigs"]["hosts"]["alpha"]["ansible_host"] == "192.0.2.2"


@pytest.mark.parametrize("host", ["a b", "me@", "@rig", "me@rig; reboot", "rig/x", "$(x)", "-v", "-lroot@rig", "me@-v"])
def test_a_bad_host_is_asked_nothing(
    inventory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], host: str
) -> None:
    machine(inventory.parent, monkeypatch, "exit 0")
    assert cli.main(["init", f"--host={host}", "-i", "hosts.yml"]) == 2
    assert "BAD_HOST" in capsys.readouterr().err
    assert not (inventory.parent / "asked").exists() and not inventory.exists()


def test_an_unknown_profile_names_the_known(inventory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert init("--host", "rig", "--profile", "rtx9999") == 2
    said = capsys.readouterr().err
    assert "PROFILE_UNKNOWN" in said and "rtx4090_r1_14b" in said


def test_without_a_terminal_nothing_hangs(
    inventory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", (inventory.parent / "empty").open("w+"))
    assert cli.main(["init", "-i", "hosts.yml"]) == 2
    said = capsys.readouterr().err
    assert "NO_TERMINAL" in said and "--host" in said
