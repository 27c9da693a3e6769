#!/usr/bin/python
"""Host side of managed_files: compares, validates, backs up and replaces a set of files rendered on the controller."""

from __future__ import annotations

import base64
import contextlib
import grp
import hashlib
import json
import os
import pwd
import shutil
import stat
import subprocess
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DOCUMENTATION = r"""
module: managed_files
short_description: A whole set of files in one round trip
description: See the action plugin of the same name, which renders the files and calls this module.
options:
  payload:
    description: JSON of files, absent and directories.
    type: str
    required: true
"""

# What we wrote last, by destination: {dest: sha256}. It tells our own file, which needs no backup, from a person's.
RECORD = Path("/var/lib/specrig/managed.json")


class Refused(Exception):
    """The set cannot be put in place. When a validation says so, no file has been replaced."""


@dataclass(frozen=True)
class Attributes:
    """Permission bits and numeric owner."""

    mode: int
    uid: int
    gid: int

    @classmethod
    def of(cls, info: os.stat_result) -> Attributes:
        """Those of something that is there."""
        return cls(stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid)

    def __str__(self) -> str:
        return f"mode {self.mode:04o} owner {self.uid}:{self.gid}"

    def set(self, path: Path) -> None:
        """Give `path` these; the owner first, because a change of owner clears set-id bits."""
        os.chown(path, self.uid, self.gid)
        path.chmod(self.mode)


@dataclass
class File:
    """One wanted file."""

    dest: Path
    data: bytes
    attributes: Attributes
    validate: list[str]
    backup: bool = False
    secret: bool = False
    if_missing: bool = False
    merge: bool = False
    unless_set: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Directory:
    """One wanted directory."""

    path: Path
    attributes: Attributes


# Of a user or group that is not there yet: in check mode, what would make it has not run.
NOBODY_YET = -1


def owner_id(name: Any, group: bool = False, check: bool = False) -> int:
    """Number of a user or group, given by name or number."""
    text = str(name)
    if text.isdigit():
        return int(text)
    try:
        return grp.getgrnam(text).gr_gid if group else pwd.getpwnam(text).pw_uid
    except KeyError:
        if check:
            return NOBODY_YET
        raise Refused(f"no {'group' if group else 'user'} {text} on this host") from None


def mode_of(value: Any) -> int:
    """An octal mode: "0644" or, from YAML, the number 0o644. Nothing else is guessed."""
    try:
        mode = int(value, 8) if isinstance(value, str) else int(value)
    except (TypeError, ValueError):
        mode = -1
    if not 0 <= mode <= 0o7777:
        raise Refused(f"mode {value!r} is not an octal mode such as '0644'")
    return mode


def attributes_of(item: dict[str, Any], mode: int, check: bool = False) -> Attributes:
    """mode, owner and group of a payload's item; by default `mode` and whoever we run as."""
    return Attributes(
        mode if item.get("mode") is None else mode_of(item["mode"]),
        os.geteuid() if item.get("owner") is None else owner_id(item["owner"], check=check),
        os.getegid() if item.get("group") is None else owner_id(item["group"], group=True, check=check),
    )


def safe_path(path: Any) -> Path:
    """An absolute, normal path at least two levels deep; anything else is a mistake that could cost a system."""
    text = str(path)
    if not text.startswith("/") or os.path.normpath(text) != text or text.count("/") < 2:
        raise Refused(f"{text!r} is not a normal absolute path below a top-level directory")
    return Path(text)


def parse(payload: dict[str, Any], check: bool = False) -> tuple[list[File], list[Path], list[Directory]]:
    """Check the payload; return (files, absent, directories)."""
    files = [
        File(
            dest=safe_path(item.get("dest")),
            data=base64.b64decode(item["base64"]) if "base64" in item else str(item["content"]).encode(),
            attributes=attributes_of(item, 0o600 if item.get("secret") else 0o644, check),
            validate=[str(a) for a in item.get("validate") or []],
            unless_set=dict(item.get("unless_set") or {}),
            **{key: bool(item.get(key)) for key in ("backup", "secret", "if_missing", "merge")},
        )
        for item in payload.get("files") or []
    ]
    directories = [
        Directory(safe_path(item.get("path")), attributes_of(item, 0o755, check))
        for item in payload.get("directories") or []
    ]
    absent = [safe_path(p) for p in payload.get("absent") or []]
    count = Counter([f.dest for f in files] + [d.path for d in directories] + absent)
    if twice := [path for path, n in count.items() if n > 1]:
        raise Refused(f"{twice[0]} is named twice")
    return files, absent, directories


def lstat(path: Path) -> os.stat_result | None:
    """`path.lstat()`, or None when there is nothing."""
    try:
        return path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None


def current(path: Path) -> bytes | None:
    """Bytes of the file at `path` (through a link), or None."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


def as_text(data: bytes | None) -> str:
    """What a diff shows of a file."""
    if data is None:
        return ""
    if b"\0" in data:
        return f"(binary, {len(data)} bytes, sha256 {hashlib.sha256(data).hexdigest()[:16]})\n"
    return data.decode(errors="replace")


def sync(path: Path) -> None:
    """Make renames in the directory `path` durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_scratch(file: File) -> Path:
    """Write the content beside `dest`, under its own name in a private directory; return the path.

    Beside, because a rename must stay on one filesystem; under its name, because validators look at it.
    """
    file.dest.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".specrig-", dir=file.dest.parent), file.dest.name)
    handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as out:
        out.write(file.data)
        os.fchown(out.fileno(), file.attributes.uid, file.attributes.gid)
        os.fchmod(out.fileno(), file.attributes.mode)
        out.flush()
        os.fsync(out.fileno())
    return scratch


def validate(file: File, scratch: Path) -> None:
    """Run the file's validator on the new content; raise Refused with its words when it says no."""
    if not file.validate:
        return
    command = [a.replace("%s", str(scratch)) for a in file.validate]
    try:
        done = subprocess.run(command, capture_output=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Refused(f"{file.dest}: validator {command[0]} could not run: {error}; the old file stays") from None
    if done.returncode != 0:
        words = (done.stderr + done.stdout).decode(errors="replace").strip()[-2000:]
        words = "(output withheld)" if file.secret else words
        raise Refused(f"{file.dest}: {command[0]} refuses the new content; the old file stays: {words}")


def read_record(path: Path) -> dict[str, str]:
    """{dest: sha256} of what we wrote; empty when there is no record."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def write_record(path: Path, record: dict[str, str]) -> None:
    """Replace the record."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    scratch.touch(mode=0o600)
    scratch.write_text(json.dumps(record, sort_keys=True, indent=1) + "\n")
    scratch.replace(path)


def overlay(there: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """`there` with the keys of `wanted` set; objects in both are merged likewise, anything else is replaced."""
    both = {
        k: overlay(there[k], v) for k, v in wanted.items() if isinstance(v, dict) and isinstance(there.get(k), dict)
    }
    return {**there, **wanted, **both}


def with_defaults(there: dict[str, Any], wanted: dict[str, Any], unless_set: dict[str, Any]) -> dict[str, Any]:
    """`wanted`, and `unless_set` too where neither has a key of it: such keys belong together and are set all or none."""
    return wanted if set(unless_set) & (set(there) | set(wanted)) else {**unless_set, **wanted}


def members(text: str, begin: int) -> tuple[dict[str, tuple[int, int, int]], int]:
    """Members of the JSON object at `text[begin]`: ({key: (start of key, start and end of value)}, place of its closing brace)."""
    decoder, found = json.JSONDecoder(), dict[str, tuple[int, int, int]]()

    def blank(at: int) -> int:
        while text[at] in " \t\r\n":
            at += 1
        return at

    at = blank(begin + 1)
    while text[at] != "}":
        key, end = decoder.raw_decode(text, at)
        value = blank(blank(end) + 1)
        _, end = decoder.raw_decode(text, value)
        found[key] = (at, value, end)
        at = blank(end)
        at = blank(at + 1) if text[at] == "," else at
    return found, at


def splice(text: str, begin: int, wanted: dict[str, Any], outermost: bool = True) -> str:
    """`text` with the keys of `wanted` set in the JSON object at `begin`; every other byte stays.

    Writing the whole file anew would change how a person wrote numbers, escapes and lines.
    """
    there, brace = members(text, begin)
    edits: list[tuple[int, int, str]] = []
    first = min((at for at, _, _ in there.values()), default=brace)
    newline = text.rfind("\n", begin, first)
    lead = text[newline + 1 : first]
    # The members' own indentation where each has its line; None on one line. An empty document gets lines.
    indent = lead if there and newline >= 0 and not lead.strip() else None
    if not there and outermost:
        indent = "  "
    more = []
    for key, value in wanted.items():
        if key not in there:
            words = json.dumps(value, indent=2 if indent is not None else None)
            more.append(f"{json.dumps(key)}: " + words.replace("\n", f"\n{indent}"))
            continue
        _, start, end = there[key]
        old = json.loads(text[start:end])
        if isinstance(old, dict) and isinstance(value, dict):
            inner = splice(text[start:end], 0, value, outermost=False)
            edits += [(start, end, inner)] if inner != text[start:end] else []
        elif old != value or type(old) is not type(value):
            edits.append((start, end, json.dumps(value)))
    if more:
        between = ", " if indent is None else f",\n{indent}"
        last = max((end for _, _, end in there.values()), default=begin + 1)
        if there:
            edits.append((last, last, between + between.join(more)))
        elif indent is None:
            edits.append((begin + 1, brace, ", ".join(more)))
        else:
            edits.append((begin + 1, brace, f"\n{indent}" + between.join(more) + "\n"))
    for start, end, words in sorted(edits, reverse=True):
        text = text[:start] + words + text[end:]
    return text


def merged(file: File) -> bytes:
    """The content to write for a JSON file that others write to as well: what is there, with our keys set.

    Keys that are not ours stay byte for byte, and so does a file that already has ours. One that is not a JSON object is refused.
    """
    old, ours = current(file.dest), json.loads(file.data)
    if old is None or not old.strip():
        ours = with_defaults({}, ours, file.unless_set)
        return (json.dumps(ours, indent=2) + "\n").encode()
    try:
        there = json.loads(old)
    except ValueError as error:
        raise Refused(f"{file.dest} is not valid JSON ({error}): correct it by hand; it was left as it is") from None
    if not isinstance(there, dict):
        raise Refused(f"{file.dest} is not a JSON object: correct it by hand; it was left as it is")
    ours = with_defaults(there, ours, file.unless_set)
    wanted = overlay(there, ours)
    if wanted == there:
        return old
    with contextlib.suppress(ValueError, IndexError):
        text = old.decode()
        text = splice(text, text.index("{"), ours)
        if json.loads(text) == wanted:
            return text.encode()
    return (json.dumps(wanted, indent=2) + "\n").encode()


def is_changed(file: File) -> bool:
    """True when content, mode or owner at `dest` is not what is wanted."""
    info = lstat(file.dest)
    if info is None:
        return True
    if stat.S_ISDIR(info.st_mode):
        raise Refused(f"{file.dest} is a directory")
    if not stat.S_ISREG(info.st_mode):  # a link: the file takes its place
        return not file.if_missing
    same = file.if_missing or current(file.dest) == file.data
    return not same or Attributes.of(info) != file.attributes


def change(path: Path, before: str, after: str) -> dict[str, str]:
    """One entry of Ansible's diff."""
    return {"before_header": str(path), "after_header": str(path), "before": before, "after": after}


def diff_of(file: File) -> dict[str, str]:
    """Before and after of a file; of its attributes when only they differ."""
    info, old = lstat(file.dest), current(file.dest)
    if info is not None and (file.if_missing or old == file.data):
        return change(file.dest, f"{Attributes.of(info)}\n", f"{file.attributes}\n")
    return change(file.dest, as_text(old), as_text(file.data))


def replace(files: list[File], record: dict[str, str]) -> dict[str, str]:
    """Validate all, then back up and replace each. Returns {dest: backup}; updates `record`."""
    backups: dict[str, str] = {}
    scratches: list[tuple[File, Path]] = []
    try:
        for file in files:
            if file.if_missing and lstat(file.dest) is not None:  # the content stays, whatever it is
                file.attributes.set(file.dest)
                continue
            scratch = write_scratch(file)
            scratches.append((file, scratch))
            validate(file, scratch)
        for file, scratch in scratches:
            old, name = current(file.dest), str(file.dest)
            # A merged file holds others' keys too, and is what a failed restart goes back to: it is always kept.
            ours = not file.merge and old is not None and record.get(name) == hashlib.sha256(old).hexdigest()
            if file.backup and old not in (None, file.data) and not ours:
                backups[name] = f"{name}.{time.strftime('%Y%m%dT%H%M%S')}.specrig~"
                shutil.copy2(name, backups[name])
            scratch.replace(file.dest)
            sync(file.dest.parent)
            record[name] = hashlib.sha256(file.data).hexdigest()
            if file.secret:
                del record[name]
    finally:
        for _, scratch in scratches:
            shutil.rmtree(scratch.parent, ignore_errors=True)
    return backups


def make(directory: Directory, check: bool) -> dict[str, str] | None:
    """Create or correct a directory; return the diff, or None when it is as wanted."""
    path, info = directory.path, lstat(directory.path)
    if info is not None and not path.is_dir():
        raise Refused(f"{path} is not a directory")
    have = None if info is None else Attributes.of(path.stat())
    if have == directory.attributes:
        return None
    if not check:
        path.mkdir(mode=0o755, parents=True, exist_ok=True)
        directory.attributes.set(path)
    return change(path, f"{have or 'absent'}\n", f"{directory.attributes}\n")


def is_directory(path: Path) -> bool:
    """True for a directory, not for a link to one."""
    return path.is_dir() and not path.is_symlink()


def apply(payload: dict[str, Any], check: bool, diff: bool, record_path: Path = RECORD) -> dict[str, Any]:
    """Bring the host to `payload`. Returns {changed, changed_files, backups, diff}; raises Refused."""
    files, absent, directories = parse(payload, check)
    gone = [p for p in absent if lstat(p) is not None]
    for path in gone:
        if is_directory(path) and set(path.iterdir()) - set(absent):
            raise Refused(f"{path} is a directory that is not empty: name what is in it, or remove it by hand")
    for file in files:
        if file.merge:
            file.data = merged(file)
    diffs = [done for d in directories if (done := make(d, check))]
    todo = [f for f in files if is_changed(f)]
    changed = [d["after_header"] for d in diffs] + [str(f.dest) for f in todo] + [str(p) for p in gone]
    diffs += [diff_of(f) for f in todo if not f.secret] if diff else []
    diffs += [change(p, "present\n", "absent\n") for p in gone]
    backups: dict[str, str] = {}
    if not check and (todo or gone):
        record = read_record(record_path)
        old = dict(record)
        try:
            backups = replace(todo, record)
            for path in sorted(gone, key=lambda p: len(p.parts), reverse=True):  # contents before their directory
                path.rmdir() if is_directory(path) else path.unlink()
                record.pop(str(path), None)
        finally:
            if record != old:
                with contextlib.suppress(OSError):  # costs a needless backup next time, no more
                    write_record(record_path, record)
    return {"changed": bool(changed), "changed_files": changed, "backups": backups, "diff": diffs if diff else []}


def main() -> None:
    """Entry point that Ansible calls."""
    from ansible.module_utils.basic import AnsibleModule

    os.umask(0o022)  # parents that have to be made are nobody's secret
    module = AnsibleModule(
        argument_spec={"payload": {"type": "str", "required": True, "no_log": True}}, supports_check_mode=True
    )
    try:
        result = apply(json.loads(module.params["payload"]), module.check_mode, module._diff)
    except Refused as error:
        module.fail_json(msg=str(error), changed=False)
    except OSError as error:
        module.fail_json(msg=f"{error.filename}: {error.strerror}", changed=False)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
