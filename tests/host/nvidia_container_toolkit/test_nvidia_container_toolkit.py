"""Containers get the cards that they ask for, and keep them. On a lab host the toolkit and the card are stand-ins; Docker and CDI are real."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.host.conftest import as_root, output

CDI = "/run/cdi/nvidia.yaml"
UUID = "GPU-00000000-0000-0000-0000-000000000001"


def only_in_its_scenario(host: Any) -> None:
    """Skip what the role's own scenario has prepared: where a plan was applied, this is a whole rig."""
    if host.file("/etc/specrig/plan.json").exists:
        pytest.skip("only in the role's own scenario")


@pytest.fixture
def access(host: Any) -> str:
    """How containers get cards on this host."""
    return "cdi" if host.file("/etc/systemd/system/specrig-cdi.service").exists else "runtime"


@pytest.fixture
def probe(host: Any) -> Iterator[str]:
    """An image to run: the static busybox of the scenario."""
    only_in_its_scenario(host)
    output(host, "sh", "-c", "tar -C /usr/bin -c busybox | docker import - probe")
    yield "probe"
    as_root(host, "docker", "rm", "-f", "probe")


def test_packages_are_of_one_version(host: Any) -> None:
    shown = output(host, "dpkg-query", "-W", "-f", "${Version}\n", "nvidia-container-toolkit*", "libnvidia-container*")
    assert len(set(filter(None, shown.splitlines()))) == 1


def test_apt_reads_its_sources(host: Any) -> None:
    assert as_root(host, "apt-get", "check").rc == 0
    assert as_root(host, "apt-get", "indextargets").rc == 0
    listed = output(host, "ls", "/etc/apt/sources.list.d").split()
    assert not {"nvidia-docker.list", "nvidia.list", "libnvidia-container.list"} & set(listed)


def test_packages_of_before_are_gone(host: Any) -> None:
    said = as_root(
        host, "dpkg-query", "-W", "-f", "${db:Status-Status}\n", "nvidia-docker2", "nvidia-container-runtime"
    )
    assert "installed" not in said.stdout.split()


def test_what_went_aside_is_still_there(host: Any) -> None:
    only_in_its_scenario(host)
    for name in ("apt/sources.list.d/nvidia-docker.list", "apt/sources.list.d/nvidia.list"):
        assert "127.0.0.1:8099" in host.file(f"/etc/{name}.specrig~").content_string
    for name in ("old", "older"):
        assert host.file(f"/usr/share/keyrings/{name}.gpg.specrig~").content_string == name


def test_daemon_json_has_our_key_and_keeps_the_others(host: Any, access: str) -> None:
    options = json.loads(host.file("/etc/docker/daemon.json").content_string)
    assert options["features"]["cdi"] if access == "cdi" else options["runtimes"]["nvidia"]
    if "max-concurrent-downloads" in options:
        text = host.file("/etc/docker/daemon.json").content_string
        assert text.startswith('{\n\t"labels" : [ "site=caf\\u00e9" ],\n\t"max-concurrent-downloads":2, "features": {')
        assert '{"containerd-snapshotter":false' in text


def test_the_device_list_is_that_of_the_running_driver(host: Any, access: str) -> None:
    if access != "cdi":
        assert not host.file(CDI).exists
        return
    assert output(host, "systemctl", "is-enabled", "specrig-cdi.service").strip() == "enabled"
    order = output(host, "systemctl", "show", "--property=After,Before", "specrig-cdi.service")
    after, before = sorted(order.splitlines())
    assert "nvidia-persistenced.service" in after and "docker.service" in before
    loaded = host.file("/proc/driver/nvidia/version")
    if not loaded.exists:
        return
    version = loaded.content_string.partition("Kernel Module")[2].split()[0]
    assert version in host.file(CDI).content_string and not host.file("/etc/cdi/nvidia.yaml").exists


def test_a_container_has_its_card_and_keeps_it_when_systemd_reloads(host: Any, access: str, probe: str) -> None:
    if access != "cdi":
        pytest.skip("Docker 20.10 has no CDI")
    run = [
        "docker",
        "run",
        "-d",
        "--name",
        probe,
        "--device",
        f"nvidia.com/gpu={UUID}",
        probe,
        "/busybox",
        "sleep",
        "60",
    ]
    output(host, *run)
    read = ["docker", "exec", probe, "/busybox", "head", "-c", "4", "/dev/nvidia0"]
    assert output(host, *read) == "\0\0\0\0"
    output(host, "systemctl", "daemon-reload")
    assert output(host, *read) == "\0\0\0\0"
    first = output(host, "docker", "exec", probe, "/busybox", "cat", "/proc/1/environ")
    assert "NVIDIA_STAND_IN=1" in first.split("\0")


def test_the_runtime_is_known_to_docker(host: Any, access: str, probe: str) -> None:
    if access == "cdi":
        pytest.skip("this host uses CDI")
    assert "nvidia" in json.loads(output(host, "docker", "info", "--format", "{{json .Runtimes}}"))
    for options in (["--runtime", "nvidia"], ["--gpus", "all"]):
        output(host, "docker", "run", "--rm", *options, probe, "/busybox", "true")


def test_the_list_is_written_again_after_a_restart_of_docker(host: Any, access: str, probe: str) -> None:
    if access != "cdi":
        pytest.skip("this host has no device list")
    output(host, "rm", CDI)
    output(host, "systemctl", "restart", "specrig-cdi.service")
    assert UUID in host.file(CDI).content_string
