#!/usr/bin/python
"""Host side of managed_files: compares, validates, backs up and replaces a set of files; the action plugin rendered them."""

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
from dataclasses import dataclass
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
RECORD = "/var/lib/specrig/managed.json"


class Refused(Exception):
    """The set cannot be put in place; nothing was replaced yet when a validation says so."""


@dataclass
class File:
    """One wanted file."""

    dest: str
    data: bytes
    mode: int
    uid: int
    gid: int
    validate: list[str]
    backup: bool
    secret: bool
    if_missing: bool
    binary: bool
    merge: bool = False


def owner_id(name: Any, group: bool = False) -> int:
    """Number of a user or group, given by name or number."""
    text = str(name)
    if text.isdigit():
        return int(text)
    try:
        return grp.getgrnam(text).gr_gid if group else pwd.getpwnam(text).pw_uid
    except KeyError:
        raise Refused(f"no {'group' if group else 'user'} {text} on this host") from None


def mode_of(value: Any, default: int) -> int:
    """An octal mode: "0644" or, from YAML, the number 420. Nothing else is guessed."""
    if value is None:
        return default
    mode = int(value, 8) if isinstance(value, str) else int(value)
    if not 0 <= mode <= 0o7777:
        raise Refused(f"mode {value!r} is not an octal mode such as '0644'")
    return mode


def safe_path(path: Any) -> str:
    """An absolute, normal path at least two levels deep; anything else is a mistake that could cost a system."""
    text = str(path)
    if not text.startswith("/") or os.path.normpath(text) != text or text.count("/") < 2:
        raise Refused(f"{text!r} is not a normal absolute path below a top-level directory")
    return text


def parse(
    payload: dict[str, Any], default_uid: int = 0, default_gid: int = 0
) -> tuple[list[File], list[str], list[dict[str, Any]]]:
    """Check the payload; return (files, absent, directories)."""
    files = []
    for item in payload.get("files") or []:
        binary = "base64" in item
        files.append(
            File(
                dest=safe_path(item.get("dest")),
                data=base64.b64decode(item["base64"]) if binary else str(item["content"]).encode(),
                mode=mode_of(item.get("mode"), 0o600 if item.get("secret") else 0o644),
                uid=owner_id(item["owner"]) if item.get("owner") is not None else default_uid,
                gid=owner_id(item["group"], group=True) if item.get("group") is not None else default_gid,
                validate=[str(a) for a in item.get("validate") or []],
                backup=bool(item.get("backup")),
                secret=bool(item.get("secret")),
                if_missing=bool(item.get("if_missing")),
                binary=binary,
                merge=bool(item.get("merge")),
            )
        )
    directories = []
    for item in payload.get("directories") or []:
        item = {"path": item} if isinstance(item, str) else item
        directories.append(
            {
                "path": safe_path(item.get("path")),
                "mode": mode_of(item.get("mode"), 0o755),
                "uid": owner_id(item["owner"]) if item.get("owner") is not None else default_uid,
                "gid": owner_id(item["group"], group=True) if item.get("group") is not None else default_gid,
            }
        )
    absent = [safe_path(p) for p in payload.get("absent") or []]
    wanted = [f.dest for f in files] + [d["path"] for d in directories]
    twice = sorted({p for p in wanted + absent if (wanted + absent).count(p) > 1})
    if twice:
        raise Refused(f"{twice[0]} is named twice")
    return files, absent, directories


def attributes(info: os.stat_result) -> tuple[int, int, int]:
    """(mode, uid, gid)."""
    return stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid


def lstat(path: str) -> os.stat_result | None:
    """`os.lstat`, or None when there is nothing."""
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def current(path: str) -> bytes | None:
    """Bytes of the plain file at `path` (through a link), or None."""
    try:
        with open(path, "rb") as handle:
            return handle.read()
    except (FileNotFoundError, NotADirectoryError):
        return None


def as_text(data: bytes | None, secret: bool, binary: bool) -> str:
    """What a diff shows of a file."""
    if data is None:
        return ""
    if secret:
        return "(secret)\n"
    if binary or b"\0" in data:
        return f"(binary, {len(data)} bytes, sha256 {hashlib.sha256(data).hexdigest()[:16]})\n"
    return data.decode(errors="replace")


def sync_directory(path: str) -> None:
    """Make renames in `path` durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_scratch(file: File) -> str:
    """Write the content beside `dest`, under its own name in a private directory: validators look at names, and the rename
    must stay on one filesystem. Returns the path."""
    parent = os.path.dirname(file.dest)
    os.makedirs(parent, mode=0o755, exist_ok=True)
    scratch = os.path.join(tempfile.mkdtemp(prefix=".specrig-", dir=parent), os.path.basename(file.dest))
    handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as out:
        out.write(file.data)
        os.fchown(out.fileno(), file.uid, file.gid)
        os.fchmod(out.fileno(), file.mode)
        out.flush()
        os.fsync(out.fileno())
    return scratch


def validate(file: File, scratch: str) -> None:
    """Run the file's validator on the new content; raise Refused with its words when it says no."""
    if not file.validate:
        return
    command = [a.replace("%s", scratch) for a in file.validate]
    try:
        done = subprocess.run(command, capture_output=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Refused(f"{file.dest}: validator {command[0]} could not run: {error}; the old file stays") from None
    if done.returncode != 0:
        words = (
            "(output withheld)" if file.secret else (done.stderr + done.stdout).decode(errors="replace").strip()[-2000:]
        )
        raise Refused(f"{file.dest}: {file.validate[0]} refuses the new content; the old file stays: {words}")


def read_record(path: str) -> dict[str, str]:
    """{dest: sha256} of what we wrote; empty when there is no record."""
    try:
        with open(path) as handle:
            value = json.load(handle)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def write_record(path: str, record: dict[str, str]) -> None:
    """Replace the record."""
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    scratch = f"{path}.{os.getpid()}"
    handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w") as out:
        json.dump(record, out, sort_keys=True, indent=1)
    os.replace(scratch, path)


def merged(file: File) -> bytes:
    """The content to write for a JSON file that others write to as well: what is there, with our keys set.

    A file that already has our keys stays as it is, byte for byte. One that is not a JSON object is refused, not replaced.
    """
    old = current(file.dest)
    if old is None or not old.strip():
        return file.data
    try:
        there = json.loads(old)
    except ValueError as error:
        raise Refused(f"{file.dest} is not valid JSON ({error}): correct it by hand; it was left as it is") from None
    if not isinstance(there, dict):
        raise Refused(f"{file.dest} is not a JSON object: correct it by hand; it was left as it is")
    wanted = {**there, **json.loads(file.data)}
    return old if wanted == there else (json.dumps(wanted, indent=2) + "\n").encode()


def is_changed(file: File) -> bool:
    """True when content, mode or owner at `dest` is not what is wanted."""
    info = lstat(file.dest)
    if info is None:
        return True
    if not stat.S_ISREG(info.st_mode):
        if stat.S_ISDIR(info.st_mode):
            raise Refused(f"{file.dest} is a directory")
        return not file.if_missing
    same = file.if_missing or current(file.dest) == file.data
    return not same or attributes(info) != (file.mode, file.uid, file.gid)


def diff_of(file: File) -> dict[str, str]:
    """Before and after, as Ansible shows them; attributes in the headers."""
    info, old = lstat(file.dest), current(file.dest)
    after = old if file.if_missing and old is not None else file.data
    before_attributes = "absent" if info is None else "mode {0:04o} owner {1}:{2}".format(*attributes(info))
    return {
        "before_header": f"{file.dest} ({before_attributes})",
        "after_header": f"{file.dest} (mode {file.mode:04o} owner {file.uid}:{file.gid})",
        "before": as_text(old, file.secret, file.binary)
        + ("" if info is None or old != after else before_attributes + "\n"),
        "after": as_text(after, file.secret, file.binary)
        + ("" if info is None or old != after else f"mode {file.mode:04o} owner {file.uid}:{file.gid}\n"),
    }


def replace(files: list[File], record: dict[str, str]) -> dict[str, str]:
    """Validate all, then back up and replace each. Returns {dest: backup}; updates `record`."""
    backups: dict[str, str] = {}
    scratches: list[tuple[File, str]] = []
    try:
        for file in files:
            info = lstat(file.dest)
            if file.if_missing and info is not None:  # the content stays, whatever it is
                os.chown(file.dest, file.uid, file.gid)
                os.chmod(file.dest, file.mode)
                continue
            scratch = write_scratch(file)
            scratches.append((file, scratch))
            validate(file, scratch)
        for file, scratch in scratches:
            old = current(file.dest)
            ours = old is not None and record.get(file.dest) == hashlib.sha256(old).hexdigest()
            if file.backup and old is not None and old != file.data and not ours:
                backups[file.dest] = f"{file.dest}.{time.strftime('%Y%m%dT%H%M%S')}.specrig~"
                shutil.copy2(file.dest, backups[file.dest])
            os.replace(scratch, file.dest)
            sync_directory(os.path.dirname(file.dest))
            if file.secret:
                record.pop(file.dest, None)
            else:
                record[file.dest] = hashlib.sha256(file.data).hexdigest()
    finally:
        for _, scratch in scratches:
            shutil.rmtree(os.path.dirname(scratch), ignore_errors=True)
    return backups


def apply(payload: dict[str, Any], check: bool, diff: bool, record_path: str = RECORD) -> dict[str, Any]:
    """Bring the host to `payload`. Returns {changed, changed_files, backups, diff}; raises Refused."""
    files, absent, directories = parse(payload, os.geteuid(), os.getegid())
    changed: list[str] = []
    diffs: list[dict[str, str]] = []
    for directory in directories:
        path = directory["path"]
        info = lstat(path)
        wanted = (directory["mode"], directory["uid"], directory["gid"])
        if info is not None and not os.path.isdir(path):
            raise Refused(f"{path} is not a directory")
        if info is not None and attributes(os.stat(path)) == wanted:
            continue
        changed.append(path)
        text = "mode {0:04o} owner {1}:{2}\n"
        before = "absent\n" if info is None else text.format(*attributes(os.stat(path)))
        diffs.append({"before_header": path, "after_header": path, "before": before, "after": text.format(*wanted)})
        if not check:
            os.makedirs(path, mode=0o755, exist_ok=True)
            os.chown(path, directory["uid"], directory["gid"])
            os.chmod(path, directory["mode"])
    for file in files:
        if file.merge:
            file.data = merged(file)
    todo = [f for f in files if is_changed(f)]
    changed += [f.dest for f in todo]
    if diff:
        diffs += [diff_of(f) for f in todo if not f.secret]
    gone = [p for p in absent if lstat(p) is not None]
    for path in gone:
        if (
            os.path.isdir(path)
            and not os.path.islink(path)
            and set(os.listdir(path)) - {os.path.basename(p) for p in absent}
        ):
            raise Refused(f"{path} is a directory that is not empty: name what is in it, or remove it by hand")
    changed += gone
    diffs += [{"before_header": p, "after_header": p, "before": "present\n", "after": "absent\n"} for p in gone]
    backups: dict[str, str] = {}
    if not check and (todo or gone):
        record = read_record(record_path)
        old = dict(record)
        backups = replace(todo, record)
        for path in sorted(gone, key=len, reverse=True):  # contents before their directory
            if os.path.isdir(path) and not os.path.islink(path):
                os.rmdir(path)
            else:
                os.unlink(path)
            record.pop(path, None)
        if record != old:
            with contextlib.suppress(OSError):
                write_record(record_path, record)
    return {"changed": bool(changed), "changed_files": changed, "backups": backups, "diff": diffs if diff else []}


def main() -> None:
    """Entry point that Ansible calls."""
    from ansible.module_utils.basic import AnsibleModule

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
