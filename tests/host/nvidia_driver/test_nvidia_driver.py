"""The driver is whole, stays what it is, and has its module for the kernel that boots next."""

from __future__ import annotations

import re
from typing import Any

import pytest

from specrig.host import machine
from tests.host.conftest import as_root, output


@pytest.fixture(autouse=True)
def managed(host: Any) -> None:
    if not host.file("/etc/apt/preferences.d/specrig-nvidia").exists:
        pytest.skip("the driver of this host is not ours")


def test_every_installed_package_of_the_driver_is_on_hold(host: Any) -> None:
    rows = output(host, "dpkg-query", "-W", "-f", "${db:Status-Abbrev}|${Package}\n").splitlines()
    driver = [row.split("|") for row in rows if machine.DRIVER_PACKAGE.fullmatch(row.split("|")[1]) and row[1] == "i"]
    assert driver and [name for status, name in driver if status[0] != "h" and "container" not in name] == []


def test_the_module_is_there_for_the_newest_kernel(host: Any) -> None:
    kernels = [name.partition("vmlinuz-")[2] for name in output(host, "ls", "/boot").splitlines() if "vmlinuz-" in name]
    newest = sorted(kernels, key=machine.natural)[-1]
    assert re.search(rf"^nvidia\S*[/,].*{re.escape(newest)}.*: installed", output(host, "dkms", "status"), re.MULTILINE)


def test_apt_would_not_change_it(host: Any) -> None:
    said = output(host, "apt-get", "--simulate", "dist-upgrade")
    assert not re.search(r"^(Inst|Remv) (lib)?nvidia-(?!container)", said, re.MULTILINE)
    rules = output(host, "apt-config", "dump", "Unattended-Upgrade::Package-Blacklist")
    assert '"nvidia-"' in rules and '"libcuda1"' in rules


def test_nouveau_is_off_in_the_settings_and_in_the_initramfs(host: Any) -> None:
    assert "blacklist nouveau" in host.file("/etc/modprobe.d/specrig-nouveau.conf").content_string
    for image in output(host, "sh", "-c", "ls /boot/initrd.img-* 2>/dev/null || true").split():
        listed = as_root(host, "lsinitramfs", image)
        assert listed.rc != 0 or "etc/modprobe.d/specrig-nouveau.conf" in listed.stdout


def test_the_persistence_daemon_starts_at_boot(host: Any) -> None:
    assert output(host, "systemctl", "is-enabled", "nvidia-persistenced.service").strip() == "enabled"
