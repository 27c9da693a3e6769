"""Docker answers, starts at boot, and its settings are what is in the file."""

from __future__ import annotations

import json
from typing import Any

from tests.host.conftest import as_root, output


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


def test_containers_have_logs_with_a_limit_or_what_daemon_json_says(host: Any) -> None:
    file = host.file("/etc/docker/daemon.json")
    options = json.loads(file.content_string) if file.exists else {}
    driver = output(host, "docker", "info", "--format", "{{.LoggingDriver}}").strip()
    assert driver == options.get("log-driver", "json-file")
    if driver == "local":
        assert options["log-opts"]["max-size"] and options["log-opts"]["max-file"]


def test_data_is_where_daemon_json_says(host: Any) -> None:
    file = host.file("/etc/docker/daemon.json")
    root = (json.loads(file.content_string) if file.exists else {}).get("data-root", "/var/lib/docker")
    assert output(host, "docker", "info", "--format", "{{.DockerRootDir}}").strip() == root


def test_a_port_beyond_loopback_is_guarded(host: Any) -> None:
    """The rules are in force, and every port that a container of ours publishes off loopback is in them."""
    names = output(host, "docker", "ps", "--quiet", "--filter", "name=^specrig-").split()
    wide = set()
    for name in names:
        ports = json.loads(output(host, "docker", "inspect", "--format", "{{json .HostConfig.PortBindings}}", name))
        bound = [one for rows in (ports or {}).values() for one in rows or []]
        wide |= {one["HostPort"] for one in bound if not one["HostIp"].startswith("127.") and one["HostIp"] != "::1"}
    assert as_root(host, "/usr/local/lib/specrig/firewall", "--check").rc == 0
    rules = host.file("/etc/specrig/firewall/iptables").content_string
    rules += host.file("/etc/specrig/firewall/ip6tables").content_string
    assert not [port for port in wide if f"--dport {port} " not in rules]
