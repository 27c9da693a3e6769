"""The real argument parsers of many vLLM versions and of other engines, without a GPU and without torch.

    python tests/contract/parsers.py --fetch                   get every version (range requests: a few MB each)
    python tests/contract/parsers.py VERSION -- ARGV…          ask one version about one command line; exits as it would
    python tests/contract/parsers.py --flags VERSION           its options as JSON
    python tests/contract/parsers.py --relock                  write parsers.lock anew

`parse(version, [argv, …])` asks one version about many command lines in one process. How it works: README.md.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import csv
import functools
import hashlib
import importlib
import io
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from base64 import urlsafe_b64decode
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]  # run as a file, the package is not on the path
from tests.contract import shapes  # noqa: E402

HERE = Path(__file__).resolve().parent
LOCK = HERE / "parsers.lock"
ENVIRONMENT = HERE / "environment.lock"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specrig" / "parsers"

# What the image's entry point is: `python3 -m vllm.entrypoints.openai.api_server`, later `vllm serve`.
ENTRY = {
    **dict.fromkeys(("0.6.4.post1", "0.7.3", "0.8.2", "0.8.5", "0.9.2", "0.10.2"), "api_server"),
    **dict.fromkeys(("0.15.1", "0.19.1", "0.25.1", "0.26.0", "0.30.0", "0.32.0", "0.33.0"), "serve"),
}
VERSIONS = tuple(ENTRY)  # of vLLM
# Other engines, as engine@version: how they are entered (driver.py).
OTHERS = {"aphrodite@0.24.1": "serve", **dict.fromkeys(("sglang@0.5.19", "sglang@0.5.23"), "sglang")}
RELEASES = (*VERSIONS, *OTHERS)
DISTRIBUTIONS = {"vllm": "vllm", "aphrodite": "aphrodite-engine", "sglang": "sglang"}

# Parts of the engine that no parser and no configuration imports: the bulk of a release.
UNUSED = tuple(
    f"vllm/{folder}/"
    for folder in (
        "attention/ops",
        "benchmarks",
        "compilation/passes/fusion",
        "core/block",
        "distributed/ec_transfer/ec_connector/cpu",
        "distributed/ec_transfer/ec_connector/mooncake",
        "distributed/kv_transfer/kv_connector/v1/hf3fs",
        "distributed/kv_transfer/kv_connector/v1/lmcache_integration",
        "distributed/kv_transfer/kv_connector/v1/mooncake",
        "distributed/kv_transfer/kv_connector/v1/moriio",
        "distributed/kv_transfer/kv_connector/v1/nixl",
        "distributed/kv_transfer/kv_connector/v1/offloading",
        "distributed/weight_transfer",
        "entrypoints/cli",
        "entrypoints/cohere",
        "entrypoints/pooling",
        "entrypoints/scale_out",
        "entrypoints/speech_to_text",
        "kernels/helion",
        "model_executor/kernels",
        "model_executor/layers/fla",
        "model_executor/layers/mamba/gdn",
        "model_executor/models",
        "models",
        "third_party",
        "v1/kv_offload/tiering",
        "v1/worker/gpu",
        "vllm_flash_attn",
    )
)
UNUSED_SGLANG = tuple(
    f"sglang/{folder}/" for folder in ("benchmark", "lang", "multimodal_gen", "srt/layers", "srt/models", "test")
)
USED_MODELS = (
    "__init__",
    "adapters",
    "config",
    "interfaces",
    "interfaces_base",
    "llama",
    "module_mapping",
    "qwen2",
    "registry",
    "utils",
    "vision",
)


# Likewise of the environment: what imports torch, and tests.
PRUNED = (
    "transformers/models/*/modeling_*.py",
    "transformers/models/*/modular_*.py",
    "transformers/models/*/image_processing_*.py",
    "transformers/models/*/video_processing_*.py",
    "numpy/f2py",
    "numpy/distutils",
    "numpy/**/tests",
    "psutil/tests",
)


@dataclass(frozen=True)
class Result:
    """What one version said to one case."""

    ok: bool
    exit_code: int
    stderr: str
    error: str = ""  # the exception that ended it, if it was not argparse's own exit
    values: dict[str, Any] = field(default_factory=dict)  # the namespace, where it differs from the defaults


@dataclass(frozen=True)
class Locked:
    """One wheel of the lock: its sha256 as the index gives it, and the sha256 of its RECORD, which has every file's."""

    version: str
    file: str
    sha256: str
    record: str


def engine_of(release: str) -> str:
    """The engine of a release: what stands before the @, else vLLM."""
    return release.partition("@")[0] if "@" in release else "vllm"


def wanted(name: str, engine: str = "vllm") -> bool:
    """Whether a wheel's member is unpacked. Engines are called as their packages are."""
    if name.endswith((".dist-info/METADATA", ".dist-info/RECORD")):
        return True
    if not name.startswith(f"{engine}/") or not name.endswith(".py"):
        return False
    if engine == "sglang":
        return not name.startswith(UNUSED_SGLANG)
    inside = name.removeprefix(f"{engine}/")
    model = inside.removeprefix("model_executor/models/").removesuffix(".py")
    return model in USED_MODELS or not f"vllm/{inside}".startswith(UNUSED)


def locked() -> dict[str, Locked]:
    """The lock file, by version."""
    rows = {}
    for line in LOCK.read_text().splitlines():
        if line and not line.startswith("#"):
            row = Locked(*line.split())
            rows[row.version] = row
    return rows


# --- fetching -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def index() -> Iterator[tuple[Any, Any]]:
    """Pip's own session and package finder, with the index, proxy, certificates and credentials pip is set up with."""
    logging.getLogger("pip").setLevel(logging.ERROR)
    command = importlib.import_module("pip._internal.commands").create_command("download")
    glibc = [f"--platform=manylinux_2_{minor}_x86_64" for minor in range(5, 40)]
    old = ["--platform=manylinux1_x86_64", "--platform=manylinux2014_x86_64"]
    words = [
        "--only-binary=:all:",
        "--no-deps",
        "--python-version=3.12",
        "--implementation=cp",
        "--abi=abi3",
        "--abi=cp312",
        "--abi=none",
        *glibc,
        *old,
    ]
    options, _ = command.parse_args([*words, "vllm"])
    make_target = importlib.import_module("pip._internal.cli.cmdoptions").make_target_python
    with command.main_context():
        session = command.get_default_session(options)
        yield session, command._build_package_finder(options, session, target_python=make_target(options))


class RemoteZip(io.RawIOBase):
    """A file on a server that answers byte ranges, read in as few requests as its reader allows."""

    def __init__(self, session: Any, url: str) -> None:
        self.session, self.url, self.position, self.received = session, url, 0, 0
        self.spans: list[tuple[int, bytes]] = []
        answer = self._get("bytes=-1048576")
        self.size = int(answer.headers["content-range"].rpartition("/")[2])
        self.spans.append((self.size - len(answer.content), answer.content))

    def _get(self, span: str) -> Any:
        answer = self.session.get(self.url, headers={"Range": span, "Accept-Encoding": "identity"}, stream=True)
        answer.raise_for_status()
        if answer.status_code != 206:
            raise NotImplementedError("the file server does not answer byte ranges")
        self.received += len(answer.content)
        return answer

    def load(self, start: int, end: int) -> None:
        """Hold bytes [start, end) in memory."""
        self.spans.append((start, self._get(f"bytes={start}-{end - 1}").content))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = 0) -> int:
        self.position = (0, self.position, self.size)[whence] + offset
        return self.position

    def read(self, count: int = -1) -> bytes:
        count = min(count if count >= 0 else self.size, self.size - self.position)
        for start, data in self.spans:
            if start <= self.position and self.position + count <= start + len(data):
                begin = self.position - start
                self.position += count
                return data[begin : begin + count]
        self.load(self.position, min(self.size, self.position + max(count, 1 << 16)))
        return self.read(count)


def spans(archive: zipfile.ZipFile, engine: str, gap: int = 200_000) -> list[tuple[int, int]]:
    """The byte ranges that hold the wanted members, near ones joined."""
    members = sorted(archive.infolist(), key=lambda m: m.header_offset)
    ends = [m.header_offset for m in members[1:]] + [archive.start_dir]
    joined: list[tuple[int, int]] = []
    for member, end in zip(members, ends, strict=True):
        if not wanted(member.filename, engine):
            continue
        if joined and member.header_offset - joined[-1][1] < gap:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((member.header_offset, end))
    return joined


@contextlib.contextmanager
def remote(session: Any, link: Any, sha256: str | None, engine: str = "vllm") -> Iterator[tuple[zipfile.ZipFile, int]]:
    """The wheel as an open archive and the bytes received; the whole file, checked, where the server has no ranges."""
    try:
        file = RemoteZip(session, link.url_without_fragment)
        with zipfile.ZipFile(file) as archive:
            for start, end in spans(archive, engine):
                file.load(start, end)
            yield archive, file.received
    except NotImplementedError:
        with tempfile.TemporaryFile() as whole:
            digest = hashlib.sha256()
            for chunk in session.get(link.url_without_fragment, stream=True).iter_content(1 << 20):
                digest.update(chunk)
                whole.write(chunk)
            if sha256 is not None and digest.hexdigest() != sha256:
                raise ValueError(f"{link.filename}: sha256 {digest.hexdigest()}, locked {sha256}") from None
            received = whole.tell()
            with zipfile.ZipFile(whole) as archive:
                yield archive, received


def record_of(archive: zipfile.ZipFile) -> bytes:
    """The wheel's RECORD: path, sha256 and size of every file in it."""
    return archive.read(next(n for n in archive.namelist() if n.endswith(".dist-info/RECORD")))


def unpack(archive: zipfile.ZipFile, record: str, folder: Path, engine: str) -> None:
    """Write the wanted members, each checked against RECORD, and RECORD against the lock."""
    text = record_of(archive)
    if hashlib.sha256(text).hexdigest() != record:
        raise ValueError(f"RECORD's sha256 is {hashlib.sha256(text).hexdigest()}, locked {record}")
    hashes = {path: digest for path, digest, _ in csv.reader(text.decode().splitlines())}
    for name in (name for name in archive.namelist() if wanted(name, engine)):
        data = archive.read(name)
        if not name.endswith("/RECORD"):
            digest = hashes[name].removeprefix("sha256=")
            if urlsafe_b64decode(digest + "=" * (-len(digest) % 4)) != hashlib.sha256(data).digest():
                raise ValueError(f"{name} does not have the sha256 that RECORD gives")
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


def stamp(row: Locked) -> str:
    """What a cached tree was made from."""
    return hashlib.sha256(
        repr((row, UNUSED, USED_MODELS, *([UNUSED_SGLANG] if engine_of(row.version) == "sglang" else []))).encode()
    ).hexdigest()


def cached(version: str) -> bool:
    """Whether the cache holds this version as the lock has it."""
    made = CACHE / version / ".made"
    return made.exists() and made.read_text() == stamp(locked()[version])


def fetch(versions: Sequence[str] = VERSIONS, say: Callable[[str], None] = lambda _: None) -> int:
    """Bring the cache to the lock; returns the bytes received."""
    missing = [v for v in versions if not cached(v)]
    if not missing:
        return 0
    rows, total = locked(), 0
    CACHE.mkdir(parents=True, exist_ok=True)
    with index() as (session, finder):
        links = {
            candidate.link.filename: candidate.link
            for engine in {engine_of(version) for version in missing}
            for candidate in finder.find_all_candidates(DISTRIBUTIONS[engine])
        }
        for version in missing:
            row = rows[version]
            link = links.get(row.file)
            if link is None:
                raise FileNotFoundError(f"the package index does not offer {row.file}")
            if link.hash_name == "sha256" and link.hash != row.sha256:
                raise ValueError(f"{row.file}: the index says sha256 {link.hash}, locked {row.sha256}")
            folder = Path(tempfile.mkdtemp(dir=CACHE, prefix=f".{version}-"))
            try:
                with remote(session, link, row.sha256, engine_of(version)) as (archive, received):
                    unpack(archive, row.record, folder, engine_of(version))
                (folder / ".made").write_text(stamp(row))
                shutil.rmtree(CACHE / version, ignore_errors=True)
                folder.chmod(0o755)
                folder.rename(CACHE / version)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            total += received
            say(f"{version:12} {received / 1e6:6.1f} MB received, {size(CACHE / version) / 1e6:6.1f} MB unpacked")
    return total


def size(folder: Path) -> int:
    """Bytes of the files below a folder."""
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


def pip(*args: str) -> str:
    """Run this interpreter's pip; its stdout. Raises with pip's own words."""
    done = subprocess.run([sys.executable, "-m", "pip", *args], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"pip {args[0]} failed:\n{done.stderr[-3000:]}")
    return done.stdout


@functools.cache
def environment() -> Path:
    """The Python of the parser environment, made once per lock."""
    key = hashlib.sha256(ENVIRONMENT.read_bytes() + repr((sys.version, PRUNED)).encode()).hexdigest()[:12]
    folder = CACHE / f"environment-{key}"
    python = folder / "bin" / "python"
    if not (folder / ".made").exists():
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=False, symlinks=True)
        pip(
            "--python",
            str(python),
            "install",
            "--quiet",
            "--no-compile",
            "--no-deps",
            "--require-hashes",
            "-r",
            str(ENVIRONMENT),
        )
        (packages,) = (folder / "lib").glob("python3*/site-packages")
        for found in [found for pattern in PRUNED for found in packages.glob(pattern)]:
            if found.is_dir():
                shutil.rmtree(found)
            elif found.parent.name != "auto":
                found.unlink(missing_ok=True)
        (folder / ".made").touch()
    return python


# --- asking -------------------------------------------------------------------------------------------------------


class Driver:
    """One running process of one version; answers until this process ends."""

    def __init__(self, version: str) -> None:
        fetch([version])
        self.home = tempfile.TemporaryDirectory()  # the engine caches what it learns of models; not from run to run
        # A clean environment: a caller's VLLM_* would change defaults.
        env = {"PATH": os.defpath, "HOME": self.home.name, "LANG": "C.UTF-8", "COLUMNS": "100", "HF_HUB_OFFLINE": "1"}
        env |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "TRANSFORMERS_VERBOSITY": "error"}
        words = [
            str(environment()),
            "-W",
            "ignore",
            "-m",
            "tests.contract.driver",
            str(CACHE / version),
            version.rpartition("@")[2],
        ]
        engine = engine_of(version)
        self.version = version
        self.said = tempfile.TemporaryFile("w+")  # noqa: SIM115  # as long as the process
        self.process = subprocess.Popen(
            [*words, {**ENTRY, **OTHERS}[version], engine],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.said,
            text=True,
            env=env,
            cwd=HERE.parents[1],
        )
        atexit.register(self.process.kill)

    def ask(self, request: Mapping[str, Any]) -> Result:
        """One question, one answer. Raises RuntimeError with the driver's stderr when it has died."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        with contextlib.suppress(BrokenPipeError):
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
        line = stdout.readline()
        if not line:
            self.said.seek(0)
            raise RuntimeError(f"the driver of {self.version} ended:\n{self.said.read()[-4000:]}")
        return Result(**json.loads(line))


@functools.cache
def driver(version: str) -> Driver:
    """The version's process, started on first use."""
    if version not in RELEASES:
        raise ValueError(f"{version} is not one of {', '.join(RELEASES)}")
    return Driver(version)


def ask(version: str, requests: Sequence[Mapping[str, Any]]) -> list[Result]:
    """One answer per request, from one process."""
    return [driver(version).ask(request) for request in requests]


T = TypeVar("T")


def each(question: Callable[[str], T], versions: Sequence[str] = VERSIONS) -> dict[str, T]:
    """The same question to several versions, two at a time."""
    environment()
    fetch(versions)
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(versions, pool.map(question, versions), strict=True))


def parse(version: str, argvs: Sequence[Sequence[str]]) -> list[Result]:
    """What the version's own parser says to each argument list (the arguments after the image)."""
    return ask(version, [{"stage": "parse", "argv": list(argv)} for argv in argvs])


# name, bytes, compute capability
RTX_4090 = ("NVIDIA GeForce RTX 4090", 24564 << 20, (8, 9))
RTX_3090 = ("NVIDIA GeForce RTX 3090", 24576 << 20, (8, 6))
RTX_3060 = ("NVIDIA GeForce RTX 3060", 12288 << 20, (8, 6))


def check_speculative(version: str, cases: Sequence[Mapping[str, Any]]) -> list[Result]:
    """What the version's engine configuration says: `AsyncEngineArgs.create_engine_config`, with its SpeculativeConfig.

    A case is {"argv": the arguments after the image, "models": {path in argv: a name of shapes.SHAPES},
    "env": {} (optional), "cards": [RTX_4090] (optional)}. A refusal is exit code 1 with the engine's exception in `error`.
    """
    folders = shapes.make(CACHE / "shapes")
    requests = []
    for case in cases:
        argv = list(case["argv"])
        for path, name in case["models"].items():
            argv = [word.replace(path, str(folders[name])) for word in argv]
        requests.append(
            {"stage": "engine", "argv": argv, "env": case.get("env", {}), "cards": case.get("cards", [RTX_4090])}
        )
    return ask(version, requests)


def flags(version: str) -> dict[str, Any]:
    """The version's options: flag -> {choices, default, takes}."""
    return ask(version, [{"stage": "flags"}])[0].values


# --- locking ------------------------------------------------------------------------------------------------------


def relock(say: Callable[[str], None]) -> None:
    """Write the lock: the wheels' hashes as the index gives them, RECORDs as found in the wheels."""
    lines = ["# Made by `parsers.py --relock`: version, wheel, sha256 of the wheel, sha256 of its RECORD."]
    with index() as (session, finder):
        links = {
            (engine, str(c.version)): c.link
            for engine, distribution in DISTRIBUTIONS.items()
            for c in finder.find_all_candidates(distribution)
            if c.link.is_wheel
        }
        for version in RELEASES:
            link = links[engine_of(version), version.rpartition("@")[2]]
            with remote(session, link, link.hash, engine_of(version)) as (archive, _):
                record = hashlib.sha256(record_of(archive)).hexdigest()
            lines.append(f"{version} {link.filename} {link.hash} {record}")
            say(lines[-1])
    LOCK.write_text("\n".join(lines) + "\n")


def main(words: Sequence[str]) -> int:
    """The command line; exits with the parser's own code."""
    cut = list(words).index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", nargs="?", choices=RELEASES)
    parser.add_argument("--fetch", action="store_true")
    parser.add_argument("--relock", action="store_true")
    parser.add_argument("--flags", metavar="VERSION", choices=RELEASES)
    options = parser.parse_args(words[:cut])
    if options.relock:
        relock(print)
    elif options.fetch:
        received = fetch(RELEASES, say=print)
        environment()
        print(f"{received / 1e6:.1f} MB received; {size(CACHE) / 1e6:.1f} MB in {CACHE}")
    elif options.flags:
        print(json.dumps(flags(options.flags), indent=1))
    elif options.version:
        result = parse(options.version, [words[cut + 1 :]])[0]
        sys.stderr.write(result.stderr)
        print(json.dumps(result.values, indent=1))
        return result.exit_code
    else:
        parser.error("name a version, --fetch, --flags or --relock")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
