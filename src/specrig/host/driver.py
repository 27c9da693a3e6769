"""Installs the distribution's NVIDIA driver as one apt transaction, and is not done before its module exists for the newest kernel.

Job: {state: present|absent, branch, version: exact or "", module: proprietary|open, packages: {proprietary, open, common}}.
The packages are named by the role, for its distribution. When the module does not build, the error names kernel, file and
line, what this transaction brought is taken out again and what it replaced is put back. Nothing here reboots or loads a module.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specrig.host import machine
from specrig.host.errors import COULD_NOT_RUN, HostError
from specrig.host.machine import Machine
from specrig.host.progress import Progress, write_json

RECORD = "/var/lib/specrig/driver.json"
SOURCE = "/etc/apt/sources.list.d/specrig-nvidia.sources"
PINS = "/etc/apt/preferences.d/specrig-nvidia"
MANAGED = "# Managed by specrig. Changes made here are replaced by its next run.\n"
COMPONENTS = "contrib non-free non-free-firmware"
APT = (
    "apt-get",
    "--yes",
    "--no-install-recommends",
    "-o",
    "DPkg::Lock::Timeout=300",
    "-o",
    "Dpkg::Options::=--force-confold",
)
APT_TIMEOUT_S = 3600.0
# dkms says which kernel and which log; the compiler says which line.
_KERNEL = re.compile(r"(?:on|for) kernel:? (\S+)")
_LOG = re.compile(r"Consult (\S+/make\.log)")
_COMPILER = re.compile(r"^(\S+?:\d+)(?::\d+)?: (?:fatal )?error: (.*)$", re.MULTILINE)


def parse(text: str) -> dict[str, Any]:
    """The job. Raises HostError DRIVER_JOB."""
    try:
        job = json.loads(text)
        assert job["state"] in ("present", "absent")  # noqa: S101  any fault of the job ends in one refusal
        assert {"proprietary", "open", "common"} <= set(job["packages"])  # noqa: S101
        job["branch"] = int(job.get("branch") or 0)
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        raise HostError(
            "DRIVER_JOB", f"the job cannot be read: {error!r}", "run it through the role nvidia_driver", COULD_NOT_RUN
        ) from None
    return dict(job)


def packages_of(m: Machine) -> dict[str, tuple[str, str]]:
    """Every package that dpkg has unpacked or installed: {name: (status letters, version)}."""
    said = m.run("dpkg-query", "--show", "--showformat=${db:Status-Abbrev}|${Package}|${Version}\n")
    rows = [line.split("|") for line in (said.out if said else "").splitlines()]
    return {row[1]: (row[0], row[2]) for row in rows if len(row) == 3 and row[0][1:2] not in ("n", "c")}


def candidates(m: Machine, package: str) -> list[str]:
    """Versions of `package` that apt could install, newest first."""
    said = m.run("apt-cache", "madison", package)
    rows = [line.split("|") for line in (said.out if said else "").splitlines()]
    return list(dict.fromkeys(row[1].strip() for row in rows if len(row) == 3 and "Packages" in row[2]))


def choose(versions: Sequence[str], branch: int, exact: str) -> str | None:
    """The version to install: of the branch (0: any), or the exact upstream or package version."""
    fitting = [v for v in versions if not branch or v.partition(".")[0] == str(branch)]
    fitting = [v for v in fitting if not exact or v == exact or v.partition("-")[0] == exact]
    return fitting[0] if fitting else None


def sources(m: Machine) -> str:
    """A deb822 file that adds non-free to each of the machine's own Debian sources; same addresses, same keys. Empty when none is found."""
    found: list[tuple[str, str, str]] = []
    files = [m.path("etc/apt/sources.list"), *sorted(m.path("etc/apt/sources.list.d").glob("*"))]
    for file in files:
        if file.name == Path(SOURCE).name:
            continue
        with contextlib.suppress(OSError):
            text = file.read_text(errors="replace")
            found += _deb822(text) if file.suffix == ".sources" else _one_line(text) if file.suffix == ".list" else []
    blocks = []
    for uri, suite, key in dict.fromkeys(found):
        signed = f"Signed-By: {key}\n" if key else ""
        blocks.append(f"Types: deb\nURIs: {uri}\nSuites: {suite}\nComponents: {COMPONENTS}\n{signed}")
    return MANAGED + "\n".join(blocks) if blocks else ""


def _one_line(text: str) -> list[tuple[str, str, str]]:
    found = []
    for line in text.splitlines():
        matched = re.match(r"deb\s+(?:\[(.*?)\]\s+)?(\S+)\s+(\S+)\s+(.*)", line.partition("#")[0].strip())
        if matched and "main" in matched[4].split():
            options = dict(option.partition("=")[::2] for option in (matched[1] or "").split())
            found.append((matched[2], matched[3], options.get("signed-by", "")))
    return found


def _deb822(text: str) -> list[tuple[str, str, str]]:
    found = []
    for block in re.split(r"\n\s*\n", text):
        lines = [line for line in block.splitlines() if not line.startswith("#")]
        fields = {key.strip().lower(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
        if (
            fields.get("enabled", "yes") != "no"
            and "deb" in fields.get("types", "").split()
            and "main" in fields.get("components", "").split()
        ):
            found += [
                (uri, suite, fields.get("signed-by", ""))
                for uri in fields.get("uris", "").split()
                for suite in fields.get("suites", "").split()
            ]
    return found


def kernels(m: Machine) -> list[str]:
    """Installed kernels, oldest first."""
    installed: list[str] = machine.kernel(m)["installed"]
    return installed


def headers(m: Machine, there: dict[str, tuple[str, str]]) -> list[str]:
    """Header packages of every installed kernel, and the metapackage that keeps them coming with each new kernel."""
    wanted = [f"linux-headers-{kernel}" for kernel in kernels(m)]
    meta = [
        name.replace("image", "headers", 1)
        for name in there
        if re.fullmatch(r"linux-image-(amd64|cloud-amd64|rt-amd64)", name)
    ]
    return wanted + (meta or ["linux-headers-amd64"])


def built(m: Machine) -> dict[str, str]:
    """{kernel: state} of the nvidia modules that DKMS has: "installed" where all of them are."""
    said = m.run("dkms", "status")
    found: dict[str, str] = {}
    for line in said.out.splitlines() if said else []:
        matched = re.match(r"nvidia[^/,]*[/,]\s*([^,]+),\s*([^,]+),\s*[^:]+:\s*(\w+)", line)
        if matched:
            found[matched[2].strip()] = matched[3]
    return found


def unbuilt(m: Machine) -> list[str]:
    """Kernels that have no module. The newest one must not be among them: it is the one that boots next."""
    states = built(m)
    return [kernel for kernel in kernels(m) if states.get(kernel) != "installed"]


def held(m: Machine) -> set[str]:
    """Packages on hold, by dpkg's own word."""
    return {name for name, (status, _) in packages_of(m).items() if status[0] == "h"}


def to_hold(there: dict[str, tuple[str, str]]) -> set[str]:
    """The driver's packages that are installed: holds on names that are not there hold nothing."""
    return {
        name
        for name, (status, _) in there.items()
        if status[1] == "i" and machine.DRIVER_PACKAGE.fullmatch(name) and "container" not in name
    }


def pins(names: Sequence[str], version: str) -> str:
    """Preferences that keep the driver at `version`, whatever else an upgrade brings."""
    upstream = version.partition("-")[0]
    return f"{MANAGED}Package: {' '.join(names)}\nPin: version {upstream}-*\nPin-Priority: 1001\n"


def other_flavour(job: dict[str, Any]) -> list[str]:
    """Packages of the flavour that is not wanted. Debian lets both be installed, and then an alternative decides which one loads."""
    names: list[str] = job["packages"]["open" if job["module"] == "proprietary" else "proprietary"]
    return names


def missing(m: Machine, job: dict[str, Any], there: dict[str, tuple[str, str]]) -> list[str]:
    """What is not as the job wants it, in words; empty when there is nothing to do."""
    wanted = [*job["packages"][job["module"]], *job["packages"]["common"], *headers(m, there)]
    gone = [name for name in wanted if there.get(name, ("un", ""))[0][1] != "i"]
    words = [f"not installed: {', '.join(gone)}"] if gone else []
    main = job["packages"][job["module"]][0]
    if main in there and choose([there[main][1]], job["branch"], job["version"]) is None:
        words.append(f"{main} is {there[main][1]}")
    other = [name for name in other_flavour(job) if there.get(name, ("un", ""))[0][1] == "i"]
    words += [f"the other flavour is installed: {', '.join(other)}"] if other else []
    loose = sorted(to_hold(there) - held(m))
    words += [f"not held: {', '.join(loose)}"] if loose else []
    kernel = unbuilt(m)
    words += [f"no module for kernel {', '.join(kernel)}"] if kernel else []
    words += [] if m.path(PINS).exists() else ["not pinned"]
    return words


class _Apt:
    """Runs apt with its output as progress, and keeps the output."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def __call__(self, phase: str, *arguments: str) -> tuple[int, str]:
        """(status, output) of apt-get."""
        command = ["env", "DEBIAN_FRONTEND=noninteractive", "NEEDRESTART_SUSPEND=1", "LC_ALL=C", *APT, *arguments]
        lines = []
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as run:
            for line in run.stdout or ():
                lines.append(line)
                if line.strip():
                    self.progress.update(phase, message=line.strip()[:100])
        return run.returncode, "".join(lines)


def build_failure(m: Machine, output: str) -> HostError | None:
    """What a failed DKMS build says: kernel, file and line. None when the output names no build."""
    log = _LOG.search(output)
    if log is None:
        return None
    kernel = _KERNEL.search(output)
    text = m.text(log[1])
    errors = list(dict.fromkeys(f"{place}: {words}" for place, words in _COMPILER.findall(text)))
    name = kernel[1].rstrip(".") if kernel else "?"
    cause = f"the module does not build for kernel {name}: {_short(errors[0]) if errors else log[1]}"
    fix = "keep to an older kernel, take the other flavour (nvidia_driver_module) or another branch; all packages are as before"
    return HostError("DRIVER_BUILD", cause, fix, lines=[_short(line) for line in errors[:8]] or text.splitlines()[-8:])


def _short(line: str) -> str:
    return re.sub(r"^/var/lib/dkms/[^/]+/[^/]+/build/", "", line)


def restore(m: Machine, before: dict[str, tuple[str, str]], apt: _Apt) -> list[str]:
    """Undo a transaction: take out what it brought, put back what it replaced. Returns what could not be undone, in words."""
    after = packages_of(m)
    new = sorted(set(after) - set(before))
    old = [
        f"{name}={version}"
        for name, (status, version) in before.items()
        if status[1] == "i" and after.get(name) != (status, version)
    ]
    left = []
    # A package whose configuration failed blocks every other transaction until it is gone, so it goes first.
    broken = [name for name in new if after[name][0][1] != "i"]
    for names in filter(None, (broken, new)):
        apt("undo", "purge", "--allow-change-held-packages", *names)
    if old:
        status, said = apt("undo", "install", "--allow-downgrades", "--allow-change-held-packages", *old)
        left += [said.strip().splitlines()[-1]] if status and said.strip() else []
    if on_hold := sorted(name for name, (status, _) in before.items() if status[0] == "h"):
        m.run("apt-mark", "hold", *on_hold)
    audit = m.run("dpkg", "--audit")
    left += [audit.out.strip()[:300]] if audit and audit.out.strip() else []
    still = sorted(set(packages_of(m)) - set(before))
    return left + ([f"still there: {', '.join(still)}"] if still else [])


def driver(text: str, progress: Progress, check: bool = False, m: Machine | None = None) -> dict[str, Any]:
    """Bring the driver to the job's state; `check` only says what would be done."""
    job, m = parse(text), m or Machine()
    there = packages_of(m)
    if job["state"] == "absent":
        return _remove(m, there, progress, check)
    todo = missing(m, job, there)
    facts = {
        "version": there.get(job["packages"][job["module"]][0], ("", ""))[1],
        "kernels": built(m),
        "loaded": machine.driver(m)["loaded"],
    }
    if not todo or check:
        return {"changed": bool(todo), "todo": todo, **facts}
    apt, main = _Apt(progress), job["packages"][job["module"]][0]
    had_source = m.path(SOURCE).exists()
    version = _candidate(m, job, main, apt)
    names = sorted({*job["packages"]["proprietary"], *job["packages"]["open"], *job["packages"]["common"]})
    old_pins = m.text(PINS)
    m.path(PINS).write_text(
        pins([name for name in names if name not in job["packages"].get("unversioned", [])], version)
    )
    wanted = [*job["packages"][job["module"]], *job["packages"]["common"], *headers(m, there)]
    gone = [f"{name}-" for name in other_flavour(job) if name in there]  # apt's word for "and without"
    status, output = apt("install", "install", "--allow-change-held-packages", "--allow-downgrades", *wanted, *gone)
    after = packages_of(m)
    lacking = unbuilt(m)
    newest = kernels(m)[-1:]
    if status or (newest and newest[0] in lacking):
        error = build_failure(m, output) or _apt_failure(status, output, lacking)
        # Only now: undoing removes DKMS's log.
        left = restore(m, there, apt)
        m.path(PINS).write_text(f"{old_pins}\n") if old_pins else m.path(PINS).unlink()
        if not had_source and m.path(SOURCE).exists():
            m.path(SOURCE).unlink()
            apt("undo", "update")
        error.lines += [f"not undone: {words}" for words in left]
        raise error
    hold = sorted(to_hold(after))
    m.run("apt-mark", "hold", *hold)
    if loose := sorted(set(hold) - held(m)):
        raise HostError("DRIVER_HOLD", f"apt-mark holds nothing of {', '.join(loose)}", "apt-mark showhold")
    known = set(json.loads(m.text(RECORD) or "[]"))
    m.path(RECORD).parent.mkdir(parents=True, exist_ok=True)
    write_json(m.path(RECORD), sorted(known | (set(after) - set(there))))
    return {
        "changed": True,
        "todo": todo,
        "version": after[main][1],
        "kernels": built(m),
        "without_module": lacking,
        "loaded": facts["loaded"],
        "held": hold,
    }


def _candidate(m: Machine, job: dict[str, Any], main: str, apt: _Apt) -> str:
    """The version to install; adds the distribution's non-free components where they are needed for it."""
    apt("lists", "update")
    version = choose(candidates(m, main), job["branch"], job["version"])
    if version is None and not m.path(SOURCE).exists() and (text := sources(m)):
        m.path(SOURCE).write_text(text)
        apt("lists", "update")
        version = choose(candidates(m, main), job["branch"], job["version"])
        if version is None:
            found = candidates(m, main)
            m.path(SOURCE).unlink()
            apt("lists", "update")
            raise _no_candidate(job, main, found)
    if version is None:
        raise _no_candidate(job, main, candidates(m, main))
    return version


def _no_candidate(job: dict[str, Any], main: str, found: Sequence[str]) -> HostError:
    asked = f"version {job['version']}" if job["version"] else f"branch {job['branch']}"
    has = f"the archive has {main} {', '.join(found)}" if found else f"the archive has no {main}"
    branches = sorted({version.partition(".")[0] for version in found})
    fix = (
        f"rig_driver: {{source: distro, branch: {branches[0]}}}"
        if branches
        else "does this machine reach its distribution's archive?"
    )
    return HostError("DRIVER_NO_CANDIDATE", f"{asked} is asked, {has}; nothing was changed", fix)


def _apt_failure(status: int, output: str, lacking: Sequence[str]) -> HostError:
    lines = [line for line in output.splitlines() if line.startswith(("E:", "Error"))] or output.splitlines()[-6:]
    if not status:
        return HostError(
            "DRIVER_BUILD",
            f"DKMS left no module for kernel {', '.join(lacking)}",
            "dkms status; are its headers installed?",
            lines=lines[-6:],
        )
    return HostError(
        "DRIVER_APT",
        f"apt ended with status {status}: {lines[0] if lines else ''}"[:400],
        "all packages are as before; correct what apt says",
        lines=lines[:8],
    )


def _remove(m: Machine, there: dict[str, tuple[str, str]], progress: Progress, check: bool) -> dict[str, Any]:
    known = set(json.loads(m.text(RECORD) or "[]"))
    ours = sorted(
        name
        for name in known & set(there)
        if machine.DRIVER_PACKAGE.fullmatch(name) or name == "glx-alternative-nvidia"
    )
    files = [path for path in (SOURCE, PINS, RECORD) if m.path(path).exists()]
    if check or not (ours or files):
        return {"changed": bool(ours or files), "todo": [*ours, *files]}
    if ours:
        m.run("apt-mark", "unhold", *ours)
        status, output = _Apt(progress)("remove", "purge", *ours)
        if status:
            raise _apt_failure(status, output, [])
    for path in files:
        m.path(path).unlink()
    return {"changed": True, "todo": [*ours, *files]}
