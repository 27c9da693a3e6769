"""Action: plan the current host on the controller, from its inventory variables and the model lock beside the inventory.

Sets the fact `rig_plan`. A refusal fails the task with every code, cause and fix; no connection is opened.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from ansible.plugins.action import ActionBase

from specrig.plan import plan_host
from specrig.runner import LOCK_NAME


def read_lock(path: Path) -> dict[str, Any]:
    """The model lock, empty where there is none yet."""
    return yaml.safe_load(path.read_text()) if path.exists() else {}


class ActionModule(ActionBase):  # type: ignore[misc]
    """`rig_plan:`"""

    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the plan as a fact, or the refusals as the failure."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        variables = task_vars or {}
        declared = {
            name: self._templar.template(value)
            for name, value in variables.items()
            if name.startswith("rig_") and name != "rig_plan"
        }
        plan = plan_host(
            variables["inventory_hostname"], declared, read_lock(Path(variables["inventory_dir"]) / LOCK_NAME)
        ).as_json()
        unlocked = [w for w in plan["warnings"] if w["code"] == "MODEL_UNLOCKED"]
        refusals = [*plan["refusals"], *unlocked]  # what is not locked can be planned, but there is nothing to stage
        if refusals:
            return result | {
                "failed": True,
                "msg": "\n".join(f"{r['code']}: {r['cause']}\n  next: {r['fix']}" for r in refusals),
            }
        return result | {"changed": False, "ansible_facts": {"rig_plan": plan}}
