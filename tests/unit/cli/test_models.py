"""`./rig models lock` against the hub double: what is locked stays, --update says what moved."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from specrig import cli
from specrig.console import CannotRun
from specrig.lab.hub import Hub
from specrig.plan import HostPlan, plan_host
from specrig.verbs import locks, models
from tests.unit.plan.tiny import CONFIG, service, tiny

TARGET, DRAFT = "specrig-lab/tiny-target", "specrig-lab/tiny-draft"
OLD, NEW = "a" * 40, "b" * 40


def publish(root: Path, commit: str) -> None:
    for repo in (TARGET, DRAFT):
        folder = root / repo / commit
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        (folder / "model.safetensors").write_bytes(b"w" * 1_000_000)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    publish(tmp_path / "hub", OLD)
    server = Hub(tmp_path / "hub")
    server.start()
    yield server
    server.stop()


class Rig:
    """`./rig models lock` on one inventory; the plan is real, only Ansible is left out."""

    def __init__(self, hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.declared: dict[str, Any] = tiny()
        self.words = ["models", "lock", "-i", str(folder / "hosts.yml"), "--endpoint", hub.url]
        self.path = folder / "models.lock.yml"
        (folder / "hosts.yml").touch()
        monkeypatch.setattr(models, "make_plans", self.plans)

    def plans(self, _inventory: Path, _hosts: Sequence[str]) -> dict[str, HostPlan]:
        lock = yaml.safe_load(self.path.read_text()) if self.path.exists() else {}
        return {"alpha": plan_host("alpha", self.declared, lock)}

    def lock(self, *options: str) -> int:
        return cli.main([*self.words, *options])

    @property
    def revisions(self) -> dict[str, str]:
        return {repo: entry["revision"] for repo, entry in yaml.safe_load(self.path.read_text())["models"].items()}


@pytest.fixture
def rig(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(hub, tmp_path, monkeypatch)


def test_locks_what_the_plan_needs_and_keeps_it(rig: Rig, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert rig.lock() == 0
    assert rig.revisions == {TARGET: OLD, DRAFT: OLD}
    assert f"{TARGET}: {OLD}, 2 files, 0.00 GB" in capsys.readouterr().out
    publish(hub.root, NEW)
    before = rig.path.read_text()
    hub.stats.clear()
    assert rig.lock() == 0
    assert rig.path.read_text() == before and hub.stats == {}, "a locked model needs no hub"
    assert f"{TARGET}: locked at {OLD}" in capsys.readouterr().out


def test_update_says_what_moved(rig: Rig, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    rig.lock()
    rig.lock("--update")
    assert "upstream changed" not in capsys.readouterr().out
    publish(hub.root, NEW)
    assert rig.lock("--update") == 0
    assert capsys.readouterr().out.count(f"(upstream changed: was {OLD})") == 2
    assert rig.revisions == {TARGET: NEW, DRAFT: NEW}


def test_a_declared_commit_is_the_one_that_is_locked(rig: Rig, hub: Hub) -> None:
    publish(hub.root, NEW)
    rig.declared = tiny(target={"repo": TARGET, "revision": OLD})
    assert rig.lock() == 0
    assert rig.revisions == {TARGET: OLD, DRAFT: NEW}
    rig.declared = tiny(draft={"repo": DRAFT, "revision": OLD})
    assert rig.lock("--update") == 0
    assert rig.revisions[DRAFT] == OLD


def test_a_hub_that_does_not_have_it_leaves_the_lock(rig: Rig, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    rig.lock()
    before = rig.path.read_text()
    hub.faults = [{"path": "*", "kind": "503", "times": 99, "after": None}]
    assert rig.lock("--update") == 2
    assert "HUB_REFUSED" in capsys.readouterr().err and rig.path.read_text() == before


def test_a_refused_plan_says_so(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    rig.declared = service("rtx4091", "x")
    assert rig.lock() == 1
    assert "alpha: nothing to lock, its plan is refused: PROFILE_UNKNOWN" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "models:\n", "# nothing\n"])
def test_an_empty_lock_is_filled(rig: Rig, text: str) -> None:
    rig.path.write_text(text)
    assert locks.read(rig.path, "models") == {}


@pytest.mark.parametrize("what", ["models", "images"])
@pytest.mark.parametrize(
    "text", [b"models: {", b"- a\n", b"models", b"models: [1, 2]\nimages: [1, 2]\n", b"\xff\0", None]
)
def test_a_broken_lock_is_told(tmp_path: Path, what: str, text: bytes | None) -> None:
    path = tmp_path / "x.lock.yml"
    path.mkdir() if text is None else path.write_bytes(text)
    with pytest.raises(CannotRun, match=r"x\.lock\.yml") as told:
        locks.read(path, what)
    assert told.value.code == "LOCK_INVALID" and f"./rig {what} lock writes a new one" in told.value.fix
    assert len(str(told.value).splitlines()) == 2


def test_a_malformed_entry_is_locked_anew(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    assert rig.lock() == 0
    whole = rig.path.read_text()
    for entry in ({"revision": "main"}, [1, 2]):
        locks.save(rig.path, "models", {**yaml.safe_load(whole)["models"], TARGET: entry})
        before = rig.path.read_text()
        assert rig.lock("--check") == 1 and rig.path.read_text() == before
        capsys.readouterr()
        assert rig.lock() == 0 and rig.path.read_text() == whole
        assert f"models[{TARGET}]" in (told := capsys.readouterr().out) and f"wrote {rig.path}" in told


def test_nothing_is_said_to_be_written_that_was_not(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    rig.declared = service("rtx4091", "x")
    assert rig.lock() == 1 and not rig.path.exists()
    told = capsys.readouterr()
    assert "wrote" not in told.out and told.err.endswith(f"next: ./rig plan alpha -i {rig.path.parent}/hosts.yml\n")
    rig.declared = tiny()
    assert rig.lock() == 0 and "wrote" in capsys.readouterr().out
    assert rig.lock("--json") == 0
    assert json.loads(capsys.readouterr().out)["written"] is False


def test_save_is_readable_and_sorted(tmp_path: Path) -> None:
    locks.save(tmp_path / "lock.yml", "models", {"b/b": {"x": 1}, "a/a": {"x": "é"}})
    lines = (tmp_path / "lock.yml").read_text().splitlines()
    assert lines[0].startswith("# Written by ./rig models lock")
    assert [line.strip() for line in lines[1:]] == ["models:", "a/a:", "x: é", "b/b:", "x: 1"]


def test_a_model_that_the_catalog_does_not_know_is_locked_and_then_planned(rig: Rig, hub: Hub) -> None:
    folder = hub.root / "somebody/new" / OLD
    folder.mkdir(parents=True)
    for file in (hub.root / TARGET / OLD).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    rig.declared = tiny(target={"repo": "somebody/new"})
    assert [f.code for f in plan_host("alpha", rig.declared, {}).refusals] == ["MODEL_UNKNOWN"]
    assert rig.lock() == 0
    locked = yaml.safe_load(rig.path.read_text())
    assert set(locked["models"]) == {"somebody/new", DRAFT}
    assert "MODEL_UNKNOWN" not in {f.code for f in plan_host("alpha", rig.declared, locked).refusals}
