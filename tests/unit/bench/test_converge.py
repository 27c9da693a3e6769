"""What is counted in a `-vvv` log. The lines are ansible-core 2.19's, recorded, and cut."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from specrig.bench import converge
from specrig.console import CannotRun

LOG = """\
PLAY [Rigs] ********************************************************************

TASK [Docker | packages] *******************************************************
task path: /r/roles/docker/tasks/install.yml:2
<192.0.2.10> ESTABLISH SSH CONNECTION FOR USER: rig
<192.0.2.10> SSH: EXEC ssh -C -o ControlMaster=auto -o ControlPersist=60s 192.0.2.10 '/bin/sh -c '"'"'echo ~ && sleep 0'"'"''
<192.0.2.10> (0, b'/home/rig\\n', b'')
<192.0.2.10> PUT /root/.ansible/tmp/ansible-local-1/tmpmk TO /home/rig/.ansible/tmp/ansible-tmp-1/AnsiballZ_apt.py
<192.0.2.10> SSH: EXEC sftp -b - -C -o ControlMaster=auto -o ControlPersist=60s '[192.0.2.10]'
<192.0.2.10> (0, b'sftp> put /root/.ansible/tmp/x TO /home\\n', b'')
<192.0.2.10> ESTABLISH SSH CONNECTION FOR USER: rig
<192.0.2.10> SSH: EXEC ssh -C -o ControlMaster=auto -o ControlPersist=60s -tt 192.0.2.10 '/bin/sh -c '"'"'python3'"'"''
<192.0.2.10> (0, b'{"stdout": "SSH: EXEC and TASK [ are words too"}', b'')
ok: [192.0.2.10] => {"changed": false, "msg": "TASK [quoted]"}

TASK [Docker | service] ********************************************************
ok: [192.0.2.10] => {"changed": false}

PLAY RECAP *********************************************************************
192.0.2.10                 : ok=2    changed=0    unreachable=0    failed=0    skipped=0    rescued=0    ignored=0
"""


def test_a_transfer_is_one_round_trip() -> None:
    assert converge.count(LOG) == {"tasks": 2, "round_trips": 3}


def play(monkeypatch: pytest.MonkeyPatch, log: str, code: int = 0) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, code, log, "")

    monkeypatch.setattr(subprocess, "run", run)


def test_both_kinds_are_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    play(monkeypatch, LOG)
    result = converge.converge(tmp_path / "hosts.yml", 3, tmp_path / "state")
    assert result["repeats"] == 3
    for kind in ("specrig", "stock"):
        assert (result[kind]["tasks"], result[kind]["round_trips"], len(result[kind]["wall_s_all"])) == (2, 3, 3)
    assert "roles_path" in (tmp_path / "state/stock.cfg").read_text()


@pytest.mark.parametrize(("log", "code"), [(LOG.replace("changed=0", "changed=1"), 0), (LOG, 2)])
def test_a_run_that_changes_or_fails_is_no_measurement(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, log: str, code: int
) -> None:
    play(monkeypatch, log, code)
    with pytest.raises(CannotRun) as caught:
        converge.converge(tmp_path / "hosts.yml", 1, tmp_path)
    assert caught.value.code == "NOT_CONVERGED" and "./rig up" in caught.value.fix


def test_no_run_is_no_median(tmp_path: Path) -> None:
    with pytest.raises(CannotRun, match="0 runs"):
        converge.converge(tmp_path / "hosts.yml", 0, tmp_path)
