"""Ask the host first: one small shell script, no module transfer. A converge that changes nothing consists of such questions."""

from __future__ import annotations

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase


def ask(action: ActionBase, script: str) -> str:
    """What `script` prints on the host, run with the task's privileges. Fails the task when it does not end well."""
    answer = action._low_level_execute_command(script)
    if answer["rc"]:
        raise AnsibleActionFail(
            f"the host did not answer (status {answer['rc']}): {(answer['stderr'] or answer['stdout']).strip()[-500:]}"
        )
    text: str = answer["stdout"]
    return text
