"""One package source with its key, and no older one beside it.

apt stops altogether when two sources of the same address name different keys ("Conflicting values set for option Signed-By").
So every older entry of the address is taken out first: a file that has no other entry is moved aside as `*.specrig~`, which apt
passes over; in a file with others the line is commented out, after a copy; a key that no source names any more is moved
aside. When apt cannot work with the result, everything is put back as it was.

Job: {name, uri, suite, components: [...], key: {url, sha256}, legacy: [files of older names]}.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from specrig.host.errors import COULD_NOT_RUN, HostError
from specrig.host.machine import Answer, Machine, tool
from specrig.host.progress import Progress

MANAGED = "# Managed by specrig. Changes made here are replaced by its next run.\n"
ASIDE = ".specrig~"
LISTS, KEYRINGS = "/etc/apt/sources.list.d", "/etc/apt/keyrings"
MAX_KEY = 1 << 20
# apt waits for dpkg's lock, but not for that of its lists: unattended upgrades hold it for minutes.
LOCK_TRIES, LOCK_WAIT_S = 60, 5.0
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_LINE = re.compile(r"\s*deb(?:-src)?\s+(?:\[(?P<options>.*?)\]\s+)?(?P<uri>\S+)\s")


class Entry(NamedTuple):
    """One entry of a source file: addresses, key file ("" for none or an embedded key), first line and line after the last."""

    uris: tuple[str, ...]
    key: str
    begin: int
    end: int


def same(uri: str) -> str:
    """What makes two addresses one for apt and for us: without the scheme, a closing slash or a difference of case in the host."""
    scheme, _, rest = uri.rpartition("://")
    host, slash, path = rest.partition("/")
    return f"{'file:' if scheme == 'file' else ''}{host.lower()}{slash}{path}".rstrip("/")


def one_line(text: str) -> list[Entry]:
    """Entries of a sources.list(5) file in its old form."""
    found = []
    for number, line in enumerate(text.splitlines()):
        if match := _LINE.match(line):
            options = dict(word.partition("=")[::2] for word in (match["options"] or "").split())
            found.append(Entry((match["uri"],), _key(options.get("signed-by", "")), number, number + 1))
    return found


def deb822(text: str) -> list[Entry]:
    """Entries of a `.sources` file; disabled ones too, because somebody may enable them again."""
    found, lines = [], text.splitlines()
    begin = 0
    for number in range(len(lines) + 1):
        if number < len(lines) and lines[number].strip():
            continue
        fields: dict[str, str] = {}
        last = ""
        for line in lines[begin:number]:
            if line.startswith("#"):
                continue
            if line[:1].isspace() and last:
                fields[last] += " " + line.strip()
            elif ":" in line:
                name, _, value = line.partition(":")
                last = name.strip().lower()
                fields[last] = value.strip()
        if uris := tuple(fields.get("uris", "").split()):
            found.append(Entry(uris, _key(fields.get("signed-by", "")), begin, number))
        begin = number + 1
    return found


def _key(value: str) -> str:
    """The key file of a Signed-By value; empty for a fingerprint or a key that is written out."""
    first = value.split()[0] if value.split() else ""
    return first if first.startswith("/") else ""


def files(m: Machine) -> dict[str, list[Entry]]:
    """{path: entries} of every source file that apt reads."""
    found = {}
    paths = [m.path("/etc/apt/sources.list"), *sorted(m.path(LISTS).glob("*"))]
    for path in paths:
        read = deb822 if path.suffix == ".sources" else one_line if path.suffix == ".list" else None
        with contextlib.suppress(OSError):
            if read:
                found["/" + str(path.relative_to(m.root))] = read(path.read_text(errors="replace"))
    return found


class Changes:
    """Changes of files that can all be taken back."""

    def __init__(self, m: Machine) -> None:
        self.m = m
        self.before: dict[Path, tuple[bytes, os.stat_result] | None] = {}

    def remember(self, path: Path) -> None:
        """Keep what is at `path` now."""
        if path not in self.before:
            self.before[path] = (path.read_bytes(), path.stat()) if path.is_file() else None

    def write(self, name: str, data: bytes) -> None:
        """Replace or make a world-readable file."""
        path = self.m.path(name)
        self.remember(path)
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.specrig")
        part.write_bytes(data)
        part.chmod(0o644)
        part.replace(path)

    def copy(self, name: str) -> None:
        """Keep a copy of a file as `*.specrig~`; one that is there already, with other content, stays."""
        path = self.m.path(name)
        data = path.read_bytes()
        number = 0
        while True:
            spare = path.with_name(f"{path.name}{f'.{number}' if number else ''}{ASIDE}")
            if not spare.exists():
                self.remember(spare)
                shutil.copy2(path, spare)
                return
            if spare.read_bytes() == data:
                return
            number += 1

    def aside(self, name: str) -> None:
        """Move a file to `*.specrig~`."""
        self.copy(name)
        self.remember(self.m.path(name))
        self.m.path(name).unlink()

    def undo(self) -> None:
        """Everything as it was."""
        for path, old in self.before.items():
            if old is None:
                path.unlink(missing_ok=True)
                continue
            data, info = old
            path.write_bytes(data)
            path.chmod(info.st_mode & 0o7777)
            with contextlib.suppress(PermissionError):
                os.chown(path, info.st_uid, info.st_gid)


def parse(text: str) -> dict[str, Any]:
    """The job. Raises HostError APT_SOURCE_JOB."""
    try:
        job = json.loads(text)
        lines = [job["uri"], job["suite"], *job.get("components", []), job["key"]["url"]]
        assert _NAME.fullmatch(job["name"])  # noqa: S101  any fault of the job ends in one refusal
        assert all(re.fullmatch(r"\S+", word) for word in lines)  # noqa: S101
        assert re.fullmatch(r"[0-9a-f]{64}", job["key"]["sha256"])  # noqa: S101
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        raise HostError(
            "APT_SOURCE_JOB",
            f"the package source is not complete (address, suite, key address, checksum): {error!r}",
            "set the role's repository variables as the vendor's installation page gives them",
            COULD_NOT_RUN,
        ) from None
    return dict(job)


def wanted(job: dict[str, Any]) -> str:
    """The text of our own file."""
    components = " ".join(job.get("components", []))
    return (
        f"{MANAGED}Types: deb\nURIs: {job['uri']}\nSuites: {job['suite']}\n"
        + (f"Components: {components}\n" if components else "")
        + f"Signed-By: {KEYRINGS}/{job['name']}.asc\n"
    )


def fetch(url: str, sha256: str) -> bytes:
    """The key. Raises HostError APT_SOURCE_KEY when it cannot be had, or has another checksum."""
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310  the address is the person's own
            data: bytes = answer.read(MAX_KEY)
    except (OSError, ValueError) as error:
        raise HostError("APT_SOURCE_KEY", f"no key from {url}: {error}", "correct the key's address") from None
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise HostError(
            "APT_SOURCE_KEY",
            f"the key at {url} has the checksum {found}, not {sha256}; it was not taken",
            "compare the fingerprint with the vendor's page before you believe either",
        )
    return data


def _without(text: str, entries: Iterable[Entry]) -> str:
    """`text` with the lines of `entries` commented out."""
    lines = text.splitlines(keepends=True)
    for entry in entries:
        for number in range(entry.begin, entry.end):
            if not lines[number].lstrip().startswith("#"):
                lines[number] = f"# moved to specrig's own file: {lines[number]}"
    return "".join(lines)


def older(m: Machine, job: dict[str, Any]) -> tuple[list[str], dict[str, list[Entry]], list[str]]:
    """(files to move aside, {file: entries to comment out}, keys that no source will name any more)."""
    ours = f"{LISTS}/{job['name']}.sources"
    key = f"{KEYRINGS}/{job['name']}.asc"
    address, whole, partly = same(job["uri"]), list[str](), dict[str, list[Entry]]()
    gone: set[str] = set()
    kept: set[str] = set()
    for name, entries in files(m).items():
        if name == ours:
            continue
        matching = [entry for entry in entries if address in map(same, entry.uris)]
        if name in job.get("legacy", []) or (matching and len(matching) == len(entries)):
            whole.append(name)
            matching = entries
        elif matching:
            partly[name] = matching
        gone |= {entry.key for entry in matching}
        kept |= {entry.key for entry in entries if entry not in matching}
    keys = [name for name in sorted(gone - kept - {"", key}) if m.path(name).is_file() and not _packaged(m, name)]
    return whole, partly, keys


def _packaged(m: Machine, name: str) -> bool:
    said = m.run("dpkg-query", "--search", name)
    return said is not None and said.rc == 0


def _apt(m: Machine, *words: str) -> Answer:
    return m.run("apt-get", *words) or Answer(127, "", "apt-get is not on this host")


def _complaint(answer: Answer) -> str:
    lines = [line for line in (answer.err + answer.out).splitlines() if line.startswith(("E:", "W:", "Err:"))]
    return " ".join(lines or (answer.err or answer.out).split("\n")[-3:])[:600]


def _readable(m: Machine, ours: str, job: dict[str, Any]) -> None:
    """Fetch the lists of this source alone, then let apt read all of them. Raises HostError APT_SOURCE."""
    only = ["-o", f"Dir::Etc::sourcelist={ours}", "-o", "Dir::Etc::sourceparts=-", "-o", "APT::Get::List-Cleanup=0"]
    for _ in range(LOCK_TRIES):
        update = _apt(m, "update", "-o", "APT::Update::Error-Mode=any", *only)
        if "Could not get lock" not in update.err:
            break
        time.sleep(LOCK_WAIT_S)
    # Before apt 2.5 a failed index was a warning, and the status 0.
    warned = re.search(r"^(Err:|W: (Failed to fetch|GPG error|An error occurred))", update.out + update.err, re.M)
    answer = update if update.rc or warned else _apt(m, "indextargets")
    if answer.rc or warned:
        raise HostError(
            "APT_SOURCE",
            f"apt cannot read {job['uri']}; all sources are as they were before: {_complaint(answer)}",
            "compare address, suite and key with the vendor's installation page",
        )


def apply(text: str, progress: Progress, check: bool = False, m: Machine | None = None) -> dict[str, Any]:
    """Bring the source to the job. Returns {changed, aside: [moved files], commented: [files], diff}."""
    m = m or Machine(run=_patient)
    job = parse(text)
    ours, key = f"{LISTS}/{job['name']}.sources", f"{KEYRINGS}/{job['name']}.asc"
    whole, partly, keys = older(m, job)
    there = m.path(key).read_bytes() if m.path(key).is_file() else b""
    key_there = hashlib.sha256(there).hexdigest() == job["key"]["sha256"]
    source = m.path(ours).read_text(errors="replace") if m.path(ours).is_file() else ""
    said = {
        "aside": [*whole, *keys],
        "commented": sorted(partly),
        "diff": [{"before_header": ours, "after_header": ours, "before": source, "after": wanted(job)}]
        if source != wanted(job)
        else [],
    }
    if source == wanted(job) and key_there and not (whole or partly or keys):
        return {"changed": False, **said}
    if check:
        return {"changed": True, **said}
    data = there
    if not key_there:
        progress.update("fetching the key")
        data = fetch(job["key"]["url"], job["key"]["sha256"])
    changes = Changes(m)
    try:
        for name in [*whole, *keys]:
            changes.aside(name)
        for name, entries in partly.items():
            changes.copy(name)
            before = m.path(name).read_bytes().decode(errors="surrogateescape")
            changes.write(name, _without(before, entries).encode(errors="surrogateescape"))
        for name, replaced in ((key, there and there != data), (ours, source and not source.startswith(MANAGED))):
            if replaced:
                changes.copy(name)
        changes.write(key, data)
        changes.write(ours, wanted(job).encode())
        progress.update("reading the source")
        _readable(m, ours, job)
    except (HostError, OSError):
        changes.undo()
        raise
    return {"changed": True, **said}


def _patient(*command: str) -> Answer | None:
    """A tool that may take as long as a download."""
    return tool(*command, timeout=600.0)
