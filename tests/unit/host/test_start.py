"""Following a unit, against a systemctl and a journalctl that play a start step by step."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from specrig.host import phases, start, units
from specrig.host.errors import HostError
from specrig.host.redact import redact

from .test_pull import Recorder

SYSTEMCTL = """#!{python}
import json, pathlib, sys
here = pathlib.Path(__file__).parent
calls = here / "calls"
argv = sys.argv[1:]
if argv[0] != "show":
    with calls.open("a") as out: print(*argv, file=out)
    sys.exit(0)
begun = calls.exists() and any(w.split()[0] in ("start", "restart") for w in calls.read_text().splitlines())
script = json.loads((here / "script").read_text())
step = here / "step"
at = int(step.read_text()) if step.exists() else 0
if begun: step.write_text(str(at + 1))
state = script[min(at + 1, len(script) - 1) if begun else 0]
for item in state["show"].items(): print("%s=%s" % item)
"""
JOURNALCTL = """#!{python}
import json, pathlib, sys
here = pathlib.Path(__file__).parent
step = here / "step"
at = int(step.read_text()) if step.exists() else 0
script = json.loads((here / "script").read_text())
lines = [line for state in script[: at + 1] for line in state.get("lines", [])]
after = next((int(a.split("=")[1]) for a in sys.argv if a.startswith("--after-cursor")), -1)
for n, (text, owner) in enumerate(lines):
    if n > after:
        print(json.dumps({"MESSAGE": text, "__CURSOR": str(n), "_PID": "7", "_SYSTEMD_INVOCATION_ID": owner}))
"""
UNIT = "specrig-chat.service"


def show(active: str, sub: str, restarts: int = 0, **more: Any) -> dict[str, str]:
    base = {"Id": UNIT, "LoadState": "loaded", "ActiveState": active, "SubState": sub, "NRestarts": str(restarts)}
    return {**base, "Result": "success", "InvocationID": "now", "UnitFileState": "enabled", **more}


INACTIVE = {"show": show("inactive", "dead")}


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(start, "POLL_S", 0.0)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for name, text in (("systemctl", SYSTEMCTL), ("journalctl", JOURNALCTL)):
        (tmp_path / name).write_text(text.replace("{python}", sys.executable))
        (tmp_path / name).chmod(0o755)

    def run(*script: dict[str, Any], **options: Any) -> tuple[dict[str, Any], list[str], Recorder]:
        (tmp_path / "script").write_text(json.dumps(script))
        progress = Recorder()
        result = start.start(UNIT, progress, **options)
        calls = tmp_path / "calls"
        return result, calls.read_text().splitlines() if calls.exists() else [], progress

    return run


def test_an_active_unit_is_left_alone(play: Any) -> None:
    result, calls, _ = play({"show": show("active", "running")}, enable=True)
    assert result["changed"] is False and calls == []


def test_check_says_what_would_happen(play: Any) -> None:
    assert play({"show": show("active", "running")}, check=True)[0]["changed"] is False
    result, calls, _ = play({"show": show("active", "running")}, check=True, restart=True)
    assert result["changed"] is True and calls == []
    assert play({"show": show("inactive", "dead", LoadState="not-found")}, check=True)[0]["changed"] is True


def test_phases_come_from_the_units_own_status(play: Any) -> None:
    result, calls, progress = play(
        INACTIVE,
        {"show": show("activating", "start", Job="7", StatusText="loading weights, 1/2 shards, about 0:40 left")},
        {"show": show("activating", "start", Job="7", StatusText="capturing graphs")},
        {"show": show("active", "running")},
    )
    assert result["changed"] is True and calls == [f"reset-failed {UNIT}", f"start --no-block {UNIT}"]
    phases = [(phase, message) for phase, _, _, message in progress.seen]
    assert ("loading weights", "1/2 shards, about 0:40 left") in phases
    assert ("capturing graphs", "activating/start") in phases


def test_active_with_a_waiting_job_is_not_the_end(play: Any) -> None:
    result, calls, _ = play(
        {"show": show("active", "running")},
        {"show": show("active", "running", Job="9")},
        {"show": show("activating", "start", Job="9")},
        {"show": show("active", "running")},
        restart=True,
    )
    assert result["changed"] is True and calls == [f"reset-failed {UNIT}", f"restart --no-block {UNIT}"]


def test_a_failure_brings_this_starts_lines_and_no_secret(play: Any) -> None:
    lines = [["an older start's line", "before"], *[[f"line {n}", "now"] for n in range(40)]]
    lines += [["non-default args: {'api_key': ['sk-verysecret', 'sk-second'], 'port': 8000}", "now"]]
    lines += [["Authorization: Bearer sk-verysecret", "now"], ["ValueError: K is 40", "now"]]
    with pytest.raises(HostError) as caught:
        play(INACTIVE, {"show": show("failed", "failed", Result="exit-code", ExecMainStatus="1"), "lines": lines})
    error = caught.value
    assert error.code == "START_FAILED" and "exit-code, exit status 1" in error.cause
    assert len(error.lines) == 30 and error.lines[-1] == "ValueError: K is 40"
    text = json.dumps(error.as_json())
    assert "sk-verysecret" not in text and "sk-second" not in text and "older start" not in text


def test_one_failed_try_is_waited_out_and_two_are_an_error(play: Any) -> None:
    waiting = {"show": show("activating", "auto-restart", 0, Result="exit-code")}
    again = {"show": show("activating", "start", 1)}
    assert play(INACTIVE, waiting, again, {"show": show("active", "running", 1)})[0]["restarts"] == 1


def test_two_failed_tries_are_an_error(play: Any) -> None:
    waiting = {"show": show("activating", "auto-restart", 0, Result="exit-code")}
    again = {"show": show("activating", "start", 1)}
    with pytest.raises(HostError) as caught:
        play(INACTIVE, waiting, again, {"show": show("activating", "auto-restart", 1, Result="oom-kill")})
    assert caught.value.code == "START_LOOP" and "oom-kill" in caught.value.cause


def test_a_restart_count_from_before_does_not_count(play: Any) -> None:
    before = {"show": show("active", "running", 5)}
    steps = [{"show": show("deactivating", "stop", 5, Job="1")}, {"show": show("activating", "start", 0, Job="1")}]
    assert play(before, *steps, {"show": show("active", "running", 0)}, restart=True)[0]["restarts"] == 0


def test_each_start_gets_a_new_budget(play: Any) -> None:
    _, calls, _ = play({"show": show("failed", "failed")}, {"show": show("active", "running")})
    assert calls == [f"reset-failed {UNIT}", f"start --no-block {UNIT}"]


def test_a_timeout_names_the_phase(play: Any) -> None:
    with pytest.raises(HostError) as caught:
        play(INACTIVE, {"show": show("activating", "start", Job="7", StatusText="warming up")}, timeout=0.2)
    assert caught.value.code == "START_TIMEOUT" and "warming up" in caught.value.cause


def test_a_unit_that_is_not_there(play: Any) -> None:
    with pytest.raises(HostError, match="START_NO_UNIT"):
        play({"show": show("inactive", "dead", LoadState="not-found")})
    with pytest.raises(HostError, match="START_NO_UNIT"):
        start.start("a; reboot", Recorder())


# As vLLM 0.32.0 wrote them on a CPU, shortened; the last ones as 0.1x writes them on a card.
LINES = """
- | (APIServer pid=9) WARNING 12-01 03:30:31 [vllm.py:1703] Enforce eager set, disabling torch.compile, CUDAGraphs, warmup.
- | (APIServer pid=9) WARNING 12-01 03:30:31 [vllm.py:1727] Inductor compilation was disabled by user settings
- | (APIServer pid=9) INFO 12-01 03:30:31 [compilation.py:317] Enabled custom fusions: norm_quant, act_quant
starting the engine | (EngineCore pid=26) INFO 12-01 03:30:46 [core.py:133] Initializing a V1 LLM engine (v0.32.0) warmup
loading weights | (Worker pid=37) INFO 12-01 03:30:57 [cpu_model_runner.py:68] Starting to load model /models/target...
sizing the KV cache | (EngineCore pid=26) INFO 12-01 03:30:59 [kv_cache_utils.py:2327] CPU KV cache size: 87,296 tokens
warming up | (EngineCore pid=26) INFO 12-01 03:31:01 [core.py:402] init engine (profile, create kv cache, warmup model) took 2
opening the port | INFO:     Application startup complete.
first token | specrig: warming, 55 s
- | (APIServer pid=9) INFO [loggers.py:335] Avg generation throughput: 0.1 tokens/s, GPU KV cache usage: 0.0%
- | INFO:     172.17.0.1:48836 - "GET /health HTTP/1.1" 200 OK
compiling | (EngineCore pid=26) INFO 12-01 03:30:59 [backends.py:540] Dynamo bytecode transform time: 8.70 s
capturing graphs | Capturing CUDA graph shapes: 100%|##########| 35/35 [00:20<00:00]
"""


@pytest.mark.parametrize("line", LINES.strip().splitlines())
def test_lines_of_a_real_start(line: str) -> None:
    wanted, _, text = line.partition(" | ")
    assert (phases.phase_of(text) or ("-", ""))[0] == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("token hf_abcdefghijkl used", "token *** used"),
        ("--api-key sk-1 --port 1", "--api-key *** --port 1"),
        ("--hf-token sk-1 --port 1", "--hf-token *** --port 1"),
        ("VLLM_API_KEY=abc", "VLLM_API_KEY=***"),
        ("by proxy http://me:p@ss@proxy:3128/x", "by proxy http://***@proxy:3128/x"),
        ("http://127.0.0.1:8000/a@b", "http://127.0.0.1:8000/a@b"),
        ("password: 'x y'", "password: *** y'"),
        ("Avg generation throughput: 12.0 tokens/s", "Avg generation throughput: 12.0 tokens/s"),
        ("num_speculative_tokens=5, max_tokens: 7", "num_speculative_tokens=5, max_tokens: 7"),
    ],
)
def test_redaction(text: str, wanted: str) -> None:
    assert redact(text) == wanted


def test_coloured_lines_are_read() -> None:
    assert units._message([27, 91, 51, 50, 109, 79, 75, 27, 91, 48, 109]) == "OK"


def test_waiting_for_another_to_start_is_not_its_own_time(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step takes 100 s: a wait of 1000, then a start of 200."""
    seconds = iter(range(0, 10**6, 50))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(seconds)))
    waits = {"show": show("activating", "start", StatusText="waiting for coder to start")}
    loads = {"show": show("activating", "start", StatusText="loading weights")}
    result, _, _ = play(INACTIVE, *[waits] * 10, loads, loads, {"show": show("active", "running")}, timeout=500)
    assert result["state"] == "active" and result["seconds"] >= 1000
    with pytest.raises(HostError, match="START_TIMEOUT"):
        play(INACTIVE, waits, *[loads] * 10, timeout=500)
