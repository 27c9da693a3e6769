"""Runs a verb of the host program and shows its progress. One round trip when there is nothing to do.

    - name: Models | stage
      host_job:
        id: stage                      # the job's name on the host; a second run attaches to it
        argv: [stage, "-"]             # the verb and its arguments
        stdin: "{{ stage_job }}"       # optional document, sent as JSON through the connection, never in argv

With `carry: true` the program travels through the connection and runs from memory: nothing has to be on the host, and
nothing is left there. For quick verbs that only read (then `id` is not needed).

Returns changed, msg and `result`, the verb's own document. In check mode the verb's quick check runs and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import time
from typing import Any

from ansible.errors import AnsibleActionFail, AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from specrig.host import PROGRAM
from specrig.host.build import build

display = Display()

POLL_S = 2.0
# A line at each change of phase, and otherwise this often.
EVERY_S = 5.0
# Polls in a row that may find the host unreachable before we give up; the job itself goes on.
LOST_POLLS = 15
# Takes the program's bytes from standard input into memory and becomes it; what follows them is the program's own input.
CARRIER = """
import os, sys
left = int(sys.argv[1])
program = os.memfd_create("specrig-host", 0)
while left:
    data = os.read(0, min(left, 65536)) or sys.exit("the program did not arrive whole")
    left -= os.write(program, data)
os.execv(sys.executable, [sys.executable, f"/proc/self/fd/{program}", *sys.argv[2:]])
"""


def parse(stdout: str) -> dict[str, Any] | None:
    """The JSON object on the last line of `stdout`, or None."""
    for text in reversed(stdout.strip().splitlines()):
        try:
            value = json.loads(text)
        except ValueError:
            return None
        return value if isinstance(value, dict) else None
    return None


def failure_text(error: dict[str, Any]) -> str:
    """An error document as a person reads it: code, cause, fix, and the log lines that tell more."""
    text = f"{error.get('code')}: {error.get('cause')}. Next: {error.get('fix')}"
    lines = error.get("lines") or []
    return text + ("\n" + "\n".join(f"  {line}" for line in lines) if lines else "")


class ActionModule(ActionBase):  # type: ignore[misc]
    """The plugin."""

    _supports_check_mode = True
    _supports_async = False
    _requires_connection = True
    TRANSFERS_FILES = False

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Start the job or find that there is nothing to do; poll it to its end."""
        super().run(tmp, task_vars)
        _, args = self.validate_argument_spec(
            argument_spec={
                "id": {"type": "str", "default": "carried"},
                "argv": {"type": "list", "elements": "str", "required": True},
                "stdin": {"type": "dict"},
                "program": {"type": "str", "default": PROGRAM},
                "carry": {"type": "bool", "default": False},
            }
        )
        host = (task_vars or {}).get("inventory_hostname", "")
        name, verb, check = args["id"], args["argv"][0], bool(self._task.check_mode)
        self._program = args["program"]
        stdin = "" if args["stdin"] is None else json.dumps(args["stdin"])
        if args["carry"]:
            return self._outcome(self._carry(args["argv"], stdin), verb)
        options = ["--check"] if check else []
        answer = self._call(["job", "run", "--id", name, *options, "--", *args["argv"]], stdin)
        if answer.get("absent"):
            if check:
                return {
                    "changed": True,
                    "msg": f"would run {verb}: {self._program} is not on the host yet",
                    "result": {},
                }
            raise AnsibleActionFail(
                f"{self._program} is not on this host yet: ./rig up puts it there (in a play: the role host_agent)"
            )
        if check and (answer.get("error") or {}).get("code") == "HOST_USAGE":
            # Its program is older than this repository, and knows the verb only after the run that replaces it.
            return {
                "changed": True,
                "msg": f"would run {verb}: {self._program} there is of another version",
                "result": {},
            }
        said, phase, lost = 0.0, "", 0
        while answer.get("state") == "running":
            progress = answer.get("progress") or {}
            now = time.monotonic()
            if progress.get("phase") != phase or now - said >= EVERY_S:
                display.display(f"[{host}] {verb}: {answer.get('line', '')}")
                said, phase = now, progress.get("phase", "")
            try:
                # The host waits for us: the end of the job is seen at once, and a poll costs one round trip.
                answer = self._call(["job", "poll", "--id", name, "--wait", str(POLL_S)], "")
                lost = 0
            except AnsibleConnectionFailure as error:
                lost += 1
                if lost > LOST_POLLS:
                    raise
                display.display(f"[{host}] {verb}: connection lost ({error}); the job goes on, trying again")
                time.sleep(POLL_S)
                with contextlib.suppress(Exception):  # whatever is wrong with the connection, the next poll tells
                    self._connection.reset()
        for told in (answer.get("result") or {}).get("told") or []:
            display.display(f"[{host}] {verb}: {told}")
        return self._outcome(answer, verb)

    def _call(self, argv: list[str], stdin: str) -> dict[str, Any]:
        """One round trip. Input always goes through a pipe: without it the connection would ask for a terminal."""
        program = shlex.quote(self._program)
        command = f"if [ -x {program} ]; then {program} {shlex.join(argv)}; else echo '{{\"absent\": true}}'; fi"
        done = self._low_level_execute_command(command, in_data=(stdin + "\n").encode())
        answer = parse(done["stdout"])
        if answer is None:
            words = (done["stderr"] or done["stdout"]).strip()[-500:]
            raise AnsibleActionFail(f"{argv[0]}: no answer from {self._program} (status {done['rc']}): {words}")
        return answer

    def _carry(self, argv: list[str], stdin: str) -> dict[str, Any]:
        program = build()
        command = f"python3 -c {shlex.quote(CARRIER)} {len(program)} {shlex.join(argv)}"
        done = self._low_level_execute_command(command, in_data=program + stdin.encode())
        answer = parse(done["stdout"])
        if answer is None:
            words = (done["stderr"] or done["stdout"]).strip()[-500:]
            raise AnsibleActionFail(f"{argv[0]}: no answer (status {done['rc']}): {words}")
        return answer

    @staticmethod
    def _outcome(answer: dict[str, Any], verb: str) -> dict[str, Any]:
        document = answer.get("result") or answer
        if error := document.get("error"):
            return {
                "failed": True,
                "changed": False,
                "msg": failure_text(error),
                "code": error.get("code"),
                "result": document,
            }
        changed = bool(answer.get("changed"))
        outcome = {"changed": changed, "msg": f"{verb}: {'done' if changed else 'nothing to do'}", "result": document}
        return outcome | {key: document[key] for key in ("warnings", "diff") if document.get(key)}
