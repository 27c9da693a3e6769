"""Action: plan hosts on the controller, from their inventory variables and the locks beside the inventory. Opens no connection.

- rig_plan:                                   # the current host: sets the fact `rig_plan`, or fails with the refusals
- rig_plan: {unlocked: true}             # the same, with models that are not locked yet: enough to look, not to apply
- rig_plan: {hosts: "{{ groups['rigs'] }}"}   # these hosts: returns `plans`, refused ones too, and fails for nothing
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from ansible.errors import AnsibleActionFail, AnsibleError
from ansible.plugins.action import ActionBase

from specrig.plan import HostPlan, plan_hosts
from specrig.runner import IMAGES_LOCK_NAME, LOCK_NAME


def read_lock(inventory_directory: str) -> Any:
    """What the locks of models and images beside the inventory hold, as one document; empty where there is none yet."""
    read: Any = {}
    for name in (LOCK_NAME, IMAGES_LOCK_NAME):
        path = Path(inventory_directory) / name
        try:
            part = yaml.safe_load(path.read_text()) if path.exists() else None
        except yaml.YAMLError as error:
            raise AnsibleActionFail(f"{path} is no YAML: {' '.join(str(error).split())}") from None
        if part is not None and not isinstance(part, dict):
            return part  # the plan says what is wrong with it
        read |= part or {}
    return read


class ActionModule(ActionBase):  # type: ignore[misc]
    """The plugin."""

    _supports_check_mode = True
    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the plan as a fact, the refusals as the failure, or the plans of the hosts that are asked for."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        variables = task_vars or {}
        _, args = self.validate_argument_spec(
            argument_spec={
                "hosts": {"type": "list", "elements": "str"},
                "unlocked": {"type": "bool", "default": False},
            }
        )
        if args["hosts"] is not None:
            plans = self.plans({host: variables["hostvars"][host] for host in args["hosts"]})
            return result | {"changed": False, "plans": {host: plan.as_json() for host, plan in plans.items()}}
        name = variables["inventory_hostname"]
        plan = self.plans({name: variables})[name].as_json()
        unlocked = [w for w in plan["warnings"] if w["code"] == "MODEL_UNLOCKED"]
        refusals = [
            *plan["refusals"],
            *([] if args["unlocked"] else unlocked),
        ]  # what is not locked can be planned, but there is nothing to stage
        if refusals:
            words = "\n".join(f"{r['code']}: {r['cause']}\n  next: {r['fix']}" for r in refusals)
            return result | {"failed": True, "msg": words}
        return result | {"changed": False, "ansible_facts": {"rig_plan": plan}}

    def plans(self, hosts: Mapping[str, Mapping[str, Any]]) -> dict[str, HostPlan]:
        """Plan `hosts` {name: its variables}; templates in their rig_ variables are resolved as anywhere in Ansible."""
        declared: dict[str, dict[str, Any]] = {}
        for host, variables in hosts.items():
            templar = self._templar.copy_with_new_env(available_variables=variables)
            ours = [name for name in variables if name.startswith("rig_") and name != "rig_plan"]
            declared[host] = {}
            try:
                for name in ours:
                    declared[host][name] = templar.template(variables[name])
            except AnsibleError as error:
                raise AnsibleActionFail(f"{host}: {name}: {error}") from error
        first = next(iter(hosts.values()), {})
        return plan_hosts(declared, read_lock(first.get("inventory_dir", ".")))
