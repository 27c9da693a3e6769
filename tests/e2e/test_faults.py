"""What a rig lives through, on the demo's host with the real engine. Each test is a row of docs/evidence/faults.md.

A row is the test's docstring: the fault, then what must hold. With SPECRIG_EVIDENCE=1 a run writes the page anew, with the seconds
that it measured. The tests share one host and follow each other: each leaves the service ready. Failures count "in a row" until an engine
has been ready for ten minutes, so after every second one comes a test that starts the service as a person does.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable

import pytest

from specrig.verbs.demo import SERVICE
from tests.e2e.conftest import UNIT, Rig

CONTAINER = UNIT.removesuffix(".service")
STATE = f"/run/specrig/services/{SERVICE}/state.json"
DIAGNOSES = "/var/lib/specrig/diagnosis"
PROBE = {"interval_s": 4, "timeout_s": 10, "failures": 3}
PATIENT = 900  # of a start: the machine may be busy with other tests


@pytest.fixture(scope="module")
def quick(rig: Rig) -> Rig:
    """The demo's rig with a probe that does not make tests wait, and few restarts; declared as a person would."""
    declared = {"rig_services": [{"name": SERVICE, "probe": PROBE, "restarts": 2}]}
    up = rig.rig("up", "-e", json.dumps(declared))
    assert up.returncode == 0, up.stdout
    assert rig.active() == "active"
    return rig


def state(rig: Rig) -> dict[str, object]:
    """What the service says of itself."""
    found = rig.ask("cat", STATE)
    value: dict[str, object] = json.loads(found.stdout) if found.returncode == 0 and found.stdout else {}
    return value


def invocation(rig: Rig) -> str:
    """Identity of the unit's present start."""
    return rig.must("systemctl", "show", "--property=InvocationID", "--value", UNIT)


def engine(rig: Rig, name: str = "VLLM::EngineCore") -> str:
    """One of the engine's processes within the container, as the host numbers it."""
    listed = rig.must("docker", "top", CONTAINER, "-eo", "pid,args")
    found = [line.split()[0] for line in listed.splitlines() if name in line]
    assert found, listed
    return found[0]


def comes_back(rig: Rig, fault: Callable[[], object]) -> float:
    """Carry out `fault`; seconds until another start of the service completes, with nothing left of the old one."""
    old, begin = invocation(rig), time.monotonic()
    fault()
    rig.wait(
        "another start completes",
        lambda: rig.active() == "active" and invocation(rig) != old and rig.complete() is not None,
        PATIENT,
    )
    took = time.monotonic() - begin
    containers = rig.must("docker", "ps", "--all", "--quiet", "--filter", f"name={CONTAINER}").split()
    assert len(containers) == 1, "a container was left over"
    inside = rig.must("docker", "top", CONTAINER, "-eo", "pid").split()[1:]
    everywhere = rig.ask("pgrep", "--uid", "61000").stdout.split()
    assert set(everywhere) <= set(inside), "processes of the engine outside its container"
    return took


def diagnosis(rig: Rig, before: str) -> str:
    """The newest diagnosis, once it is another one than `before`; the key is not in it."""
    rig.wait("a diagnosis", lambda: newest_diagnosis(rig) != before, 120)
    newest = newest_diagnosis(rig)
    text = rig.must("cat", f"{DIAGNOSES}/{newest}")
    key = rig.must("cat", f"/etc/specrig/services/{SERVICE}/api-key")
    assert key not in text and len(text) < 250_000
    assert rig.must("stat", "--format=%a", f"{DIAGNOSES}/{newest}") == "640"
    return text


def newest_diagnosis(rig: Rig) -> str:
    """Name of the newest diagnosis; only so many are kept, so they are not counted."""
    return next(iter(rig.ask("ls", "-t", DIAGNOSES).stdout.split()), "")


def test_out_of_memory(quick: Rig, seconds: dict[str, float]) -> None:
    """Out of memory: the engine's largest process is killed | it comes back; nothing of the old one is left.

    Not run: the kernel's own choice. The lab's hosts have no memory controller, and the machine's memory is not theirs to fill. The signal is
    sent by hand."""
    seconds["test_out_of_memory"] = comes_back(quick, lambda: quick.must("kill", "-9", engine(quick, "VLLM::Worker")))


def test_docker_killed(quick: Rig, seconds: dict[str, float]) -> None:
    """`kill -9` of dockerd | Docker and the service come back; no second engine, nothing of the old one."""
    kill = ("systemctl", "kill", "--signal=KILL", "--kill-whom=main", "docker.service")
    seconds["test_docker_killed"] = comes_back(quick, lambda: quick.must(*kill))


def test_always_crashes(quick: Rig, seconds: dict[str, float]) -> None:
    """Every start fails (the draft's configuration is gone) | it gives up after the declared tries, `status` says why, a diagnosis is left."""
    before = newest_diagnosis(quick)
    draft = next(m["Source"] for m in quick.inspect(CONTAINER)["Mounts"] if m["Destination"] == "/models/draft")
    quick.must("mv", f"{draft}/config.json", f"{draft}/config.away")
    begin = time.monotonic()
    try:
        quick.ask("systemctl", "restart", "--no-block", UNIT)
        quick.wait("given up", lambda: quick.active() == "failed", PATIENT)
        took = time.monotonic() - begin
        shown = quick.must("systemctl", "show", "--property=NRestarts,ExecMainStatus,StatusText", UNIT)
        assert "NRestarts=2" in shown and "ExecMainStatus=3" in shown, shown
        said = quick.rig("status").stdout
        assert "gave up after 3 tries in a row; the last time the engine ended with exit status 1" in said, said
        assert f"{DIAGNOSES}/{SERVICE}-" in said, said
        assert "config.json" in diagnosis(quick, before)
        time.sleep(5)
        assert quick.active() == "failed", "it was tried again"
        assert quick.ask("docker", "ps", "--all", "--quiet", "--filter", f"name={CONTAINER}").stdout == ""
    finally:
        quick.must("mv", f"{draft}/config.away", f"{draft}/config.json")
        quick.must("systemctl", "restart", UNIT)  # a person's start is a new first try
    assert quick.complete() is not None
    seconds["test_always_crashes"] = took


def test_container_stopped(quick: Rig, seconds: dict[str, float]) -> None:
    """`docker stop` of the container, by somebody who does not know the unit | it comes back."""
    seconds["test_container_stopped"] = comes_back(quick, lambda: quick.must("docker", "stop", CONTAINER))


@pytest.mark.nightly
def test_main_process_killed(quick: Rig, seconds: dict[str, float]) -> None:
    """`kill -9` of the unit's main process | its container goes with it; it comes back."""
    kill = ("systemctl", "kill", "--signal=KILL", "--kill-whom=main", UNIT)
    seconds["test_main_process_killed"] = comes_back(quick, lambda: quick.must(*kill))


def test_hung_engine(quick: Rig, seconds: dict[str, float]) -> None:
    """The engine's core hangs (SIGSTOP): `/health` stays green | the probe sees it: degraded, a diagnosis, then a new start."""
    before, core, seen = newest_diagnosis(quick), engine(quick), []

    def hang() -> None:
        quick.must("kill", "-STOP", core)
        quick.wait("degraded", lambda: state(quick).get("phase") == "degraded", 120)
        health = quick.ask(
            "curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "http://127.0.0.1:8000/health", "-m", "5"
        )
        status = quick.ask("systemctl", "show", "--property=StatusText,ActiveState", UNIT).stdout
        seen.extend([health.stdout, status])

    took = comes_back(quick, hang)
    assert seen[0] == "200", "health was not green: this shows nothing"
    assert "StatusText=degraded, no token within 10 s" in seen[1] and "ActiveState=active" in seen[1]
    text = diagnosis(quick, before)
    # What a stopped process looks like, taken before it was killed.
    assert re.search(rf"^ *{core} +T", text, re.MULTILINE), text[:3000]
    seconds["test_hung_engine"] = took


def test_disk_full(quick: Rig, seconds: dict[str, float]) -> None:
    """No space left where the service keeps its state, cache and diagnoses | it starts and serves all the same.

    Not run: Docker's own storage full; in the lab that is the disk of the machine below."""
    image, places = quick.inspect(CONTAINER), [f"/var/lib/specrig/services/{SERVICE}", DIAGNOSES]
    places += [m["Source"] for m in image["Mounts"] if m["Destination"] == "/home/engine"]
    for place in places:
        quick.must("mount", "-t", "tmpfs", "-o", "size=16k,mode=0770", "tmpfs", place)
        quick.ask("dd", "if=/dev/zero", f"of={place}/full", "bs=4k")
    try:
        begin = time.monotonic()
        quick.must("systemctl", "restart", UNIT)
        took = time.monotonic() - begin
        assert quick.complete() is not None
        assert "100%" in quick.must("df", places[0])
        seconds["test_disk_full"] = took
    finally:
        for place in places:
            quick.must("umount", "--lazy", place)


def test_reboot(quick: Rig, seconds: dict[str, float]) -> None:
    """The host is rebooted | the service is back without anybody's help."""
    boot = quick.must("cat", "/proc/1/stat").split()[21]
    begin = time.monotonic()
    quick.ask("systemctl", "reboot")
    quick.wait("the host is another one", lambda: _boot(quick) not in ("", boot), 180)
    quick.wait("the service completes", lambda: quick.active() == "active" and quick.complete() is not None, PATIENT)
    seconds["test_reboot"] = time.monotonic() - begin


def _boot(rig: Rig) -> str:
    found = rig.ask("cat", "/proc/1/stat").stdout.split()
    return found[21] if len(found) > 21 else ""


def test_drop_in_of_a_person_stays(quick: Rig) -> None:
    """A person's drop-in | `up` neither removes nor replaces it, and finds nothing to change."""
    folder = f"/etc/systemd/system/{UNIT}.d"
    place = f"{folder}/mine.conf"
    quick.must("mkdir", "-p", folder)
    quick.must("sh", "-c", f'printf "[Service]\\nNice=3\\n" > {place}')
    quick.must("systemctl", "daemon-reload")
    try:
        up = quick.rig("up", "-e", json.dumps({"rig_services": [{"name": SERVICE, "probe": PROBE, "restarts": 2}]}))
        assert re.search(r" changed=0 ", up.stdout), up.stdout
        assert quick.must("cat", place) == "[Service]\nNice=3"
        assert "Nice=3" in quick.must("systemctl", "show", "--property=Nice", UNIT)
    finally:
        quick.must("rm", "-r", folder)
        quick.must("systemctl", "daemon-reload")


@pytest.mark.nightly
def test_two_on_one_slot(quick: Rig, seconds: dict[str, float]) -> None:
    """Two services declared on one slot, one of them exclusive | one runs; `switch` changes which, also at boot, and `up` leaves it so.

    On the CPU, which is what CPU services share; cards differ only in the plan's sum."""
    tiny = {"name": SERVICE, "probe": PROBE, "restarts": 2, "exclusive": True}
    [planned] = [s for s in json.loads(quick.must("cat", "/etc/specrig/plan.json"))["services"] if s["name"] == SERVICE]
    other = {
        "name": "other", "version": planned["version"], "image": planned["image"], "device": "cpu", "method": "ngram", "k": 3,
        "target": {"repo": "specrig-lab/tiny-target"}, "max_model_len": 2048, "max_num_seqs": 4, "served_name": SERVICE,
        "env": {"VLLM_CPU_KVCACHE_SPACE": "1"},
    }  # fmt: skip
    words = ["-e", json.dumps({"rig_services": [tiny, other]})]
    second = "specrig-other.service"

    def which() -> dict[str, tuple[str, str]]:
        units = (UNIT, second)
        return {
            unit: (
                quick.ask("systemctl", "is-active", unit).stdout.strip(),
                quick.ask("systemctl", "is-enabled", unit).stdout.strip(),
            )
            for unit in units
        }

    try:
        up = quick.rig("up", *words)
        assert up.returncode == 0, up.stdout
        assert which() == {UNIT: ("active", "enabled"), second: ("inactive", "disabled")}
        begin = time.monotonic()
        quick.must("/usr/local/lib/specrig/specrig-host", "choose", "other")
        took = time.monotonic() - begin
        assert which() == {UNIT: ("inactive", "disabled"), second: ("active", "enabled")}
        again = quick.rig("up", *words)
        assert re.search(r" changed=0 ", again.stdout), again.stdout
        assert which()[second] == ("active", "enabled")
        unknown = quick.rig("switch", "nothing")
        assert unknown.returncode == 2 and "UNKNOWN_SERVICE" in unknown.stderr + unknown.stdout
        quick.must("/usr/local/lib/specrig/specrig-host", "choose", SERVICE)
        assert which() == {UNIT: ("active", "enabled"), second: ("inactive", "disabled")}
        seconds["test_two_on_one_slot"] = took
    finally:
        quick.ask("systemctl", "disable", "--now", second)
        quick.ask("rm", f"/etc/systemd/system/{second}")
        quick.ask("systemctl", "daemon-reload")
        quick.rig("up")
