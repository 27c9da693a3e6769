"""The one program that specrig puts on a rig runs there, and only root can change it."""

from __future__ import annotations

import json
from typing import Any

from tests.host.conftest import HOST_PROGRAM, as_root, output


def test_program_runs_with_the_rigs_own_python(host: Any) -> None:
    assert output(host, HOST_PROGRAM, "--version").strip()
    assert json.loads(output(host, HOST_PROGRAM, "status").splitlines()[-1])["ok"]


def test_only_root_changes_it(host: Any) -> None:
    for path, mode in ((HOST_PROGRAM, "755"), (HOST_PROGRAM.rpartition("/")[0], "755")):
        assert output(host, "stat", "--format=%a %U %G", path).split() == [mode, "root", "root"]


def test_a_mistake_is_told_with_a_code_and_a_fix(host: Any) -> None:
    done = as_root(host, HOST_PROGRAM, "start", "no-such-unit.service")
    error = json.loads(done.stdout.splitlines()[-1])["error"]
    assert done.rc == 2 and error["code"] == "START_NO_UNIT" and error["fix"]
