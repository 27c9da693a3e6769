"""What runs on this rig, as one document: units, containers, health, models, the applied plan."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any

from specrig.host import diagnosis, docker_api, proof, proven, ready, retire, start, units
from specrig.host.errors import HostError
from specrig.host.manifest import DAMAGED, read_manifest

PLAN = Path("/etc/specrig/plan.json")
# Units of ours that are no service: a scrub that is not running is no shortfall.
OWN = (
    "specrig-cdi.service",
    "specrig-gpu-fans.service",
    "specrig-gpu-tuning.service",
    "specrig-scrub.service",
    "specrig-share.service",
    "specrig-gateway.service",
    "specrig-gateway-relay.service",
    "specrig-webui.service",
)


def models(root: Path) -> list[dict[str, Any]]:
    """Published models under `root`: repo, revision, path, bytes, derived, and whether `current` points at it."""
    found = []
    for directory in sorted(
        p for p in root.glob("*/*") if p.is_dir() and not p.is_symlink() and p.parent.name != ".partial"
    ):
        manifest = read_manifest(directory)
        if manifest is None:
            continue
        link = directory.parent / "current"
        found.append(
            {
                "repo": manifest.get("repo"),
                "revision": manifest.get("revision"),
                "path": str(directory),
                "bytes": sum(int(f.get("size") or 0) for f in manifest.get("files") or []),
                "derived": manifest.get("derive") is not None,
                **({"damaged": True} if (directory / DAMAGED).exists() else {}),
                "current": link.is_symlink() and str(link.readlink()) == directory.name,
            }
        )
    return found


def _health(service: dict[str, Any]) -> dict[str, Any] | None:
    if not service.get("ports"):
        return None
    url = proof.url(service)
    try:
        code, _ = ready.call(url, str(service.get("health_path") or "/health"), timeout=3)
    except (OSError, http.client.HTTPException) as error:
        return {"url": url, "ok": False, "cause": str(error)}
    return {"url": url, "ok": code == 200, "status": code}


def _progress(name: str) -> dict[str, Any]:
    """What the service's main process says of itself: {phase, detail, eta_s, start_s?, tries?, last_failure?}."""
    try:
        found = json.loads((Path("/run/specrig/services") / name / "state.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _alternate(unit: dict[str, str]) -> bool:
    """Whether another service that shares the cards has been chosen instead of this one."""
    others = start.alternates(unit)
    off = unit.get("ActiveState") not in start.RUNNING and unit.get("UnitFileState") != "enabled"
    return bool(others) and off and any(one.get("UnitFileState") == "enabled" for one in units.show(*others))


def _stale(name: str, unit: dict[str, str], service: dict[str, Any]) -> bool:
    """Whether the service runs with a file that has been replaced since it was started."""
    files = start.read_once(name, (str(file.get("path")) for file in service.get("files") or []))
    return unit.get("NeedDaemonReload") == "yes" or units.older_than(unit, files)


def _container(name: str) -> dict[str, Any] | None:
    try:
        found = docker_api.inspect_container(name)
    except HostError as error:
        return {"error": error.as_json()}
    if found is None:
        return None
    state = found.get("State") or {}
    config = found.get("Config") or {}
    return {
        "name": name,
        "image": config.get("Image"),
        "image_id": found.get("Image"),
        "status": state.get("Status"),
        "started_at": state.get("StartedAt"),
    }


def webui(wanted: dict[str, Any] | None) -> dict[str, Any] | None:
    """The web interface as planned (`host.webui`) and as it is; None where none is planned."""
    if not wanted or wanted.get("state") != "present":
        return None
    unit = units.show(str(wanted["unit"]))[0]
    files = [f"/etc/systemd/system/{wanted['unit']}", *(one["key_file"] for one in wanted["endpoints"])]
    return {
        "unit": wanted["unit"],
        "there": unit.get("LoadState") == "loaded",
        "state": unit.get("ActiveState"),
        "since": unit.get("StateChangeTimestamp"),
        "restarts": int(unit.get("NRestarts") or 0),
        "stale": unit.get("NeedDaemonReload") == "yes" or units.older_than(unit, [file for file in files if file]),
        "health": _health(wanted),
    }


def status(root: Path | None = None, plan_file: Path = PLAN) -> dict[str, Any]:
    """All of it. `root` is the models' directory; by default the applied plan's, else /srv/models."""
    try:
        plan = json.loads(plan_file.read_text())
    except (OSError, ValueError):
        plan = None
    services = {s.get("unit"): s for s in (plan or {}).get("services") or []}
    if root is None:
        paths = [Path(m["path"]) for m in (plan or {}).get("models") or [] if m.get("path")]
        root = paths[0].parent.parent if paths else Path("/srv/models")
    rows, ours = [], retire.installed()
    names = sorted({*services, *(u["Id"] for u in units.show("specrig-*.service", *services) if u.get("Id"))} - {None})
    for unit in units.show(*names) if names else []:
        name = unit.get("Id", "")
        if name.startswith("specrig-job-") or name in OWN or "@" in name:
            continue
        service, short = services.get(name), name[len("specrig-") : -len(".service")]
        rows.append(
            {
                "unit": name,
                "state": unit.get("ActiveState"),
                "sub": unit.get("SubState"),
                "since": unit.get("StateChangeTimestamp"),
                "restarts": int(unit.get("NRestarts") or 0),
                "result": unit.get("Result"),
                "enabled": unit.get("UnitFileState"),
                "status": unit.get("StatusText") or "",
                "progress": _progress(short),
                "alternate": _alternate(unit),
                "ours": short in ours,
                "diagnosis": str(found[0]) if (found := diagnosis.files(short)) else None,
                "stale": _stale(name, unit, service or {}),
                "container": _container(name[: -len(".service")]),
                "health": _health(service) if service else None,
                "upgrade": proven.summary(name[len("specrig-") : -len(".service")]),
            }
        )
    return {
        "changed": False,
        "plan_hash": (plan or {}).get("plan_hash"),
        "units": rows,
        "webui": webui(((plan or {}).get("host") or {}).get("webui")),
        "models": models(root),
        "models_root": str(root),
    }
