"""Installs or removes Debian packages with `ansible.builtin.apt`, and asks dpkg first: one cheap round trip when there is nothing to do.

    - name: Docker | packages
      packages:
        name: [docker.io, docker-cli]      # or name=version, also of an older one
        state: present            # or absent
        without: [nvidia-docker2]          # with present: packages whose place these take; removed, their settings stay
        start: true               # false: services of a new package are not started; nothing else is changed about them

Returns changed, packages (what was to do) and new (those of them that were there in no version).
Check mode says what would be installed without python3-apt and without package lists on the host, which a bare machine has not.
"""

from __future__ import annotations

import shlex
from typing import Any

from ansible.plugins.action import ActionBase

from specrig.ansible.ask import ask

LOCK_TIMEOUT_S = 300  # unattended upgrades hold dpkg's lock for minutes
CACHE_VALID_S = 3600


def installed(listing: str) -> set[str]:
    """Packages that `dpkg-query -W -f '${db:Status-Abbrev}${Package}=${Version}\\n'` calls installed (held ones too): name and name=version."""
    there = {line[3:].strip() for line in listing.splitlines() if line[1:2] == "i"}
    return there | {entry.partition("=")[0] for entry in there}


class ActionModule(ActionBase):  # type: ignore[misc]
    """The plugin."""

    _supports_check_mode = True
    _supports_diff = True
    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Ask, and only where something is to do, act."""
        super().run(tmp, task_vars)
        _, args = self.validate_argument_spec(
            argument_spec={
                "name": {"type": "list", "elements": "str", "required": True},
                "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
                "without": {"type": "list", "elements": "str", "default": []},
                "start": {"type": "bool", "default": True},
            }
        )
        names = [name.partition("=")[0] for name in [*args["name"], *args["without"]]]
        query = f"dpkg-query --show --showformat='${{db:Status-Abbrev}}${{Package}}=${{Version}}\\n' {shlex.join(names)} 2>/dev/null || true"
        there = installed(ask(self, query))
        present = args["state"] == "present"
        todo = [name for name in args["name"] if (name in there) != present]
        gone = [name for name in args["without"] if name in there] if present else []
        rows = [f"{'install' if present else 'remove'} {name}\n" for name in todo] + [
            f"remove {name}\n" for name in gone
        ]
        diff = {"before": "", "after": "".join(rows)}
        result: dict[str, Any] = {"changed": bool(todo or gone), "packages": [*todo, *gone], "diff": diff}
        if not result["changed"] or self._task.check_mode:
            return result
        # After the new ones are there, so that no container lacks its runtime in between.
        for wanted, state in ((todo, args["state"]), (gone, "absent")):
            if not wanted:
                continue
            done = self._apt(wanted, state, task_vars, args["start"])
            if done.get("failed"):
                return {**done, "diff": diff}
        result["new"] = [name for name in todo if name.partition("=")[0] not in there] if present else []
        return result

    def _apt(self, names: list[str], state: str, task_vars: dict[str, Any] | None, start: bool) -> dict[str, Any]:
        options: dict[str, Any] = {"name": names, "state": state, "lock_timeout": LOCK_TIMEOUT_S}
        if state == "present":
            options |= {"update_cache": True, "cache_valid_time": CACHE_VALID_S, "install_recommends": False}
            options |= {} if start else {"policy_rc_d": 101}
            options |= {"allow_downgrade": True} if any("=" in name for name in names) else {}
        done: dict[str, Any] = self._execute_module(
            module_name="ansible.builtin.apt", module_args=options, task_vars=task_vars
        )
        return done
