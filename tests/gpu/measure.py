"""Measures engines on a GPU. Standard library only; runs beside vLLM, without this repository's package.

    measure.py CASES.json STEP…      each step in order; what a failed engine would have done is left out

    up:A,B        start the engines, wait until each answers     launch:A,B    start them, do not wait
    memory:A      wait until A has sized its KV cache            ready:A,B     wait until each answers
    bench:SET:ROUNDS:TOKENS:A,B   one request at a time, the engines in turn; the order is reversed every other round
    trace:A       GPU and launch time of one short request (A must have a --profiler-config)
    down:A,B      stop them (`down:all`)                         note:TEXT     into the records

Engines outlive this program: a later call can go on with them. Records are JSON lines, below WORK and copied to $OUT.
"""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

WORK = Path(os.environ.get("WORK", "/tmp/specrig-gpu"))
OUT = Path(os.environ.get("OUT", str(WORK / "out")))
RECORDS = WORK / "records.jsonl"
SERVE = os.environ.get("SERVE", "python3 -m vllm.entrypoints.cli.main serve").split()
DEADLINE = time.monotonic() + float(os.environ.get("SECONDS_LEFT", "570"))
PROMPT_TOKENS = 256
FIRST_PORT = 18000
SPECIAL = [
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜begin▁of▁sentence｜>",
    "<|EOT|>",
    "<think>",
    "</think>",
]
FIRST_SPECIAL = 151643

# What the engine's log says -> (pattern, how to read it)
LOG: dict[str, str] = {
    "weights_gib": r"Model loading took ([\d.]+) GiB",
    "load_s": r"Model loading took [\d.]+ GiB memory and ([\d.]+) seconds",
    "kv_gib": r"Available KV cache memory: (-?[\d.]+) GiB",
    "kv_tokens": r"GPU KV cache size: ([\d,]+) tokens",
    "activation_gib": r"([\d.]+) GiB for peak activation",
    "other_gib": r"([\d.]+) GiB for non-torch memory",
    "graphs_gib": r"Graph capturing finished in \d+ secs, took ([\d.]+) GiB",
    "graphs_estimate_gib": r"Estimated CUDA graph memory: ([\d.]+) GiB",
    "graph_s": r"Graph capturing finished in (\d+) secs",
    "init_s": r"init engine .* took ([\d.]+) s",
    "compile_s": r"init engine .*\(compilation: ([\d.]+) s\)",
    "free_gib": r"Free memory on device \(([\d.]+)/",
    "card_gib": r"Free memory on device \([\d.]+/([\d.]+) GiB\)",
}
SAID: dict[str, str] = {
    "async_scheduling": r"Asynchronous scheduling is (enabled|disabled)",
    "attention": r"Using (\w+) attention backend",
    "kernel": r"Using (\w+) for AutoAWQ",
    "kv_kernel_error": r"(ValueError: .*)",
    "runner": r"(using the V1 model runner|Using V2 [Mm]odel [Rr]unner)",
}


def write(kind: str, **fields: Any) -> None:
    """One record, at once on disk and in $OUT."""
    line = json.dumps({"kind": kind, "at": round(time.time(), 3), **fields})
    with RECORDS.open("a") as file:
        file.write(line + "\n")
    OUT.mkdir(parents=True, exist_ok=True)
    shutil.copy(RECORDS, OUT / "records.jsonl")
    print(line[:400], flush=True)


def left() -> float:
    """Seconds until this call must end."""
    return DEADLINE - time.monotonic()


# ---------------------------------------------------------------- model folders


def tokenizer() -> dict[str, Any]:
    """A byte-level tokenizer of the real size: filler words up to the special tokens' ids."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {b: chr(b) for b in plain} | {b: chr(256 + n) for n, b in enumerate(sorted(set(range(256)) - set(plain)))}
    vocab = {letters[b]: b for b in range(256)} | {f"\u0120w{i}": i for i in range(256, FIRST_SPECIAL)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    bpe = {"type": "BPE", "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": ""}
    return {
        "version": "1.0",
        "added_tokens": [{"id": FIRST_SPECIAL + i, "content": s, **flags} for i, s in enumerate(SPECIAL)],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": bpe | {"fuse_unk": False, "byte_fallback": False, "vocab": vocab, "merges": []},
    }


def make_models(models: dict[str, dict[str, Any]]) -> Path:
    """Folders with config.json and an invented tokenizer; there are no weights."""
    root = WORK / "models"
    template = (
        "{{bos_token}}{% for m in messages %}{{'<｜User｜>' if m.role == 'user' else '<｜Assistant｜>'}}{{m.content}}"
        "{% endfor %}{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[3],
        "eos_token": SPECIAL[0],
        "pad_token": SPECIAL[0],
        "model_max_length": 131072,
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    words = json.dumps(tokenizer(), ensure_ascii=False)
    for name, config in models.items():
        folder = root / name
        if not folder.exists():
            folder.mkdir(parents=True)
            (folder / "config.json").write_text(json.dumps(config, indent=1))
            (folder / "tokenizer.json").write_text(words)
            (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return root


# ---------------------------------------------------------------- engines


def command(case: dict[str, Any], port: int, root: Path) -> list[str]:
    """The planned arguments, then the overlay; only the models' places and the port are this machine's."""
    places = {inside: str(root / name) for inside, name in case["models"].items()}

    def placed(word: str) -> str:
        for inside, outside in places.items():
            word = word.replace(inside, outside)
        return word

    return [placed(word) for word in [*case["argv"], *case["overlay"], "--port", str(port)]]


class Engine:
    """One engine, known by its folder below WORK."""

    def __init__(self, name: str, case: dict[str, Any], number: int) -> None:
        self.name, self.case = name, case
        self.port = FIRST_PORT + number
        self.log = WORK / "logs" / f"{name}.log"
        self.pid_file = WORK / "pids" / name

    @property
    def pid(self) -> int | None:
        return int(self.pid_file.read_text()) if self.pid_file.exists() else None

    def alive(self) -> bool:
        pid = self.pid
        if pid is None:
            return False
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
        with contextlib.suppress(OSError):
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        return False

    def launch(self, root: Path) -> None:
        for folder in (self.log.parent, self.pid_file.parent):
            folder.mkdir(parents=True, exist_ok=True)
        argv = command(self.case, self.port, root)
        env = {**os.environ, **self.case["env"]}
        with self.log.open("w") as log:
            process = subprocess.Popen(
                [*SERVE, *argv], env=env, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        self.pid_file.write_text(str(process.pid))
        write("launch", case=self.name, argv=argv, env=self.case["env"])

    def get(self, path: str, body: Any = None, timeout: float = 60) -> tuple[int, str]:
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            if body is None:
                link.request("GET", path)
            else:
                link.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            answer = link.getresponse()
            return answer.status, answer.read().decode(errors="replace")
        finally:
            link.close()

    def healthy(self) -> bool:
        try:
            return self.get("/health", timeout=2)[0] == 200
        except OSError:
            return False

    def wait(self, done: Any, what: str, limit: float) -> bool:
        end = min(time.monotonic() + limit, DEADLINE)
        while time.monotonic() < end:
            if done():
                return True
            if not self.alive():
                break
            time.sleep(0.3)
        write(
            "failed", case=self.name, what=what, alive=self.alive(), tail=self.log.read_text(errors="replace")[-3000:]
        )
        return False

    def facts(self) -> dict[str, Any]:
        text = self.log.read_text(errors="replace")
        found: dict[str, Any] = {}
        for key, pattern in LOG.items():
            if match := re.search(pattern, text):
                found[key] = float(match[1].replace(",", ""))
        for key, pattern in SAID.items():
            if said := re.findall(pattern, text):
                found[key] = sorted(set(said))
        return found

    def ready(self, limit: float) -> bool:
        begun = self.pid_file.stat().st_mtime
        if not self.wait(self.healthy, "no /health", limit):
            return False
        seconds = round(time.time() - begun, 1)
        body = {"model": self.model(), "messages": [{"role": "user", "content": "w300 w301"}], "max_tokens": 16}
        status, text = self.get("/v1/chat/completions", body | {"temperature": 0, "ignore_eos": True})
        usage = json.loads(text).get("usage") if status == 200 else text[:500]
        write("ready", case=self.name, seconds=seconds, chat_status=status, usage=usage, facts=self.facts())
        return status == 200

    def model(self) -> str:
        argv: list[str] = self.case["argv"]
        return argv[argv.index("--served-model-name") + 1]

    def counters(self) -> dict[str, float]:
        """Speculation counters, summed over labels."""
        found: dict[str, float] = {}
        for line in self.get("/metrics")[1].splitlines():
            if match := re.match(r"vllm:spec_decode_num_(drafts|draft_tokens|accepted_tokens)_total\{.*\} (\S+)", line):
                found[match[1]] = found.get(match[1], 0.0) + float(match[2])
        return found

    def decode(self, tokens: int, seed: int) -> dict[str, Any]:
        """One streamed request. t/s = (completion tokens - 1) / (last chunk - first chunk), tokens as the server counts."""
        prompt = random.Random(seed).sample(range(1000, 150000), PROMPT_TOKENS)
        body = {
            "model": self.model(),
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        before = self.counters()
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        start = time.perf_counter()
        link.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = link.getresponse()
        times: list[float] = []
        usage: dict[str, int] = {}
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            now = time.perf_counter()
            data = json.loads(line[6:])
            if data.get("choices"):
                times.append(now)
            usage = data.get("usage") or usage
        link.close()
        after = self.counters()
        seconds = times[-1] - times[0]
        done = int(usage["completion_tokens"])
        run = {
            "prompt_tokens": usage["prompt_tokens"],
            "completion_tokens": done,
            "seconds": round(seconds, 4),
            "first_s": round(times[0] - start, 4),
            "chunks": len(times),
            "tps": round((done - 1) / seconds, 2),
        }
        return run | {key: after[key] - before.get(key, 0.0) for key in after}

    def stop(self) -> None:
        pid = self.pid
        if pid is None:
            return
        for sign in (signal.SIGTERM, signal.SIGKILL):
            end = time.monotonic() + 8
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, sign)
                while self.alive() and time.monotonic() < end:
                    time.sleep(0.1)
        self.pid_file.unlink(missing_ok=True)


# ---------------------------------------------------------------- steps


def bench(engines: list[Engine], name: str, rounds: int, tokens: int) -> None:
    engines = [engine for engine in engines if engine.healthy()]
    for engine in engines:
        engine.decode(64, seed=1)  # warm: what is compiled at the first request
    for number in range(rounds):
        for engine in engines if number % 2 == 0 else engines[::-1]:
            if left() < 15:
                write("note", text=f"{name}: time is up in round {number}")
                return
            write("run", set=name, round=number, case=engine.name, **engine.decode(tokens, seed=100 + number))


def trace(engine: Engine) -> None:
    """Sum the GPU's kernels and the host's launches over one short request."""
    folder = WORK / "trace"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    engine.get("/start_profile", {}, timeout=120)
    run = engine.decode(64, seed=7)
    engine.get("/stop_profile", {}, timeout=300)
    for file in sorted(folder.rglob("*.json*")):
        with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as text:
            events = json.load(text).get("traceEvents", [])
        kernels = [e for e in events if e.get("ph") == "X" and e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
        host = [e for e in events if e.get("ph") == "X" and e.get("cat") in ("cuda_runtime", "cuda_driver")]
        if not kernels:
            continue
        names: dict[str, list[float]] = {}
        for event in kernels + host:
            names.setdefault(event["name"][:90], []).append(float(event["dur"]))
        spans = sorted((float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in kernels)
        busy, reached = 0.0, spans[0][0]
        for begin, end in spans:
            busy += max(0.0, end - max(begin, reached))
            reached = max(reached, end)
        top = sorted(names.items(), key=lambda item: -sum(item[1]))[:40]
        write(
            "trace",
            case=engine.name,
            file=file.name,
            run=run,
            gpu_busy_ms=round(busy / 1000, 3),
            span_ms=round((reached - spans[0][0]) / 1000, 3),
            kernels=len(kernels),
            host_calls=len(host),
            top=[[name, len(durations), round(sum(durations) / 1000, 3)] for name, durations in top],
        )


def machine() -> None:
    query = "name,driver_version,memory.total,memory.used,clocks.sm,clocks.mem,power.limit,ecc.mode.current,mig.mode.current"
    smi = subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    said = "import torch, transformers, triton, vllm; print(torch.__version__, transformers.__version__, triton.__version__, vllm.__version__)"
    versions = subprocess.run(["python3", "-c", said], capture_output=True, text=True, check=False)
    cpu = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    write(
        "machine",
        nvidia_smi=smi.stdout.strip(),
        torch_transformers_triton_vllm=versions.stdout.strip().splitlines()[-1:],
        python=sys.version.split()[0],
        cpu=cpu[:1],
        cores=os.cpu_count(),
        kernel=os.uname().release,
    )


def logs() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    if (WORK / "logs").exists():
        with tarfile.open(OUT / "logs.tar.gz", "w:gz") as archive:
            archive.add(WORK / "logs", "logs")


def main(argv: list[str]) -> int:
    """Run the steps; the exit status says only whether the program itself ran."""
    WORK.mkdir(parents=True, exist_ok=True)
    document = json.loads(Path(argv[0]).read_text())
    root = make_models(document["models"])
    everyone = {n: Engine(n, case, i) for i, (n, case) in enumerate(document["cases"].items())}
    for step in argv[1:]:
        verb, _, rest = step.partition(":")
        if left() < 12:
            write("note", text=f"no time left for {step}")
            continue
        write("step", step=step, left_s=round(left()))
        try:
            if verb == "machine":
                machine()
            elif verb == "note":
                write("note", text=rest)
            elif verb == "bench":
                name, rounds, tokens, names = rest.split(":")
                bench([everyone[n] for n in names.split(",")], name, int(rounds), int(tokens))
            else:
                chosen = everyone if rest == "all" else {n: everyone[n] for n in rest.split(",")}
                for engine in chosen.values():
                    if verb in ("up", "launch"):
                        engine.launch(root)
                    elif verb == "memory":
                        engine.wait(lambda e=engine: "kv_gib" in e.facts(), "no KV cache", 300)
                    elif verb == "trace":
                        trace(engine)
                    elif verb == "down":
                        engine.stop()
                if verb in ("up", "ready"):
                    for engine in chosen.values():
                        engine.ready(300)
        except Exception as error:  # one engine's trouble must not cost the others' time
            write("error", step=step, error=repr(error))
        logs()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
