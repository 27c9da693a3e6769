"""Keeps a systemd unit enabled and running with `ansible.builtin.systemd_service`, and asks systemd first.

    - name: Docker | service
      units:
        name: docker.service
        running: true             # false: only enabled, for a unit that cannot run yet

In check mode a unit that is not there yet counts as one that would be started.
"""

from __future__ import annotations

import shlex
from typing import Any

from ansible.plugins.action import ActionBase

from specrig.ansible.ask import ask


def as_wanted(properties: str, running: bool = True) -> bool:
    """Whether `systemctl show` output says enabled, not masked, and (where that is wanted) running."""
    values = dict(line.partition("=")[::2] for line in properties.splitlines())
    return values.get("UnitFileState") == "enabled" and (not running or values.get("ActiveState") == "active")


class ActionModule(ActionBase):  # type: ignore[misc]
    """The plugin."""

    _supports_check_mode = True
    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Ask, and only where something is to do, act."""
        super().run(tmp, task_vars)
        _, args = self.validate_argument_spec(
            argument_spec={"name": {"type": "str", "required": True}, "running": {"type": "bool", "default": True}}
        )
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
