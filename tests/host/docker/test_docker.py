"""Docker answers, starts at boot, and its settings are what is in the file."""

from __future__ import annotations

import json
from typing import Any

from tests.host.conftest import output


def test_engine_runs_and_starts_at_boot(host: Any) -> None:
    assert output(host, "systemctl", "is-active", "docker.service").strip() == "active"
    assert output(host, "systemctl", "is-enabled", "docker.service").strip() == "enabled"


def test_engine_answers(host: Any) -> None:
    version = output(host, "docker", "version", "--format", "{{.Server.Version}}").strip()
    assert int(version.split(".")[0]) >= 20


def test_daemon_json_is_valid_and_in_force(host: Any) -> None:
    file = host.file("/etc/docker/daemon.json")
    if not file.exists:
        return
    options = json.loads(file.content_string)
    assert (file.user, file.mode) == ("root", 0o644)
    insecure = options.get("insecure-registries", [])
    known = json.loads(output(host, "docker", "info", "--format", "{{json .RegistryConfig.IndexConfigs}}"))
    assert set(insecure) <= set(known), f"daemon.json names {insecure}, Docker knows {sorted(known)}"
