"""Preflight over recorded machines: a directory for /proc, /sys and /etc, and what the tools said.

nvidia-smi's answers were recorded from an H200 (fixtures/); where a test needs other words in them, it says so.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specrig.host import machine, preflight
from specrig.host.errors import HostError
from specrig.host.findings import CODES
from specrig.host.machine import Answer, Machine
from specrig.lab import cards as fake
from specrig.plan import plan_host
from specrig.plan.types import Facts

from .docker import Docker
from .test_retire import UNIT

FIXTURES = Path(__file__).parent / "fixtures"
XML = (FIXTURES / "nvidia-smi-h200.xml").read_text()
TOPOLOGY = (FIXTURES / "h200-topo.txt").read_text()
DEBIAN = 'ID=debian\nVERSION_ID="13"\nPRETTY_NAME="Debian GNU/Linux 13 (trixie)"\n'
NAMES = {"2684": "AD102 [GeForce RTX 4090]", "2204": "GA102 [GeForce RTX 3090]", "2335": "GH100 [H200 SXM 141GB]"}
DRIVER = (
    "NVRM version: NVIDIA UNIX {kind}x86_64 Kernel Module  {version}  Release Build\nGCC version:  gcc version 14.2.0\n"
)


class Rig:
    """A recorded machine. `tools` maps the beginning of a command line to its answer."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tools: dict[str, Answer] = {
            "uname -m": Answer(0, "x86_64\n", ""),
            "dpkg --audit": Answer(0, "", ""),
            "dpkg-query --search": Answer(1, "", "no path found"),
            "dpkg-query": Answer(0, "", ""),
            "apt-get": Answer(0, "", ""),
            "timedatectl": Answer(0, "NTP=yes\nNTPSynchronized=yes\n", ""),
        }
        self.write("etc/os-release", DEBIAN)
        self.write("proc/sys/kernel/osrelease", "6.12.117+deb13-amd64\n")
        self.write("boot/vmlinuz-6.12.117+deb13-amd64")

    def write(self, name: str, text: str | bytes = "") -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())

    def plug(self, *cards: str) -> None:
        for name, data in fake.functions(list(cards)).items():
            self.write(f"sys/bus/pci/devices/{name}", data)

    def run(self, *command: str) -> Answer | None:
        line = " ".join(command)
        if line.startswith("lspci"):
            device = (self.root / f"sys/bus/pci/devices/{command[-1]}/device").read_text().strip()[2:]
            return Answer(
                0, f"{command[-1]} VGA compatible controller: NVIDIA Corporation {NAMES[device]} (rev a1)\n", ""
            )
        return next((answer for start, answer in self.tools.items() if line.startswith(start)), None)

    def driver(self, version: str = "550.163.01", kind: str = "") -> None:
        self.write("proc/driver/nvidia/version", DRIVER.format(version=version, kind=kind))
        self.tools["nvidia-smi --query"] = Answer(0, XML, "")
        self.tools["nvidia-smi topo"] = Answer(0, TOPOLOGY, "")

    def look(self, **wanted: Any) -> dict[str, Any]:
        return preflight.preflight(json.dumps(wanted), Machine(self.root, self.run))

    def codes(self, **wanted: Any) -> set[str]:
        return {one["code"] for one in self.look(**wanted)["findings"]}


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no-docker")
    return Rig(tmp_path)


def claim(profile: str) -> list[dict[str, Any]]:
    cards: list[dict[str, Any]] = plan_host("h", {"rig_profile": profile}).as_json()["host"]["gpus"]
    return cards


def test_a_service_that_up_will_take_off_holds_no_port(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The renamed service wants the port of the one that it was: that is no refusal. A stranger's is."""
    monkeypatch.setattr(machine, "listeners", lambda _: {8000: [], 8001: []})
    wanted = [{"unit": "specrig-new.service", "ports": [{"port": 8000}]}]
    bound = {"HostConfig": {"PortBindings": {"8000/tcp": [{"HostIp": "127.0.0.1", "HostPort": "8000"}]}}}
    with Docker(rig.root, monkeypatch) as docker:
        docker.containers["specrig-old"] = {"Id": "1", "State": {"Running": True}, **bound}
        assert rig.codes(services=wanted) == {"PORT_TAKEN"}, "a container of that name, and no service of ours"
        rig.write("etc/systemd/system/specrig-old.service", UNIT.format(name="old"))
        assert rig.codes(services=wanted) == set()
        assert rig.codes(services=[{"unit": "specrig-new.service", "ports": [{"port": 8001}]}]) == {"PORT_TAKEN"}
        both = [*wanted, {"unit": "specrig-old.service", "ports": []}]
        assert rig.codes(services=both) == {"PORT_TAKEN"}, "it stays"
        instead = [{**wanted[0], "conflicts": ["specrig-old.service"]}, both[1]]
        assert rig.codes(services=instead) == set(), "one runs instead of the other"


def test_a_plain_machine_has_nothing_against_it(rig: Rig) -> None:
    report = rig.look()
    assert report["findings"] == [] and report["ok"] and not report["changed"]
    assert report["facts"]["kernel"]["newest"] == "6.12.117+deb13-amd64"


def test_cards_are_what_the_inventory_claims(rig: Rig) -> None:
    rig.plug("rtx_4090")
    [card] = rig.look()["facts"]["cards"]
    assert (card["id"], card["name"], card["bar1_mib"]) == ("2684", "AD102 [GeForce RTX 4090]", 32768)
    assert rig.codes(cards=claim("rtx4090_r1_14b")) == set()
    report = rig.look(cards=claim("dual_rtx3090_r1_32b_tp2"))
    assert not report["ok"]
    assert report["findings"][0]["cause"] == (
        "the inventory claims 2 × GeForce RTX 3090; the machine has 1 × AD102 [GeForce RTX 4090]"
    )


def test_two_cards_claimed_one_there_and_the_other_way_round(rig: Rig) -> None:
    rig.plug("rtx_3090", "rtx_3090")
    both = claim("dual_rtx3090_r1_32b_tp2")
    assert rig.codes(cards=both) == {"ACS_REDIRECT"}  # the fake root port redirects, as many boards do
    assert "CARDS_UNCLAIMED" in rig.codes(cards=both[:1])
    assert "CARDS_MISMATCH" in rig.codes(cards=[*both, both[0]])


def test_what_lies_between_two_cards(rig: Rig) -> None:
    rig.plug("rtx_3090", "rtx_3090")
    rig.write("sys/kernel/iommu_groups/0/type", "DMA-FQ\n")
    small = "0xa0000000 0xa0ffffff 0x40200\n0x610000000000 0x61000fffffff 0x14220c\n"
    rig.write("sys/bus/pci/devices/0000:02:00.0/resource", small)
    both = claim("dual_rtx3090_r1_32b_tp2")
    report = rig.look(cards=both)
    causes = {one["code"]: one["cause"] for one in report["findings"]}
    assert report["ok"] and causes == {
        "ACS_REDIRECT": "at 0000:00:01.0",
        "IOMMU_TRANSLATES": "the IOMMU is on, and not in pass-through",
        "BAR1_SMALL": "0000:02:00.0 shows 256 MiB, 32768 MiB are possible",
    }
    rig.write("sys/kernel/iommu_groups/0/type", "identity\n")
    assert "IOMMU_TRANSLATES" not in rig.codes(cards=both)


@pytest.mark.parametrize("config", [b"", bytes(64), bytes(4096), b"\xff" * 4096, bytes(0x100) + b"\x01\x00\x01\x10"])
def test_odd_configuration_space_is_no_acs(rig: Rig, config: bytes) -> None:
    rig.write("sys/bus/pci/devices/0000:00:01.0/class", "0x060400\n")
    rig.write("sys/bus/pci/devices/0000:00:01.0/config", config)
    assert machine.acs(Machine(rig.root, rig.run)) == []


def test_the_real_nvidia_smi_is_understood() -> None:
    [gpu] = machine.gpus_of(XML)
    assert (gpu["slot"], gpu["name"], gpu["uuid"]) == (
        "0000:00:06.0",
        "H200",
        "GPU-00000000-0000-0000-0000-000000000001",
    )
    assert (gpu["memory_total_mib"], gpu["memory_free_mib"], gpu["bar1_mib"]) == (143771, 143156, 262144)
    assert gpu["persistence"] and gpu["holders"] == []
    assert gpu["power_w"]["current"] == 700.0 and gpu["power_w"]["min"] == 200.0
    assert machine.links_of(TOPOLOGY) == {}


def test_two_linked_cards() -> None:
    # The recorded matrix with a second row and column, as nvidia-smi prints a bridged pair.
    matrix = "\t\x1b[4mGPU0\tGPU1\tCPU Affinity\x1b[0m\nGPU0\t X \tNV4\t0-15\nGPU1\tNV4\t X \t0-15\n\nLegend:\n  X    = Self\n"
    assert machine.links_of(matrix) == {"0-1": "NV4"}


def test_the_plan_can_read_the_facts(rig: Rig) -> None:
    rig.driver("580.159.04", "Open Kernel Module for ")
    rig.write("proc/driver/nvidia/version", DRIVER.format(version="580.159.04", kind="Open Kernel Module for "))
    facts = rig.look()["facts"]
    read = Facts.model_validate(facts)
    assert read.driver_version == "580.159.04" and read.gpus and read.gpus[0].memory_total_mib == 143771


@pytest.mark.parametrize(
    ("words", "version", "is_open"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.163.01  Tue Apr  8 12:41:17 UTC 2025",
            "550.163.01",
            False,
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build", "580.159.04", True),
        ("", None, None),
    ],
)
def test_the_loaded_module(rig: Rig, words: str, version: str | None, is_open: bool | None) -> None:
    rig.write("proc/driver/nvidia/version", words)
    found = rig.look()["facts"]["driver"]
    assert (found["loaded"], found["open"]) == (version, is_open)


def secure_boot_on(rig: Rig) -> None:
    rig.write(machine.SECURE_BOOT, b"\x06\0\0\0\x01")


def nouveau(rig: Rig) -> None:
    rig.write("sys/module/nouveau/refcnt", "1")


def runfile(rig: Rig) -> None:
    rig.write("usr/bin/nvidia-uninstall")


def snap(rig: Rig) -> None:
    rig.write("var/lib/snapd/snaps/nvidia-550-server_1.snap")


def vendor_stack(rig: Rig) -> None:
    rig.tools["dpkg-query --show --showformat=${db:Status-Abbrev}\t${Package}\n lambda-stack*"] = Answer(
        1, "ii \tlambda-stack-cuda\n", ""
    )
    rig.tools = dict(sorted(rig.tools.items(), key=lambda pair: -len(pair[0])))


def mismatch(rig: Rig) -> None:
    rig.driver()
    rig.tools["nvidia-smi --query"] = Answer(18, "Failed to initialize NVML: Driver/library version mismatch\n", "")


def old(rig: Rig) -> None:
    rig.driver("470.256.02")


def half(rig: Rig) -> None:
    words = (
        "The following packages are only half configured, probably due to problems\nconfiguring them the first time.\n"
    )
    rig.tools["dpkg --audit"] = Answer(0, f"{words} nvidia-kernel-dkms   NVIDIA binary kernel module DKMS source\n", "")


def signed_by(rig: Rig) -> None:
    rig.tools["apt-get"] = Answer(
        100, "", "E: Conflicting values set for option Signed-By regarding source https://x/ stable\n"
    )


def locked(rig: Rig) -> None:
    rig.write("var/lib/dpkg/lock-frontend")
    inode = (rig.root / "var/lib/dpkg/lock-frontend").stat().st_ino
    rig.write("proc/locks", f"1: POSIX  ADVISORY  WRITE 4711 fe:00:{inode} 0 EOF\n")
    rig.write("proc/4711/comm", "unattended-upgr\n")


def newer_kernel(rig: Rig) -> None:
    rig.write("boot/vmlinuz-6.12.120+deb13-amd64")
    rig.write("boot/vmlinuz-6.9.1-amd64")


def reboot_required(rig: Rig) -> None:
    rig.write("run/reboot-required")
    rig.write("run/reboot-required.pkgs", "linux-image-6.12.120\n")


def other_system(rig: Rig) -> None:
    rig.write("etc/os-release", "ID=fedora\nVERSION_ID=43\nPRETTY_NAME='Fedora Linux 43'\n")


def ubuntu(rig: Rig) -> None:
    rig.write("etc/os-release", 'ID=ubuntu\nVERSION_ID="24.04"\nPRETTY_NAME="Ubuntu 24.04.3 LTS"\n')


def arm(rig: Rig) -> None:
    rig.tools["uname -m"] = Answer(0, "aarch64\n", "")


def no_clock(rig: Rig) -> None:
    rig.tools["timedatectl"] = Answer(0, "NTP=no\nNTPSynchronized=no\n", "")


def test_a_driver_that_is_not_there_is_proposed_as_new_as_the_plan_needs_it(rig: Rig) -> None:
    driver = {"source": "none", "branch": 580, "min_version": "580.65.06", "reason": "vllm 0.33.0 carries CUDA 13.0"}
    [one] = [one for one in rig.look(driver=driver)["findings"] if one["code"] == "DRIVER_ABSENT"]
    assert "branch: 580" in one["fix"] and "550" not in one["fix"] and "carries CUDA 13.0" in one["cause"]


CUDA = {"source": "none", "min_version": "550.54.14"}
OURS = {"source": "distro", "min_version": "550.54.14"}


@pytest.mark.parametrize(
    ("fault", "driver", "code", "words"),
    [
        (lambda rig: None, CUDA, "DRIVER_ABSENT", "nvidia-smi is not here"),
        (old, CUDA, "DRIVER_OLD", "driver 470.256.02 is loaded, 550.54.14 is needed"),
        (mismatch, CUDA, "DRIVER_MISMATCH", "Driver/library version mismatch"),
        (secure_boot_on, OURS, "SECURE_BOOT", "Secure Boot is on, no driver is loaded"),
        (nouveau, OURS, "NOUVEAU_LOADED", "nouveau"),
        (runfile, OURS, "DRIVER_FOREIGN", "/usr/bin/nvidia-uninstall (NVIDIA's .run installer)"),
        (snap, OURS, "DRIVER_FOREIGN", "nvidia-550-server_1.snap (snap)"),
        (vendor_stack, OURS, "DRIVER_FOREIGN", "lambda-stack-cuda (Lambda Stack)"),
        (half, None, "APT_BROKEN", "nvidia-kernel-dkms"),
        (signed_by, None, "APT_BROKEN", "Conflicting values set for option Signed-By"),
        (locked, None, "APT_LOCKED", "unattended-upgr holds it"),
        (newer_kernel, None, "REBOOT_PENDING", "6.12.120+deb13-amd64 is installed"),
        (reboot_required, None, "REBOOT_PENDING", "linux-image-6.12.120"),
        (other_system, None, "OS_UNSUPPORTED", "Fedora Linux 43"),
        (ubuntu, None, "OS_UNTESTED", "Ubuntu 24.04.3 LTS"),
        (arm, None, "ARCHITECTURE", "aarch64"),
        (no_clock, None, "CLOCK_UNKEPT", "neither"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_each_fault_has_its_code(
    rig: Rig, fault: Callable[[Rig], None], driver: dict[str, str] | None, code: str, words: str
) -> None:
    fault(rig)
    report = rig.look(**({"driver": driver} if driver else {}))
    [one] = [one for one in report["findings"] if one["code"] == code]
    assert words in one["cause"] and report["ok"] is (one["level"] == "warning")


def test_a_foreign_driver_that_stays_is_nobody_elses_business(rig: Rig) -> None:
    rig.driver()
    runfile(rig)
    assert rig.codes(driver=CUDA) == set()
    assert rig.codes(driver=OURS) == {"DRIVER_FOREIGN"}


def test_secure_boot_with_an_enrolled_key_or_a_loaded_driver_is_fine(rig: Rig) -> None:
    secure_boot_on(rig)
    rig.write("var/lib/dkms/mok.pub")
    rig.tools["mokutil --test-key"] = Answer(1, "/var/lib/dkms/mok.pub is not enrolled\n", "")
    assert rig.codes(driver=OURS) == {"SECURE_BOOT"}
    rig.tools["mokutil --test-key"] = Answer(0, "/var/lib/dkms/mok.pub is already enrolled\n", "")
    assert rig.codes(driver=OURS) == set()
    del rig.tools["mokutil --test-key"]
    rig.driver()
    assert rig.codes(driver=CUDA) == set()


SPEC = """cdiVersion: 0.5.0
kind: nvidia.com/gpu
devices:
- name: "0"
  containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
      major: 1
      minor: 5
- name: {uuid}
  containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
containerEdits:
  mounts:
  - hostPath: /usr/lib/x86_64-linux-gnu/libcuda.so.{version}
    containerPath: /usr/lib/x86_64-linux-gnu/libcuda.so.{version}
"""
H200 = "GPU-00000000-0000-0000-0000-000000000001"


def test_a_device_list_that_is_of_now(rig: Rig) -> None:
    rig.driver("580.159.04")
    rig.write("run/cdi/nvidia.yaml", SPEC.format(uuid=H200, version="580.159.04"))
    rig.write("run/cdi/other.yaml", "kind: vendor.com/device\n")
    report = rig.look()
    assert report["findings"] == [] and report["facts"]["cdi"]["specs"] == [
        {"path": "/run/cdi/nvidia.yaml", "driver": "580.159.04", "cards": [H200], "nodes": {"/dev/nvidia0": 1}}
    ]
    assert not preflight.cdi_check(Machine(rig.root, rig.run))["changed"]


@pytest.mark.parametrize(
    ("uuid", "version", "words"),
    [
        (H200, "550.163.01", "is of driver 550.163.01, 580.159.04 is loaded"),
        ("GPU-0000000a-0000-0000-0000-000000000001", "580.159.04", f"the machine has {H200}"),
    ],
)
def test_a_device_list_of_another_driver_or_of_other_cards(rig: Rig, uuid: str, version: str, words: str) -> None:
    rig.driver("580.159.04")
    rig.write("run/cdi/nvidia.yaml", SPEC.format(uuid=uuid, version=version))
    [one] = rig.look()["findings"]
    assert (one["code"], one["level"]) == ("CDI_STALE", "warning") and words in one["cause"]
    found = preflight.cdi_check(Machine(rig.root, rig.run))
    assert found["changed"] and found["loaded"] and words in found["stale"][0]


def test_a_device_node_that_got_another_number(rig: Rig) -> None:
    rig.driver("580.159.04")
    rig.write("run/cdi/nvidia.json", json.dumps({"kind": "nvidia.com/gpu", "x": [{"path": "/dev/null", "major": 195}]}))
    (rig.root / "dev").mkdir()
    (rig.root / "dev/null").symlink_to("/dev/null")
    assert "has /dev/null with major number 195, it is 1" in rig.look()["findings"][0]["cause"]


def test_two_device_lists(rig: Rig) -> None:
    rig.driver("580.159.04")
    for folder in ("run", "etc"):
        rig.write(f"{folder}/cdi/nvidia.yaml", SPEC.format(uuid=H200, version="580.159.04"))
    [one] = rig.look()["findings"]
    assert one["code"] == "CDI_TWICE" and one["cause"] == "/etc/cdi/nvidia.yaml and /run/cdi/nvidia.yaml"


@pytest.mark.parametrize("joined", ["PHB", "NV4"])
def test_a_claimed_bridge(rig: Rig, joined: str) -> None:
    rig.plug("rtx_3090", "rtx_3090")
    rig.driver("580.159.04")
    two = XML.replace("</gpu>", "</gpu><gpu id='00000000:02:00.0'></gpu>", 1)
    rig.tools["nvidia-smi --query"] = Answer(0, two, "")
    matrix = f"\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \t{joined}\t0-15\nGPU1\t{joined}\t X \t0-15\n"
    del rig.tools["nvidia-smi topo"]
    rig.tools["nvidia-smi topo --matrix"] = Answer(0, matrix, "")
    rig.tools["nvidia-smi topo -p2p"] = Answer(0, " \tGPU0\tGPU1\t\n GPU0\tX\tCNS\t\n GPU1\tCNS\tX\t\n", "")
    both = claim("dual_rtx3090_r1_32b_tp2")
    assert "NVLINK_ABSENT" not in rig.codes(cards=both)
    report = rig.look(cards=[{**card, "nvlink": True} for card in both])
    assert report["facts"]["links"] == {"0-1": joined} and report["facts"]["peers"] == {"0-1": "CNS"}
    told = {one["code"]: one for one in report["findings"]}
    assert ("NVLINK_ABSENT" in told) is (joined == "PHB") and report["ok"] is (joined == "NV4")
    if joined == "PHB":
        assert told["NVLINK_ABSENT"]["cause"] == "nvidia-smi says PHB between the cards"


def test_secure_boot_with_consent_or_with_ubuntus_signed_modules(rig: Rig) -> None:
    secure_boot_on(rig)
    assert "SECURE_BOOT" not in rig.codes(driver={**OURS, "mok": "stage"})
    assert "SECURE_BOOT" in rig.codes(driver={**CUDA, "mok": "stage"}), (
        "consent for a driver that specrig does not install"
    )
    ubuntu(rig)
    assert "SECURE_BOOT" not in rig.codes(driver={**OURS, "source": "distro"})
    assert "SECURE_BOOT" in rig.codes(driver={**OURS, "source": "nvidia"})


def test_who_holds_the_memory(rig: Rig) -> None:
    rig.driver()
    assert rig.codes() == set()
    process = "<process_info><pid>77</pid><type>C</type><process_name>python3</process_name><used_memory>9000 MiB</used_memory></process_info>"
    held = re.sub(r"<processes>.*?</processes>", f"<processes>{process}</processes>", XML, flags=re.DOTALL)
    rig.tools["nvidia-smi --query"] = Answer(0, held.replace("<used>0 MiB</used>", "<used>9100 MiB</used>", 1), "")
    [one] = rig.look()["findings"]
    assert one["code"] == "VRAM_HELD" and "9000 of 143771 MiB are held by python3 (pid 77, 9000 MiB)" in one["cause"]
    silent = XML.replace("<used>0 MiB</used>", "<used>9100 MiB</used>", 1)  # the holder lives in another pid namespace
    rig.tools["nvidia-smi --query"] = Answer(0, silent, "")
    assert "9100 of 143771 MiB are held by not listed" in rig.look()["findings"][0]["cause"]


def test_room_for_the_models(rig: Rig) -> None:
    (rig.root / "srv").mkdir()
    rig.write("srv/models/a/done")
    there = {"path": "/srv/models/a/done", "files": [{"size": 10**18}]}
    assert rig.codes(models_root="/srv/models", models=[there, {"path": None, "files": []}]) == set()
    report = rig.look(
        models_root="/srv/models/not/yet", models=[{"path": "/srv/models/b", "files": [{"size": 10**18}]}]
    )
    assert "931322574.6 GiB are still to come" in report["findings"][0]["cause"] and not report["ok"]


def test_a_port_that_somebody_has(rig: Rig) -> None:
    table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    rig.write(
        "proc/net/tcp",
        f"{table}   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 9911 1\n",
    )
    rig.write("proc/55/comm", "nginx\n")
    (rig.root / "proc/55/fd").mkdir()
    (rig.root / "proc/55/fd/3").symlink_to("socket:[9911]")
    service = {"unit": "specrig-chat.service", "ports": [{"bind": "127.0.0.1", "port": 8000}]}
    report = rig.look(services=[service])
    assert report["findings"][0]["cause"] == "port 8000 of specrig-chat.service is held by nginx (pid 55)"
    assert rig.codes(services=[{"unit": "specrig-b.service", "ports": [{"port": 8001}]}]) == set()


def test_a_clock_that_is_off(rig: Rig) -> None:
    assert rig.codes(time=time.time() - 5) == set()
    [one] = rig.look(time=time.time() + 7200)["findings"]
    assert one["code"] == "CLOCK_OFF" and re.fullmatch(r"7(199|200) s behind the controller's", one["cause"])


@pytest.mark.parametrize("text", ["[]", "{", '{"gpus": []}'])
def test_input_that_cannot_be_read_is_refused(rig: Rig, text: str) -> None:
    with pytest.raises(HostError, match="PREFLIGHT_INPUT"):
        preflight.preflight(text, Machine(rig.root, rig.run))


def test_it_writes_nothing(rig: Rig) -> None:
    rig.plug("rtx_3090", "rtx_3090")
    rig.driver()
    before = sorted(str(path) for path in rig.root.rglob("*"))
    rig.look(cards=claim("dual_rtx3090_r1_32b_tp2"), models_root="/srv/models", driver=OURS)
    assert sorted(str(path) for path in rig.root.rglob("*")) == before


def test_every_code_is_met_here_and_told_in_full() -> None:
    tested = Path(__file__).read_text()
    missing = {code for code in CODES if f'"{code}"' not in tested} - {"DISK_SHORT", "DISK_SLOW", "PORT_TAKEN"}
    assert not missing and all(code.title and code.fix for code in CODES.values())


def test_kernels_sort_as_people_count() -> None:
    assert sorted(["6.12.117+deb13-amd64", "6.9.1-amd64", "6.12.9-amd64"], key=machine.natural)[-1].startswith(
        "6.12.117"
    )
