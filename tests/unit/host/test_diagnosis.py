"""What a failed service leaves behind: no secret, no more than agreed, whatever part of the machine does not answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from specrig.host import cache, diagnosis, proven
from specrig.host.errors import HostError

from .docker import Docker

KEY = "this-is-the-key-0123456789"
TOOL = """#!/bin/sh
case "$0 $*" in
*systemctl*show*) echo Id=specrig-tiny.service; echo InvocationID=abc;;
*journalctl*--dmesg*) echo "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus"; echo "usb 1-1: new device";;
*journalctl*abc*) echo "args: --api-key %s"; echo "HF_TOKEN=hf_abcdefghijklmnop"
  head -c 5000 /dev/zero | tr '\\\\0' x; echo; echo ValueError: K is 40;;
*) echo "$(basename $0) says nothing";;
esac
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(diagnosis, "DIRECTORY", tmp_path / "diagnosis")
    monkeypatch.setattr(diagnosis, "SERVICES", tmp_path / "services")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    (tmp_path / "services/tiny").mkdir(parents=True)
    (tmp_path / "services/tiny/api-key").write_text(KEY + "\n")
    (tmp_path / "bin").mkdir()
    for name in ("systemctl", "journalctl", "df", "free", "nvidia-smi", "docker"):
        (tmp_path / "bin" / name).write_text(TOOL % KEY)
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def test_it_says_what_was_seen_and_no_secret(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Docker(here, monkeypatch) as docker:
        docker.containers["specrig-tiny"] = {
            "Id": "c1",
            "State": {"OOMKilled": True, "ExitCode": 137},
            "Config": {"Env": ["X=" + KEY]},
        }
        path = Path(diagnosis.diagnose("tiny")["path"])
    text = path.read_text()
    assert path.stat().st_mode & 0o777 == 0o640 and path.parent.stat().st_mode & 0o777 == 0o750
    assert "Xid" in text and "usb 1-1" not in text and '"OOMKilled": true' in text and "ValueError: K is 40" in text
    assert KEY not in text and "hf_abcdefghijklmnop" not in text and "***" in text
    assert max(map(len, text.splitlines())) <= diagnosis.LONGEST + 2


def test_one_for_each_start(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = diagnosis.diagnose("tiny")
    assert diagnosis.diagnose("tiny") == {"changed": False, "path": first["path"]}
    # systemd names the failed start to its OnFailure= unit, whatever runs by then.
    monkeypatch.setenv("MONITOR_INVOCATION_ID", "another")
    assert diagnosis.diagnose("tiny")["changed"]
    assert Path(first["path"]).exists()


def test_a_part_that_fails_does_not_cost_the_others(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{here}/none.sock")
    (here / "bin/df").write_text("#!/bin/sh\nexit 7\n")
    text = Path(diagnosis.diagnose("tiny")["path"]).read_text()
    assert "no answer on" in text and "ValueError: K is 40" in text


def test_only_the_newest_are_kept(here: Path) -> None:
    (here / "diagnosis").mkdir()
    for day in range(1, 20):
        (here / f"diagnosis/tiny-202001{day:02}T000000Z.txt").write_text("x")
    (here / "diagnosis/tiny-two-20200101T000000Z.txt").write_text("another service's")
    path = Path(diagnosis.diagnose("tiny")["path"])
    kept = sorted(p.name for p in (here / "diagnosis").iterdir())
    assert len(kept) == diagnosis.KEPT + 1 and path.name in kept and "tiny-two-20200101T000000Z.txt" in kept
    assert "tiny-20200110T000000Z.txt" not in kept and "tiny-20200119T000000Z.txt" in kept


@pytest.mark.parametrize("name", ["", "../etc", "a b", "A", "tiny\n"])
def test_no_other_name(here: Path, name: str) -> None:
    with pytest.raises(HostError, match="DIAGNOSIS_FILE"):
        diagnosis.diagnose(name)


def test_caches_of_this_start_and_of_both_ways_back_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the one that was tried last is taken back: `rollback` still finds the cache of the one before."""
    monkeypatch.setattr(proven, "ROOT", tmp_path / "services")
    for name in ("previous", "proven"):
        proven.Home("tiny").keep({Path("/unit"): name.encode()}, {"service": {"cache_key": name}})
    caches = tmp_path / "tiny"
    for name in ("tried", "proven", "previous", "older"):
        (caches / name / "deep").mkdir(parents=True)
    (caches / "link").symlink_to("older")
    assert cache.prune(caches / "tried")["removed"] == ["older"]
    assert cache.prune(caches / "proven")["removed"] == ["tried"]
    assert {p.name for p in caches.iterdir()} == {"proven", "previous", "link"}
