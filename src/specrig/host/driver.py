"""Installs NVIDIA's driver as one apt transaction, and is not done before its module is there for the newest kernel.

Job: {state, branch, version: exact or "", main, packages, others, unversioned, signed, dkms, image, components, lock_timeout_s,
enrol}.
`main` is the package whose version is the driver's, `packages` all that are wanted (with it), `others` those of another flavour, source
or branch, which go. `signed` is how packages of ready-made modules begin (the kernel or its flavour follows), `dkms` what builds modules where
there is none; without `signed`, DKMS is among `packages`. `image` matches the kernel's metapackages, its group is their flavour.
`enrol`: a person has agreed to enrol DKMS's key with Secure Boot.
The role names all of them, for its distribution and source. Nothing is decided here but the version: the newest that fits.

States: present; absent; ready (may the machine reboot into this driver?); loaded (did it?). The last two only look.

A transaction is tried dry and downloaded first. When it fails, or the module does not build, the error says why, what it brought is taken
out and what it replaced is put back, from package files that are kept for that. Nothing here reboots or loads a module.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from specrig.host import machine
from specrig.host.errors import COULD_NOT_RUN, HostError
from specrig.host.machine import Machine
from specrig.host.progress import Progress, write_json

RECORD = "/var/lib/specrig/driver.json"
KEPT = "/var/lib/specrig/driver-packages"
SOURCE = "/etc/apt/sources.list.d/specrig-nvidia.sources"
PINS = "/etc/apt/preferences.d/specrig-nvidia"
UNATTENDED = "/etc/apt/apt.conf.d/52specrig-nvidia"
NOUVEAU = "etc/modprobe.d/specrig-nouveau.conf"
MANAGED = "# Managed by specrig. Changes made here are replaced by its next run.\n"
# Every package of a driver has its version, so a pattern and a version name all of them and nothing else.
PINNED = "*nvidia* libcuda* firmware-nvidia-*"
APT = (
    "apt-get",
    "--yes",
    "--no-install-recommends",
    "-o",
    f"Dir::Cache::archives={KEPT}",
    "-o",
    "APT::Keep-Downloaded-Packages=true",
    "-o",
    "DPkg::Lock::Timeout=300",
    "-o",
    "Dpkg::Options::=--force-confold",
)
# Another branch is another version, and what it replaces is on hold.
CHANGING = ("--allow-change-held-packages", "--allow-downgrades")
LOCKS = ("var/lib/dpkg/lock-frontend", "var/lib/dpkg/lock", "var/lib/apt/lists/lock")
# dkms says which kernel and which log; the compiler says which line.
_KERNEL = re.compile(r"(?:on|for) kernel:? (\S+)")
_LOG = re.compile(r"Consult (\S+/make\.log)")
_COMPILER = re.compile(r"^(\S+?:\d+)(?::\d+)?: (?:fatal )?error: (.*)$", re.MULTILINE)
_SIGNED = re.compile(r"linux-(?:modules|objects|signatures)-nvidia-.*")
# What apt-get update says about a source it could not read; the last two are warnings, and old lists go on being used.
_UNREAD = re.compile(
    r"^(?:E: .*|Err:.*|W: (?:GPG error|An error occurred during the signature|Failed to fetch).*)$", re.MULTILINE
)
_KEY = re.compile(r"NO_PUBKEY|EXPKEYSIG|REVKEYSIG|BADSIG|not signed|signature verification|GPG error|sqv|Signed-By")

Packages = Mapping[str, tuple[str, str]]


def parse(text: str) -> dict[str, Any]:
    """The job, with all its keys. Raises HostError DRIVER_JOB."""
    empty: dict[str, Any] = {
        "others": [],
        "unversioned": [],
        "signed": "",
        "dkms": [],
        "image": "linux-image-(amd64)",
        "components": "",
        "lock_timeout_s": 300,
        "enrol": False,
    }
    try:
        job = json.loads(text)
        assert job["state"] in ("present", "absent", "ready", "loaded")  # noqa: S101  any fault of the job ends in one refusal
        if job["state"] != "absent":
            assert job["main"] in job["packages"]  # noqa: S101
            re.compile(job.get("image", ""))
        job["branch"] = int(job.get("branch") or 0)
    except (ValueError, KeyError, TypeError, AssertionError, re.error) as error:
        raise HostError(
            "DRIVER_JOB", f"the job cannot be read: {error!r}", "run it through the role nvidia_driver", COULD_NOT_RUN
        ) from None
    return {**empty, **job}


def packages_of(m: Machine) -> dict[str, tuple[str, str]]:
    """Every package that dpkg has unpacked or installed: {name: (status letters, version)}."""
    said = m.run("dpkg-query", "--show", "--showformat=${db:Status-Abbrev}|${Package}|${Version}\n")
    rows = [line.split("|") for line in (said.out if said else "").splitlines()]
    return {row[1]: (row[0], row[2]) for row in rows if len(row) == 3 and row[0][1:2] not in ("n", "c")}


def installed(there: Packages, name: str) -> bool:
    """Whether dpkg has `name` completely."""
    return there.get(name, ("un", ""))[0][1] == "i"


def candidates(m: Machine, *names: str) -> dict[str, list[str]]:
    """Versions that apt could install, newest first, by package; names that it does not know are left out."""
    said = m.run("apt-cache", "madison", *names)
    found: dict[str, list[str]] = {}
    for line in said.out.splitlines() if said else []:
        row = [word.strip() for word in line.split("|")]
        if len(row) == 3 and "Packages" in row[2] and row[1] not in found.setdefault(row[0], []):
            found[row[0]].append(row[1])
    return found


def choose(versions: Sequence[str], branch: int, exact: str) -> str | None:
    """The version to install: of the branch (0: any), or the exact upstream or package version."""
    fitting = [v for v in versions if not branch or v.partition(".")[0] == str(branch)]
    fitting = [v for v in fitting if not exact or v == exact or v.partition("-")[0] == exact]
    return fitting[0] if fitting else None


def kept(m: Machine) -> dict[tuple[str, str], Path]:
    """Package files of this driver and the one before: {(name, version): path}."""
    found = {}
    for path in m.path(KEPT).glob("*_*_*.deb"):
        name, version, _ = path.name.split("_", 2)
        found[name, unquote(version)] = path
    return found


def sources(m: Machine, components: str) -> str:
    """A deb822 file that adds `components` to each of the machine's own sources; same addresses, same keys. Empty when none is found."""
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
        blocks.append(f"Types: deb\nURIs: {uri}\nSuites: {suite}\nComponents: {components}\n{signed}")
    return MANAGED + "\n".join(blocks) if blocks and components else ""


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
    found: list[str] = machine.kernel(m)["installed"]
    return found


def flavours(job: Mapping[str, Any], there: Packages) -> list[str]:
    """Flavours of the installed kernel metapackages, which bring each new kernel: amd64, generic, generic-hwe-24.04 …"""
    matched = (re.fullmatch(job["image"], name) for name in there if installed(there, name))
    return sorted({match[1] for match in matched if match})


def modules(m: Machine, job: Mapping[str, Any], there: Packages) -> list[str]:
    """Packages that give each installed kernel its module, and go on doing so with each new kernel.

    Ready-made modules where the archive has one for the newest kernel, else headers and DKMS. An older kernel whose package
    is no longer to be had stays without: it is not the one that boots next.
    """
    present, metas = kernels(m), flavours(job, there)
    signed = [f"{job['signed']}-{kernel}" for kernel in present] if job["signed"] else []
    headers = [f"linux-headers-{kernel}" for kernel in present]
    asked = [name for name in (*signed, *headers) if not installed(there, name)]
    known = {name for name in (*signed, *headers) if installed(there, name)} | set(
        candidates(m, *asked) if asked else ()
    )
    builds = any(installed(there, name) for name in job["dkms"])
    if signed and not builds and (signed[-1] in known or not known):
        extra = [f"{job['signed']}-{flavour}" for flavour in metas]
        more = candidates(m, *extra) if extra and not all(installed(there, name) for name in extra) else extra
        return [name for name in signed if name in known or name == signed[-1]] + [n for n in extra if n in more]
    wanted = [name for name in headers if name in known or name == headers[-1]]
    follow = [f"linux-headers-{flavour}" for flavour in metas] or ["linux-headers-amd64"] * (not signed)
    return [*job["dkms"], *wanted, *follow]


def built(m: Machine) -> dict[str, str]:
    """{kernel: state} of the nvidia modules that DKMS has: "installed" where all of them are."""
    said = m.run("dkms", "status")
    found: dict[str, str] = {}
    for line in said.out.splitlines() if said else []:
        matched = re.match(r"nvidia[^/,]*[/,]\s*([^,]+),\s*([^,]+),\s*[^:]+:\s*(\w+)", line)
        if matched:
            found[matched[2].strip()] = matched[3]
    return found


def unbuilt(m: Machine, job: Mapping[str, Any], there: Packages) -> list[str]:
    """Kernels that have no module, oldest first. The newest one must not be among them: it is the one that boots next."""
    states = built(m)
    ready = {kernel for kernel in kernels(m) if job["signed"] and installed(there, f"{job['signed']}-{kernel}")}
    return [kernel for kernel in kernels(m) if states.get(kernel) != "installed" and kernel not in ready]


def obtainable(m: Machine, job: Mapping[str, Any], lacking: Sequence[str]) -> list[str]:
    """Those of the kernels in `lacking` that could get a module: the newest in any case, others when a package is to be had."""
    newest = kernels(m)[-1:]
    names = {
        k: [f"linux-headers-{k}", *([f"{job['signed']}-{k}"] if job["signed"] else [])]
        for k in lacking
        if k not in newest
    }
    known = candidates(m, *(name for several in names.values() for name in several)) if names else {}
    return [k for k in lacking if k in newest or any(name in known for name in names[k])]


def held(there: Packages) -> set[str]:
    """Packages on hold, by dpkg's own word."""
    return {name for name, (status, _) in there.items() if status[0] == "h"}


def of_driver(name: str) -> bool:
    """Whether a package belongs to a driver; modules for one kernel do as well."""
    return bool(machine.DRIVER_PACKAGE.fullmatch(name) or _SIGNED.fullmatch(name)) and "container" not in name


def to_hold(there: Packages) -> set[str]:
    """The driver's packages that are installed: holds on names that are not there hold nothing.

    Ready-made modules are not held: they must come with each new kernel, and can only be those of the driver's version.
    """
    return {name for name in there if installed(there, name) and of_driver(name) and not _SIGNED.fullmatch(name)}


def pins(version: str) -> str:
    """Preferences that keep the driver at `version`, whatever else an upgrade brings."""
    return f"{MANAGED}Package: {PINNED}\nPin: version {version.partition('-')[0]}-*\nPin-Priority: 1001\n"


def unattended(there: Packages) -> str:
    """What keeps unattended upgrades off the driver: its packages by name. A driver that is replaced while it is loaded stops working."""
    rows = "".join(f'  "{re.escape(name)}$";\n' for name in sorted(to_hold(there)))
    return f"{MANAGED.replace('#', '//', 1)}Unattended-Upgrade::Package-Blacklist {{\n{rows}}};\n"


def unwanted(job: Mapping[str, Any], there: Packages, wanted: Sequence[str]) -> list[str]:
    """Installed packages of another flavour, source or branch. Debian lets two flavours be installed, and then chance decides which one loads."""
    branch = re.compile(r"-(\d{3}(?:-server)?)(?=-|$)")
    mine = {match[1] for name in wanted if of_driver(name) and (match := branch.search(name))}
    found = []
    for name in there:
        number = branch.search(name) if of_driver(name) else None
        stale = bool(mine) and number is not None and number[1] not in mine
        found += [name] if (name in job["others"] or stale) and name not in wanted else []
    return found


def missing(m: Machine, job: Mapping[str, Any], there: Packages) -> list[str]:
    """What is not as the job wants it, in words; empty when there is nothing to do."""
    wanted = [*job["packages"], *modules(m, job, there)]
    gone = [name for name in wanted if not installed(there, name)]
    words = [f"not installed: {', '.join(gone)}"] if gone else []
    main = job["main"]
    if main in there and choose([there[main][1]], job["branch"], job["version"]) is None:
        words.append(f"{main} is {there[main][1]}")
    other = [name for name in unwanted(job, there, wanted) if installed(there, name)]
    words += [f"of another flavour, branch or source: {', '.join(other)}"] if other else []
    loose = sorted(to_hold(there) - held(there))
    words += [f"not held: {', '.join(loose)}"] if loose else []
    kernel = obtainable(m, job, unbuilt(m, job, there))
    words += [f"no module for kernel {', '.join(kernel)}"] if kernel else []
    words += [] if m.path(PINS).exists() else ["not pinned"]
    words += [] if m.text(UNATTENDED) == unattended(there).strip() else ["not kept from unattended upgrades"]
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
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", cwd=KEPT
        ) as run:
            for line in run.stdout or ():
                lines.append(line)
                if line.strip():
                    self.progress.update(phase, message=line.strip()[:100])
        return run.returncode, "".join(lines)

    def dkms(self, kernel: str) -> str:
        """Output of DKMS, building what it knows for `kernel`; nothing where there is no DKMS."""
        self.progress.update("build", message=f"modules for kernel {kernel}")
        try:
            command = ["dkms", "autoinstall", "-k", kernel]
            done = subprocess.run(command, capture_output=True, text=True, check=False, errors="replace")
        except FileNotFoundError:
            return ""
        return done.stdout + done.stderr


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
    fix = "keep to an older kernel, take the other flavour (rig_driver: {module: …}) or another branch; all packages are as before"
    return HostError("DRIVER_BUILD", cause, fix, lines=[_short(line) for line in errors[:8]] or text.splitlines()[-8:])


def _short(line: str) -> str:
    return re.sub(r"^/var/lib/dkms/[^/]+/[^/]+/build/", "", line)


def restore(m: Machine, before: Packages, apt: _Apt) -> list[str]:
    """Undo a transaction: take out what it brought, put back what it replaced. Returns what could not be undone, in words."""
    after, files = packages_of(m), kept(m)
    new = sorted(set(after) - set(before))
    old = [(n, v) for n, (status, v) in before.items() if status[1] == "i" and after.get(n) != (status, v)]
    # A file from before: the archive may have dropped that version since.
    names = [str(files[one]) if one in files else "=".join(one) for one in old]
    # Both at once: what goes and what comes back may need, or exclude, each other.
    words = ("install", "--purge", *CHANGING, *names, *(f"{name}-" for name in new))
    status, said = apt("undo", *words) if names or new else (0, "")
    if status:
        # A package whose configuration failed can block every transaction. It alone goes first, by force: apt would take along what needs it.
        if broken := [name for name, (letters, _) in packages_of(m).items() if letters[1] != "i" and name in new]:
            m.run("dpkg", "--purge", "--force-depends", *broken)
        present = packages_of(m)
        words = ("install", "--purge", *CHANGING, *names, *(f"{name}-" for name in new if name in present))
        status, said = apt("undo", *words)
    if rest := sorted(set(packages_of(m)) - set(before)):
        apt("undo", "purge", *CHANGING, *rest)
    if on_hold := sorted(held(before)):
        m.run("apt-mark", "hold", *on_hold)
    left = [said.strip().splitlines()[-1]] if status and said.strip() else []
    audit = m.run("dpkg", "--audit")
    left += [audit.out.strip()[:300]] if audit and audit.out.strip() else []
    now = packages_of(m)
    still = sorted(set(now) - set(before))
    lost = sorted(
        n for n, (letters, v) in before.items() if letters[1] == "i" and (not installed(now, n) or now[n][1] != v)
    )
    left += [f"still there: {', '.join(still)}"] if still else []
    return left + ([f"not as before: {', '.join(lost)}"] if lost else [])


def driver(text: str, progress: Progress, check: bool = False, m: Machine | None = None) -> dict[str, Any]:
    """Bring the driver to the job's state; `check` only says what would be done."""
    job, m = parse(text), m or Machine()
    there = packages_of(m)
    if job["state"] in ("ready", "loaded"):
        return look(m, job, there)
    if job["state"] == "absent":
        return _remove(m, there, progress, check)
    todo = missing(m, job, there)
    main = job["main"]
    facts = {
        "version": there.get(main, ("", ""))[1],
        "kernels": built(m),
        "without_module": unbuilt(m, job, there),
        "loaded": machine.driver(m)["loaded"],
        "secure_boot": machine.secure_boot(m),
    }
    if todo:
        _may_change(m, job, there, facts["loaded"])
    if not todo or check:
        return {"changed": bool(todo), "todo": todo, **facts}
    m.path(KEPT).joinpath("partial").mkdir(parents=True, exist_ok=True)
    wait_for_locks(m, float(job["lock_timeout_s"]), progress)
    apt = _Apt(progress)
    with _files(m, PINS, SOURCE) as files, _unheld(m, there):
        version = _candidate(m, job, apt)
        m.path(PINS).write_text(pins(version))
        output = _transaction(m, job, apt, there, version)
        if output is None:
            files.clear()  # from here on they are right
    if output is not None:
        # The files are as before, so apt finds what was there before. DKMS's log goes with what is undone, so it is read first.
        error = build_failure(m, output) or _apt_failure(output, unbuilt(m, job, packages_of(m)))
        error.lines += [f"not undone: {words}" for words in restore(m, there, apt)]
        raise error
    after = packages_of(m)
    m.path(UNATTENDED).write_text(unattended(after))
    hold = sorted(to_hold(after))
    m.run("apt-mark", "hold", *hold)
    if loose := sorted(set(hold) - held(packages_of(m))):
        raise HostError("DRIVER_HOLD", f"apt-mark holds nothing of {', '.join(loose)}", "apt-mark showhold")
    known = set(json.loads(m.text(RECORD) or "[]"))
    m.path(RECORD).parent.mkdir(parents=True, exist_ok=True)
    write_json(m.path(RECORD), sorted(known | (set(after) - set(there))))
    _keep(m, there, after)
    return {
        "changed": True,
        "todo": todo,
        "version": after[main][1],
        "kernels": built(m),
        "without_module": unbuilt(m, job, after),
        "loaded": facts["loaded"],
        "secure_boot": machine.secure_boot(m),
        "held": hold,
    }


def _may_change(m: Machine, job: Mapping[str, Any], there: Packages, loaded: str | None) -> None:
    """Refuse before any change: DRIVER_FOREIGN, and DRIVER_SECURE_BOOT where the new module could not be loaded."""
    if foreign := machine.foreign(m):
        raise HostError(
            "DRIVER_FOREIGN",
            f"a driver that apt does not know is here: {'; '.join(foreign)}; nothing was changed",
            "remove it by its own means (sudo nvidia-uninstall; snap remove), or keep it: rig_driver: {source: none}",
        )
    # Secure Boot takes no module that DKMS signs with a key nobody has enrolled.
    boot = machine.secure_boot(m)
    builds = not job["signed"] or any(name in modules(m, job, there) for name in job["dkms"])
    if boot["enabled"] and not loaded and boot["dkms_key_enrolled"] is not True and builds and not job["enrol"]:
        raise HostError(
            "DRIVER_SECURE_BOOT",
            "Secure Boot is on, and would refuse the module that DKMS builds: its key is not enrolled; nothing was changed",
            "rig_driver: {mok: stage} stages the key, for a person at the console to enrol. Without a console: Ubuntu's ready-made signed modules "
            "(source: distro there), or Secure Boot off in the firmware",
        )


@contextlib.contextmanager
def _files(m: Machine, *paths: str) -> Iterator[dict[str, str | None]]:
    """Puts files back as they were when the body fails; the body empties what it is given to keep them."""
    before: dict[str, str | None] = {
        path: m.path(path).read_text() if m.path(path).exists() else None for path in paths
    }
    try:
        yield before
    finally:
        for path, text in before.items():
            if text is not None:
                m.path(path).write_text(text)
            else:
                m.path(path).unlink(missing_ok=True)


@contextlib.contextmanager
def _unheld(m: Machine, there: Packages) -> Iterator[None]:
    """Lifts the driver's holds for the body: apt's solver does not give way to a hold. They are set again when the body fails."""
    lifted = sorted(held(there) & to_hold(there))
    if lifted:
        m.run("apt-mark", "unhold", *lifted)
    try:
        yield
    except BaseException:
        if lifted:
            m.run("apt-mark", "hold", *lifted)
        raise


def wait_for_locks(m: Machine, timeout: float, progress: Progress) -> None:
    """Wait for other users of apt and dpkg. Raises HostError DRIVER_LOCKED."""
    deadline = time.monotonic() + timeout
    while holder := machine.lock_holder(m, *LOCKS):
        if time.monotonic() > deadline:
            raise HostError(
                "DRIVER_LOCKED",
                f"{holder} has held apt's or dpkg's lock for {timeout:.0f} s; nothing was changed",
                "let it end, or find out why it does not; then run this again",
            )
        progress.update("waiting", message=f"{holder} holds apt's lock")
        time.sleep(1.0)


def _lists(apt: _Apt) -> None:
    """Read the sources again. Raises HostError DRIVER_LISTS when one of them cannot be read: what it has might be outdated."""
    status, output = apt("lists", "update")
    wrong = [line.strip() for line in _UNREAD.findall(output)]
    if not (status or wrong):
        return
    lines = (
        list(dict.fromkeys(line for line in wrong if not line.startswith("Err:"))) or wrong or output.splitlines()[-3:]
    )
    if _KEY.search("\n".join(lines)):
        what = "a source is not signed by the key that it names: the key was replaced, or this is not its publisher"
        fix = "compare the key with its publisher's page; for NVIDIA's repository: the new key's SHA-256 into rig_driver.repository_key_sha256"
    else:
        what, fix = (
            "apt cannot read one of its sources",
            "correct or remove that source: sudo apt-get update must end well",
        )
    first = next((line for line in lines if "404" in line or _KEY.search(line)), lines[0] if lines else "")
    raise HostError("DRIVER_LISTS", f"{what}: {first}; nothing was changed"[:500], fix, lines=lines[:8])


def _candidate(m: Machine, job: Mapping[str, Any], apt: _Apt) -> str:
    """The version to install; adds the distribution's components where they are needed for it."""
    main = job["main"]
    _lists(apt)
    files = sorted((v for n, v in kept(m) if n == main), key=machine.natural, reverse=True)
    version = choose(candidates(m, main).get(main, []), job["branch"], job["version"])
    if version is None and not m.path(SOURCE).exists() and (text := sources(m, job["components"])):
        m.path(SOURCE).write_text(text)
        try:
            _lists(apt)
            version = choose(candidates(m, main).get(main, []), job["branch"], job["version"])
        finally:
            if version is None:
                m.path(SOURCE).unlink()
                apt("lists", "update")
    version = version or choose(files, job["branch"], job["version"])
    if version is None:
        raise _no_candidate(job, m)
    return version


def _no_candidate(job: Mapping[str, Any], m: Machine) -> HostError:
    main, branch = job["main"], str(job["branch"])
    asked = f"version {job['version']}" if job["version"] else f"branch {branch}"
    found = candidates(m, main).get(main, [])
    if main.count(branch) and not found:  # the branch is part of the name: then the names say which there are
        before, _, after = main.partition(branch)
        said = m.run("apt-cache", "pkgnames", before)
        names = re.findall(rf"^{re.escape(before)}(\d{{3}}){re.escape(after)}$", said.out if said else "", re.MULTILINE)
        branches = sorted(set(names))
        has = (
            f"the archive has {before}…{after} for {', '.join(branches)}" if branches else f"the archive has no {main}"
        )
    else:
        branches = sorted({version.partition(".")[0] for version in found})
        has = f"the archive has {main} {', '.join(found)}" if found else f"the archive has no {main}"
    fix = (
        f"rig_driver: {{branch: {branches[-1]}}}"
        if branches
        else "does this machine reach the archive that it is to come from?"
    )
    return HostError("DRIVER_NO_CANDIDATE", f"{asked} is asked, {has}; nothing was changed", fix)


def _transaction(m: Machine, job: Mapping[str, Any], apt: _Apt, there: Packages, version: str) -> str | None:
    """One apt run for all of it: tried dry, downloaded, done. What it said when it failed or the newest kernel has no module."""
    wanted = [*job["packages"], *modules(m, job, there)]
    gone = [f"{name}-" for name in unwanted(job, there, wanted)]  # apt's word for "and without"
    files = kept(m)
    known = candidates(m, *job["packages"])
    # A version that only the kept files have: all of them, since apt does not find what they depend on either.
    if version not in known.get(job["main"], []):
        upstream = version.partition("-")[0]
        old = {name: path for (name, v), path in files.items() if v.partition("-")[0] == upstream}
        wanted = [name for name in wanted if name not in old] + sorted(str(path) for path in old.values())
    words = ["install", *CHANGING, *wanted, *gone]
    _rehearse(apt, there, words)
    _save_old(m, apt, there, version, job["main"])
    status, output = apt("download", *words, "--download-only")
    if status:
        lines = [line for line in output.splitlines() if line.startswith(("E: Failed to fetch", "Err:", "E:"))]
        line = min(lines, key=lambda line: not line.startswith("E: Failed"), default="")  # it names address and reason
        cause = f"apt cannot fetch what it lists: {line}; nothing was changed"[:500]
        raise HostError(
            "DRIVER_DOWNLOAD", cause, "run this again; a mirror that lags behind lists what it no longer has"
        )
    status, output = apt("install", *words)
    for kernel in unbuilt(m, job, packages_of(m)) if not status else ():
        # Headers that were there already, or a hook that failed: nothing has asked DKMS for this kernel.
        if m.path(f"lib/modules/{kernel}/build").exists():
            output += apt.dkms(kernel)
    lacking, newest = unbuilt(m, job, packages_of(m)), kernels(m)[-1:]
    return output if status or (newest and newest[0] in lacking) else None


def _rehearse(apt: _Apt, there: Packages, words: Sequence[str]) -> None:
    """Dry run. Raises HostError when apt cannot, or would touch what is not the driver's: DRIVER_APT, DRIVER_HELD, DRIVER_REMOVES."""
    status, output = apt("rehearsal", "--simulate", *words)
    theirs = sorted(name for name in held(there) if not of_driver(name))
    if status and theirs and "held broken packages" in output:
        raise HostError(
            "DRIVER_HELD",
            f"apt finds no way while {', '.join(theirs)} is on hold; nothing was changed",
            f"sudo apt-mark unhold {' '.join(theirs)}",
            lines=[line.strip() for line in output.splitlines() if "Depends:" in line or line.startswith("E:")][:8],
        )
    if status:
        error = _apt_failure(output)
        error.fix = "nothing was changed; correct what apt says"
        raise error
    new = set(re.findall(r"^Inst (\S+?)(?::\w+)? ", output, re.MULTILINE))
    away = set(re.findall(r"^(?:Remv|Purg) (\S+?)(?::\w+)? ", output, re.MULTILINE)) - new
    leaving = sorted(name for name in away if not of_driver(name) and not name.startswith("glx-alternative"))
    if leaving:
        raise HostError(
            "DRIVER_REMOVES",
            f"apt would remove {', '.join(leaving)} for it; nothing was changed",
            "remove them yourself if you can do without, or take another branch or source",
        )
    locked = [name for name in theirs if name in new]
    if locked:
        raise HostError(
            "DRIVER_HELD",
            f"{', '.join(locked)} is on hold, and the driver needs another version; nothing was changed",
            f"sudo apt-mark unhold {' '.join(locked)}",
        )


def _save_old(m: Machine, apt: _Apt, there: Packages, version: str, main: str) -> None:
    """Have the package files of the driver that is there, while the archive still has them: the way back."""
    if main not in there or there[main][1] == version:
        return
    files = kept(m)
    lacking = [(n, v) for n, (_, v) in there.items() if installed(there, n) and of_driver(n) and (n, v) not in files]
    for name, old in lacking:
        apt("keep", "download", f"{name}={old}")  # one by one: what the archive has dropped must not stop the others


def _keep(m: Machine, before: Packages, after: Packages) -> None:
    """Keep the driver's package files, and those of the driver it replaced; throw away the rest."""
    wanted = {(n, v) for there in (before, after) for n, (_, v) in there.items() if of_driver(n)}
    for one, path in kept(m).items():
        if one not in wanted:
            path.unlink()


def _apt_failure(output: str, lacking: Sequence[str] = ()) -> HostError:
    lines = [line for line in output.splitlines() if line.startswith("E:")]
    if not lines:
        return HostError(
            "DRIVER_BUILD",
            f"there is no module for kernel {', '.join(lacking)}",
            "dkms status; are its headers installed? All packages are as before",
            lines=output.splitlines()[-6:],
        )
    return HostError(
        "DRIVER_APT",
        f"apt failed: {lines[0][3:]}"[:400],
        "all packages are as before; correct what apt says",
        lines=lines[:8],
    )


def look(m: Machine, job: Mapping[str, Any], there: Packages) -> dict[str, Any]:
    """Whether the machine may reboot into the driver (state ready), or runs it (state loaded). Raises HostError when not."""
    version, newest = there.get(job["main"], ("", ""))[1], kernels(m)[-1:]
    loaded, kernel = machine.driver(m)["loaded"], machine.kernel(m)["running"]
    facts = {"changed": False, "version": version, "loaded": loaded, "newest": newest[0] if newest else None}
    lacking = [name for name in unbuilt(m, job, there) if name in newest]
    if job["state"] == "ready":
        why = [f"kernel {name} boots next and has no module" for name in lacking]
        why += [] if version and installed(there, job["main"]) else [f"{job['main']} is not installed"]
        why += [f"{name} would still load nouveau" for name in _with_nouveau(m)]
        if why:
            raise HostError(
                "DRIVER_NOT_READY", f"no reboot: {'; '.join(why)}", "run the role nvidia_driver to its end first"
            )
        return facts
    if version and loaded == version.partition("-")[0]:
        return facts
    reason, fix = _not_loaded(m, kernel, newest, kernel in unbuilt(m, job, there))
    said = m.run("journalctl", "--dmesg", "--boot", "--no-pager", "--output=cat", "--grep=nvidia|NVRM|nouveau")
    lines = said.out.strip().splitlines()[-6:] if said and said.rc == 0 else []
    cause = f"the machine is back; driver {version or 'none'} is installed, {loaded or 'none'} is loaded: {reason}"
    raise HostError("DRIVER_NOT_LOADED", cause, fix, lines=lines)


def _with_nouveau(m: Machine) -> list[str]:
    """Initramfs images that have nouveau and not our word against it."""
    found = []
    for name in m.names("boot", "initrd.img-*"):
        said = m.run("lsinitramfs", str(m.path(f"boot/{name}")))
        if said and said.rc == 0 and "nouveau.ko" in said.out and NOUVEAU not in said.out:
            found.append(f"/boot/{name}")
    return found


def _not_loaded(m: Machine, running: str, newest: Sequence[str], lacks: bool) -> tuple[str, str]:
    """(why, what to do), the likeliest reason first."""
    if machine.secure_boot(m)["enabled"]:
        return "Secure Boot is on and refuses modules that are not signed by an enrolled key", (
            "mokutil --test-key /var/lib/dkms/mok.pub; docs/driver.md, Secure Boot"
        )
    if machine.driver(m)["nouveau"]:
        return "nouveau holds the card", "sudo update-initramfs -u -k all, then reboot"
    if not machine.cards(m):
        return "no NVIDIA card is on the PCI bus", "lspci -nn -d 10de:; is the card seated and powered?"
    if newest and running != newest[0]:
        return f"kernel {running} runs, not the newest, {newest[0]}", "set the boot loader to the newest kernel"
    if lacks:
        return f"kernel {running} has no module", "dkms status"
    return "the kernel did not take the module", "sudo modprobe nvidia; sudo journalctl --dmesg --grep=NVRM"


def _remove(m: Machine, there: Packages, progress: Progress, check: bool) -> dict[str, Any]:
    known = set(json.loads(m.text(RECORD) or "[]"))
    ours = sorted(name for name in known & set(there) if of_driver(name) or name == "glx-alternative-nvidia")
    files = [path for path in (SOURCE, PINS, UNATTENDED, RECORD) if m.path(path).exists()]
    if check or not (ours or files):
        return {"changed": bool(ours or files), "todo": [*ours, *files]}
    if ours:
        m.path(KEPT).mkdir(parents=True, exist_ok=True)
        wait_for_locks(m, 300.0, progress)
        m.run("apt-mark", "unhold", *ours)
        status, output = _Apt(progress)("remove", "purge", *ours)
        if status:
            m.run("apt-mark", "hold", *sorted(held(there) & set(ours)))
            raise _apt_failure(output)
    for path in files:
        m.path(path).unlink()
    shutil.rmtree(m.path(KEPT), ignore_errors=True)
    return {"changed": True, "todo": [*ours, *files]}
