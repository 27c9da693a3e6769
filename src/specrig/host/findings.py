"""Judges facts of a machine against what is wanted of it. Pure: facts and wishes in, findings out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

CLOCK_OFF_S = 60
VRAM_HELD_MIB = 512
GIB = 1 << 30
# Where the roles have been run (their meta says the same), and where nobody has tried.
TESTED = {("debian", "12"), ("debian", "13")}
# Where what the roles choose was tested: names of packages, files, sources; on another distribution that said it was this one.
STAND_IN = {("ubuntu", "24.04")}


class Code(NamedTuple):
    """What a finding means. A refusal stops the play before anything changes; a warning is told."""

    level: str
    title: str
    fix: str


# Every code of preflight. A code is never renamed or given another meaning.
CODES = {
    "ACS_REDIRECT": Code(
        "warning",
        "Bridges send traffic between two cards through the root complex",
        "leave peer-to-peer off (the default), or turn ACS off in the firmware",
    ),
    "APT_BROKEN": Code(
        "refusal",
        "apt or dpkg cannot install anything",
        "put it in order by hand first: sudo dpkg --configure --pending; sudo apt-get check",
    ),
    "APT_LOCKED": Code(
        "warning",
        "Another program holds dpkg's lock",
        "nothing: the roles wait five minutes for it",
    ),
    "ARCHITECTURE": Code(
        "refusal",
        "The processor is not x86-64",
        "use an x86-64 machine; the engines' images are built for it",
    ),
    "BAR1_SMALL": Code(
        "warning",
        "A card shows only a part of its memory on the bus",
        "turn on Above 4G Decoding and Resizable BAR in the firmware; an old VBIOS may lack it",
    ),
    "CARDS_MISMATCH": Code(
        "refusal",
        "The cards are not those that the inventory claims",
        "correct rig_gpus or rig_profile, or the machine: lspci -nn -d 10de:",
    ),
    "CARDS_UNCLAIMED": Code(
        "warning",
        "The machine has more cards than the inventory claims",
        "add them to rig_gpus, or leave them idle",
    ),
    "CDI_STALE": Code(
        "warning",
        "The list of cards for containers is not that of the running driver",
        "./rig up writes it again (by hand: sudo systemctl restart specrig-cdi.service)",
    ),
    "CDI_TWICE": Code(
        "warning",
        "More than one list of cards for containers",
        "keep /run/cdi/nvidia.yaml, which is written at each boot, and remove the other",
    ),
    "CLOCK_OFF": Code(
        "refusal",
        "The clock differs from the controller's",
        "set it: sudo timedatectl set-ntp true (certificates and apt's signatures depend on it)",
    ),
    "CLOCK_UNKEPT": Code(
        "warning",
        "Nothing keeps the clock",
        "sudo apt-get install systemd-timesyncd",
    ),
    "DISK_SHORT": Code(
        "refusal",
        "The models do not fit on their filesystem",
        "free space, or set rig_models_root to a larger one",
    ),
    "DISK_SLOW": Code(
        "warning",
        "The models lie on a turning disk or over a network",
        "set rig_models_root to an SSD; loading is bound by the disk",
    ),
    "DRIVER_ABSENT": Code(
        "refusal",
        "No NVIDIA driver is loaded, and none is to be installed",
        "install one of the branch that ./rig plan names, or let specrig (docs/driver.md)",
    ),
    "DRIVER_FOREIGN": Code(
        "refusal",
        "A driver that apt does not know is on the machine",
        "remove it by its own means (sudo nvidia-uninstall; snap remove), or keep it: rig_driver: {source: none}",
    ),
    "DRIVER_MISMATCH": Code(
        "refusal",
        "The driver's module and its tools do not agree",
        "reboot: the module in memory is not the one on disk",
    ),
    "DRIVER_OLD": Code(
        "refusal",
        "The driver is older than the engine's image needs",
        "a newer driver, or an older engine: rig_driver: {branch: …} makes the plan choose",
    ),
    "IOMMU_TRANSLATES": Code(
        "warning",
        "The IOMMU translates what two cards say to each other",
        "iommu=pt on the kernel's command line, when NCCL hangs or the kernel logs IO_PAGE_FAULT",
    ),
    "NVLINK_ABSENT": Code(
        "refusal",
        "NVLink is claimed and the driver sees none",
        "nvlink: false in rig_gpus, or seat the bridge: nvidia-smi topo --matrix shows NV# between bridged cards",
    ),
    "NOUVEAU_LOADED": Code(
        "warning",
        "nouveau holds the card",
        "a reboot after the driver is installed: it is on nouveau's blacklist then",
    ),
    "OS_UNSUPPORTED": Code(
        "refusal",
        "Not a Debian or Ubuntu",
        "Debian 12 or 13, or Ubuntu 24.04",
    ),
    "OS_UNTESTED": Code(
        "warning",
        "The roles have not been run on this release",
        "Debian 12 or 13 are tested; tell us how this one went",
    ),
    "PORT_TAKEN": Code(
        "refusal",
        "Somebody else listens on a service's port",
        "stop it, or give the service another port",
    ),
    "REBOOT_PENDING": Code(
        "warning",
        "A reboot is due",
        "reboot when it suits you; a driver is built for the newest kernel anyway",
    ),
    "SECURE_BOOT": Code(
        "refusal",
        "Secure Boot is on and would refuse the driver's module",
        "rig_driver: {mok: stage} puts DKMS's key up for you to enrol at the console; without a console: Ubuntu's signed modules, or Secure Boot off",
    ),
    "VRAM_HELD": Code(
        "warning",
        "Other programs hold memory of a card",
        "stop them, or lower gpu_memory_utilization",
    ),
}


def finding(code: str, cause: str, fix: str = "") -> dict[str, str]:
    """{code, level, cause, fix} of a known code. Raises KeyError on another."""
    return {"code": code, "level": CODES[code].level, "cause": cause, "fix": fix or CODES[code].fix}


def judge(facts: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[dict[str, str]]:
    """All findings, refusals first. `wanted` is preflight's input; what it does not name is not judged."""
    found = [one for rule in RULES for one in rule(facts, wanted)]
    return sorted(found, key=lambda one: one["level"])


def _system(facts: Mapping[str, Any], _wanted: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    system = facts["os"]
    if system["id"] not in ("debian", "ubuntu") or not facts["apt"]["present"]:
        yield finding("OS_UNSUPPORTED", f"this is {system['name'] or 'unknown'}")
    elif (system["id"], system["version_id"]) in STAND_IN:
        yield finding(
            "OS_UNTESTED", f"this is {system['name']}: the roles were run on a stand-in for it, not on itself"
        )
    elif (system["id"], system["version_id"]) not in TESTED:
        yield finding("OS_UNTESTED", f"this is {system['name']}")
    if system["architecture"] != "x86_64":
        yield finding("ARCHITECTURE", f"uname says {system['architecture'] or 'nothing'}")


def _kernel(facts: Mapping[str, Any], _wanted: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    kernel = facts["kernel"]
    why = []
    if kernel["newest"] and kernel["newest"] != kernel["running"]:
        why.append(f"kernel {kernel['running']} runs, {kernel['newest']} is installed")
    if kernel["reboot_required"]:
        why.append(f"/run/reboot-required names {', '.join(kernel['reboot_packages']) or 'no package'}")
    if why:
        yield finding("REBOOT_PENDING", "; ".join(why))


def _driver(facts: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    want, driver = wanted.get("driver"), facts["driver"]
    if not want:
        return
    managed, loaded = want.get("source", "none") != "none", driver["loaded"]
    if driver["nouveau"]:
        yield finding("NOUVEAU_LOADED", "the module nouveau is loaded")
    if managed and driver["foreign"]:
        yield finding("DRIVER_FOREIGN", "; ".join(driver["foreign"]))
    boot = facts["secure_boot"]
    # Ubuntu's archive has modules that Canonical has signed; elsewhere a person may have agreed to enrol DKMS's key.
    signed = want.get("source") == "distro" and facts["os"]["id"] == "ubuntu"
    agreed = managed and want.get("mok") == "stage"
    if boot["enabled"] and not loaded and boot["dkms_key_enrolled"] is not True and not signed and not agreed:
        state = {False: "DKMS's key is not enrolled", None: "no key of DKMS is enrolled"}[boot["dkms_key_enrolled"]]
        yield finding("SECURE_BOOT", f"Secure Boot is on, no driver is loaded, {state}")
    if not loaded and not managed:
        cause, fix = facts["gpus_error"] or "no nvidia module is loaded", ""
        if branch := want.get("branch"):  # not whatever the distribution has: an old one holds the engine back
            fix = f"install branch {branch}, or let specrig: rig_driver: {{source: nvidia, branch: {branch}, …}} (docs/driver.md)"
        yield finding("DRIVER_ABSENT", f"{cause}; {want['reason']}" if want.get("reason") else cause, fix)
    elif loaded and facts["gpus"] is None:
        yield finding("DRIVER_MISMATCH", f"module {loaded} is loaded, nvidia-smi says: {facts['gpus_error']}")
    elif loaded and not managed and _key(loaded) < _key(want.get("min_version") or "0"):
        yield finding("DRIVER_OLD", f"driver {loaded} is loaded, {want['min_version']} is needed")


def _key(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def _cards(facts: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    claims: Sequence[Mapping[str, Any]] = wanted.get("cards") or []
    if not claims:
        return
    title = {pci: claim["title"] for claim in claims for pci in claim["pci_ids"]}
    there = Counter(title.get(card["id"], card["name"] or f"10de:{card['id']}") for card in facts["cards"])
    claimed = Counter(claim["title"] for claim in claims)
    words = " and ".join(f"{count} × {name}" for name, count in there.items()) or "no NVIDIA card"
    if claimed - there:
        said = " and ".join(f"{count} × {name}" for name, count in claimed.items())
        yield finding("CARDS_MISMATCH", f"the inventory claims {said}; the machine has {words}")
    elif there - claimed:
        yield finding("CARDS_UNCLAIMED", f"the inventory claims {sum(claimed.values())}, the machine has {words}")


def _two_cards(facts: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    claims = wanted.get("cards") or []
    if len(claims) < 2 or len(facts["cards"]) < 2:
        return
    for card in facts["cards"]:
        full = max((claim["bar1_mib"] for claim in claims if card["id"] in claim["pci_ids"]), default=0)
        if card["bar1_mib"] is not None and card["bar1_mib"] < full:
            yield finding("BAR1_SMALL", f"{card['slot']} shows {card['bar1_mib']} MiB, {full} MiB are possible")
    words = set(facts["links"].values())
    if all(claim.get("nvlink") for claim in claims) and words and not all(word.startswith("NV") for word in words):
        yield finding("NVLINK_ABSENT", f"nvidia-smi says {', '.join(sorted(words))} between the cards")
    if facts["acs_redirect"]:
        yield finding("ACS_REDIRECT", f"at {', '.join(facts['acs_redirect'])}")
    if facts["iommu"]["on"] and not facts["iommu"]["passthrough"]:
        yield finding("IOMMU_TRANSLATES", "the IOMMU is on, and not in pass-through")


def _cdi(facts: Mapping[str, Any], _wanted: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    specs = facts["cdi"]["specs"]
    if len(specs) > 1:
        yield finding("CDI_TWICE", " and ".join(spec["path"] for spec in specs))
    for why in facts["cdi"]["stale"]:
        yield finding("CDI_STALE", why)


def _memory(facts: Mapping[str, Any], _wanted: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    for number, gpu in enumerate(facts["gpus"] or []):
        others = [holder for holder in gpu["holders"] if not holder["ours"]]
        held = sum(holder["mib"] or 0 for holder in others)
        ours = any(holder["ours"] for holder in gpu["holders"])
        used = held if others or ours else gpu["memory_used_mib"] or 0  # a holder in another namespace is not listed
        if used >= VRAM_HELD_MIB:
            who = ", ".join(f"{h['name']} (pid {h['pid']}, {h['mib']} MiB)" for h in others) or "not listed"
            yield finding("VRAM_HELD", f"card {number}: {used} of {gpu['memory_total_mib']} MiB are held by {who}")


def _disk(facts: Mapping[str, Any], _wanted: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    disk = facts["models_root"]
    if disk is None:
        return
    if disk["missing_bytes"] > disk["free_bytes"]:
        need, free = disk["missing_bytes"] / GIB, disk["free_bytes"] / GIB
        yield finding("DISK_SHORT", f"{need:.1f} GiB are still to come to {disk['path']}, {free:.1f} GiB are free")
    if disk["rotational"] or disk["filesystem"].startswith(("nfs", "cifs", "smb", "fuse.sshfs", "9p")):
        what = "a turning disk" if disk["rotational"] else disk["filesystem"]
        yield finding("DISK_SLOW", f"{disk['path']} is on {what} {disk['device']}".rstrip())


def _ports(facts: Mapping[str, Any], _wanted: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    for port in facts["ports"]:
        if port["taken"] and not port["ours"]:
            who = ", ".join(f"{holder['name']} (pid {holder['pid']})" for holder in port["holders"]) or "somebody"
            yield finding("PORT_TAKEN", f"port {port['port']} of {port['unit']} is held by {who}")


def _apt(facts: Mapping[str, Any], _wanted: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    apt = facts["apt"]
    if apt["half_configured"]:
        yield finding("APT_BROKEN", f"not fully installed: {', '.join(apt['half_configured'])}")
    if apt["errors"]:
        yield finding("APT_BROKEN", " ".join(apt["errors"])[:500])
    if apt["locked_by"]:
        yield finding("APT_LOCKED", f"{apt['locked_by']} holds it")


def _clock(facts: Mapping[str, Any], _wanted: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    clock = facts["clock"]
    if clock["ahead_s"] is not None and abs(clock["ahead_s"]) > CLOCK_OFF_S:
        way = "ahead of" if clock["ahead_s"] > 0 else "behind"
        yield finding("CLOCK_OFF", f"{abs(clock['ahead_s']):.0f} s {way} the controller's")
    elif not clock["synchronised"] and not clock["ntp"]:
        yield finding("CLOCK_UNKEPT", "timedatectl says neither NTP nor synchronised")


RULES = (_system, _kernel, _driver, _cards, _two_cards, _cdi, _memory, _disk, _ports, _apt, _clock)
