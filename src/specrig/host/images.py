"""Engine images on this host: is there room for one, what keeps it here, what is a file of it, what nothing uses any more.

An image that is run by digest has no tag, and `docker image prune` takes images without a tag. So each gets one of ours, its
keeper `specrig/<name>:<first digits of the digest>`; by it the image is also found after it was loaded from a file, where Docker
forgets digests.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, urlencode

from specrig.host import docker_api, proven
from specrig.host.errors import COULD_NOT_RUN, HostError
from specrig.host.manifest import digest as file_digest
from specrig.host.progress import Progress, amount
from specrig.host.status import PLAN

KEEPER = "specrig/"
# Unpacked layers take about 2.4 times their compressed size (vLLM 0.12: 12 -> 28.6 GB), and some compressed ones lie beside them.
FACTOR = 3.0
# containerd's store keeps the compressed layers too.
FACTOR_CONTAINERD = 3.5
CONTAINERD = Path("/var/lib/containerd")
CHUNK = 1 << 20
_DIGEST = re.compile(r"@sha256:([0-9a-f]{64})$")


def keeper(image: str) -> str:
    """Our own name for an image that is named by digest; empty for one that is not."""
    match = _DIGEST.search(image)
    if not match:
        return ""
    name = image.partition("@")[0].rpartition("/")[2].partition(":")[0].lower()
    return f"{KEEPER}{re.sub(r'[^a-z0-9]+', '-', name).strip('-') or 'image'}:{match[1][:16]}"


def found(image: str) -> tuple[str, dict[str, Any]] | None:
    """(the name under which Docker finds `image`, what it says of it): its own, or its keeper's. None: it is not here."""
    for name in (image, keeper(image)):
        if name and (said := docker_api.inspect_image(name)) is not None:
            return name, said
    return None


def keep(image: str) -> None:
    """Give `image` its keeper."""
    name, _, tag = keeper(image).partition(":")
    if name:
        status, body = docker_api.call(
            "POST", f"/images/{quote(image, safe='/:@')}/tag?{urlencode({'repo': name, 'tag': tag})}"
        )
        if status != 201:
            raise HostError("PULL_FAILED", f"Docker does not tag {image}: {body}", "systemctl status docker")


# -- room -----------------------------------------------------------------------------------------------------------


def missing_bytes(layers: Sequence[Mapping[str, Any]], here: Sequence[Sequence[str]]) -> int:
    """Compressed bytes of the layers that no image here begins with: layers are shared from the bottom up."""
    ids = [layer["diff_id"] for layer in layers]
    shared = 0
    for other in here:
        same = 0
        for ours, theirs in zip(ids, other):
            if ours != theirs:
                break
            same += 1
        shared = max(shared, same)
    return sum(int(layer["size"]) for layer in layers[shared:])


def room(image: str, layers: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a pull that would fill Docker's disk. Raises HostError PULL_DISK with both numbers."""
    status, info = docker_api.get("/info")
    if status != 200 or not layers:
        return
    contained = any("containerd" in str(row) for row in info.get("DriverStatus") or [])
    root = CONTAINERD if contained else Path(str(info.get("DockerRootDir") or "/var/lib/docker"))
    _, rows = docker_api.get("/images/json")
    here = [(docker_api.inspect_image(row["Id"]) or {}).get("RootFS", {}).get("Layers") or [] for row in rows or []]
    compressed = missing_bytes(layers, here)
    factor = FACTOR_CONTAINERD if contained else FACTOR
    with contextlib.suppress(FileNotFoundError):
        free = shutil.disk_usage(root).free
        if compressed * factor > free:
            raise HostError(
                "PULL_DISK",
                f"{image} needs about {amount(compressed * factor)} in {root} ({amount(compressed)} of layers, "
                f"{factor:g} times that while they are unpacked); {amount(free)} are free",
                "./rig images list; ./rig images prune --apply",
            )


# -- files ----------------------------------------------------------------------------------------------------------


def archive_file(directory: Path, image: str) -> Path | None:
    """The file of `image` in `directory`, whether it is there or not; None for an image without a digest."""
    match = _DIGEST.search(image)
    if not match:
        return None
    name = image.partition("@")[0]
    name = name[: name.rfind(":")] if ":" in name.rpartition("/")[2] else name
    flat = re.sub(r"[^A-Za-z0-9._-]+", "--", name)
    known = [directory / f"{flat}@sha256-{match[1]}.tar{end}" for end in (".zst", "")]
    there = [path for path in known if path.exists()]
    return there[0] if there else known[0 if shutil.which("zstd") else 1]


def about(file: Path) -> dict[str, Any] | None:
    """What was written down of an archive; None when it is not whole."""
    try:
        told = json.loads(file.with_name(file.name + ".json").read_text())
        return told if isinstance(told, dict) and file.stat().st_size == told["size"] else None
    except (OSError, ValueError, KeyError):
        return None


@contextlib.contextmanager
def _reading(*commands: list[str]) -> Iterator[IO[bytes]]:
    """Output of a pipeline; any part that fails is an error."""
    running: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            source = running[-1].stdout if running else subprocess.DEVNULL
            running.append(subprocess.Popen(command, stdin=source, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL))
            if len(running) > 1 and running[-2].stdout:
                running[-2].stdout.close()
        if out := running[-1].stdout:
            yield out
        if failed := [c[0] for c, p in zip(commands, running) if p.wait() != 0]:
            raise HostError(
                "ARCHIVE_FAILED", f"{', '.join(failed)} failed while the image was written", "df -h; docker images"
            )
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()


def save(image: str, directory: Path, progress: Progress) -> Path | None:
    """Write `image` to a file of `directory` unless it is there; None for an image without a digest.

    Raises HostError ARCHIVE_DISK, ARCHIVE_FAILED.
    """
    file, here = archive_file(directory, image), found(image)
    if file is None or here is None or about(file) is not None:
        return file
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    need, free = int(here[1].get("Size") or 0), shutil.disk_usage(directory).free
    if need > free:
        raise HostError(
            "ARCHIVE_DISK",
            f"a file of {image} may take {amount(need)}; {directory} has {amount(free)} free",
            "./rig images prune --archives --apply, or another rig_images_archive",
        )
    partial = file.with_name(f".{file.name}.partial")
    commands = [["docker", "save", keeper(image)]] + (
        [["zstd", "-q", "-3", "-T0", "-c"]] if file.suffix == ".zst" else []
    )
    total, sha = 0, hashlib.sha256()
    try:
        with _reading(*commands) as data, partial.open("wb") as out:
            while chunk := data.read(CHUNK):
                out.write(chunk)
                sha.update(chunk)
                total += len(chunk)
                progress.update("archive", total, None, file.name[:60])
            out.flush()
            os.fsync(out.fileno())
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise HostError("ARCHIVE_FAILED", f"{file}: {error}", f"df -h {directory}") from error
    except HostError:
        partial.unlink(missing_ok=True)
        raise
    partial.replace(file)
    told = {"image": image, "id": here[1].get("Id"), "size": total, "sha256": sha.hexdigest(), "at": round(time.time())}
    proven.write(file.with_name(file.name + ".json"), json.dumps(told, sort_keys=True).encode())
    return file


def load(image: str, directory: Path, progress: Progress) -> bool:
    """Bring `image` back from its file; False when there is none. Raises HostError ARCHIVE_DAMAGED, ARCHIVE_FAILED."""
    file = archive_file(directory, image)
    told = about(file) if file else None
    if file is None or told is None:
        return False
    done = 0

    def tick(count: int) -> None:
        nonlocal done
        done += count
        progress.update("verifying the archive", done, told["size"])

    if file_digest(file, "sha256", tick) != told["sha256"]:
        raise HostError("ARCHIVE_DAMAGED", f"{file} is not what was written", f"remove it: rm {file}")
    progress.update("loading the archive", message=file.name[:60])
    unpack = [["zstd", "-q", "-d", "-c", str(file)]] if file.suffix == ".zst" else [["cat", str(file)]]
    with _reading(*unpack, ["docker", "load", "--quiet"]) as answer:
        answer.read()
    here = docker_api.inspect_image(keeper(image))
    if here is None or here.get("Id") != told["id"]:
        raise HostError("ARCHIVE_DAMAGED", f"{file} holds another image than {told['id']}", f"remove it: rm {file}")
    return True


# -- what is used ---------------------------------------------------------------------------------------------------


def _plan(plan_file: Path) -> dict[str, Any]:
    try:
        plan = dict(json.loads(plan_file.read_text()))
        return {**plan, "services": [dict(service) for service in plan["services"]]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HostError(
            "GC_NO_PLAN", f"{plan_file} cannot be read, so nobody knows what is used", "./rig up first", COULD_NOT_RUN
        ) from error


def planned_archive(plan_file: Path = PLAN) -> Path | None:
    """Where the applied plan keeps files of images."""
    try:
        directory = str((_plan(plan_file).get("host") or {}).get("images_archive") or "")
    except HostError:
        return None
    return Path(directory) if directory else None


def _repository(name: str) -> str:
    bare = name.partition("@")[0]
    return bare[: bare.rfind(":")] if ":" in bare.rpartition("/")[2] else bare


def _uses(plan: Mapping[str, Any]) -> dict[str, list[str]]:
    """Image -> who needs it: the applied plan, and what each service was proven with."""
    uses: dict[str, list[str]] = {}
    for service in plan["services"]:
        uses.setdefault(str(service["image"]), []).append(f"planned for {service['name']}")
    webui = (plan.get("host") or {}).get("webui") or {}
    if webui.get("state") == "present":
        uses.setdefault(str(webui["image"]), []).append("planned for webui")
    for home in proven.homes():
        for link in ("proven", "previous"):
            if record := home.get(link):
                uses.setdefault(str(record["image"]), []).append(f"{link} of {home.path.name}")
    return uses


def images(prune: bool = False, apply: bool = False, archives: bool = False, plan_file: Path = PLAN) -> dict[str, Any]:
    """Our images and their files, with who uses them. `prune` names those that nothing uses; `apply` removes them.

    Ours are images of a repository that the plan or a record names, and those with a keeper; no other is looked at. An image
    that any container has is used. `archives` lets `prune` take the files of unused images too. Raises HostError GC_NO_PLAN.
    """
    plan = _plan(plan_file)
    uses = _uses(plan)
    by_id: dict[str, list[str]] = {}
    for image, who in uses.items():
        if here := found(image):
            by_id.setdefault(str(here[1].get("Id")), []).extend(who)
    _, containers = docker_api.get("/containers/json?all=1")
    for container in containers or []:
        name = (container.get("Names") or ["?"])[0].lstrip("/")
        by_id.setdefault(str(container.get("ImageID")), []).append(f"container {name}")
    ours = {_repository(image) for image in uses}
    rows = []
    for row in docker_api.get("/images/json")[1] or []:
        names = [n for n in [*(row.get("RepoTags") or []), *(row.get("RepoDigests") or [])] if "<none>" not in n]
        if any(n.startswith(KEEPER) or _repository(n) in ours for n in names):
            rows.append(
                {"id": row["Id"], "names": sorted(names), "bytes": row["Size"], "used": by_id.get(row["Id"], [])}
            )
    directory = str((plan.get("host") or {}).get("images_archive") or "")
    files = _archives(Path(directory), uses) if directory else []
    answer = {"changed": False, "images": rows, "archives": files, "free_bytes": shutil.disk_usage(_root()).free}
    if not prune:
        return answer
    unused = [row for row in rows if not row["used"]]
    old = [row for row in files if not row["used"]] if archives else []
    for row in unused if apply else []:
        for name in row["names"]:
            docker_api.call("DELETE", f"/images/{quote(name, safe='/:@')}")
    for row in old if apply else []:
        for path in (Path(row["path"]), Path(row["path"] + ".json")):
            path.unlink(missing_ok=True)
    key = "removed" if apply else "would_remove"
    gone = [{"path": (row["names"] or [row["id"]])[0], "bytes": row["bytes"]} for row in unused]
    gone += [{"path": row["path"], "bytes": row["bytes"]} for row in old]
    return {"changed": bool(gone), key: gone, "bytes": sum(int(row["bytes"]) for row in gone)}


def _root() -> Path:
    _, info = docker_api.get("/info")
    root = Path(str((info or {}).get("DockerRootDir") or "/var/lib/docker"))
    return root if root.exists() else Path("/")


def _archives(directory: Path, uses: Mapping[str, list[str]]) -> list[dict[str, Any]]:
    rows = []
    for note in sorted(directory.glob("*.tar*.json")):
        file = note.with_name(note.name[: -len(".json")])
        told = about(file)
        image = str((told or {}).get("image"))
        size = file.stat().st_size if file.exists() else 0
        rows.append(
            {"path": str(file), "image": image, "bytes": size, "whole": told is not None, "used": uses.get(image, [])}
        )
    return rows
