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
    ready_made = output(
        host, "sh", "-c", f"dpkg-query -W -f '${{db:Status-Abbrev}}\n' 'linux-modules-nvidia-*-{newest}' 2>&1 || true"
    )
    built = output(host, "sh", "-c", "dkms status 2>&1 || true")
    assert "ii " in ready_made or re.search(rf"^nvidia\S*[/,].*{re.escape(newest)}.*: installed", built, re.MULTILINE)


def test_apt_would_not_change_it(host: Any) -> None:
    said = output(host, "apt-get", "--simulate", "dist-upgrade")
    assert not re.search(r"^(Inst|Remv) (lib)?nvidia-(?!container)", said, re.MULTILINE)
    rules = re.findall(r'"(.*)"', output(host, "apt-config", "dump", "Unattended-Upgrade::Package-Blacklist"))
    held = output(host, "apt-mark", "showhold").split()
    driver = [name for name in held if machine.DRIVER_PACKAGE.fullmatch(name)]
    # unattended-upgrades matches its rules from the beginning of a name.
    assert driver and [name for name in driver if not any(re.match(rule, name) for rule in rules)] == []
    assert not any(re.match(rule, "nvidia-container-toolkit") for rule in rules if rule)


def test_nouveau_is_off_in_the_settings_and_in_the_initramfs(host: Any) -> None:
    assert "blacklist nouveau" in host.file("/etc/modprobe.d/specrig-nouveau.conf").content_string
    for image in output(host, "sh", "-c", "ls /boot/initrd.img-* 2>/dev/null || true").split():
        listed = as_root(host, "lsinitramfs", image)
        assert listed.rc == 0 and "etc/modprobe.d/specrig-nouveau.conf" in listed.stdout, image


def test_the_persistence_daemon_starts_at_boot_after_the_modules(host: Any) -> None:
    said = output(host, "systemctl", "show", "--property=After,WantedBy,UnitFileState", "nvidia-persistenced.service")
    shown = dict(line.partition("=")[::2] for line in said.splitlines())
    assert shown["UnitFileState"] in ("enabled", "static") and "multi-user.target" in shown["WantedBy"]
    assert "systemd-modules-load.service" in shown["After"]
    assert "nvidia-uvm" in host.file("/etc/modules-load.d/specrig-nvidia.conf").content_string


def test_nothing_of_nvidias_repository_comes_by_itself(host: Any) -> None:
    if not host.file("/etc/apt/sources.list.d/nvidia-driver.sources").exists:
        pytest.skip("the driver is the distribution's")
    assert (
        "Signed-By: /etc/apt/keyrings/nvidia-driver.asc"
        in host.file("/etc/apt/sources.list.d/nvidia-driver.sources").content_string
    )
    pin = host.file("/etc/apt/preferences.d/nvidia-driver-repository").content_string
    assert "Pin-Priority: 100\n" in pin and "Package: *\n" in pin
