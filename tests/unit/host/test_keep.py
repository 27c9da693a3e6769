"""What is published stays right, is found when it does not, is carried to hosts without a network, and goes when unused."""

from __future__ import annotations

import io
import json
import os
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from specrig.host import bundle, keep, manifest, stage
from specrig.host.cli import main
from specrig.host.errors import HostError

from .models import write_model
from .test_stage import FILES, QUIET, REVISION, document, hub_of, padded_job, refused, run

OTHER = "f" * 40


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with one published model."""
    with hub_of(FILES) as hub:
        run(document(tmp_path / "models", hub.url))
    return tmp_path / "models"


def home(root: Path) -> Path:
    return root / "org--name" / REVISION


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    stamp = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))


def falls_short(code: str, call: Any) -> HostError:
    with pytest.raises(HostError) as caught:
        call()
    assert caught.value.code == code
    return caught.value


def test_verify_reads_all_of_it(root: Path) -> None:
    assert keep.verify(root, QUIET) == {
        "changed": False,
        "verified": 1,
        "bytes": 300_079,
        "models": [{"path": str(home(root)), "ok": True, "damaged": []}],
    }


def test_a_flipped_bit_is_found_reported_and_repaired(root: Path, tmp_path: Path) -> None:
    flip(home(root) / "model.safetensors")
    report = tmp_path / "var/scrub.json"
    error = falls_short("STORE_DAMAGED", lambda: keep.verify(root, QUIET, 10**9, report))
    assert error.lines == [str(home(root) / "model.safetensors")] and error.status == 1
    told = json.loads(report.read_text())
    assert told["ok"] is False and told["models"][0]["damaged"] == ["model.safetensors"]
    assert (home(root) / "model.safetensors").exists(), "a service may be using it"
    assert keep.listing(root)["models"][0]["damaged"] is True
    with hub_of(FILES) as hub:
        assert run(document(root, hub.url), check=True)["would_stage"] == ["a"]
        run(document(root, hub.url))
        assert list(hub.sent) == [f"/org/name/resolve/{REVISION}/model.safetensors"], "only the bad file comes again"
    assert keep.verify(root, QUIET)["verified"] == 1 and not (home(root) / manifest.DAMAGED).exists()


@pytest.mark.parametrize("harm", ["gone", "short", "link"])
def test_other_harm_is_found(root: Path, harm: str) -> None:
    path = home(root) / "config.json"
    path.unlink()
    if harm == "short":
        path.write_text("{}")
    elif harm == "link":
        path.symlink_to("model.safetensors")
    assert "config.json" in falls_short("STORE_DAMAGED", lambda: keep.verify(root, QUIET)).cause


def test_nothing_verified_is_a_failure(tmp_path: Path) -> None:
    falls_short("STORE_EMPTY", lambda: keep.verify(tmp_path, QUIET))


def test_scrub_is_slow(root: Path) -> None:
    begin = time.monotonic()
    keep.verify(root, QUIET, limit=1_000_000)
    assert 0.25 < time.monotonic() - begin < 3


# -- removing --------------------------------------------------------------------------------------------------------


def second(root: Path) -> Path:
    """Another revision of the model, older by its manifest's time."""
    path = root / "org--name" / OTHER
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / manifest.MANIFEST).write_text(
        json.dumps(
            {"repo": "org/name", "revision": OTHER, "derive": None, "files": [{"path": "config.json", "size": 2}]}
        )
    )
    os.utime(path / manifest.MANIFEST, (1, 1))
    return path


def applied(tmp_path: Path, *paths: Path) -> Path:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"models": [{"path": str(path)} for path in paths]}))
    return plan


def test_gc_says_first_and_removes_only_what_nothing_uses(root: Path, tmp_path: Path) -> None:
    old, plan = second(root), applied(tmp_path, home(root))
    assert [r["path"] for r in keep.gc(root, QUIET, plan_file=plan)["would_remove"]] == [str(old)]
    assert old.exists()
    assert keep.gc(root, QUIET, keep=1, plan_file=plan)["changed"] is False
    result = keep.gc(root, QUIET, apply=True, plan_file=plan)
    assert result["changed"] and not old.exists() and home(root).exists()
    assert (root / "org--name/current").exists()
    assert keep.gc(root, QUIET, apply=True, plan_file=plan)["changed"] is False


def test_gc_keeps_what_a_unit_names_although_the_plan_does_not(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, plan = second(root), applied(tmp_path, home(root))
    units = tmp_path / "units"
    (units / "specrig-old.service.d").mkdir(parents=True)
    (units / "specrig-old.service").write_text(f'  --volume "{root}/org--name/{OTHER}:/models/target:ro" \\\n')
    monkeypatch.setattr(keep.in_use, "__defaults__", (plan, units))
    assert keep.gc(root, QUIET, apply=True, plan_file=plan)["changed"] is False and old.exists()
    (units / "specrig-old.service").write_text("")
    (units / "specrig-old.service.d/mine.conf").write_text(f"Environment=M={root}/org--name/current\n")
    (root / "org--name/current").unlink()
    (root / "org--name/current").symlink_to(OTHER)
    assert keep.gc(root, QUIET, apply=True, plan_file=plan)["changed"] is False and old.exists()


def test_gc_without_a_plan_does_nothing(root: Path, tmp_path: Path) -> None:
    error = falls_short("GC_NO_PLAN", lambda: keep.gc(root, QUIET, apply=True, plan_file=tmp_path / "none"))
    assert error.status == 2 and home(root).exists()


def test_gc_and_a_stager_exclude_each_other(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "LOCK_WAIT_S", 0.1)
    second(root)
    with stage.locked(root):
        falls_short("STAGE_BUSY", lambda: keep.gc(root, QUIET, apply=True, plan_file=applied(tmp_path, home(root))))


def test_gc_of_everything_leaves_no_litter(root: Path, tmp_path: Path) -> None:
    partial = root / ".partial/org--other" / OTHER
    partial.mkdir(parents=True)
    (partial / "x").write_bytes(b"1" * 5000)
    assert keep.gc(root, QUIET, apply=True, plan_file=applied(tmp_path))["bytes"] > 300_000
    assert [p.relative_to(root).as_posix() for p in sorted(root.rglob("*"))] == [".partial", ".partial/.lock"]


def test_orphans_are_swept_by_the_next_stager(tmp_path: Path) -> None:
    root = tmp_path / "models"
    for name, days in (("old", 20), ("young", 2)):
        directory = root / ".partial" / f"org--{name}" / OTHER
        directory.mkdir(parents=True)
        (directory / "x").write_text("x")
        stamp = time.time() - days * 86400
        for path in (directory / "x", directory):
            os.utime(path, (stamp, stamp))
    (root / ".partial/org--young/.old-1").mkdir()
    with hub_of(FILES) as hub:
        run(document(root, hub.url))
    assert sorted(p.name for p in (root / ".partial").iterdir()) == [".lock", "org--young"]
    assert [p.name for p in (root / ".partial/org--young").iterdir()] == [OTHER]


# -- bundles ---------------------------------------------------------------------------------------------------------


def test_a_bundle_carries_models_to_a_host_without_a_network(root: Path, tmp_path: Path) -> None:
    dest = tmp_path / "models.tar"
    result = bundle.write(root, dest, [], QUIET)
    assert result["models"] == [f"org/name@{REVISION}"] and dest.stat().st_size == result["bytes"]
    first = dest.read_bytes()
    bundle.write(root, dest, ["org/name"], QUIET)
    assert dest.read_bytes() == first, "the same models, the same bytes"
    doc = document(tmp_path / "far", "", bundle=str(dest)) | {"endpoint": None}
    assert run(doc)["staged"][0]["from"] == {"bundle": 300_079}
    assert keep.verify(tmp_path / "far", QUIET)["verified"] == 1
    job = bundle.job_of(dest, tmp_path / "other")
    assert stage.stage(job, QUIET)["changed"] and stage.stage(job, QUIET)["changed"] is False


def test_a_directory_does_as_well(root: Path, tmp_path: Path) -> None:
    doc = document(tmp_path / "far", "", bundle=str(root)) | {"endpoint": None}
    assert run(doc)["changed"] and bundle.job_of(root, tmp_path / "x").artefacts[0].repo == "org/name"


def test_a_bundle_with_other_bytes_is_no_source(root: Path, tmp_path: Path) -> None:
    flip(home(root) / "model.safetensors")
    falls_short("STORE_DAMAGED", lambda: bundle.write(root, tmp_path / "b.tar", [], QUIET))
    assert not list(tmp_path.glob("b.tar*"))
    doc = document(tmp_path / "far", "", bundle=str(root)) | {"endpoint": None}
    refused(doc, "STAGE_OFFLINE")
    assert not (tmp_path / "far/org--name").exists()
    with hub_of(FILES) as hub:  # and with a hub only the bad file is fetched
        result = run(document(tmp_path / "far", hub.url, bundle=str(root)))
    assert result["staged"][0]["from"]["hub"] == 300_000


def test_a_hostile_bundle(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "evil.tar"
    base = f"org--name/{REVISION}"
    with tarfile.open(path, "w") as tar:
        for name, kind, target in (
            ("../../evil", tarfile.REGTYPE, ""),
            (f"{base}/config.json", tarfile.SYMTYPE, "/etc/passwd"),
            (f"{base}/model.safetensors", tarfile.LNKTYPE, "/etc/shadow"),
            (f"{base}/sub dir/t.json", tarfile.FIFOTYPE, ""),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target
            tar.addfile(info)
    before = sorted(tmp_path.rglob("*"))
    doc = document(tmp_path / "far", "", bundle=str(path)) | {"endpoint": None}
    assert "config.json" in refused(doc, "STAGE_OFFLINE").cause
    assert [p for p in sorted(tmp_path.rglob("*")) if p not in before and "far" not in p.parts] == []
    falls_short("BUNDLE_BROKEN", lambda: bundle.job_of(path, tmp_path / "far"))


@pytest.mark.parametrize("content", [b"", b"no tar at all" * 100, None])
def test_a_broken_bundle_is_coded(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "b.tar"
    if content is not None:
        path.write_bytes(content)
    falls_short("BUNDLE_BROKEN", lambda: bundle.job_of(path, tmp_path / "far"))


def test_a_bundles_own_manifest_is_hostile_input(tmp_path: Path) -> None:
    path = tmp_path / "b.tar"
    value = {"repo": "org/name", "revision": REVISION, "files": [{"path": "../x", "size": 1, "sha256": "0" * 64}]}
    with tarfile.open(path, "w") as tar:
        data = json.dumps(value).encode()
        info = tarfile.TarInfo(f"org--name/{REVISION}/{manifest.MANIFEST}")
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))
    falls_short("STAGE_MANIFEST", lambda: bundle.job_of(path, tmp_path / "far"))


def test_what_cannot_be_bundled(root: Path, tmp_path: Path) -> None:
    falls_short("BUNDLE_NOTHING", lambda: bundle.write(root, tmp_path / "b.tar", ["org/none"], QUIET))
    falls_short("BUNDLE_DEST", lambda: bundle.write(root, tmp_path / "no/b.tar", [], QUIET))


def test_a_padded_draft_is_made_anew_where_it_is_unpacked(tmp_path: Path) -> None:
    write_model(tmp_path / "source", vocab=16)
    files = {p.name: p.read_bytes() for p in (tmp_path / "source").iterdir()}
    with hub_of(files) as hub:
        run(padded_job(tmp_path, hub.url, files))
    root = tmp_path / "models"
    assert bundle.write(root, tmp_path / "b.tar", [], QUIET)["models"] == [f"org/name@{REVISION}"]
    far = padded_job(tmp_path / "far", "", files) | {"endpoint": None, "bundle": str(tmp_path / "b.tar")}
    assert [s["id"] for s in run(far)["staged"]] == ["a", "b"]
    pads = [next(p.glob(f"*/*-pad24/{manifest.MANIFEST}")).read_bytes() for p in (root, tmp_path / "far/models")]
    assert pads[0] == pads[1], "byte-identical on each host"
    assert keep.verify(tmp_path / "far/models", QUIET)["verified"] == 2


def test_the_verbs_speak_json(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)  # what the program sets for itself is not for this process

    def say(*words: str) -> tuple[int, dict[str, Any]]:
        code = main([*words, "--root", str(root)])
        return code, json.loads(capsys.readouterr().out.splitlines()[-1])

    code, found = say("models")
    assert code == 0 and found["models"][0]["repo"] == "org/name" and found["free_bytes"] > 0
    assert say("verify")[0] == 0
    assert say("bundle", str(tmp_path / "b.tar"))[1]["ok"]
    flip(home(root) / "config.json")
    code, found = say("verify")
    assert code == 1 and found["error"]["code"] == "STORE_DAMAGED"
    assert main(["import", str(tmp_path / "b.tar"), "--root", str(root)]) == 0, "a bundle repairs, too"
    capsys.readouterr()
    assert say("verify")[0] == 0
