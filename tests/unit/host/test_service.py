"""A service's main process with an engine that is a small program, systemd's socket and a `docker` that only stops it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specrig.host import acceptance, gate, service, turns, units
from specrig.host.service import FAILED, GAVE_UP, REFUSED, STOPPED, Service, Settings
from specrig.plan.dialects import dialect

KEY = "k-0123456789abcdef"
FIXTURES = Path(__file__).with_name("fixtures")
# Plays an engine; `mode` (a file) is read at each request: ok, hang, frozen (its health page too), busy, queue (its turn comes late), wrong.
ENGINE = """
import http.server, json, os, pathlib, sys, time
here = pathlib.Path(sys.argv[1])
for line in sys.argv[3:]:
    print(line, flush=True)
    if line.startswith("exit"): sys.exit(int(line.split()[1]))
(here / "pid").write_text(str(os.getpid()))
count = 0
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args): pass
    def say(self, status, text):
        self.send_response(status); self.end_headers(); self.wfile.write(text.encode())
    def do_GET(self):
        global count
        if self.path == "/health":
            if (here / "mode").read_text() == "frozen": time.sleep(30)
            return self.say(200, "")
        count += (here / "mode").read_text() == "busy"
        self.say(200, "llamacpp:tokens_predicted_total 7\\nllamacpp:n_decode_total %d\\nllamacpp:requests_processing 1\\n" % count)
    def do_POST(self):
        mode = (here / "mode").read_text()
        if self.headers["Authorization"] != "Bearer KEY": return self.say(401, "")
        if mode in ("hang", "busy", "frozen"): time.sleep(30)
        if mode == "queue":
            time.sleep(1)
            (here / "turn").touch()
        if mode == "wrong": return self.say(500, "boom")
        self.say(200, json.dumps({"usage": {"completion_tokens": 1}}))
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
""".replace("KEY", KEY)
DOCKER = """#!{python}
import os, pathlib, signal, sys
here = pathlib.Path(__file__).parent
with (here / "calls").open("a") as out: print(*[pathlib.Path(sys.argv[0]).name, *sys.argv[1:]], file=out)
if sys.argv[1] == "stop": os.kill(int((here / "pid").read_text()), signal.SIGKILL)
"""


class Stage:
    """One service on a stage of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        with socket.socket() as probe_:
            probe_.bind(("127.0.0.1", 0))
            self.port = probe_.getsockname()[1]
        self.said: list[str] = []
        self.seen = threading.Condition()
        self.mode("ok")
        (directory / "key").write_text(KEY + "\n")
        (directory / "engine.py").write_text(ENGINE)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(directory / "notify"))
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):  # closed at the end
            while data := self.socket.recv(4096):
                with self.seen:
                    self.said += data.decode().splitlines()
                    self.seen.notify_all()

    def mode(self, name: str) -> None:
        (self.directory / "mode").write_text(name)

    def wait(self, what: str) -> None:
        with self.seen:
            assert self.seen.wait_for(lambda: any(what in line for line in self.said), 20), (what, self.said)

    def until(self, true: Callable[[], bool]) -> None:
        end = time.monotonic() + 20
        while not true():
            assert time.monotonic() < end
            time.sleep(0.02)

    def service(self, *lines: str, **more: Any) -> Service:
        command = [sys.executable, str(self.directory / "engine.py"), str(self.directory), str(self.port), *lines]
        settings: dict[str, Any] = {
            "name": "tiny", "container": "specrig-tiny", "url": f"http://127.0.0.1:{self.port}", "model": "m",
            "command": command, "key_file": self.directory / "key", "metrics_path": "/metrics", "start_timeout": 20,
            "progress": dialect("llama_cpp", "b11434").progress,
            "stop_timeout": 5, "probe_interval": 0.1, "probe_timeout": 0.3, "plan_key": "p",
        }  # fmt: skip
        return Service(Settings(**{**settings, **more}))

    def play(self, one: Service, *steps: Callable[[], None], stop: bool = True) -> int:
        """Run the service to its end; `steps` one after the other meanwhile, then stop it."""

        failed: list[BaseException] = []

        def beside() -> None:
            try:
                for step in steps:
                    step()
            except BaseException as error:
                failed.append(error)
            if stop or failed:
                one.stop.set()

        other = threading.Thread(target=beside)
        other.start()
        status = one.run()
        other.join()
        if failed:
            raise failed[0]
        return status

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / "run/state.json").read_text())
        return found

    def calls(self) -> str:
        path = self.directory / "calls"
        return path.read_text() if path.exists() else ""


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(service, "TICK_S", 0.02)
    monkeypatch.setattr(service, "DELAYS_S", (0.05,))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no-docker.sock")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    for variable, name in (("RUNTIME_DIRECTORY", "run"), ("STATE_DIRECTORY", "state")):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(variable, str(tmp_path / name))
    monkeypatch.setattr(turns, "DIRECTORY", tmp_path / "cards")
    for tool in ("docker", "systemctl"):
        (tmp_path / tool).write_text(DOCKER.replace("{python}", sys.executable))
        (tmp_path / tool).chmod(0o755)
    one = Stage(tmp_path)
    yield one
    one.socket.close()


def test_started_is_a_completion_and_stopped_leaves_nothing(stage: Stage) -> None:
    status = stage.play(stage.service("INFO Starting to load model /models/target"), lambda: stage.wait("READY=1"))
    assert status == STOPPED and "docker stop --time 5 specrig-tiny" in stage.calls()
    order = [line for line in stage.said if line.startswith(("STATUS=", "READY", "STOPPING"))]
    assert order == [
        "STATUS=starting the engine", "STATUS=loading weights", "STATUS=warming, first token", "STATUS=ready",
        "READY=1", "STOPPING=1", "STATUS=stopping",
    ]  # fmt: skip
    assert any(line.startswith("EXTEND_TIMEOUT_USEC=") for line in stage.said) and "WATCHDOG=1" in stage.said


def test_no_time_is_foretold_before_a_first_start(stage: Stage) -> None:
    stage.play(stage.service("Starting to load model"), lambda: stage.wait("READY=1"))
    assert not [line for line in stage.said if "left" in line]
    history = json.loads((stage.directory / "state/start.json").read_text())
    assert [name for name, _ in history["phases"]] == ["starting the engine", "loading weights", "warming"]
    # As if that start had taken long: the next one of the same plan says how long, the one of another plan does not.
    history |= {"seconds": 100, "phases": [["starting the engine", 0], ["loading weights", 20], ["warming", 90]]}
    (stage.directory / "state/start.json").write_text(json.dumps(history))
    stage.said.clear()
    stage.play(
        stage.service("Starting to load model"),
        lambda: stage.wait("loading weights, about 1:20 left"),
        lambda: stage.wait("READY=1"),
    )
    (stage.directory / "state/start.json").write_text(json.dumps(history))
    stage.said.clear()
    stage.play(stage.service("Starting to load model", plan_key="other"), lambda: stage.wait("READY=1"))
    assert not [line for line in stage.said if "left" in line]


def test_arguments_that_the_engine_refuses_are_not_tried_again(stage: Stage) -> None:
    assert stage.play(stage.service("usage: …", "exit 2"), stop=False) == REFUSED
    assert "will not do better" in stage.state()["detail"]


NO = ("error: invalid argument: ", "error while handling argument ")


@pytest.mark.parametrize(
    "line", ["error: invalid argument: --bogus", 'error while handling argument "--parallel": stoi']
)
def test_an_engine_whose_exit_status_does_not_tell_is_understood_by_its_words(stage: Stage, line: str) -> None:
    assert stage.play(stage.service("build: 1", line, "exit 1", refused_words=NO), stop=False) == REFUSED
    assert stage.state()["detail"].endswith(line)


def test_other_words_of_it_are_no_refusal(stage: Stage) -> None:
    lines = ["srv error: invalid argument: x", "error: failed to load model", "exit 1"]
    assert stage.play(stage.service(*lines, refused_words=NO), stop=False) == FAILED
    assert stage.play(stage.service(f"{NO[0]}--bogus", "exit 1"), stop=False) == FAILED, "not this engine's words"


def test_a_key_or_a_name_that_the_engine_does_not_know_is_not_tried_again(stage: Stage) -> None:
    (stage.directory / "key").write_text("another-key-entirely")
    assert stage.play(stage.service(), stop=False) == REFUSED
    assert "refused the API key" in stage.state()["detail"] and "docker stop" in stage.calls()


def test_an_engine_that_always_ends_is_given_up_with_its_cause(stage: Stage) -> None:
    begin = time.monotonic()
    ends = [stage.play(stage.service("Starting to load model", "exit 1", restarts=2), stop=False) for _ in range(3)]
    assert ends == [FAILED, FAILED, GAVE_UP] and time.monotonic() - begin >= 2 * 0.05
    said = stage.state()["detail"]
    assert (
        said
        == "gave up after 3 tries in a row; the last time the engine ended with exit status 1 while loading weights"
    )
    assert any("try 3 of 3 in 0:00: the engine ended with exit status 1" in line for line in stage.said)


def test_a_persons_start_is_a_first_try(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    (stage.directory / "run/tries.json").write_text(json.dumps({"tries": 5, "cause": "x"}))
    monkeypatch.setenv("INVOCATION_ID", "1")
    monkeypatch.setattr(units, "show", lambda unit: [{"NRestarts": "0"}])
    assert stage.play(stage.service("exit 1"), stop=False) == FAILED
    assert stage.state()["tries"] == 1


def test_what_was_ready_for_long_has_not_failed_in_a_row(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "STEADY_S", 0.1)
    (stage.directory / "run/tries.json").write_text(json.dumps({"tries": 5, "cause": "x"}))
    stage.play(stage.service(), lambda: stage.wait("READY=1"), lambda: time.sleep(0.5))
    assert json.loads((stage.directory / "run/tries.json").read_text()) == {}


def test_a_hung_engine_is_degraded_then_looked_at_then_killed(stage: Stage) -> None:
    status = stage.play(
        stage.service(probe_failures=2), lambda: stage.wait("READY=1"), lambda: stage.mode("hang"), stop=False
    )
    assert status == FAILED
    degraded = [line for line in stage.said if line.startswith("STATUS=degraded")]
    assert degraded == [f"STATUS=degraded, no token within 0 s, {n} of 2 times" for n in (1, 2)]
    assert stage.calls().splitlines() == [
        "systemctl start specrig-diagnosis@tiny.service",
        "docker stop --time 5 specrig-tiny",
    ]


def test_one_bad_answer_is_not_the_end(stage: Stage) -> None:
    one = stage.service(probe_failures=3)
    steps = [
        lambda: stage.wait("READY=1"),
        lambda: stage.mode("wrong"),
        lambda: stage.wait("1 of 3"),
        lambda: stage.mode("ok"),
    ]

    def ready_again() -> None:
        with stage.seen:
            assert stage.seen.wait_for(
                lambda: stage.said[-1:] == ["STATUS=ready"] or "STATUS=ready" in stage.said[-2:], 20
            )

    assert stage.play(one, *steps, ready_again) == STOPPED


def test_a_busy_engine_is_not_hung(stage: Stage) -> None:
    """llama.cpp counts the tokens of an answer when it ends; until then its decodes move."""
    one = stage.service(probe_failures=1)
    steps = [lambda: stage.wait("READY=1"), lambda: stage.mode("busy"), lambda: stage.wait("ready, busy")]
    assert stage.play(one, *steps) == STOPPED
    assert not [line for line in stage.said if "degraded" in line]


def test_an_engine_that_dies_later_is_a_failure(stage: Stage) -> None:
    def kill() -> None:
        os.kill(int((stage.directory / "pid").read_text()), signal.SIGKILL)

    assert stage.play(stage.service(), lambda: stage.wait("READY=1"), kill, stop=False) == FAILED
    assert stage.state()["last_failure"] == "the engine ended with exit status -9"


def test_a_start_that_takes_too_long_ends(stage: Stage) -> None:
    stage.mode("wrong")
    assert stage.play(stage.service(start_timeout=3), stop=False) == FAILED
    assert "was not ready after 3 s, while warming" in stage.state()["detail"]


def test_a_full_disk_does_not_end_it(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(service, "write_json", full)
    assert stage.play(stage.service(), lambda: stage.wait("READY=1"), lambda: time.sleep(0.3)) == STOPPED


def test_a_clock_that_jumps_changes_nothing(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = time.time, iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: real() + 86_400 * (-1) ** next(calls))
    one = stage.service(probe_failures=1)
    assert stage.play(one, lambda: stage.wait("READY=1"), lambda: time.sleep(0.5)) == STOPPED
    assert not [line for line in stage.said if "degraded" in line]


def test_stopped_while_it_waits(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "DELAYS_S", (30.0,))
    (stage.directory / "run/tries.json").write_text(json.dumps({"tries": 1, "cause": "x"}))
    assert stage.play(stage.service(), lambda: stage.wait("waiting, try 2 of 6")) == STOPPED
    assert not (stage.directory / "pid").exists(), "an engine was started"


@pytest.mark.parametrize(
    ("engine", "version", "page"),
    [("vllm", "0.26.0", "vllm-0.26.0-metrics.txt"), ("llama_cpp", "b11434", "llama-cpp-b11434-metrics.txt")],
)
def test_what_moves_while_an_engine_works_is_on_its_metrics_page(engine: str, version: str, page: str) -> None:
    """As recorded from the real ones."""
    names = dialect(engine, version).progress
    assert names and set(names) <= set(acceptance.samples((FIXTURES / page).read_text()))


def test_who_waits_for_others_long_answer_is_not_hung(stage: Stage) -> None:
    """An engine without counters: the probe keeps its place in the queue, longer than its time, and gets its token."""
    one = stage.service(probe_failures=1, probe_timeout=0.2, patience=30, progress=())
    steps = [
        lambda: stage.wait("READY=1"),
        lambda: stage.mode("queue"),
        lambda: stage.until(lambda: (stage.directory / "turn").exists()),
        lambda: time.sleep(0.3),
    ]
    assert stage.play(one, *steps) == STOPPED
    assert not [line for line in stage.said if "degraded" in line]


def test_an_engine_without_counters_is_hung_when_its_time_is_over(stage: Stage) -> None:
    one = stage.service(probe_failures=3, probe_timeout=0.2, patience=1, progress=())
    assert stage.play(one, lambda: stage.wait("READY=1"), lambda: stage.mode("hang"), stop=False) == FAILED
    assert stage.state()["last_failure"] == "the engine gave no token: no token within 1 s"


def test_an_engine_whose_health_page_hangs_too_has_no_such_time(stage: Stage) -> None:
    one = stage.service(probe_failures=2, probe_timeout=0.2, patience=300, progress=())
    assert stage.play(one, lambda: stage.wait("READY=1"), lambda: stage.mode("frozen"), stop=False) == FAILED
    assert "nor /health: timed out" in stage.state()["last_failure"]


@pytest.fixture
def other(stage: Stage) -> Iterator[subprocess.Popen[str]]:
    """Another service's process that is starting on card 1."""
    code = "import sys; from specrig.host import turns; from pathlib import Path; turns.DIRECTORY = Path(sys.argv[1])"
    code += "; held = turns.take(['1'], 'coder', print, print); print('held', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(turns.DIRECTORY)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as one:
        assert one.stdout is not None and one.stdout.readline() == "held\n"
        yield one
        one.kill()


def free(*cards: str) -> None:
    """Another service gets these cards soon."""
    until = time.monotonic() + 5

    def pause(_: float) -> None:
        assert time.monotonic() < until, "still held"
        time.sleep(0.05)

    turns.take(cards, "third", pause, lambda _: None).close()


def test_services_that_share_a_card_start_one_after_the_other(
    stage: Stage, other: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "wait", lambda *_: "")
    monkeypatch.setattr(service, "BEAT_S", 0.2)
    monkeypatch.setattr(turns, "POLL_S", 0.1)

    def waits() -> None:
        stage.wait("STATUS=waiting for coder to start")
        time.sleep(0.8)
        assert not (stage.directory / "pid").exists(), "an engine was started beside the other"
        assert sum(line.startswith("EXTEND_TIMEOUT_USEC=") for line in stage.said) >= 2, "systemd would lose patience"
        other.kill()  # whatever ends it

    one = stage.service(vram={"1": 1, "0": 1})
    assert stage.play(one, waits, lambda: stage.wait("READY=1"), lambda: free("0", "1")) == STOPPED


def test_stopped_while_it_waits_for_another(stage: Stage, other: subprocess.Popen[str]) -> None:
    one = stage.service(vram={"0": 1, "1": 1, "2": 1})
    assert stage.play(one, lambda: stage.wait("waiting for coder to start")) == STOPPED
    assert not (stage.directory / "pid").exists()
    free("0", "2")  # it holds nothing any more


def test_a_failed_start_gives_the_cards_back(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "wait", lambda *_: "no room")
    assert stage.play(stage.service(vram={"0": 1}), stop=False) == FAILED
    free("0")


def test_without_a_place_for_the_locks_it_starts(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "wait", lambda *_: "")
    monkeypatch.setattr(turns, "DIRECTORY", stage.directory / "key/no-directory")
    assert stage.play(stage.service(vram={"0": 1}), lambda: stage.wait("READY=1")) == STOPPED
