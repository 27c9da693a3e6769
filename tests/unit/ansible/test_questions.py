"""What the cheap questions conclude from real answers of dpkg, systemd and os-release."""

from __future__ import annotations

import pytest

from specrig.ansible.action.os_release import facts
from specrig.ansible.action.packages import installed
from specrig.ansible.action.units import as_wanted

DEBIAN_12 = """\
PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"
NAME="Debian GNU/Linux"
VERSION_ID="12"
VERSION="12 (bookworm)"
VERSION_CODENAME=bookworm
ID=debian
HOME_URL="https://www.debian.org/"
SUPPORT_URL="https://www.debian.org/support"
BUG_REPORT_URL="https://bugs.debian.org/"
"""
DEBIAN_13 = """\
PRETTY_NAME="Debian GNU/Linux 13 (trixie)"
NAME="Debian GNU/Linux"
VERSION_ID="13"
VERSION="13 (trixie)"
VERSION_CODENAME=trixie
DEBIAN_VERSION_FULL=13.1
ID=debian
HOME_URL="https://www.debian.org/"
"""
UBUNTU_2404 = """\
PRETTY_NAME="Ubuntu 24.04.1 LTS"
NAME="Ubuntu"
VERSION_ID="24.04"
VERSION="24.04.1 LTS (Noble Numbat)"
VERSION_CODENAME=noble
ID=ubuntu
ID_LIKE=debian
UBUNTU_CODENAME=noble
LOGO=ubuntu-logo
"""
SID = "PRETTY_NAME='Debian GNU/Linux forky/sid'\nNAME=\"Debian GNU/Linux\"\n# no VERSION_ID\nID=debian\nVERSION_CODENAME=forky\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (DEBIAN_12, ("Debian", "12", "12", "bookworm")),
        (DEBIAN_13, ("Debian", "13", "13", "trixie")),
        (UBUNTU_2404, ("Ubuntu", "24", "24.04", "noble")),
        (SID, ("Debian", "", "", "forky")),
        ("", ("", "", "", "")),
    ],
    ids=["debian-12", "debian-13", "ubuntu-24.04", "sid", "empty"],
)
def test_facts_of_the_distribution(text: str, said: tuple[str, ...]) -> None:
    names = ("distribution", "distribution_major_version", "distribution_version", "distribution_release")
    assert facts(text) == dict(zip(names, said, strict=True))


def test_what_dpkg_calls_installed() -> None:
    listing = (
        "ii docker.io=26.1.5+dfsg1-9+b9\n"
        "hi linux-image-amd64=6.12.57-1\n"  # held
        "rc docker-cli=26.1.5+dfsg1-9+b9\n"  # removed, its configuration is left
        "un podman=\n"
        "pn runc=\n"
        "iF half-configured=1\n"
        "iU unpacked=1\n"
        "iHRhalf-installed=1\n"
        "\n"
    )
    names = {"docker.io", "linux-image-amd64"}
    assert installed(listing) == names | {"docker.io=26.1.5+dfsg1-9+b9", "linux-image-amd64=6.12.57-1"}
    assert installed("") == set()


@pytest.mark.parametrize(
    ("properties", "wanted"),
    [
        ("UnitFileState=enabled\nActiveState=active\n", True),
        ("ActiveState=active\nUnitFileState=enabled\n", True),
        ("UnitFileState=enabled\nActiveState=failed\n", False),
        ("UnitFileState=enabled\nActiveState=activating\n", False),
        ("UnitFileState=disabled\nActiveState=active\n", False),
        ("UnitFileState=enabled-runtime\nActiveState=active\n", False),
        ("UnitFileState=masked\nActiveState=inactive\n", False),
        ("UnitFileState=\nActiveState=inactive\n", False),  # no such unit
        ("", False),
    ],
)
def test_a_unit_is_as_wanted(properties: str, wanted: bool) -> None:
    assert as_wanted(properties) is wanted


def test_a_unit_that_cannot_run_yet_is_enabled_only() -> None:
    assert as_wanted("UnitFileState=enabled\nActiveState=inactive\n", running=False)
    assert not as_wanted("UnitFileState=disabled\nActiveState=active\n", running=False)
