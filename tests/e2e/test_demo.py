"""What must hold on a rig, on the demo's host with the real engine."""

from __future__ import annotations

import json
import re
import time

import pytest

from specrig.plan.catalog import profiles
from tests.e2e.conftest import KEY_FILE, UNIT, Rig

# The status of each `METHOD /path`, asked without a key.
STATUSES = (
    "import http.client,json,sys\n"
    "def ask(method,path):\n"
    " c=http.client.HTTPConnection('127.0.0.1',8000,timeout=60);c.request(method,path);return c.getresponse().status\n"
    "print(json.dumps({one:ask(*one.split()) for one in sys.argv[1:]}))"
)


def test_demo_shows_speculation_that_changes_no_word(demo_output: str) -> None:
    assert "greedy output: identical" in demo_output
    alpha = re.search(r"α = (\d\.\d+) \((\d+) of (\d+) drafted", demo_output)
    assert alpha and float(alpha[1]) > 0 and int(alpha[2]) > 0


def test_second_up_changes_nothing(rig: Rig) -> None:
    again = rig.rig("up")
    assert again.returncode == 0, again.stdout
    assert re.search(r"demo +: ok=[1-9]\d* +changed=0 +unreachable=0 +failed=0", again.stdout), again.stdout


def test_check_and_diff_are_empty(rig: Rig) -> None:
    check = rig.rig("up", "--check", "--diff")
    assert check.returncode == 0, check.stdout
    assert re.search(r"demo +: ok=[1-9]\d* +changed=0 ", check.stdout), check.stdout
    assert not re.search(r"^(---|\+\+\+) ", check.stdout, re.MULTILINE), check.stdout


def test_status_says_as_planned(rig: Rig) -> None:
    status = rig.rig("status")
    assert status.returncode == 0, status.stdout + status.stderr
    assert "as planned" in status.stdout and "answers" in status.stdout


def test_checks_of_the_host_pass(rig: Rig) -> None:
    verify = rig.rig("verify")
    assert verify.returncode == 0, verify.stdout
    assert re.search(r"\d+ passed", verify.stdout)


def test_no_page_but_health_without_the_key(rig: Rig) -> None:
    """Whatever the engine serves: the paths are its own list. A browser's preflight is no page."""
    status, listed = rig.get("/openapi.json", KEY_FILE)
    assert status == 200
    paths = [path.replace("{", "").replace("}", "") for path in json.loads(listed)["paths"]]
    assert len(paths) > 10
    asked = [f"{method} {path}" for path in ["/metrics", "/docs", *paths] for method in ("GET", "POST", "OPTIONS")]
    said = json.loads(rig.must("python3", "-c", STATUSES.replace("'", '"'), *asked))
    assert {one: code for one, code in said.items() if code != 401} == {
        "GET /health": 200,
        "POST /health": 405,
        "OPTIONS /health": 405,
    }
    preflight = ["-X", "OPTIONS", "-H", "Origin:http://editor.test", "-H", "Access-Control-Request-Method:GET"]
    assert rig.get("/metrics", "", *preflight) == (400, "Disallowed CORS origin"), (
        "the engine's own answer, and no page"
    )
    assert "vllm:" in rig.get("/metrics", KEY_FILE)[1]


def test_active_means_a_completion_works(rig: Rig) -> None:
    rig.must("systemctl", "restart", "--no-block", UNIT)
    rig.wait("is starting", lambda: rig.active() == "activating", 90)
    rig.wait("active again", lambda: rig.active() == "active")
    assert rig.complete() is not None, "active, but no completion"


def test_interrupted_between_writing_and_restarting(rig: Rig) -> None:
    """A unit that is newer than its process: status says so, and the next `up` restarts it although no file changes."""
    before = rig.engine_pid()
    rig.must("touch", f"/etc/systemd/system/{UNIT}")
    status = rig.rig("status")
    assert status.returncode == 1 and "settings from before" in status.stdout, status.stdout
    assert rig.rig("up").returncode == 0
    assert rig.engine_pid() != before
    assert rig.rig("status").returncode == 0


def test_killed_engine_comes_back(rig: Rig, seconds: dict[str, float]) -> None:
    """`kill -9` of the engine's first process | it comes back."""
    before = rig.engine_pid()
    rig.must("pkill", "-9", "-f", "[v]llm serve /models/target")
    seconds["test_killed_engine_comes_back"] = rig.wait(
        "a new engine completes",
        lambda: rig.active() == "active" and rig.complete() is not None and rig.engine_pid() != before,
    )


def test_docker_restarted_comes_back(rig: Rig, seconds: dict[str, float]) -> None:
    """Docker is restarted (an upgrade of its package does that) | the service comes back with it."""
    before, begin = rig.engine_pid(), time.monotonic()
    rig.must("systemctl", "restart", "docker.service")
    rig.wait(
        "the service completes",
        lambda: rig.active() == "active" and rig.complete() is not None and rig.engine_pid() != before,
    )
    seconds["test_docker_restarted_comes_back"] = time.monotonic() - begin


def test_stopped_leaves_nothing(rig: Rig) -> None:
    rig.must("systemctl", "stop", UNIT)
    assert rig.must("docker", "ps", "--all", "--quiet", "--filter", f"name={UNIT.removesuffix('.service')}") == ""
    assert rig.ask("pgrep", "-f", "[v]llm serve").stdout.strip() == ""
    rig.must("systemctl", "start", UNIT)
    assert rig.complete() is not None, "started, but no completion"


def test_docker_stopped_and_started_brings_it_back(rig: Rig, seconds: dict[str, float]) -> None:
    """Docker is stopped, and started again later | the service stops with it and comes back with it; the time is from Docker's start."""
    rig.must("systemctl", "stop", "docker.service", "docker.socket")
    assert rig.active() != "active"
    begin = time.monotonic()
    rig.must("systemctl", "start", "docker.service")
    rig.wait("the service completes", lambda: rig.active() == "active" and rig.complete() is not None)
    seconds["test_docker_stopped_and_started_brings_it_back"] = time.monotonic() - begin


def test_real_engine_refuses_the_pair_without_padding(rig: Rig) -> None:
    """The reason for the padded draft, in upstream's own words."""
    running = rig.inspect(UNIT.removesuffix(".service"))
    target = next(m["Source"] for m in running["Mounts"] if m["Destination"] == "/models/target")
    draft = rig.must(
        "find",
        "/srv/models/specrig-lab--tiny-draft",
        "-mindepth",
        "1",
        "-maxdepth",
        "1",
        "-type",
        "d",
        "-not",
        "-name",
        "*-pad*",
    )
    config = '{"method":"draft_model","model":"/models/draft","num_speculative_tokens":5}'
    refused = rig.ask(
        "docker", "run", "--rm", "--volume", f"{target}:/models/target:ro", "--volume", f"{draft}:/models/draft:ro",
        "--env", "HF_HUB_OFFLINE=1", "--env", "VLLM_CPU_KVCACHE_SPACE=1", running["Config"]["Image"],
        "/models/target", "--max-model-len", "2048", "--enforce-eager", "--speculative-config", config,
    )  # fmt: skip
    assert refused.returncode != 0
    said = re.search(
        r"Target and draft model should have the same vocabulary size[^\n]*", refused.stdout + refused.stderr
    )
    assert said, (refused.stdout + refused.stderr)[-2000:]
    print(f"\nupstream: {said[0][:160]}")
    assert "vocab_size=1152" in said[0] and "vocab_size=1024" in said[0]


def test_a_service_that_is_planned_no_more_makes_room(rig: Rig) -> None:
    """A second service comes and goes; the first one does not notice, and the second one's key is there when it comes back."""
    tiny = {key: value for key, value in profiles()["cpu_demo"].services[0].items() if key not in ("draft", "vocab")}
    both = {"rig_services": [{**tiny, "name": "second", "port": 8001, "method": "ngram"}]}
    up = rig.rig("up", "-e", json.dumps(both))
    assert up.returncode == 0, up.stdout
    first, second = rig.engine_pid(), "specrig-second.service"
    assert rig.must("systemctl", "is-active", second) == "active"
    key = rig.must("sha256sum", "/etc/specrig/services/second/api-key")
    status = rig.rig("status")
    assert status.returncode == 1 and f"{second} is not in the plan any more" in status.stdout, status.stdout
    check = rig.rig("up", "--check", "--diff")
    assert check.returncode == 0 and re.search(rf"^--- .*{second}", check.stdout, re.MULTILINE), check.stdout
    assert rig.must("systemctl", "is-active", second) == "active"
    up = rig.rig("up")
    assert up.returncode == 0 and "second is not in the plan any more: stopped and removed" in up.stdout, up.stdout
    assert rig.ask("systemctl", "cat", second).returncode != 0
    assert rig.must("docker", "ps", "--all", "--quiet", "--filter", "name=specrig-second") == ""
    assert rig.must("sha256sum", "/etc/specrig/services/second/api-key") == key
    assert rig.engine_pid() == first and rig.rig("status").returncode == 0
    assert "changed=0" in rig.rig("up").stdout


WAYS: dict[str, dict[str, object] | None] = {
    "padded draft": {},
    "heterogeneous vocabularies": {"vocab": "heterogeneous"},
    "ngram": {"method": "ngram", "draft": None},
    "off": None,
}


@pytest.fixture(scope="module")
def greedy_text(rig: Rig) -> str:
    """What greedy decoding says with the padded draft."""
    text = rig.complete("You may", 120)
    assert text
    return text


@pytest.mark.parametrize("way", WAYS)
def test_each_way_to_speculate_says_the_same(rig: Rig, greedy_text: str, way: str) -> None:
    """Drafted-token counters move when speculation is on, there are none when it is off, and no word changes."""
    service = WAYS[way]
    declared = {"rig_speculation": False} if service is None else {"rig_services": [{"name": "tiny", **service}]}
    up = rig.rig("up", "-e", json.dumps(declared))
    assert up.returncode == 0, up.stdout
    before = rig.metrics()
    assert rig.complete("You may", 120) == greedy_text
    moved = {name: value - before.get(name, 0) for name, value in rig.metrics().items()}
    drafted, accepted = moved.get("spec_decode_num_draft_tokens", 0), moved.get("spec_decode_num_accepted_tokens", 0)
    print(f"\n{way}: {accepted:.0f} of {drafted:.0f} drafted tokens accepted")
    assert (drafted > 0 and accepted > 0) if service is not None else not moved
