"""Action: plan hosts on the controller, from their inventory variables and the locks beside the inventory. Opens no connection.

- rig_plan:                                   # the current host: sets the fact `rig_plan`, or fails with the refusals
- rig_plan: {unlocked: true}             # the same, with models that are not locked yet: enough to look, not to apply
- rig_plan: {hosts: "{{ groups['rigs'] }}"}   # these hosts: returns `plans`, refused ones too, and fails for nothing
- rig_plan: {gateway: true}              # the current host as a gateway before all rigs: sets the fact `gateway_plan`, or fails
- rig_plan: {gateways: "{{ groups['gateways'] }}"}   # these gateways: returns `plans`, refused ones too, and fails for nothing
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleError
from ansible.plugins.action import ActionBase

from specrig import faults
from specrig.console import CannotRun
from specrig.plan import HostPlan, plan_gateway, plan_hosts
from specrig.runner import IMAGES_LOCK_NAME, LOCK_NAME
from specrig.verbs import locks

# Names of the playbooks, for one run; no declarations.
OF_A_PLAY = ("rig_plan", "rig_serial", "rig_retry")


def read_lock(inventory_directory: str) -> dict[str, Any]:
    """What the locks of models and images beside the inventory hold, as one document; empty where there is none yet."""
    names = {"models": LOCK_NAME, "images": IMAGES_LOCK_NAME}
    return {what: locks.read(Path(inventory_directory) / name, what) for what, name in names.items()}


def gateways_of(variables: Mapping[str, Any]) -> list[str]:
    """Hosts of the group `gateways`."""
    return list(variables["groups"].get("gateways", []))


def refused(refusals: list[dict[str, str]]) -> dict[str, Any]:
    """A failed result that says why and what to do."""
    return {"failed": True, "msg": "\n".join(str(CannotRun(**refusal)) for refusal in refusals)}


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
                "gateway": {"type": "bool", "default": False},
                "gateways": {"type": "list", "elements": "str"},
            }
        )
        try:
            return result | self.answer(args, variables)
        except CannotRun as error:
            return result | refused([error.as_json()])

    def answer(self, args: Mapping[str, Any], variables: Mapping[str, Any]) -> dict[str, Any]:
        """What is asked for. Raises CannotRun where it cannot even be planned."""
        if args["gateway"] or args["gateways"] is not None:
            return self.gateways(args["gateways"], variables)
        if args["hosts"] is not None:
            plans = self.plans({host: variables["hostvars"][host] for host in args["hosts"]}, variables)
            return {"changed": False, "plans": {host: plan.as_json() for host, plan in plans.items()}}
        name = variables["inventory_hostname"]
        plan = self.plans({name: variables}, variables)[name].as_json()
        unlocked = [w for w in plan["warnings"] if w["code"] == "MODEL_UNLOCKED"]
        refusals = [
            *plan["refusals"],
            *([] if args["unlocked"] else unlocked),
        ]  # what is not locked can be planned, but there is nothing to stage
        if refusals:
            return refused(refusals)
        return {"changed": False, "ansible_facts": {"rig_plan": plan}}

    def gateways(self, names: list[str] | None, variables: Mapping[str, Any]) -> dict[str, Any]:
        """The plans of the gateways `names`, or of the current host with None: then its refusals are the failure."""
        if names == []:
            return {"changed": False, "plans": {}}
        every, rigs = variables["hostvars"], variables["groups"].get("rigs", [])
        hosts = {host: every[host] for host in dict.fromkeys([*rigs, *(names or [variables["inventory_hostname"]])])}
        declared = self.declared(hosts, ("ansible_host",))
        lock = read_lock(variables.get("inventory_dir", "."))
        plans = plan_hosts({rig: declared[rig] for rig in rigs}, lock, gateways=gateways_of(variables))

        def plan(name: str) -> dict[str, Any]:
            return plan_gateway(name, declared[name], {rig: declared[rig] for rig in rigs}, lock, plans).as_json()

        if names is not None:
            return {"changed": False, "plans": {name: plan(name) for name in names}}
        own = plan(variables["inventory_hostname"])
        if own["refusals"]:
            return refused(own["refusals"])
        return {"changed": False, "ansible_facts": {"gateway_plan": own}}

    def plans(self, hosts: Mapping[str, Mapping[str, Any]], variables: Mapping[str, Any]) -> dict[str, HostPlan]:
        """Plan `hosts` {name: its variables}."""
        first = next(iter(hosts.values()), {})
        lock = read_lock(first.get("inventory_dir", "."))
        return plan_hosts(self.declared(hosts), lock, gateways=gateways_of(variables))

    def declared(self, hosts: Mapping[str, Mapping[str, Any]], more: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
        """The rig_ variables of `hosts`, and those named in `more`; templates in them are resolved as anywhere in Ansible."""
        declared: dict[str, dict[str, Any]] = {}
        for host, variables in hosts.items():
            templar = self._templar.copy_with_new_env(available_variables=variables)
            ours = [n for n in variables if (n.startswith("rig_") and n not in OF_A_PLAY) or n in more]
            declared[host] = {}
            try:
                for name in ours:
                    declared[host][name] = templar.template(variables[name])
            except AnsibleError as error:
                # Not Ansible's own failure: it would print the lines around, and secrets may stand there.
                why = CannotRun(
                    f"{host}: {name}: {' '.join(str(error).split())}", f"correct {name} of {host}", "PLAN_FAILED"
                )
                if faults.vault(why.cause):
                    why.code, why.fix = "VAULT_PASSWORD", faults.VAULT_FIX
                raise why from None
        return declared
