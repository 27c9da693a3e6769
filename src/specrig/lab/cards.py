"""Makes a lab host look as if NVIDIA cards were plugged in: `lspci` and everything else that reads the PCI bus sees them.

A folder of made-up PCI functions is mounted over /sys/bus/pci/devices of the container, and again by a unit at each boot.
There is no driver and nothing to compute with.
"""

from __future__ import annotations

import base64
import io
import struct
import tarfile
from typing import Any

from specrig.lab.errors import LabError
from specrig.plan.catalog import catalog

FOLDER = "/var/lib/specrig-lab/pci"
DEVICES = "/sys/bus/pci/devices"
# Not a name of specrig's own: `status` would take it for a service.
UNIT = "/etc/systemd/system/lab-cards.service"
_BOOT = f"""[Unit]
Description=Lab: made-up PCI functions
Before=basic.target
DefaultDependencies=no
After=local-fs.target
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/mount --bind {FOLDER} {DEVICES}
[Install]
WantedBy=basic.target
"""
_MEMORY_64_PREFETCH, _MEMORY = 0x14220C, 0x40200  # flags as sysfs prints them


def _config(device: int, pci_class: int, bridge: bool) -> bytes:
    """4096 bytes of configuration space; a bridge carries ACS with request and completion redirect on."""
    space = bytearray(4096)
    struct.pack_into("<HHHHB", space, 0, 0x10DE if not bridge else 0x8086, device, 0x0006, 0, 0xA1)
    space[9:12] = pci_class.to_bytes(3, "little")
    space[14] = 1 if bridge else 0
    if bridge:
        struct.pack_into("<IHH", space, 0x100, 0x0001_000D, 0b11111, 0b1111)
    return bytes(space)


def functions(cards: list[str]) -> dict[str, bytes]:
    """{path below FOLDER: content} of a root port and one function per card (catalog names). Raises LabError."""
    known = catalog().gpus
    files: dict[str, bytes] = {}

    def add(slot: str, vendor: int, device: int, pci_class: int, regions: list[tuple[int, int, int]]) -> None:
        lines = [f"0x{at:016x} 0x{at + size - 1 if size else 0:016x} 0x{flags:016x}\n" for at, size, flags in regions]
        texts = {"vendor": f"0x{vendor:04x}", "device": f"0x{device:04x}", "class": f"0x{pci_class:06x}", "irq": "0"}
        texts |= {"subsystem_vendor": "0x10de", "subsystem_device": "0x0000", "revision": "0xa1"}
        files.update({f"{slot}/{name}": f"{text}\n".encode() for name, text in texts.items()})
        files[f"{slot}/resource"] = "".join([*lines, *["0x0 0x0 0x0\n"] * (7 - len(lines))]).encode()
        files[f"{slot}/config"] = _config(device, pci_class, vendor != 0x10DE)

    add("0000:00:01.0", 0x8086, 0x460D, 0x060400, [])
    for number, name in enumerate(cards, start=1):
        if name not in known:
            raise LabError("LAB_CARD", f"no card is called {name}", f"one of {', '.join(known)}")
        base, window = 0x6000_0000_0000 + (number << 40), known[name].bar1_mib << 20
        regions = [(0xA000_0000, 16 << 20, _MEMORY), (base, window, _MEMORY_64_PREFETCH)]
        add(f"0000:{number:02x}:00.0", 0x10DE, int(known[name].pci_ids[0], 16), 0x030000, regions)
    return files


def plug(container: Any, cards: list[str]) -> None:
    """Put `cards` into a running lab host, instead of those it has; none takes them out. Raises LabError."""
    files = functions(cards)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    steps = [f"while mountpoint -q {DEVICES}; do umount {DEVICES}; done", f"rm -rf {FOLDER}"]
    steps += [f"systemctl disable --quiet {UNIT.rpartition('/')[2]} 2>&1 || true", f"rm -f {UNIT}"]
    if cards:
        unit = base64.b64encode(_BOOT.encode()).decode()
        word = base64.b64encode(out.getvalue()).decode()
        steps += [
            f"mkdir -p {FOLDER}",
            f"echo {word} | base64 -d | tar -xz -C {FOLDER}",
            f"mount --bind {FOLDER} {DEVICES}",
            f"echo {unit} | base64 -d > {UNIT}",
            f"systemctl enable --quiet {UNIT}",
        ]
    done = container.exec_run(["sh", "-ec", "\n".join(steps)])
    if done.exit_code:
        raise LabError(
            "LAB_CARDS", done.output.decode(errors="replace").strip()[-300:], "is the host up? ./rig lab list"
        )
