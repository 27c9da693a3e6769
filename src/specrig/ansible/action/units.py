"""Keeps a systemd unit enabled and running with `ansible.builtin.systemd_service`, and asks systemd first.

    - name: Docker | service
      units:
        name: docker.service
        running: true             # false: only enabled, for a unit that cannot run yet

With `newer_than: [FILE…]` nothing is done: the task is "changed" when the unit has been running since before one of the files
was written, so that it can notify a handler. In check mode a unit that is not there yet counts as one that would be started.
"""

from __future__ import annotations

import shlex
from typing import Any

from ansible.plugins.action import ActionBase

from specrig.ansible.ask import ask


def as_wanted(properties: str, running: bool = True) -> bool:
    """Whether `systemctl show` output says enabled (or static: others start it), not masked, and (where that is wanted) running."""
    values = dict(line.partition("=")[::2] for line in properties.splitlines())
    return values.get("UnitFileState") in ("enabled", "static") and (
        not running or values.get("ActiveState") == "active"
    )


# systemd's monotonic clock is Python's: wall clocks jump, and whole seconds would miss a file written in the second of the start.
OLDER = (
    "import os,subprocess,sys,time;"
    "p=['systemctl','show','--property=ExecMainStartTimestampMonotonic','--value',sys.argv[1]];"
    "m=float(subprocess.run(p,capture_output=True,text=True).stdout.strip() or 0)/1e6;"
    "b=time.time()-time.monotonic()+m;"
    "print('older' if m and any(os.path.exists(f) and os.stat(f).st_mtime>b for f in sys.argv[2:]) else '')"
)


def older_script(unit: str, files: list[str]) -> str:
    """A shell script that prints `older` when `unit` runs since before one of `files` was written."""
    return shlex.join(["python3", "-c", OLDER, unit, *files])


class ActionModule(ActionBase):  # type: ignore[misc]
    """The plugin."""

    _supports_check_mode = True
    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Ask, and only where something is to do, act."""
        super().run(tmp, task_vars)
        _, args = self.validate_argument_spec(
            argument_spec={
                "name": {"type": "str", "required": True},
                "running": {"type": "bool", "default": True},
                "newer_than": {"type": "list", "elements": "str"},
            }
        )
        if args["newer_than"] is not None:
            return {"changed": ask(self, older_script(args["name"], args["newer_than"])).strip() == "older"}
        query = f"systemctl show --property=UnitFileState,ActiveState {shlex.quote(args['name'])}"
        if as_wanted(ask(self, query), args["running"]):
            return {"changed": False}
        if self._task.check_mode:
            return {"changed": True}
        options = {"name": args["name"], "enabled": True, "masked": False}
        options |= {"state": "started"} if args["running"] else {}
        result: dict[str, Any] = self._execute_module(
            module_name="ansible.builtin.systemd_service", module_args=options, task_vars=task_vars
        )
        return result
