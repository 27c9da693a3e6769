"""What this machine is, read from /proc, /sys and a few tools that only read. Each function gathers one part of `facts`.

Everything goes through a `Machine`, so that a recorded machine (a directory and answers of tools) can be read instead.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
import subprocess
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

NVIDIA = "0x10de"
BRIDGE, VGA, DISPLAY_3D = "0x0604", "0x0300", "0x0302"
SECURE_BOOT = "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
# The key that DKMS signs with: Ubuntu's own place, and DKMS's.
DKMS_KEYS = ("/var/lib/shim-signed/mok/MOK.der", "/var/lib/dkms/mok.pub")
# PCI Express extended capability "Access Control Services", and the bits of its control register that send a peer's
# request to the root complex first (PCI Express Base Specification 7.7.8).
ACS, ACS_CONTROL, ACS_REDIRECT = 0x000D, 6, 0b1100
PCI_EXTENDED, PCI_END = 0x100, 0x1000
# Package names of the distribution's and of NVIDIA's own repository: what a driver from apt consists of.
DRIVER_PACKAGE = re.compile(
    r"(?:lib)?nvidia-.*|(?:lib)?cuda-drivers.*|xserver-xorg-video-nvidia.*|libcuda1|libnvidia.*|firmware-nvidia-.*"
)
TOOL_TIMEOUT_S = 60.0


class Answer(NamedTuple):
    """How a tool ended."""

    rc: int
    out: str
    err: str


def tool(*command: str, timeout: float = TOOL_TIMEOUT_S) -> Answer | None:
    """Run a tool, most often one that only reads; None when it is not there. One that does not come back has the status 124."""
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            errors="replace",
            env=environment,
        )
    except (FileNotFoundError, PermissionError):
        return None
    except subprocess.TimeoutExpired:
        return Answer(124, "", f"no answer in {timeout:.0f} s")
    return Answer(done.returncode, done.stdout, done.stderr)


class Machine:
    """Files below `root` and answers of tools."""

    def __init__(self, root: Path = Path("/"), run: Callable[..., Answer | None] = tool) -> None:
        self.root = root
        self.run = run

    def path(self, name: str) -> Path:
        """`name` (absolute or not) below the root."""
        return self.root / name.lstrip("/")

    def text(self, name: str) -> str:
        """A file's text, stripped; empty when it cannot be read."""
        try:
            return self.path(name).read_text(errors="replace").strip()
        except OSError:
            return ""

    def names(self, folder: str, pattern: str = "*") -> list[str]:
        """Names that match in a folder, sorted."""
        return sorted(found.name for found in self.path(folder).glob(pattern))


def natural(version: str) -> list[tuple[int, Any]]:
    """A sort key under which 6.9 comes before 6.12."""
    return [(1, int(part)) if part.isdigit() else (0, part) for part in re.findall(r"\d+|[^\d.+~-]+", version)]


def system(m: Machine) -> dict[str, Any]:
    """Distribution, architecture, memory."""
    release = dict(line.partition("=")[::2] for line in m.text("etc/os-release").splitlines())
    values = {key: value.strip("\"'") for key, value in release.items()}
    memory = re.search(r"MemTotal:\s+(\d+)", m.text("proc/meminfo"))
    machine = m.run("uname", "-m")
    return {
        "id": values.get("ID", ""),
        "version_id": values.get("VERSION_ID", ""),
        "name": values.get("PRETTY_NAME", ""),
        "architecture": machine.out.strip() if machine else "",
        "memory_mib": int(memory[1]) // 1024 if memory else None,
    }


def kernel(m: Machine) -> dict[str, Any]:
    """The running kernel, those installed, the newest of them, and whether a reboot is due."""
    running = m.text("proc/sys/kernel/osrelease")
    installed = sorted((name[len("vmlinuz-") :] for name in m.names("boot", "vmlinuz-*")), key=natural)
    newest = installed[-1] if installed else None
    packages = m.text("run/reboot-required.pkgs").split()
    required = m.path("run/reboot-required").exists() or m.path("var/run/reboot-required").exists()
    return {
        "running": running,
        "installed": installed,
        "newest": newest,
        "headers": [name for name in installed if m.path(f"lib/modules/{name}/build").exists()],
        "reboot_required": required,
        "reboot_packages": sorted(set(packages)),
        "command_line": m.text("proc/cmdline"),
    }


def secure_boot(m: Machine) -> dict[str, Any]:
    """Firmware, Secure Boot, and whether the key that DKMS signs with is enrolled (None where it cannot be said)."""
    try:
        data = m.path(SECURE_BOOT).read_bytes()  # four bytes of attributes, one of value
    except OSError:
        data = b""
    enabled = data[4] == 1 if len(data) == 5 else False
    key = next((path for path in DKMS_KEYS if m.path(path).exists()), "")
    said = m.run("mokutil", "--test-key", key) if enabled and key else None
    enrolled = "is already enrolled" in said.out if said else None
    return {
        "efi": m.path("sys/firmware/efi").is_dir() and bool(data),
        "enabled": enabled,
        "dkms_key": key,
        "dkms_key_enrolled": enrolled,
    }


def packages(m: Machine) -> dict[str, dict[str, Any]]:
    """The driver's packages that dpkg knows: {name: {version, installed, held}}."""
    said = m.run("dpkg-query", "--show", "--showformat=${db:Status-Abbrev}\t${Package}\t${Version}\n")
    found = {}
    for line in said.out.splitlines() if said else []:
        status, _, rest = line.partition("\t")
        name, _, version = rest.partition("\t")
        if DRIVER_PACKAGE.fullmatch(name) and status[1:2] not in ("", "n", "c"):
            found[name] = {"version": version, "installed": status[1] == "i", "held": status[0] == "h"}
    return found


def foreign(m: Machine) -> list[str]:
    """Signs of a driver that apt does not know: each one a path or a package, with what it is."""
    signs = [
        ("usr/bin/nvidia-uninstall", "NVIDIA's .run installer"),
        ("usr/bin/nvidia-installer", "NVIDIA's .run installer"),
        ("var/lib/nvidia/log", "NVIDIA's .run installer"),
    ]
    found = [f"/{path} ({what})" for path, what in signs if m.path(path).exists() and not _owned(m, f"/{path}")]
    snaps = [
        *m.names("var/lib/snapd/snaps", "nvidia-*.snap"),
        *m.names("var/lib/snapd/snaps", "pc-kernel_*nvidia*.snap"),
    ]
    found += [f"/var/lib/snapd/snaps/{name} (snap)" for name in snaps]
    said = m.run(
        "dpkg-query",
        "--show",
        "--showformat=${db:Status-Abbrev}\t${Package}\n",
        "lambda-stack*",
        "system76-driver-nvidia",
        "amdgpu-dkms",
    )
    vendors = {"lambda-stack": "Lambda Stack", "system76": "System76's driver"}
    for line in said.out.splitlines() if said else []:
        name = line.partition("\t")[2]
        found += [f"{name} ({what})" for start, what in vendors.items() if line[1:2] == "i" and name.startswith(start)]
    return found


def _owned(m: Machine, path: str) -> bool:
    said = m.run("dpkg-query", "--search", path)
    return said is not None and said.rc == 0


def driver(m: Machine) -> dict[str, Any]:
    """The loaded module, its licence, the packages, and what is not from apt."""
    loaded = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d{3}\.\d+(?:\.\d+)?)", m.text("proc/driver/nvidia/version"))
    return {
        "loaded": loaded[1] if loaded else None,
        "open": "Open Kernel Module" in m.text("proc/driver/nvidia/version") if loaded else None,
        "packages": packages(m),
        "foreign": foreign(m),
        "nouveau": m.path("sys/module/nouveau").is_dir(),
    }


def _resource_mib(m: Machine, slot: str, region: int) -> int | None:
    lines = m.text(f"sys/bus/pci/devices/{slot}/resource").splitlines()
    with contextlib.suppress(IndexError, ValueError):
        start, end, _ = (int(word, 16) for word in lines[region].split())
        return (end - start + 1) >> 20 if end else 0
    return None


def cards(m: Machine) -> list[dict[str, Any]]:
    """NVIDIA's display and 3D controllers on the PCI bus, by slot: what is plugged in, driver or not."""
    found = []
    for slot in m.names("sys/bus/pci/devices"):
        base = f"sys/bus/pci/devices/{slot}"
        if m.text(f"{base}/vendor") != NVIDIA or m.text(f"{base}/class")[:6] not in (VGA, DISPLAY_3D):
            continue
        said = m.run("lspci", "-D", "-s", slot)
        name = said.out.partition(": ")[2].strip() if said and said.rc == 0 else ""
        name = re.sub(r"^NVIDIA Corporation |\s*\(rev \w+\)$", "", name)
        link = m.path(f"{base}/driver")
        found.append(
            {
                "slot": slot,
                "id": m.text(f"{base}/device")[2:].lower(),
                "name": name,
                "driver": link.resolve().name if link.exists() else None,
                # BAR1, the window through which the CPU and other cards see this card's memory.
                "bar1_mib": _resource_mib(m, slot, 1),
            }
        )
    return found


def acs(m: Machine) -> list[str]:
    """Bridges that send traffic between two cards up to the root complex (ACS request or completion redirect)."""
    found = []
    for slot in m.names("sys/bus/pci/devices"):
        if m.text(f"sys/bus/pci/devices/{slot}/class")[:6] != BRIDGE:
            continue
        try:
            config = m.path(f"sys/bus/pci/devices/{slot}/config").read_bytes()
        except OSError:
            continue
        if any(_acs_control(config)):
            found.append(slot)
    return found


def _acs_control(config: bytes) -> Iterator[int]:
    """The redirect bits of each ACS capability in a function's configuration space."""
    offset, seen = PCI_EXTENDED, set()
    while PCI_EXTENDED <= offset <= min(len(config), PCI_END) - 8 and offset not in seen:
        seen.add(offset)
        (header,) = struct.unpack_from("<I", config, offset)
        if header & 0xFFFF == ACS:
            yield struct.unpack_from("<H", config, offset + ACS_CONTROL)[0] & ACS_REDIRECT
        offset = header >> 20


def iommu(m: Machine) -> dict[str, Any]:
    """Whether the IOMMU translates, and whether devices pass it untranslated."""
    groups = m.names("sys/kernel/iommu_groups")
    types = {m.text(f"sys/kernel/iommu_groups/{group}/type") for group in groups}
    return {"on": bool(groups), "passthrough": bool(groups) and types <= {"identity"}}


def _mib(text: str | None) -> int | None:
    found = re.match(r"\s*(\d+) MiB", text or "")
    return int(found[1]) if found else None


def _watts(text: str | None) -> float | None:
    found = re.match(r"\s*([\d.]+) W", text or "")
    return float(found[1]) if found else None


def gpus_of(xml: str) -> list[dict[str, Any]]:
    """The cards in `nvidia-smi --query --xml-format` output. Raises ElementTree.ParseError."""
    found = []
    for gpu in ElementTree.fromstring(xml).iter("gpu"):  # noqa: S314  the driver's own output
        power = gpu.find("gpu_power_readings")
        power = gpu.find("power_readings") if power is None else power
        limits = (
            {key: power.findtext(f"{key}_power_limit") for key in ("current", "default", "min", "max")}
            if power is not None
            else {}
        )
        if power is not None and limits["current"] is None:  # the name before driver 535
            limits["current"] = power.findtext("power_limit")
        processes = gpu.find("processes")
        found.append(
            {
                "slot": _slot(gpu.get("id", "")),
                "name": (gpu.findtext("product_name") or "").replace("NVIDIA ", ""),
                "uuid": gpu.findtext("uuid"),
                "memory_total_mib": _mib(gpu.findtext("fb_memory_usage/total")),
                "memory_used_mib": _mib(gpu.findtext("fb_memory_usage/used")),
                "memory_free_mib": _mib(gpu.findtext("fb_memory_usage/free")),
                "bar1_mib": _mib(gpu.findtext("bar1_memory_usage/total")),
                "display": gpu.findtext("display_active") == "Enabled",
                "persistence": gpu.findtext("persistence_mode") == "Enabled",
                "power_w": {key: _watts(text) for key, text in limits.items()},
                "holders": [
                    {
                        "pid": int(process.findtext("pid") or 0),
                        "name": process.findtext("process_name") or "",
                        "mib": _mib(process.findtext("used_memory")),
                    }
                    for process in (processes.iter("process_info") if processes is not None else ())
                ],
            }
        )
    return found


def _slot(bus_id: str) -> str:
    """nvidia-smi's 00000000:01:00.0 as sysfs writes it."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def gpus(m: Machine) -> tuple[list[dict[str, Any]] | None, str]:
    """(cards as the driver sees them, ""); (None, why) when it does not answer."""
    said = m.run("nvidia-smi", "--query", "--xml-format")
    if said is None:
        return None, "nvidia-smi is not here"
    if said.rc == 0:
        with contextlib.suppress(ElementTree.ParseError):
            return gpus_of(said.out), ""
    return None, " ".join((said.out + " " + said.err).split())[:300] or f"nvidia-smi ended with status {said.rc}"


def links(m: Machine) -> dict[str, str]:
    """How each pair of cards is connected, by nvidia-smi's own words: {"0-1": "PHB"}; NV# is NVLink."""
    said = m.run("nvidia-smi", "topo", "--matrix")
    return links_of(said.out) if said and said.rc == 0 else {}


def links_of(matrix: str) -> dict[str, str]:
    """The same from the matrix that `nvidia-smi topo --matrix` prints."""
    rows = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in matrix.splitlines()]
    rows = [row for row in rows if row and re.fullmatch(r"GPU\d+", row[0]) and "X" in row]
    return {
        f"{a}-{b}": rows[a][b + 1] for a in range(len(rows)) for b in range(a + 1, len(rows)) if len(rows[a]) > b + 1
    }


def peers(m: Machine) -> dict[str, str]:
    """Whether the driver lets each pair of cards read each other, in its own words: {"0-1": "OK"}; a claim, not a test."""
    said = m.run("nvidia-smi", "topo", "-p2p", "r")
    return links_of(said.out) if said and said.rc == 0 else {}


def cdi(m: Machine) -> list[dict[str, Any]]:
    """Lists of NVIDIA's cards for containers (CDI), where Docker looks: {path, driver, cards, nodes: {path: major}}."""
    found = []
    for folder in ("etc/cdi", "run/cdi"):  # /var/run is /run
        for name in (*m.names(folder, "*.yaml"), *m.names(folder, "*.json")):
            text = m.text(f"{folder}/{name}")
            if not re.search(r"kind\W+nvidia\.com/gpu\b", text):
                continue
            # No YAML in the standard library: these are words that stand in each entry, whatever the file's form.
            version = re.search(r"lib(?:cuda|nvidia-ml)\.so\.(\d{3}\.\d+(?:\.\d+)?)", text)
            nodes = re.findall(r"\bpath\W+(/dev/[\w/-]+)(?:(?!path)[^/]){0,80}?\bmajor\W+(\d+)", text)
            found.append(
                {
                    "path": f"/{folder}/{name}",
                    "driver": version[1] if version else None,
                    "cards": sorted(set(re.findall(r"name\W+(GPU-[0-9a-fA-F-]+)", text))),
                    "nodes": {path: int(major) for path, major in nodes},
                }
            )
    return found


def stale(m: Machine, specs: list[dict[str, Any]], loaded: str | None, gpus: list[dict[str, Any]] | None) -> list[str]:
    """Why the list in `specs` is not that of the driver and the cards of now; one reason a line."""
    why = []
    for spec in specs:
        if loaded and spec["driver"] and spec["driver"] != loaded:
            why.append(f"{spec['path']} is of driver {spec['driver']}, {loaded} is loaded")
        there = sorted(str(gpu["uuid"]) for gpu in gpus or [])
        if there and spec["cards"] and spec["cards"] != there:
            why.append(f"{spec['path']} lists {', '.join(spec['cards'])}; the machine has {', '.join(there)}")
        for path, major in spec["nodes"].items():
            with contextlib.suppress(OSError):
                now = os.major(m.path(path).stat().st_rdev)
                if now != major:
                    why.append(f"{spec['path']} has {path} with major number {major}, it is {now}")
    return why


def disk(m: Machine, root: str) -> dict[str, Any]:
    """Where `root` is or would be: filesystem, free bytes for a user's files, and what carries it."""
    place = m.path(root)
    while not place.exists():
        place = place.parent
    room, device = os.statvfs(place), place.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = [line.partition(" - ") for line in m.text("proc/self/mountinfo").splitlines()]
    kinds = [right.split()[0] for left, _, right in mounts if left.split()[2:3] == [number] and right]
    block = m.path(f"sys/dev/block/{number}").resolve()
    queue = next((p / "queue" for p in (block, block.parent) if (p / "queue").is_dir()), None)
    name = queue.parent.name if queue else ""
    spins = (queue / "rotational").read_text().strip() == "1" if queue and (queue / "rotational").exists() else None
    return {
        "path": root,
        "exists": m.path(root).is_dir(),
        "filesystem": kinds[-1] if kinds else "",
        "device": name,
        "rotational": spins,
        "nvme": name.startswith("nvme"),
        "free_bytes": room.f_bavail * room.f_frsize,
    }


def listeners(m: Machine) -> dict[int, list[dict[str, Any]]]:
    """TCP ports that somebody listens on: {port: [{pid, name}]}; the holder is empty where it cannot be seen."""
    inodes: dict[str, int] = {}
    for table in ("tcp", "tcp6"):
        for line in m.text(f"proc/net/{table}").splitlines()[1:]:
            words = line.split()
            if len(words) > 9 and words[3] == "0A":
                inodes[words[9]] = int(words[1].rpartition(":")[2], 16)
    found: dict[int, list[dict[str, Any]]] = {port: [] for port in inodes.values()}
    for process in m.path("proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for handle in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    target = str(handle.readlink())
                    port = inodes.get(target[len("socket:[") : -1]) if target.startswith("socket:[") else None
                    if port is not None:
                        holder = {"pid": int(process.name), "name": m.text(f"proc/{process.name}/comm")}
                        found[port] += [] if holder in found[port] else [holder]
    return found


def apt(m: Machine) -> dict[str, Any]:
    """Whether dpkg and apt are in order. Nothing is refreshed, and apt's own caches are left alone."""
    audit = m.run("dpkg", "--audit")
    no_cache = ("-o", "Dir::Cache::pkgcache=", "-o", "Dir::Cache::srcpkgcache=")
    # Reads every source and every status, as an installation would: conflicting Signed-By and broken dependencies show here.
    check = m.run("apt-get", *no_cache, "--option", "Debug::NoLocking=true", "check")
    lines = [line.strip() for line in check.err.splitlines() if line.startswith("E:")] if check and check.rc else []
    return {
        "present": check is not None and audit is not None,
        "half_configured": [
            line.split()[0] for line in (audit.out if audit else "").splitlines() if line.startswith(" ")
        ],
        "errors": lines,
        "locked_by": lock_holder(m, "var/lib/dpkg/lock-frontend", "var/lib/dpkg/lock"),
    }


def lock_holder(m: Machine, *locks: str) -> str:
    """Name of a program that holds one of the lock files; empty when none does."""
    for lock in locks:
        with contextlib.suppress(OSError):
            inode = str(m.path(lock).stat().st_ino)
            rows = [line.split() for line in m.text("proc/locks").splitlines()]
            for holder in (row[4] for row in rows if len(row) > 5 and row[5].rpartition(":")[2] == inode):
                return m.text(f"proc/{holder}/comm") or f"process {holder}"
    return ""


def clock(m: Machine, there: float | None) -> dict[str, Any]:
    """Whether the clock is kept by somebody, and how far it is from the controller's (`there`, seconds of the epoch)."""
    said = m.run("timedatectl", "show", "--property=NTP", "--property=NTPSynchronized")
    values = dict(line.partition("=")[::2] for line in (said.out if said else "").splitlines())
    return {
        "synchronised": values.get("NTPSynchronized") == "yes",
        "ntp": values.get("NTP") == "yes",
        "ahead_s": None if there is None else round(time.time() - there, 1),
    }
