"""What the driver verb decides, on recorded answers of apt, dpkg and dkms. The transaction itself runs in Molecule, with real apt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specrig.host import driver, machine
from specrig.host.errors import HostError
from specrig.host.machine import Answer, Machine
from specrig.host.progress import Progress

DEBIAN: dict[str, Any] = {
    "main": "nvidia-kernel-dkms",
    "packages": ["nvidia-kernel-dkms", "libcuda1", "nvidia-persistenced"],
    "others": ["nvidia-open-kernel-dkms", "nvidia-driver-cuda"],
    "components": "contrib non-free non-free-firmware",
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
    return json.dumps({"state": "present", "branch": 550, "version": "", **DEBIAN, **changed})


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
        if command[:2] == ("dpkg-query", "--search"):
            return Answer(1, "", "no path found")
        if command[0] == "dpkg-query":
            return Answer(
                0, "".join(f"{status}|{name}|{version}\n" for name, (status, version) in self.packages.items()), ""
            )
        if command[:2] == ("apt-cache", "madison"):
            return Answer(0, "".join(line for line in MADISON.splitlines(True) if line.split()[0] in command), "")
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
        for name, text in ((driver.PINS, ""), (driver.UNATTENDED, driver.unattended(self.packages))):
            path = self.root / name.lstrip("/")
            path.parent.mkdir(parents=True)
            path.write_text(text)

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
    assert rig.todo() == [
        "of another flavour, branch or source: nvidia-open-kernel-dkms",
        "not kept from unattended upgrades",
    ]


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
    found = driver.candidates(Machine(rig.root, rig.run), "nvidia-kernel-dkms")["nvidia-kernel-dkms"]
    assert driver.choose(found, branch, exact) == chosen


def test_a_branch_that_the_archive_lacks_is_refused_with_those_it_has(rig: Rig) -> None:
    error = driver._no_candidate(json.loads(job(branch=580)), Machine(rig.root, rig.run))
    assert error.cause == (
        "branch 580 is asked, the archive has nvidia-kernel-dkms 550.163.01-2, 535.261.03-1; nothing was changed"
    )
    assert error.fix == "rig_driver: {branch: 550}"


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
    found = driver.sources(Machine(rig.root, rig.run), DEBIAN["components"])
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
    text = driver.sources(Machine(rig.root, rig.run), DEBIAN["components"])
    assert text.count("Types: deb") == 3 and text.count("Signed-By: /usr/share/keyrings/d.pgp") == 2
    assert "URIs: http://s/debian-security\nSuites: trixie-security" in text and "Signed-By: /k.asc" in text
    assert "http://b" not in text and "http://off" not in text
    (folder / Path(driver.SOURCE).name).write_text(text)
    assert driver.sources(Machine(rig.root, rig.run), DEBIAN["components"]) == text, "our own file is not read back"


def test_no_source_no_file(rig: Rig) -> None:
    assert driver.sources(Machine(rig.root, rig.run), DEBIAN["components"]) == ""


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"state": "here"}', job(branch="new"), job(packages=[]), job(image="(")]
)
def test_a_job_that_cannot_be_read(text: str) -> None:
    with pytest.raises(HostError, match="DRIVER_JOB"):
        driver.parse(text)


def test_removal_takes_what_came_and_is_still_there(rig: Rig) -> None:
    rig.complete()
    record = rig.root / driver.RECORD.lstrip("/")
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps(["nvidia-kernel-dkms", "libcuda1", "gcc-14", "nvidia-gone", "linux-headers-amd64"]))
    found = ["libcuda1", "nvidia-kernel-dkms", driver.PINS, driver.UNATTENDED, driver.RECORD]
    assert rig.todo(state="absent") == found
    assert Rig(rig.root / "boot").todo(state="absent") == []


# Ubuntu, as the role names its packages.
UBUNTU: dict[str, Any] = {
    "branch": 580,
    "main": "nvidia-headless-no-dkms-580-server-open",
    "packages": ["nvidia-headless-no-dkms-580-server-open", "nvidia-utils-580-server"],
    "others": ["nvidia-headless-no-dkms-580-server"],
    "signed": "linux-modules-nvidia-580-server-open",
    "dkms": ["nvidia-dkms-580-server-open"],
    "image": "linux-image-((?!unsigned)[a-z][a-z0-9.-]*)",
}


class Ubuntu(Rig):
    """A machine whose archive lists the packages in `archive`."""

    def __init__(self, root: Path, *archive: str) -> None:
        super().__init__(root)
        self.archive = set(archive)
        (root / f"boot/vmlinuz-{KERNEL}").unlink()
        self.kernel("6.8.0-90-generic")
        self.packages["linux-image-generic"] = ("ii ", "6.8.0-90.91")

    def run(self, *command: str) -> Answer | None:
        if command[:2] == ("apt-cache", "madison"):
            rows = [f"{name} | 580.95.05-0ubuntu1 | x Packages\n" for name in command if name in self.archive]
            return Answer(0, "".join(rows), "")
        return super().run(*command)

    def wanted(self) -> list[str]:
        return driver.modules(Machine(self.root, self.run), json.loads(job(**UBUNTU)), self.packages)


SIGNED = "linux-modules-nvidia-580-server-open-"


def test_modules_are_ready_made_where_the_newest_kernel_has_them(tmp_path: Path) -> None:
    names = [SIGNED + "6.8.0-90-generic", SIGNED + "generic", "linux-headers-6.8.0-90-generic", "linux-headers-generic"]
    rig = Ubuntu(tmp_path, *names)
    assert rig.wanted() == names[:2]
    rig.kernel("6.8.0-9-generic")  # older, and no longer in the archive
    assert rig.wanted() == names[:2]
    rig.kernel("6.8.0-91-generic")
    rig.archive.add("linux-headers-6.8.0-91-generic")
    assert rig.wanted() == [
        "nvidia-dkms-580-server-open",
        "linux-headers-6.8.0-90-generic",
        "linux-headers-6.8.0-91-generic",
        "linux-headers-generic",
    ]


def test_a_ready_made_module_counts_and_is_not_held(tmp_path: Path) -> None:
    rig = Ubuntu(tmp_path)
    rig.packages[SIGNED + "6.8.0-90-generic"] = ("ii ", "6.8.0-90.91")
    rig.packages["nvidia-utils-580-server"] = ("hi ", "580.95.05-0ubuntu1")
    document = driver.parse(job(**UBUNTU))
    assert driver.unbuilt(Machine(rig.root, rig.run), document, rig.packages) == []
    assert driver.to_hold(rig.packages) == {"nvidia-utils-580-server"}


def test_packages_of_another_branch_go_and_those_without_a_branch_stay() -> None:
    there = dict.fromkeys(
        ["libnvidia-cfg1-535-server", "libnvidia-cfg1-580-server", SIGNED.replace("580", "535") + "generic", "libnvidia-ml1",
         "nvidia-container-toolkit", "nvidia-headless-no-dkms-580-server", "gcc-535-x", "nvidia-utils-580"], ("ii ", "1")
    )  # fmt: skip
    found = driver.unwanted(driver.parse(job(**UBUNTU)), there, UBUNTU["packages"])
    assert found == [
        "libnvidia-cfg1-535-server",
        "linux-modules-nvidia-535-server-open-generic",
        "nvidia-headless-no-dkms-580-server",
        "nvidia-utils-580",
    ]


def test_debian_names_no_branch_so_nothing_is_stale() -> None:
    there = dict.fromkeys(["libcuda1", "libnvidia-ml1", "nvidia-tesla-470-kernel-dkms"], ("ii ", "1"))
    assert driver.unwanted(driver.parse(job()), there, DEBIAN["packages"]) == []


def test_an_older_kernel_that_can_have_no_module_is_not_asked_for_again(rig: Rig) -> None:
    rig.complete()
    rig.kernel("6.12.48+deb13-amd64")
    assert rig.todo() == []


class Dry:
    """apt whose dry run says `said`."""

    def __init__(self, said: str, status: int = 0) -> None:
        self.said, self.status = said, status

    def __call__(self, phase: str, *arguments: str) -> tuple[int, str]:
        return self.status, self.said


@pytest.mark.parametrize(
    ("said", "code", "cause"),
    [
        ("Remv nvidia-smi [550.163.01-2]\nRemv xserver-xorg-core [1]\nInst libcuda1 [1] (2 x)\n", "DRIVER_REMOVES", "xserver-xorg-core"),
        ("Inst dkms [3.0] (3.2 Debian [all])\nInst libcuda1 [1] (2 x)\n", "DRIVER_HELD", "dkms is on hold"),
    ],
)  # fmt: skip
def test_a_dry_run_that_touches_what_is_not_the_drivers_is_refused(said: str, code: str, cause: str) -> None:
    there = {"dkms": ("hi ", "3.0"), "libcuda1": ("hi ", "1")}
    apt: Any = Dry(said)
    with pytest.raises(HostError, match=code) as seen:
        driver._rehearse(apt, there, ["install"])
    assert cause in seen.value.cause and "nothing was changed" in seen.value.cause


def test_a_dry_run_of_the_driver_only_passes_and_one_that_apt_refuses_does_not() -> None:
    there = {"nvidia-smi": ("hi ", "1")}
    fine: Any = Dry("Remv nvidia-smi [1]\nInst nvidia-driver-cuda (2 x)\nInst libcuda1:amd64 [1] (2 x)\n")
    driver._rehearse(fine, there, ["install"])
    broken: Any = Dry("E: Unable to correct problems, you have held broken packages.\n", 100)
    with pytest.raises(HostError, match="DRIVER_APT") as seen:
        driver._rehearse(broken, there, ["install"])
    assert "held broken packages" in seen.value.cause and seen.value.fix.startswith("nothing was changed")
    with pytest.raises(HostError, match="DRIVER_HELD") as seen:
        driver._rehearse(broken, {**there, "dkms": ("hi ", "99")}, ["install"])
    assert seen.value.fix == "sudo apt-mark unhold dkms"


@pytest.mark.parametrize(
    ("said", "status", "cause"),
    [
        ("Err:1 http://x/ y Release\n  404  Not Found\nE: The repository 'http://x/ y Release' has no Release file.\n", 100, "cannot read"),
        ("W: GPG error: file:/srv: NO_PUBKEY 01\nE: The repository 'file:/srv' is not signed.\n", 100, "not signed by the key"),
        ("W: An error occurred during the signature verification. The repository is not updated: EXPKEYSIG 0123\n", 0, "not signed by the key"),
        ("W: Failed to fetch http://x/InRelease  Could not resolve 'x'\n", 0, "cannot read"),
    ],
)  # fmt: skip
def test_a_source_that_cannot_be_read_or_believed_is_refused(said: str, status: int, cause: str) -> None:
    apt: Any = Dry(said, status)
    with pytest.raises(HostError, match="DRIVER_LISTS") as seen:
        driver._lists(apt)
    assert cause in seen.value.cause and seen.value.lines


def test_lists_that_are_read_pass() -> None:
    apt: Any = Dry("Get:1 http://x/ trixie InRelease [1 kB]\nW: Target Packages is configured multiple times\n")
    driver._lists(apt)


def test_kept_files_are_found_by_name_and_version(rig: Rig) -> None:
    folder = rig.root / driver.KEPT.lstrip("/")
    (folder / "partial").mkdir(parents=True)
    for name in ("libcuda1_550.163.01-2_amd64.deb", "nvidia-x_1%3a2-3_all.deb", "gcc_1_amd64.deb"):
        (folder / name).touch()
    m = Machine(rig.root, rig.run)
    assert set(driver.kept(m)) == {("libcuda1", "550.163.01-2"), ("nvidia-x", "1:2-3"), ("gcc", "1")}
    driver._keep(m, {"libcuda1": ("hi ", "550.163.01-2")}, {"libcuda1": ("hi ", "580.1-1")})
    assert set(driver.kept(m)) == {("libcuda1", "550.163.01-2")}


def test_files_are_put_back_when_the_body_fails_and_stay_when_it_does_not(rig: Rig) -> None:
    m = Machine(rig.root, rig.run)
    (rig.root / "there").write_text("before")
    with pytest.raises(KeyError), driver._files(m, "there", "new"):
        (rig.root / "there").write_text("x")
        (rig.root / "new").write_text("x")
        raise KeyError
    assert (rig.root / "there").read_text() == "before" and not (rig.root / "new").exists()
    with driver._files(m, "there") as files:
        (rig.root / "there").write_text("after")
        files.clear()
    assert (rig.root / "there").read_text() == "after"


def test_unattended_upgrades_are_told_names_not_beginnings(rig: Rig) -> None:
    rig.complete()
    text = driver.unattended(rig.packages)
    assert '"libcuda1$";' in text and "container" not in text and text.startswith("// Managed by specrig")


def look(rig: Rig, state: str) -> dict[str, Any]:
    return driver.driver(job(state=state), Progress(quiet=True), m=Machine(rig.root, rig.run))


def test_no_reboot_into_a_kernel_without_its_module(rig: Rig) -> None:
    rig.complete()
    assert look(rig, "ready")["newest"] == KERNEL
    rig.dkms = ""
    with pytest.raises(HostError, match="DRIVER_NOT_READY") as seen:
        look(rig, "ready")
    assert f"kernel {KERNEL} boots next and has no module" in seen.value.cause


def test_no_reboot_with_nouveau_in_an_initramfs(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.complete()
    (rig.root / f"boot/initrd.img-{KERNEL}").touch()
    listing = "kernel/drivers/gpu/drm/nouveau/nouveau.ko.xz\n"
    was = rig.run
    monkeypatch.setattr(rig, "run", lambda *c: Answer(0, listing, "") if c[0] == "lsinitramfs" else was(*c))
    with pytest.raises(HostError, match="would still load nouveau"):
        look(rig, "ready")
    listing += "etc/modprobe.d/specrig-nouveau.conf\n"
    assert look(rig, "ready")["changed"] is False


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("sys/module/nouveau/x", "nouveau holds the card"),
        ("nothing", "no NVIDIA card is on the PCI bus"),
        ("sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c", "Secure Boot is on"),
    ],
)
def test_a_machine_that_came_back_without_the_driver_says_why(rig: Rig, name: str, reason: str) -> None:
    rig.complete()
    path = rig.root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x06\x00\x00\x00\x01")
    with pytest.raises(HostError, match="DRIVER_NOT_LOADED") as seen:
        look(rig, "loaded")
    assert reason in seen.value.cause and "550.163.01-2 is installed, none is loaded" in seen.value.cause


def test_the_loaded_driver_is_the_installed_one(rig: Rig) -> None:
    rig.complete()
    version = rig.root / "proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.163.01  Tue\n")
    assert look(rig, "loaded")["loaded"] == "550.163.01"
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.261.03  Tue\n")
    with pytest.raises(HostError, match=r"DRIVER_NOT_LOADED.*535\.261\.03 is loaded"):
        look(rig, "loaded")


def test_secure_boot_needs_consent_or_signed_modules(rig: Rig) -> None:
    boot = rig.root / machine.SECURE_BOOT
    boot.parent.mkdir(parents=True)
    boot.write_bytes(b"\x06\x00\x00\x00\x01")
    with pytest.raises(HostError, match="DRIVER_SECURE_BOOT") as seen:
        rig.todo()
    assert "Ubuntu's ready-made signed modules" in seen.value.fix
    assert rig.todo(enrol=True)
    assert rig.todo(**{**UBUNTU, "image": "linux-image-(generic)"}), "signed modules need no key"


def test_a_foreign_driver_is_refused_before_any_change(rig: Rig) -> None:
    (rig.root / "usr/bin").mkdir(parents=True)
    (rig.root / "usr/bin/nvidia-uninstall").touch()
    with pytest.raises(HostError, match="DRIVER_FOREIGN"):
        rig.todo()


def test_a_lock_that_is_not_let_go_names_its_holder(rig: Rig) -> None:
    lock = rig.root / "var/lib/apt/lists/lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    (rig.root / "proc/77").mkdir(parents=True)
    (rig.root / "proc/77/comm").write_text("unattended-upgr\n")
    (rig.root / "proc/locks").write_text(f"1: POSIX  ADVISORY  WRITE 77 fd:01:{lock.stat().st_ino} 0 EOF\n")
    m = Machine(rig.root, rig.run)
    with pytest.raises(HostError, match="DRIVER_LOCKED: unattended-upgr has held"):
        driver.wait_for_locks(m, 0.0, Progress(quiet=True))
    (rig.root / "proc/locks").write_text("")
    driver.wait_for_locks(m, 0.0, Progress(quiet=True))
