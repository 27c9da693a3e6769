"""`./rig models lock --check` and `--allow-unsafe`: a committed lock is law, and what moved upstream is told."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import yaml

from specrig import cli
from specrig.host import manifest
from specrig.lab.hub import Hub
from specrig.plan import HostPlan, plan_host
from specrig.verbs import models
from tests.unit.plan.tiny import CONFIG, tiny

REPOS = ("specrig-lab/tiny-target", "specrig-lab/tiny-draft")
OLD, NEW = "a" * 40, "b" * 40


def publish(root: Path, commit: str, licence: str = "mit", weights: str = "model.safetensors") -> None:
    for repo in REPOS:
        folder = root / repo / commit
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        (folder / "README.md").write_text(f"---\nlicense: {licence}\n---\n")
        (folder / weights).write_bytes(commit[:1].encode() * 1_000_000)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    publish(tmp_path / "hub", OLD)
    server = Hub(tmp_path / "hub")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    lock = tmp_path / "models.lock.yml"

    def plans(_inventory: Path, _hosts: Sequence[str]) -> dict[str, HostPlan]:
        return {"alpha": plan_host("alpha", tiny(), yaml.safe_load(lock.read_text()) if lock.exists() else {})}

    monkeypatch.setattr(models, "make_plans", plans)
    (tmp_path / "hosts.yml").touch()
    return lock


def lock(hub: Hub, path: Path, *options: str) -> int:
    return cli.main(["models", "lock", "-i", str(path.with_name("hosts.yml")), "--endpoint", hub.url, *options])


def test_check_tells_what_changed_upstream_and_writes_nothing(
    hub: Hub, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lock(hub, path, "--check") == 1 and not path.exists(), "not locked yet"
    assert lock(hub, path) == 0
    assert "licence mit" in capsys.readouterr().out
    before = path.read_text()
    assert lock(hub, path, "--check") == 0
    publish(hub.root, NEW, licence="other")
    assert lock(hub, path, "--check") == 1
    told = capsys.readouterr().out
    assert "licence mit -> other" in told and "model.safetensors has other bytes (1000000 -> 1000000)" in told
    assert path.read_text() == before


def test_an_allowance_is_written_into_the_lock_and_stays(hub: Hub, path: Path) -> None:
    publish(hub.root, NEW, weights="pytorch_model.bin")
    assert lock(hub, path) == 2
    assert lock(hub, path, "--allow-unsafe", "pytorch_model.bin") == 0
    entries = yaml.safe_load(path.read_text())["models"]
    assert all(entry["unsafe"] == ["pytorch_model.bin"] for entry in entries.values())
    assert lock(hub, path, "--update") == 0


def test_the_plan_of_a_locked_pair_is_a_job_in_stage_order(hub: Hub, path: Path) -> None:
    assert lock(hub, path) == 0
    plan = plan_host("alpha", tiny(), yaml.safe_load(path.read_text())).as_json()
    job = manifest.parse_job({"root": "/srv/models", "endpoint": hub.url, "artefacts": plan["models"]})
    assert [a.source is not None for a in job.artefacts] == sorted(a.source is not None for a in job.artefacts)
    assert sum(a.size for a in job.artefacts) == sum(f["size"] for m in plan["models"] for f in m["files"])
