"""The status document, on a systemctl that plays, Docker's API on a socket of ours, and a plan and models on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specrig.host import manifest, status

from .docker import Docker

SHOW = """#!/bin/sh
cat <<END
Id=specrig-chat.service
ActiveState=active
SubState=running
NRestarts=2
Result=success
UnitFileState=enabled

Id=specrig-job-stage.service
ActiveState=active

Id=specrig-scrub.service
ActiveState=failed
END
"""


def test_status_puts_unit_container_models_and_plan_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/systemctl").write_text(SHOW)
    (tmp_path / "bin/systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    model = tmp_path / "models/org--name/rev"
    model.mkdir(parents=True)
    files = [{"path": "a", "size": 7}]
    document: dict[str, Any] = {"repo": "org/name", "revision": "rev", "derive": None, "files": files}
    (model / manifest.MANIFEST).write_text(json.dumps(document))
    (model.parent / "current").symlink_to("rev")
    (tmp_path / "models/.partial/org--name").mkdir(parents=True)
    plan = tmp_path / "plan.json"
    service = {"unit": "specrig-chat.service", "ports": [{"bind": "0.0.0.0", "port": 1}], "health_path": "/health"}
    plan.write_text(json.dumps({"plan_hash": "abc", "services": [service], "models": [{"path": str(model)}]}))
    with Docker(tmp_path, monkeypatch) as docker:
        docker.containers["specrig-chat"] = {
            "State": {"Status": "running"},
            "Config": {"Image": "vllm:1"},
            "Image": "sha256:1",
        }
        found = status.status(plan_file=plan)
    assert found["plan_hash"] == "abc" and found["models_root"] == str(tmp_path / "models")
    (unit,) = found["units"]
    assert unit["restarts"] == 2 and unit["container"]["image"] == "vllm:1"
    assert unit["health"]["ok"] is False and unit["health"]["url"] == "http://127.0.0.1:1"
    assert found["models"] == [
        {
            "repo": "org/name",
            "revision": "rev",
            "path": str(model),
            "bytes": 7,
            "derived": False,
            "current": True,
        }
    ]


def test_a_planned_web_interface_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "systemctl").write_text("#!/bin/sh\nprintf 'LoadState=loaded\\nActiveState=active\\nNRestarts=1\\n'\n")
    (tmp_path / "systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    wanted: dict[str, Any] = {"state": "present", "unit": "specrig-webui.service", "endpoints": [{"key_file": ""}]}
    found = status.webui(wanted | {"ports": [{"bind": "127.0.0.1", "port": 1}], "health_path": "/health"})
    assert found is not None and (found["there"], found["state"], found["restarts"]) == (True, "active", 1)
    assert found["health"]["url"] == "http://127.0.0.1:1" and not found["health"]["ok"]
    assert status.webui(None) is None and status.webui({"state": "absent"}) is None


@pytest.mark.parametrize(
    ("bind", "host"), [("127.0.0.2", "127.0.0.2"), ("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]")]
)
def test_health_is_asked_where_the_service_listens(bind: str, host: str) -> None:
    health = status._health({"ports": [{"bind": bind, "port": 1}]})
    assert health is not None and health["url"] == f"http://{host}:1" and health["ok"] is False and health["cause"]
