"""The rig's own program beside a real engine on a real card: `PYTHONPATH=src python3 -m tests.gpu.host CASES.json CASE`.

There is no systemd and no Docker on such a machine, so the parts are called one by one: looking, the CUDA check, the memory gate,
phases, probe, acceptance. Records are JSON lines, as those of measure.py. Nothing here changes a setting of the card.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specrig.host import acceptance, arguments, gate, machine, phases, preflight, probe, ready
from specrig.host.errors import HostError
from tests.gpu import measure

METRICS = {
    "kind": "counters",
    "drafts": "vllm:spec_decode_num_drafts_total",
    "drafted": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
}
PROGRESS = ("vllm:iteration_tokens_total_count", "vllm:generation_tokens_total")
M = machine.Machine()


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """(seconds, result)."""
    begin = time.monotonic()
    found = work()
    return round(time.monotonic() - begin, 2), found


def verb(*words: str, stdin: str = "") -> dict[str, Any]:
    """A verb of the host program, as a rig runs it."""
    done = subprocess.run(
        [sys.executable, "-m", "specrig.host", *words], input=stdin, capture_output=True, text=True, check=False
    )
    lines = done.stdout.strip().splitlines()
    try:
        said = json.loads(lines[-1])
    except (ValueError, IndexError):
        said = {"stdout": done.stdout[-500:], "stderr": done.stderr[-500:]}
    return {"rc": done.returncode, "said": said}


def look() -> None:
    """The machine, its card, and what is refused."""
    measure.write("cuda_check", **verb("cuda-check"))
    wanted = {
        "cards": [{"title": "RTX 4090", "pci_ids": ["10de:2684"], "bar1_mib": 256}],
        "driver": {"source": "none", "min_version": "580"},
    }
    seconds, report = timed(lambda: preflight.preflight(json.dumps(wanted)))
    facts = report["facts"]
    measure.write(
        "preflight", seconds=seconds, codes=[f["code"] for f in report["findings"]], findings=report["findings"],
        gpus=facts.get("gpus"), driver=facts.get("driver"), keys=sorted(facts),
    )  # fmt: skip
    for watts in (500, 100_000):
        job = json.dumps({"state": "present", "cards": [{"gpu": "all", "watts": watts}], "mask_sleep": False})
        measure.write("gpu_tuning_check", watts=watts, **verb("gpu-tuning", "--check", "-", stdin=job))
    job = json.dumps({"fans": [{"gpu": "all", "curve": [[40, 30], [60, 50], [75, 80], [83, 100]]}]})
    measure.write("fan_curve_check", **verb("fan-curve", "--check", "-", stdin=job))


def ask_parser(case: dict[str, Any]) -> None:
    """The snippet that asks an image's parser, in this engine's environment."""
    serve = ["vllm", "serve"]
    good = ["/models/target", *case["argv"][1:]]
    for name, argv in {"planned": good, "misspelt": [*good, "--num-speculative-tokens", "5"]}.items():
        begin = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", arguments.SNIPPETS["vllm"], json.dumps(serve), *argv],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        seconds = round(time.monotonic() - begin, 1)
        measure.write("parser", argv=name, rc=done.returncode, seconds=seconds, stderr=done.stderr[-300:])


def follow(engine: measure.Engine, stop: threading.Event) -> list[tuple[float, str]]:
    """The phases that the log announces, with the second of each."""
    found: list[tuple[float, str]] = []
    begin, at = time.monotonic(), 0
    while not stop.is_set():
        text = engine.log.read_text(errors="replace")
        for line in text[at:].splitlines():
            phase = phases.phase_of(line)
            if phase and (not found or found[-1][1] != phase[0]):
                found.append((round(time.monotonic() - begin, 1), phase[0]))
        at = len(text)
        stop.wait(0.5)
    return found


def core_of(pid: int) -> int:
    """The process that drives the card: the child that calls itself EngineCore. Raises LookupError when there is none."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            if parent == pid and "EngineCore" in (path.parent / "cmdline").read_text():
                return int(path.parent.name)
        except (OSError, ValueError, IndexError):
            continue
    raise LookupError(f"process {pid} has no EngineCore")


def lives(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def health(url: str) -> int | str:
    """Status of /health, or why there is none."""
    try:
        return ready.call(url, "/health", timeout=5)[0]
    except OSError as error:
        return type(error).__name__


def until_free(needs: dict[str, int], limit: float) -> dict[str, Any]:
    """How long the gate waits, and its first and last words."""
    words: list[str] = []
    begin = time.monotonic()

    def pause(wait: float) -> bool:
        time.sleep(wait)
        return False

    left = gate.wait(needs, pause, words.append, time.monotonic, M, limit)
    return {"seconds": round(time.monotonic() - begin, 1), "first": words[:1], "last": words[-1:], "left": left}


def main(argv: list[str]) -> int:
    """All of it, in order."""
    cases = json.loads(Path(argv[0]).read_text())
    case = cases["cases"][argv[1]]
    measure.WORK.mkdir(parents=True, exist_ok=True)
    root = measure.make_models(cases["models"])
    look()
    ask_parser(case)
    engine = measure.Engine(argv[1], case, 0)
    url, model = f"http://127.0.0.1:{engine.port}", engine.model()
    needs = {"0": 100 * 1024}
    measure.write("gate_empty_card", **until_free(needs, 30))
    stop, said = threading.Event(), []
    engine.launch(root)
    follower = threading.Thread(target=lambda: said.extend(follow(engine, stop)))
    follower.start()
    try:
        answer: dict[str, Any] = ready.ready(url, model, 400)
    except HostError as error:
        answer = {"error": error.cause, "tail": engine.log.read_text(errors="replace")[-1500:]}
    stop.set()
    follower.join()
    measure.write("ready", answer=answer, log_phases=said)
    if "error" in answer:
        return 1

    def ask(limit: float) -> dict[str, Any]:
        seconds, (state, why) = timed(
            lambda: probe.probe(url, model, limit, None, "/v1/completions", metrics_path="/metrics", progress=PROGRESS)
        )
        return {"state": state, "why": why, "seconds": seconds, "health": health(url)}

    measure.write("probe_idle", **ask(10))
    page = engine.get("/metrics")[1]
    before, run = acceptance.read(page, METRICS), engine.decode(256, seed=5)
    after = acceptance.read(engine.get("/metrics")[1], METRICS)
    measure.write("acceptance", before=before._asdict(), after=after._asdict(), run=run)
    load = [threading.Thread(target=engine.decode, args=(2000, seed)) for seed in range(8)]
    for thread in load:
        thread.start()
    time.sleep(2)
    measure.write("probe_under_load", **ask(10))
    measure.write("probe_under_load_impatient", **ask(0.02))
    for thread in load:
        thread.join()
    core = core_of(engine.pid or 0)
    os.kill(core, signal.SIGSTOP)
    measure.write("probe_stopped_core", **ask(10))
    os.kill(core, signal.SIGCONT)
    measure.write("probe_continued_core", **ask(30))
    past: dict[str, Any] = {}
    measure.write("gate_engine_up", said=gate.lacking({"0": 139 * 1024}, M, past))
    # An API server that is killed alone: does its core keep the card's memory? (vLLM #55510)
    os.kill(engine.pid or 0, signal.SIGKILL)
    time.sleep(1)
    measure.write(
        "killed_server", core_lives=lives(core), gate=until_free({"0": 138 * 1024}, 45), core_lives_then=lives(core)
    )
    if lives(core):
        os.kill(core, signal.SIGKILL)
        measure.write("killed_core", gate=until_free({"0": 138 * 1024}, 30))
    measure.logs()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
