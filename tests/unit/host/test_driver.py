"""What the driver verb decides, on recorded answers of apt, dpkg and dkms. The transaction itself runs in Molecule, with real apt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specrig.host import driver
from specrig.host.errors import HostError
from specrig.host.machine import Answer, Machine
from specrig.host.progress import Progress

PACKAGES = {
    "proprietary": ["nvidia-kernel-dkms"],
    "open": ["nvidia-open-kernel-dkms"],
    "common": ["libcuda1", "nvidia-persistenced"],
    "unversioned": ["nvidia-persistenced"],
}
MADISON = """\
nvidia-kernel-dkms | 550.163.01-2 | http://deb.example/debian trixie/non-free amd64 Packages
nvidia-kernel-dkms | 535.261.03-1 | http://deb.example/debian bookworm/non-free amd64 Packages
nvidia-graphics-drivers | 550.163.01-2 | http://deb.example/debian trixie/non-free Sources
"""
KERNEL = "6.12.118+deb13-amd64"
# As DKMS 3.2 of Debian 13 says it when nvidia-open-kernel-dkms 550.163.01-2 does not build.
DKMS_SAYS = f"""\
Building initial module nvidia-current-open/550.163.01 for {KERNEL}
Building module(s)............(bad exit status: 2)
Failed command:
env NV_VERBOSE=1 make -j2 modules KERNEL_UNAME={KERNEL}

Error! Bad return status for module build on kernel: {KERNEL} (x86_64)
Consult /var/lib/dkms/nvidia-current-open/550.163.01/build/make.log for more information.
dpkg: error processing package nvidia-open-kernel-dkms (--configure):
"""
MAKE_LOG = """\
/var/lib/dkms/nvidia-current-open/550.163.01/build/nvidia/nv-pci.c: In function 'nv_resize_pcie_bars':
/var/lib/dkms/nvidia-current-open/550.163.01/build/nvidia/nv-pci.c:237:9: error: too few arguments to function 'pci_resize_resource'
make[4]: *** [scripts/Makefile.build:202: nvidia/nv-pci.o] Error 1
"""


def job(**changed: Any) -> str:
    return json.dumps(
        {"state": "present", "branch": 550, "version": "", "module": "proprietary", "packages": PACKAGES, **changed}
    )


class Rig:
    """A recorded machine whose dpkg has `packages` {name: (status, version)}."""

    def __init__(self, root: Path) -> None:
        self.root, self.packages = root, dict[str, tuple[str, str]]()
        self.dkms = ""
        (root / "boot").mkdir()
        self.kernel(KERNEL)

    def kernel(self, name: str) -> None:
        (self.root / f"boot/vmlinuz-{name}").touch()

    def run(self, *command: str) -> Answer | None:
        if command[0] == "dpkg-query":
            return Answer(
                0, "".join(f"{status}|{name}|{version}\n" for name, (status, version) in self.packages.items()), ""
            )
        if command[:2] == ("apt-cache", "madison"):
            return Answer(0, MADISON, "")
        return Answer(0, self.dkms, "") if command == ("dkms", "status") else None

    def complete(self) -> None:
        """As after a good run."""
        names = ["nvidia-kernel-dkms", "libcuda1", "nvidia-persistenced", "libnvidia-ml1"]
        self.packages = dict.fromkeys(names, ("hi ", "550.163.01-2"))
        self.packages |= {
            f"linux-headers-{KERNEL}": ("ii ", "6.12.118-1"),
            "linux-headers-amd64": ("ii ", "6.12.118-1"),
        }
        self.packages |= {"nvidia-container-toolkit": ("ii ", "1.17.8-1")}
        self.dkms = f"nvidia-current/550.163.01, {KERNEL}, x86_64: installed\n"
        path = self.root / driver.PINS.lstrip("/")
        path.parent.mkdir(parents=True)
        path.touch()

    def todo(self, **changed: Any) -> list[str]:
        found = driver.driver(job(**changed), Progress(quiet=True), check=True, m=Machine(self.root, self.run))
        words: list[str] = found["todo"]
        return words


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_a_blank_machine_and_a_finished_one(rig: Rig) -> None:
    assert rig.todo()[0].startswith("not installed: nvidia-kernel-dkms, libcuda1")
    rig.complete()
    assert rig.todo() == [] and rig.todo(branch=0) == [] and rig.todo(version="550.163.01") == []


def test_a_new_kernel_needs_a_module_and_its_headers(rig: Rig) -> None:
    rig.complete()
    rig.kernel("6.12.120+deb13-amd64")
    assert rig.todo() == [
        "not installed: linux-headers-6.12.120+deb13-amd64",
        "no module for kernel 6.12.120+deb13-amd64",
    ]


def test_a_module_that_is_built_but_not_installed_does_not_count(rig: Rig) -> None:
    rig.complete()
    rig.dkms = rig.dkms.replace("installed", "built")
    assert rig.todo() == [f"no module for kernel {KERNEL}"]


def test_a_hold_that_is_gone_and_another_branch(rig: Rig) -> None:
    rig.complete()
    rig.packages["libcuda1"] = ("ii ", "550.163.01-2")
    assert rig.todo() == ["not held: libcuda1"]
    assert rig.todo(branch=535) == ["nvidia-kernel-dkms is 550.163.01-2", "not held: libcuda1"]


def test_the_other_flavour_goes(rig: Rig) -> None:
    rig.complete()
    rig.packages["nvidia-open-kernel-dkms"] = ("hi ", "550.163.01-2")
    assert rig.todo() == ["the other flavour is installed: nvidia-open-kernel-dkms"]


def test_names_that_are_not_installed_are_not_held(rig: Rig) -> None:
    rig.complete()
    rig.packages["libnvidia-egl1"] = ("rc ", "550.163.01-2")
    held = driver.to_hold(driver.packages_of(Machine(rig.root, rig.run)))
    assert "libnvidia-egl1" not in held and "nvidia-container-toolkit" not in held and "libnvidia-ml1" in held


@pytest.mark.parametrize(
    ("branch", "exact", "chosen"),
    [
        (0, "", "550.163.01-2"),
        (535, "", "535.261.03-1"),
        (550, "550.163.01", "550.163.01-2"),
        (550, "550.163.01-2", "550.163.01-2"),
        (580, "", None),
        (550, "550.54.14", None),
        (55, "", None),
    ],
)
def test_the_version_that_apt_has(rig: Rig, branch: int, exact: str, chosen: str | None) -> None:
    assert driver.choose(driver.candidates(Machine(rig.root, rig.run), "nvidia-kernel-dkms"), branch, exact) == chosen


def test_a_branch_that_the_archive_lacks_is_refused_with_those_it_has() -> None:
    error = driver._no_candidate({"version": "", "branch": 580}, "nvidia-kernel-dkms", ["550.163.01-2"])
    assert error.cause == "branch 580 is asked, the archive has nvidia-kernel-dkms 550.163.01-2; nothing was changed"
    assert error.fix == "rig_driver: {source: distro, branch: 550}"


def test_the_failing_pair_names_kernel_file_and_line(rig: Rig) -> None:
    log = rig.root / "var/lib/dkms/nvidia-current-open/550.163.01/build/make.log"
    log.parent.mkdir(parents=True)
    log.write_text(MAKE_LOG)
    error = driver.build_failure(Machine(rig.root, rig.run), DKMS_SAYS)
    assert error and error.code == "DRIVER_BUILD"
    assert error.cause == (
        f"the module does not build for kernel {KERNEL}: "
        "nvidia/nv-pci.c:237: too few arguments to function 'pci_resize_resource'"
    )
    assert driver.build_failure(Machine(rig.root, rig.run), "E: Unable to locate package x") is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "etc/apt/sources.list",
            "deb http://deb.example/debian trixie main\ndeb-src http://deb.example/debian trixie main\n# deb x y main\n",
        ),
        (
            "etc/apt/sources.list.d/debian.sources",
            "Types: deb deb-src\nURIs: http://deb.example/debian\nSuites: trixie\nComponents: main\n",
        ),
    ],
)
def test_non_free_comes_from_the_machines_own_mirror(rig: Rig, name: str, text: str) -> None:
    (rig.root / "etc/apt/sources.list.d").mkdir(parents=True)
    (rig.root / name).write_text(text)
    found = driver.sources(Machine(rig.root, rig.run))
    assert found == (
        f"{driver.MANAGED}Types: deb\nURIs: http://deb.example/debian\nSuites: trixie\nComponents: contrib non-free non-free-firmware\n"
    )


def test_keys_and_suites_of_the_sources_are_kept_and_others_left_out(rig: Rig) -> None:
    folder = rig.root / "etc/apt/sources.list.d"
    folder.mkdir(parents=True)
    (folder / "debian.sources").write_text(
        "Types: deb\nURIs: http://a/debian\nSuites: trixie trixie-updates\nComponents: main contrib\nSigned-By: /usr/share/keyrings/d.pgp\n\n"
        "Enabled: no\nTypes: deb\nURIs: http://off/\nSuites: x\nComponents: main\n"
    )
    (folder / "other.list").write_text("deb [arch=amd64 signed-by=/k.asc] http://b/x trixie stable\n")
    (folder / "security.list").write_text("deb [signed-by=/k.asc] http://s/debian-security trixie-security main\n")
    text = driver.sources(Machine(rig.root, rig.run))
    assert text.count("Types: deb") == 3 and text.count("Signed-By: /usr/share/keyrings/d.pgp") == 2
    assert "URIs: http://s/debian-security\nSuites: trixie-security" in text and "Signed-By: /k.asc" in text
    assert "http://b" not in text and "http://off" not in text
    (folder / Path(driver.SOURCE).name).write_text(text)
    assert driver.sources(Machine(rig.root, rig.run)) == text, "our own file is not read back"


def test_no_source_no_file(rig: Rig) -> None:
    assert driver.sources(Machine(rig.root, rig.run)) == ""


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"state": "here"}', job(branch="new"), job(packages={})])
def test_a_job_that_cannot_be_read(text: str) -> None:
    with pytest.raises(HostError, match="DRIVER_JOB"):
        driver.parse(text)


def test_removal_takes_what_came_and_is_still_there(rig: Rig) -> None:
    rig.complete()
    record = rig.root / driver.RECORD.lstrip("/")
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps(["nvidia-kernel-dkms", "libcuda1", "gcc-14", "nvidia-gone", "linux-headers-amd64"]))
    assert rig.todo(state="absent") == ["libcuda1", "nvidia-kernel-dkms", driver.PINS, driver.RECORD]
    assert Rig(rig.root / "boot").todo(state="absent") == []
