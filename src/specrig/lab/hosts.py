"""Lab hosts: containers that boot systemd, reached over SSH like a rig. All of it is found again by label."""

from __future__ import annotations

import contextlib
import hashlib
import io
import ipaddress
import re
import shutil
import socket
import subprocess
import tarfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from docker.errors import APIError, NotFound
from docker.types import IPAMConfig, IPAMPool

from specrig.lab import images, paths
from specrig.lab.errors import LabError
from specrig.lab.parallel import parallel
from specrig.lab.progress import Progress

NETWORK = "specrig-lab"
# Hosts are reached here. Docker gives out addresses anew at each start, except on a network whose subnet was asked for.
ADDRESSES = "specrig-lab-hosts"
LABEL = "specrig.lab"
BOOT_TIMEOUT_S = 120
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")
# What systemd and a nested Docker need beyond Docker's default set where --privileged cannot be had.
CAPABILITIES = [
    "SYS_ADMIN",
    "NET_ADMIN",
    "SYS_PTRACE",
    "SYS_NICE",
    "IPC_LOCK",
    "DAC_READ_SEARCH",
    "SYSLOG",
    "LINUX_IMMUTABLE",
]
# Docker's and containerd's image stores need a real filesystem below them: an overlay cannot lie on an overlay.
VOLUMES = {"docker": "/var/lib/docker", "containerd": "/var/lib/containerd"}
# Docker restarts a container whose init failed. So a reboot is a failure here, and any other end is none.
REBOOTED = 133
ENDS = {"reboot": REBOOTED, "poweroff": 0, "halt": 0}
# A device that Docker's default rules do not grant: what the tests of device access pass through, as a card is.
DEVICES = [device for device in ("/dev/fuse",) if Path(device).exists()]
_privileged: dict[str, bool] = {}
_probe = threading.Lock()


@dataclass(frozen=True)
class Host:
    """One lab host as Docker knows it. `address` is empty while it does not run."""

    name: str
    lab: str
    os: str
    status: str
    address: str
    container: str


def container_name(lab: str, name: str) -> str:
    """Name of a host's container (and prefix of its volumes)."""
    return f"specrig-{lab}-{name}"


def check_name(name: str, what: str = "host") -> str:
    """Return `name` if it can be a host name. Raises LabError LAB_NAME."""
    if not _NAME.fullmatch(name):
        raise LabError("LAB_NAME", f"{name!r} cannot be a {what}'s name", "use a-z, 0-9 and -, at most 32 characters")
    return name


def ensure_network(client: Any) -> None:
    """Make the lab's network when it is missing."""
    if not client.networks.list(names=[f"^{NETWORK}$"]):
        client.networks.create(NETWORK, driver="bridge", labels={LABEL: ""}, check_duplicate=True)


def ensure_addresses(client: Any) -> ipaddress.IPv4Network:
    """Make the network of the hosts' lasting addresses when it is missing; its subnet, one that Docker found free."""
    with paths.exclusive(ADDRESSES):
        found = client.networks.list(names=[f"^{ADDRESSES}$"])
        if not found:
            probe = client.networks.create(f"{ADDRESSES}-probe", driver="bridge", labels={LABEL: ""})
            subnet = _subnet(probe)
            probe.remove()
            pool = IPAMConfig(pool_configs=[IPAMPool(subnet=str(subnet))])
            found = [client.networks.create(ADDRESSES, driver="bridge", labels={LABEL: ""}, ipam=pool)]
        return _subnet(found[0])


def _subnet(network: Any) -> ipaddress.IPv4Network:
    network.reload()
    return ipaddress.IPv4Network(network.attrs["IPAM"]["Config"][0]["Subnet"])


def address_of(name: str, subnet: ipaddress.IPv4Network, attempt: int = 0) -> str:
    """The address that a container of this name has as long as it lives; another one at each attempt. Gateway and broadcast are left out."""
    number = int.from_bytes(hashlib.sha256(f"{name} {attempt}".encode()).digest()[:8], "big")
    return str(subnet[2 + number % (subnet.num_addresses - 3)])


def _address(container: Any) -> str:
    """Where a running container answers. Hosts of an older lab have only the first network."""
    networks = container.attrs["NetworkSettings"]["Networks"]
    return str((networks.get(ADDRESSES) or networks.get(NETWORK) or {}).get("IPAddress", ""))


def ensure_key() -> tuple[Path, str]:
    """Return (private key file, public key line) of the lab's own ed25519 pair, made on first use."""
    key = paths.state() / "id_ed25519"
    if not key.exists():
        if shutil.which("ssh-keygen") is None:
            raise LabError("LAB_SSH_CLIENT", "ssh-keygen is not here", "apt-get install openssh-client")
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "specrig-lab", "-f", key], check=True)
    return key, key.with_suffix(".pub").read_text()


def find(client: Any, lab: str | None = None) -> list[Host]:
    """Lab hosts of one lab, or of all, by label; sorted by lab and name."""
    query = {"label": [f"{LABEL}={lab}" if lab else LABEL, "specrig.host"]}
    found = []
    for container in client.containers.list(all=True, filters=query, ignore_removed=True):
        labels = container.labels
        name, system = labels["specrig.host"], labels["specrig.os"]
        found.append(Host(name, labels[LABEL], system, container.status, _address(container), container.name))
    return sorted(found, key=lambda h: (h.lab, h.name))


def up(client: Any, lab: str, hosts: Mapping[str, str]) -> Path:
    """Bring the hosts {name: os} of `lab` up, wait until systemd and SSH answer, and return the inventory file.

    Hosts that exist are started when they are stopped and kept as they are. Raises LabError.
    """
    check_name(lab, "lab")
    for name, os_name in hosts.items():
        check_name(name)
        for old in find(client, lab):
            if old.name == name and old.os != os_name:
                raise LabError(
                    "LAB_HOST_EXISTS", f"{name} runs {old.os}, asked for {os_name}", f"./rig lab down {name}"
                )
    key, public = ensure_key()
    systems = sorted(set(hosts.values()))
    tags = dict(zip(systems, parallel([partial(images.ensure_host, client, s) for s in systems]), strict=True))
    ensure_network(client)
    subnet = ensure_addresses(client)
    with Progress("hosts") as say:
        who = ", ".join(hosts) if len(hosts) < 5 else f"{len(hosts)} hosts"
        say.phase(f"booting {who}")
        jobs = [
            partial(_boot, client, lab, name, system, tags[system], public, subnet) for name, system in hosts.items()
        ]
        failed = parallel(jobs, lambda number: say.update(number, len(hosts), "up"))
        for name, units in zip(hosts, failed, strict=True):
            if units:
                say.phase(f"{name} is degraded: {units}")
        say.done(f"{who} up")
    return write_inventory(client, lab, key)


def _boot(
    client: Any, lab: str, name: str, os_name: str, image: str, public: str, subnet: ipaddress.IPv4Network
) -> str:
    try:
        container = client.containers.get(container_name(lab, name))
    except NotFound:
        container = _create(client, lab, name, os_name, image)
    _put(container, "/home/rig", ".ssh/authorized_keys", public.encode())
    if container.status != "running":
        _start(client, container, subnet)
    failed = _wait_for_systemd(container)
    container.reload()
    _wait_for_ssh(_address(container), name)
    return failed


def _start(client: Any, container: Any, subnet: ipaddress.IPv4Network) -> None:
    """Start with an address that stays, also through a reboot: the same for this name each time, as long as no one else has it."""
    network = client.networks.get(ADDRESSES)
    for attempt in range(16):
        container.reload()
        if attempt or ADDRESSES not in container.attrs["NetworkSettings"]["Networks"]:
            with contextlib.suppress(APIError):  # not connected
                network.disconnect(container, force=True)
            network.connect(container, ipv4_address=address_of(container.name, subnet, attempt))
        try:
            container.start()
        except APIError as error:
            if "already in use" not in str(error.explanation):
                raise
        else:
            return
    raise LabError(
        "LAB_HOST_ADDRESS", f"{container.name} finds no free address in {subnet}", "./rig lab list; ./rig lab down"
    )


def _create(client: Any, lab: str, name: str, os_name: str, image: str) -> Any:
    labels = {LABEL: lab, "specrig.host": name, "specrig.os": os_name}
    volumes = {}
    for part, target in VOLUMES.items():
        volume = f"{container_name(lab, name)}-{part}"
        client.volumes.create(volume, labels=labels)
        volumes[volume] = {"bind": target, "mode": "rw"}
    rights: dict[str, Any] = {"privileged": True} if may_be_privileged(client, image) else {"cap_add": CAPABILITIES}
    container = client.containers.create(
        image,
        name=container_name(lab, name),
        hostname=name,
        network=NETWORK,
        labels=labels,
        volumes=volumes,
        tmpfs={"/run": "rw,nosuid,nodev,exec,mode=755", "/run/lock": "rw,nosuid,nodev,noexec,size=5m"},
        security_opt=["seccomp=unconfined", "apparmor=unconfined"],
        cgroupns="private",
        devices=[f"{device}:{device}:rwm" for device in DEVICES],
        stop_signal="SIGRTMIN+3",
        restart_policy={"Name": "on-failure"},
        **rights,
    )
    for way, status in ENDS.items():
        text = f"[Unit]\nSuccessAction=exit-force\nSuccessActionExitStatus={status}\n"
        _put(container, "/etc/systemd/system", f"systemd-{way}.service.d/lab.conf", text.encode(), owner=0)
    return container


def may_be_privileged(client: Any, image: str) -> bool:
    """Whether this Engine can start a privileged container; not where it lacks capabilities itself. Asked once."""
    with _probe:
        if client.api.base_url not in _privileged:
            probe = client.containers.create(image, entrypoint="/bin/true", privileged=True, labels={LABEL: ""})
            try:
                probe.start()
                _privileged[client.api.base_url] = True
            except APIError:
                _privileged[client.api.base_url] = False
            finally:
                probe.remove(force=True)
        return _privileged[client.api.base_url]


def _put(container: Any, folder: str, name: str, data: bytes, owner: int = 1000) -> None:
    """Write a file of `owner` (the user rig) below `folder`, for its owner only, parents included, running or not."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for parent in reversed(Path(name).parents[:-1]):
            entry = tarfile.TarInfo(str(parent))
            entry.type, entry.mode, entry.uid, entry.gid = tarfile.DIRTYPE, 0o700, owner, owner
            archive.addfile(entry)
        entry = tarfile.TarInfo(name)
        entry.size, entry.mode, entry.uid, entry.gid = len(data), 0o600, owner, owner
        archive.addfile(entry, io.BytesIO(data))
    container.put_archive(folder, out.getvalue())


def _read(container: Any, path: str) -> str:
    chunks, _ = container.get_archive(path)
    with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as archive:
        member = archive.extractfile(archive.next() or tarfile.TarInfo())
        return member.read().decode() if member else ""


def _wait_for_systemd(container: Any) -> str:
    """Wait for the end of the boot; return the failed units (empty = running)."""
    deadline, said = time.monotonic() + BOOT_TIMEOUT_S, ""
    while time.monotonic() < deadline:
        # Not --wait: it fails at once as long as the bus is not there.
        said = container.exec_run(["systemctl", "is-system-running"]).output.decode().strip()
        if said == "running":
            return ""
        if said == "degraded":
            units = container.exec_run(
                ["systemctl", "list-units", "--failed", "--plain", "--no-legend"]
            ).output.decode()
            return ", ".join(line.split()[0] for line in units.splitlines() if line.strip())
        container.reload()
        if container.status != "running":
            container.update(restart_policy={"Name": "no"})
            break
        time.sleep(0.3)
    log = container.logs(tail=8).decode(errors="replace").strip()
    raise LabError(
        "LAB_HOST_BOOT",
        f"{container.name} did not boot in {BOOT_TIMEOUT_S} s: {container.status}, systemd says {said!r}\n    {log}",
        f"docker logs {container.name}; then ./rig lab down",
    )


def _wait_for_ssh(address: str, name: str) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((address, 22), timeout=2) as connection:
                if connection.recv(4) == b"SSH-":
                    return
        except OSError:
            pass
        time.sleep(0.2)
    raise LabError(
        "LAB_HOST_SSH",
        f"{name} is up, but {address}:22 does not answer from here",
        "the Docker Engine must run on this machine itself, with no firewall before its bridge",
    )


def write_inventory(client: Any, lab: str, key: Path | None = None) -> Path:
    """Write `.rig/lab/<lab>/inventory.yml` and the known_hosts beside it from what runs; return the inventory."""
    key = key or ensure_key()[0]
    folder = paths.state(lab)
    known, rigs = [], {}
    for host in find(client, lab):
        if not host.address:
            continue
        # Read through the Engine, not over the network: so the first connection is checked as well.
        words = _read(client.containers.get(host.container), "/etc/ssh/ssh_host_ed25519_key.pub").split()
        known.append(f"{host.address} {words[0]} {words[1]}")
        rigs[host.name] = {"ansible_host": host.address}
    known_hosts = folder / "known_hosts"
    shared = {
        "ansible_user": "rig",
        "ansible_become": True,
        "ansible_ssh_private_key_file": str(key),
        "ansible_ssh_common_args": f"-o UserKnownHostsFile={known_hosts} -o IdentitiesOnly=yes",
    }
    _write(known_hosts, "".join(f"{line}\n" for line in known))
    inventory = folder / "inventory.yml"
    text = yaml.safe_dump({"rigs": {"vars": shared, "hosts": rigs}}, sort_keys=False)
    _write(inventory, f"# Written by ./rig lab up; hosts of the lab {lab!r}.\n{text}")
    return inventory


def _write(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)


def remove(client: Any, container: str, timeout: float = 60) -> None:
    """Remove a container with its anonymous volumes, and return when it is gone; another remover may have been first."""
    deadline = time.monotonic() + timeout
    with contextlib.suppress(NotFound):
        while True:
            try:
                client.containers.get(container).remove(force=True, v=True)
            except APIError as error:
                if error.status_code != 409 or time.monotonic() > deadline:
                    raise
                time.sleep(0.2)


def down(client: Any, lab: str, names: list[str] | None = None) -> list[str]:
    """Remove hosts of `lab` (all without `names`) with their volumes; return the names that are gone."""
    gone = [h for h in find(client, lab) if not names or h.name in names]
    parallel([partial(remove, client, host.container) for host in gone])
    # By label and not by container: a creation that was interrupted leaves volumes without one.
    alive = {h.name for h in find(client, lab)}
    for volume in client.volumes.list(filters={"label": f"{LABEL}={lab}"}):
        name = (volume.attrs.get("Labels") or {}).get("specrig.host")
        if name and name not in alive and (not names or name in names):
            volume.remove(force=True)
    if alive:
        write_inventory(client, lab)
    else:
        shutil.rmtree(paths.state(lab), ignore_errors=True)
    return [h.name for h in gone]


def ssh_command(host: Host, command: list[str] | None = None) -> list[str]:
    """The ssh command line that reaches a running lab host."""
    options = ["-i", str(ensure_key()[0]), "-o", f"UserKnownHostsFile={paths.state(host.lab) / 'known_hosts'}"]
    return ["ssh", *options, "-o", "IdentitiesOnly=yes", f"rig@{host.address}", *(command or [])]
