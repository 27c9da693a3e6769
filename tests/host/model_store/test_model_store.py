"""Every published model is complete, unaltered, plain, read by all and written by root only."""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import Any

from tests.host.conftest import as_root, output

MANIFEST = ".specrig-manifest.json"


def manifests(host: Any) -> list[PurePosixPath]:
    """Manifests of all published models."""
    plan = host.file("/etc/specrig/plan.json")
    root = json.loads(plan.content_string)["host"]["models_root"] if plan.exists else "/srv/models"
    found = output(host, "find", root, "-mindepth", "3", "-maxdepth", "3", "-name", MANIFEST).split()
    return [PurePosixPath(path) for path in found if "/.partial/" not in path]


def test_models_are_there(host: Any) -> None:
    assert manifests(host), "0 models verified is a failure"


def test_files_are_what_the_manifest_says(host: Any) -> None:
    for path in manifests(host):
        manifest = json.loads(output(host, "cat", str(path)))
        assert manifest["files"], f"{path} lists no file"
        for file in manifest["files"]:
            where = str(path.parent / file["path"])
            if "sha256" in file:
                assert output(host, "sha256sum", where).split()[0] == file["sha256"], where
            assert int(output(host, "stat", "--format=%s", where)) == file["size"], where


def test_files_are_plain_and_not_writable_by_others(host: Any) -> None:
    for path in manifests(host):
        odd = output(
            host, "find", str(path.parent), "(", "-type", "l", "-o", "-perm", "/022", "-o", "!", "-user", "root", ")"
        )
        assert not odd, f"links, writable or foreign files: {odd}"


def test_current_points_to_a_published_revision(host: Any) -> None:
    for path in manifests(host):
        target = output(host, "readlink", "--canonicalize", str(path.parent.parent / "current")).strip()
        assert as_root(host, "test", "-f", f"{target}/{MANIFEST}").rc == 0


def test_padded_draft_is_as_wide_as_said(host: Any) -> None:
    for path in manifests(host):
        if "-pad" not in path.parent.name:
            continue
        config = json.loads(output(host, "cat", str(path.parent / "config.json")))
        assert config["vocab_size"] == int(path.parent.name.rpartition("-pad")[2])
