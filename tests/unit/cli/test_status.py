"""`./rig status`: what hosts answered, what falls short, and what a person reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specrig import cli, runner
from specrig.plan import HostPlan, plan_host
from specrig.verbs import answers, status
from tests.unit.plan.tiny import tiny, tiny_lock

UNIT = "specrig-tiny.service"
PLAN = plan_host("alpha", tiny(), tiny_lock())
ANSWER: dict[str, Any] = {
    "changed": False,
    "plan_hash": PLAN.as_json()["plan_hash"],
    "units": [
        {
            "unit": UNIT,
            "state": "active",
            "sub": "running",
            "since": "Tue 2026-12-01 03:00:00 UTC",
            "restarts": 0,
            "health": {"url": "http://127.0.0.1:8000", "ok": True, "status": 200},
        }
    ],
    "models": [{"path": "/srv/models/a--b/c", "bytes": 51_000_000, "derived": True}],
    "models_root": "/srv/models",
}
# As ansible.posix.json records the status playbook, less what differs from run to run.
RECORDED = {
    "plays": [
        {
            "play": {"name": "Status", "path": "playbooks/status.yml:3"},
            "tasks": [
                {
                    "task": {"name": "Status | ask the rig", "path": "playbooks/status.yml:8"},
                    "hosts": {
                        "alpha": {"_ansible_no_log": False, "action": "host_job", "changed": False, "result": ANSWER},
                        "beta": {
                            "_ansible_no_log": False,
                            "action": "host_job",
                            "changed": False,
                            "msg": 'Task failed: Data could not be sent to remote host "192.0.2.9". Make sure this host can '
                            "be reached over ssh: ssh: connect to host 192.0.2.9 port 22: No route to host",
                            "unreachable": True,
                        },
                        "gamma": {
                            "action": "host_job",
                            "changed": False,
                            "failed": True,
                            "msg": "/usr/local/lib/specrig/specrig-host is not on the host",
                        },
                    },
                }
            ],
        }
    ],
    "stats": {"alpha": {"ok": 1, "unreachable": 0}, "beta": {"ok": 0, "unreachable": 1}},
}


WEB = "specrig-webui.service"


def beside(**web: Any) -> dict[str, Any]:
    """The answer of a host with a web interface."""
    fine = {"unit": WEB, "there": True, "state": "active", "since": "today", "restarts": 0, "stale": False}
    return {**ANSWER, "webui": {**fine, "health": {"ok": True}, **web}}


def answer(**unit: Any) -> dict[str, Any]:
    return {**ANSWER, "units": [{**ANSWER["units"][0], **unit}]}


def test_each_hosts_own_answer() -> None:
    reports = answers.reports(RECORDED, ["delta"])
    assert reports["alpha"] == ANSWER
    assert reports["beta"]["error"]["code"] == "UNREACHABLE" and "No route to host" in reports["beta"]["error"]["cause"]
    assert "is not on the host" in reports["gamma"]["error"]["cause"]
    assert reports["delta"]["error"]["cause"] == "no answer"
    assert all(reports[host]["error"]["fix"] for host in ("beta", "gamma", "delta"))
    assert answers.reports({}) == {}


DRIFT = "what runs is not what is planned now"


@pytest.mark.parametrize(
    ("report", "short"),
    [
        (ANSWER, []),
        ({**ANSWER, "units": []}, [f"{UNIT} is planned and not there"]),
        ({}, [f"{UNIT} is planned and not there", DRIFT]),
        ({**ANSWER, "plan_hash": "another"}, [DRIFT]),
        (answer(state="failed", health=None), [f"{UNIT} is failed"]),
        (answer(state="activating"), [f"{UNIT} is activating"]),
        (
            answer(state="activating", status="loading weights, about 0:40 left"),
            [f"{UNIT} is activating: loading weights, about 0:40 left"],
        ),
        (
            answer(state="failed", health=None, status="failed, gave up after 6 tries", diagnosis="/d/t.txt"),
            [f"{UNIT} is failed: failed, gave up after 6 tries; why: sudo less /d/t.txt"],
        ),
        (
            answer(status="degraded, no token within 60 s, 1 of 3 times"),
            [f"{UNIT} is degraded, no token within 60 s, 1 of 3 times"],
        ),
        (answer(state="inactive", health=None, alternate=True), []),
        (answer(health={"ok": False, "cause": "refused"}), [f"{UNIT} does not answer"]),
        (answer(health=None), [f"{UNIT} does not answer"]),
        (
            {
                **ANSWER,
                "units": [*ANSWER["units"], {**ANSWER["units"][0], "unit": "specrig-old.service", "ours": True}],
            },
            ["specrig-old.service is not in the plan any more: ./rig up stops and removes it"],
        ),
        ({"error": {"code": "UNREACHABLE", "cause": "No route", "fix": ""}}, ["UNREACHABLE: No route"]),
        (beside(), []),
        (beside(there=False, state="inactive"), [f"{WEB} is planned and not there"]),
        (beside(state="failed"), [f"{WEB} is failed: journalctl -u {WEB}"]),
        (beside(health={"ok": False}), [f"{WEB} does not answer"]),
        (beside(stale=True), [f"{WEB} runs with settings from before they were written: ./rig up"]),
    ],
)
def test_shortfalls(report: dict[str, Any], short: list[str]) -> None:
    assert status.shortfalls(report, PLAN) == short


def test_what_a_person_reads() -> None:
    head, unit, model = status.describe("alpha", ANSWER, PLAN)
    assert head == "alpha: as planned"
    assert [word in unit for word in (UNIT, "active", " answers", "restarts 0", "03:00:00")] == [True] * 5
    assert model == "  /srv/models/a--b/c  0.05 GB  made here"
    assert f"{WEB}            active       answers" in status.describe("alpha", beside(), PLAN)[2]
    assert "does not answer" in status.describe("alpha", answer(health=None), PLAN)[1]
    assert status.describe("alpha", answer(status="ready, busy"), PLAN)[2] == "    ready, busy"
    chosen_not = answer(state="inactive", health=None, alternate=True)
    assert "not chosen" in status.describe("alpha", chosen_not, PLAN)[1]
    assert status.describe("alpha", {**ANSWER, "plan_hash": "0" * 64}, PLAN)[0] == (
        "alpha: the plan has changed since it was applied: ./rig up"
    )
    assert "no plan applied yet" in status.describe("alpha", {**ANSWER, "plan_hash": None}, PLAN)[0]
    error = {"code": "UNREACHABLE", "cause": "No route to host", "fix": "ssh"}
    assert status.describe("beta", {"error": error}, PLAN) == ["beta: UNREACHABLE: No route to host", "  next: ssh"]


def hosts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *names: str) -> list[str]:
    """An inventory of `names`, all with one plan; returns the words of `./rig status` on it."""
    plans: dict[str, HostPlan] = dict.fromkeys(names, PLAN)
    play = RECORDED["plays"][0]["tasks"][0]["hosts"]  # type: ignore[index]
    recorded = {"plays": [{"tasks": [{"hosts": {n: play[n] for n in names if n in play}}]}]}
    monkeypatch.setattr(status, "make_plans", lambda *_: plans)
    monkeypatch.setattr(runner, "playbook_json", lambda *_: recorded)
    (tmp_path / "hosts.yml").touch()
    return ["status", "-i", str(tmp_path / "hosts.yml")]


def test_all_well_is_0(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cli.main(hosts(monkeypatch, tmp_path, "alpha")) == 0


def test_a_host_that_does_not_answer_is_1_and_the_others_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = hosts(monkeypatch, tmp_path, "alpha", "beta", "delta")
    assert cli.main(words) == 1
    said = capsys.readouterr().out
    assert "alpha: as planned" in said and "No route to host" in said and "delta: NO_ANSWER: no answer" in said
    assert cli.main([*words, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)["hosts"]
    assert told["alpha"]["failures"] == [] and told["alpha"]["units"][0]["unit"] == UNIT
    assert "No route to host" in told["beta"]["failures"][0] and told["delta"]["failures"] == ["NO_ANSWER: no answer"]
