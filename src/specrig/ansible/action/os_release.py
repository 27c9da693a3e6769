"""Facts that roles use, in one cheap round trip: distribution, distribution_major_version, distribution_release.

The names and values are those of `ansible.builtin.setup`, which takes ten times as long to say them.
"""

from __future__ import annotations

import shlex
from typing import Any

from ansible.plugins.action import ActionBase

from specrig.ansible.ask import ask


def facts(os_release: str) -> dict[str, str]:
    """Facts from the text of /etc/os-release (os-release(5))."""
    values = dict(word.partition("=")[::2] for word in shlex.split(os_release, comments=True) if "=" in word)
    return {
        "distribution": values.get("ID", "").capitalize(),
        "distribution_major_version": values.get("VERSION_ID", "").partition(".")[0],
        "distribution_version": values.get("VERSION_ID", ""),
        "distribution_release": values.get("VERSION_CODENAME", ""),
    }


class ActionModule(ActionBase):  # type: ignore[misc]
    """`os_release:`"""

    _supports_check_mode = True
    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the facts."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        return result | {"changed": False, "ansible_facts": facts(ask(self, "cat /etc/os-release"))}
