"""Every published model is complete, unaltered, plain, read by all and written by root only."""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import Any

from tests.host.conftest import HOST_PROGRAM, as_root, output

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


def shows(host: Any, unit: str, *names: str) -> dict[str, str]:
    """Properties of a unit, as systemd has them."""
    text = output(host, "systemctl", "show", f"--property={','.join(names)}", unit)
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def test_scrub_is_due_and_finds_nothing(host: Any) -> None:
    """The timer waits, and what it starts succeeds within its sandbox."""
    timer = shows(host, "specrig-scrub.timer", "ActiveState", "UnitFileState", "NextElapseUSecRealtime")
    assert (timer["ActiveState"], timer["UnitFileState"]) == ("active", "enabled") and timer["NextElapseUSecRealtime"]
    output(host, "systemctl", "start", "specrig-scrub.service")
    report = json.loads(output(host, "cat", "/var/lib/specrig/scrub.json"))
    assert report["ok"] and report["bytes"] > 0
    service = shows(host, "specrig-scrub.service", "IOSchedulingClass", "Nice", "Result")
    assert (service["IOSchedulingClass"], service["Nice"], service["Result"]) == ("3", "19", "success")


def test_sharing_is_read_only_and_without_rights(host: Any) -> None:
    if as_root(host, "systemctl", "cat", "specrig-share.service").rc != 0:
        return
    state = shows(host, "specrig-share.service", "ActiveState", "MainPID", "DynamicUser", "NoNewPrivileges")
    assert (state["ActiveState"], state["DynamicUser"], state["NoNewPrivileges"]) == ("active", "yes", "yes")
    status = output(host, "cat", f"/proc/{state['MainPID']}/status")
    told = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    assert told["Uid"].split()[0] != "0" and int(told["CapEff"], 16) == 0
    listening = output(host, "sh", "-c", f"ss -Hltnp | grep -F pid={state['MainPID']},").split()[3]
    for path in manifests(host):
        manifest = json.loads(output(host, "cat", str(path)))
        if manifest["derive"] is None:
            base = f"http://{listening}/{manifest['repo']}/resolve/{manifest['revision']}"
            assert json.loads(output(host, "curl", "-fsS", f"{base}/config.json"))["vocab_size"]
            assert as_root(host, "curl", "-fsS", f"{base}/{MANIFEST}").rc == 22, "not listed, not served"


def test_the_host_can_tell_what_it_holds(host: Any) -> None:
    report = json.loads(output(host, HOST_PROGRAM, "models").splitlines()[-1])
    assert report["ok"] and len(report["models"]) == len(manifests(host))
