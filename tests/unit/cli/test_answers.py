"""What verbs share: `--json` everywhere, errors with a next step, one document of a run that changes things."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specrig import cli, runner
from specrig.console import CannotRun
from specrig.verbs import answers, gateway, locks, verify

STREAMS = {"rig demo", "rig test", "rig lab ssh"}  # these have no result but what they do


def leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    below = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    for action in below:
        for one in action.choices.values():
            yield from leaves(one)
    if not below:
        yield parser


def test_every_verb_with_a_result_has_json() -> None:
    without = {p.prog for p in leaves(cli.parser()) if "--json" not in p.format_help()}
    assert without == STREAMS


def test_what_is_required_is_all_that_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["switch"])
    assert capsys.readouterr().err.splitlines()[-1].endswith("the following arguments are required: SERVICE")


def recorded(outcomes: dict[str, dict[str, Any]], stats: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"plays": [{"tasks": [{"hosts": outcomes}]}], "stats": stats or {}}


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "hosts.yml").touch()
    monkeypatch.chdir(tmp_path)
    said: dict[str, Any] = {}
    monkeypatch.setattr(runner, "load_hosts", lambda *_, **__: {"gw": {}})
    monkeypatch.setattr(runner, "playbook_json", lambda *_: said)
    return said


def test_a_drain_that_can_not_be_says_code_cause_and_next(
    play: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    error = {"code": "GATEWAY_NO_RIG", "cause": "no rig 'nosuch' behind this gateway", "fix": "name one of these"}
    play |= recorded({"gw": {"failed": True, "msg": "…", "result": {"error": error}}})
    assert cli.main(["drain", "nosuch", "-i", "hosts.yml"]) == 1
    told = "gw: GATEWAY_NO_RIG: no rig 'nosuch' behind this gateway\n  next: name one of these\n"
    assert capsys.readouterr().out == told
    play |= recorded({"gw": {"unreachable": True, "msg": "no route to host"}})
    assert cli.main(["drain", "beta", "-i", "hosts.yml"]) == 2
    told = capsys.readouterr().out
    assert told.startswith("gw: UNREACHABLE: no route to host\n  next: ssh to gw")
    assert cli.main(["drain", "beta", "-i", "hosts.yml", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["gateways"]["gw"]["error"]["code"] == "UNREACHABLE"
    assert gateway.drained("gw", "beta", {"running": 2}, on=True) == [
        "gw: beta gets no new requests; 2 still run there"
    ]


def test_up_as_one_document(play: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    fine = {"ok": 9, "changed": 2, "failures": 0, "unreachable": 0, "skipped": 3}
    play |= recorded({"gw": {"changed": True}}, {"gw": fine})
    assert cli.main(["up", "-i", "hosts.yml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"hosts": {"gw": {k: v for k, v in fine.items() if k != "skipped"}}}
    play |= recorded({"gw": {"failed": True, "msg": "the disk is full"}}, {"gw": {**fine, "failures": 1}})
    assert cli.main(["up", "-i", "hosts.yml", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["hosts"]["gw"]["errors"][0]["cause"] == "the disk is full"
    refusals = [CannotRun("40 is more than 16", "k: 5", "K_TOO_LARGE"), CannotRun("a", "b", "PORT_CLASH")]
    said = "\n".join(map(str, refusals))
    play |= recorded({"gw": {"failed": True, "msg": said}}, {"gw": {**fine, "failures": 1}})
    assert cli.main(["up", "-i", "hosts.yml", "--json"]) == 1
    errors = json.loads(capsys.readouterr().out)["hosts"]["gw"]["errors"]
    assert errors == [refusal.as_json() for refusal in refusals]


@pytest.mark.parametrize(("ansible", "code"), [(0, 0), (2, 1), (4, 2)])
def test_up_says_with_its_exit_code_that_a_host_is_away(
    play: dict[str, Any], monkeypatch: pytest.MonkeyPatch, ansible: int, code: int
) -> None:
    monkeypatch.setattr(runner, "playbook", lambda *_: ansible)
    assert cli.main(["up", "-i", "hosts.yml"]) == code
    counts = {"ok": 1, "changed": 0, "failures": int(ansible == 2), "unreachable": int(ansible == 4)}
    play |= recorded({}, {"gw": counts})
    assert cli.main(["up", "-i", "hosts.yml", "--json"]) == code


def test_no_host_that_answers_is_not_a_host_that_falls_short() -> None:
    away: answers.Report = {"error": {"code": "UNREACHABLE"}}
    fine: answers.Report = {"units": []}
    assert answers.exit_code({"a": away, "b": away}, short=True) == 2
    assert answers.exit_code({"a": away, "b": fine}, short=True) == 1
    assert answers.exit_code({"a": fine}, short=False) == 0 == answers.exit_code({}, short=False)


def test_explain_as_a_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "port_clash", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["code"], told["level"]) == ("PORT_CLASH", "refusal") and told["fix"]
    assert cli.main(["explain", "PORT_CLASHES"]) == 2
    assert "did you mean PORT_CLASH?" in capsys.readouterr().err


def test_both_locks_are_read_and_written_alike(tmp_path: Path) -> None:
    for what, verb in (("models", "hold"), ("images", "run")):
        locks.save(tmp_path / what, what, {"a": {"x": 1}})
        assert (
            f"./rig {what} lock" in (tmp_path / what).read_text() and f"will {verb}." in (tmp_path / what).read_text()
        )
        assert locks.read(tmp_path / what, what) == {"a": {"x": 1}}


INVENTORY: dict[str, Any] = {
    "_meta": {"hostvars": {"alpha": {"rig_profile": "cpu_demo"}, "gw": {"rig_gateway": {"port": 9000}}}},
    "rigs": {"hosts": ["alpha"]},
}


def inventory(monkeypatch: pytest.MonkeyPatch, document: dict[str, Any]) -> None:
    done = subprocess.CompletedProcess([], 0, json.dumps(document), "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)


def test_a_gateways_variables_on_a_host_that_is_none_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "hosts.yml").touch()
    inventory(monkeypatch, INVENTORY)
    assert cli.main(["plan", "-i", str(tmp_path / "hosts.yml")]) == 2
    told = capsys.readouterr().err
    assert (
        told.startswith("GATEWAY_NOT_IN_GROUP: gw has rig_gateway, and the group `gateways`")
        and "under `gateways:`" in told
    )
    inventory(monkeypatch, INVENTORY | {"gateways": {"hosts": ["gw"]}})
    assert list(runner.load_hosts(tmp_path / "hosts.yml")) == ["alpha"]


REPORT = """<testsuites><testsuite>
<testcase classname="tests.host.docker.test_docker" name="test_a[ansible://alpha]"/>
<testcase classname="tests.host.docker.test_docker" name="test_b[ansible://alpha-2-x y]"><failure/></testcase>
<testcase classname="tests.host.docker.test_docker" name="test_c[ansible://alpha-p]"><skipped/></testcase>
</testsuite></testsuites>"""


def test_verify_checks_gateways_that_are_no_rigs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "hosts.yml").touch()
    ran: list[tuple[str, str]] = []
    away: dict[str, dict[str, Any]] = {}

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        if "pytest" not in command:
            document = {"rigs": {"hosts": ["alpha", "alpha-2"]}, "gateways": {"hosts": ["alpha", "gw"]}}
            plays = {
                "plays": [{"tasks": [{"hosts": {host: {"ping": "pong"} for host in command[1].split(",")} | away}]}]
            }
            said = plays if command[0].endswith("/ansible") else document
            return subprocess.CompletedProcess(command, 0, json.dumps(said), "")
        at = command.index("no:cacheprovider") + 1
        ran.append((command[at], command[-1]))
        if command[at] == "tests/host":
            Path(command[at + 1].partition("=")[2]).write_text(REPORT)
        return subprocess.CompletedProcess(command, int(command[at] == "tests/host"))

    monkeypatch.setattr(subprocess, "run", run)
    assert cli.main(["verify", "-i", str(tmp_path / "hosts.yml"), "--json"]) == 1
    assert ran == [
        ("tests/host", "--hosts=ansible://alpha,ansible://alpha-2"),
        ("tests/host/gateway", "--hosts=ansible://gw"),
    ]
    counts = json.loads(capsys.readouterr().out)["hosts"]
    assert counts["alpha"] == {"passed": 1, "skipped": 1, "failed": []}
    assert counts["alpha-2"]["failed"] == ["tests.host.docker.test_docker.test_b[ansible://alpha-2-x y]"]
    assert verify.run is not None and counts["gw"] == {"passed": 0, "skipped": 0, "failed": []}
    ran.clear()
    away |= {host: {"unreachable": True, "msg": "no route to host"} for host in ("alpha-2", "gw")}
    assert cli.main(["verify", "-i", str(tmp_path / "hosts.yml"), "--json"]) == 2
    assert ran == [("tests/host", "--hosts=ansible://alpha")], "who answers is checked"
    told = capsys.readouterr()
    assert "alpha-2: UNREACHABLE: no route to host\n  next: ssh to alpha-2" in told.err
    assert json.loads(told.out)["hosts"]["gw"]["error"]["code"] == "UNREACHABLE"


def test_help_installs_nothing(tmp_path: Path) -> None:
    """The front door with a Python that only says what it was asked."""
    for name in ("rig", "pyproject.toml", "requirements.yml", "requirements/run.lock", "requirements/dev.lock"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((runner.ROOT / name).read_bytes())
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho "$*" >>{tmp_path}/asked\nexec {sys.executable} -c ""\n')
    python.chmod(0o755)
    said = "cat requirements/run.lock requirements/run.lock pyproject.toml requirements.yml | cksum"
    stamp = subprocess.run(["sh", "-c", said], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    (tmp_path / ".venv/.run").write_text(stamp)
    for words in (["verify", "--help"], ["test", "-h"]):
        subprocess.run(["sh", "rig", *words], cwd=tmp_path, check=True)
    assert (tmp_path / "asked").read_text() == "-m specrig verify --help\n-m specrig test -h\n"
