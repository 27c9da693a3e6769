"""Puts a whole set of files on a host in one task and one round trip. Rendered here, compared and replaced there.

    - name: Service | files
      managed_files:
        directories: [{path: /etc/specrig, mode: "0755"}]
        files:
          - {src: systemd/specrig-service.service.j2, dest: /etc/systemd/system/specrig-chat.service,
             vars: {service: "{{ item }}"}, validate: [systemd-analyze, verify, "%s"]}
          - {content: "{{ key }}\\n", dest: /etc/specrig/chat.key, mode: "0600", secret: true, if_missing: true}
          - {host_program: true, dest: /usr/local/lib/specrig/specrig-host, mode: "0755"}
        absent: [/etc/specrig/old.env]

`src` is looked up under the repository's templates/ (else as Ansible's template does) and rendered with the same
semantics: trim_blocks on, lstrip_blocks off, one trailing newline kept. `vars` are added to the template's variables.
Also per file: mode (0644; 0600 when secret), owner and group (who connects, root under become), backup (of a file that
we did not write), if_missing (an existing content stays), merge (a JSON object whose
keys are set in the file there; objects within it likewise; everything else in it stays byte for byte), unless_set (with
merge: keys that are set together, where the file has none of them).
Returns changed, changed_files (destinations, directories, removed paths), backups ({dest: copy}), and a diff of what is
not secret.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.module_utils.parsing.convert_bool import boolean
from ansible.plugins.action import ActionBase
from ansible.template import trust_as_template

from specrig.ansible.ask import ask
from specrig.ansible.modules.managed_files import overlay, with_defaults
from specrig.host.build import build

TEMPLATES = Path(__file__).resolve().parents[4] / "templates"
MANAGED = "Managed by specrig. Changes made here are replaced by its next run."
_SWITCHES = ("backup", "secret", "if_missing", "merge")
_SENT = ("mode", "owner", "group", "validate", "unless_set", *_SWITCHES)
_KEYS = {"src", "content", "host_program", "dest", "vars", *_SENT}


def probe(payload: dict[str, Any]) -> str:
    """A shell script that says, one line each, type, mode, owner and digest of every path of `payload`.

    It prints content only of files that are merged into (base64); everything else, secrets too, as SHA-256.
    """
    merged = [item["dest"] for item in payload["files"] if item.get("merge")]
    paths = [item.get("dest") or item["path"] for item in payload["files"] + payload["directories"]] + payload["absent"]
    words = " ".join(shlex.quote(path) for path in paths)
    whole = "|".join(shlex.quote(path) for path in merged) or "''"
    return (
        f'for p in {words}; do if [ -e "$p" ] || [ -L "$p" ]; then d=; '
        f'if [ -f "$p" ]; then case "$p" in {whole}) d=$(base64 -w0 < "$p");; *) d=$(sha256sum < "$p" | cut -c1-64);; esac; fi; '
        'stat -c "%F|%a|%U|%G|$d|%n" "$p"; else echo "none|||||$p"; fi; done'
    )


def in_place(payload: dict[str, Any], answer: str) -> bool:
    """Whether the host already is as `payload` wants it. Any doubt is a no: then the module looks for itself."""
    seen = {row[5]: row[:5] for line in answer.splitlines() if len(row := line.split("|", 5)) == 6}

    def same(path: str, kind: str, item: dict[str, Any], default: str) -> bool:
        mode = item.get("mode", default)
        if not isinstance(mode, str) or not re.fullmatch("[0-7]{1,5}", mode) or path not in seen:
            return False
        wanted = [format(int(mode, 8), "o"), item.get("owner", "root"), item.get("group", "root")]
        return seen[path][0].startswith(kind) and seen[path][1:4] == wanted

    for item in payload["files"]:
        path = item["dest"]
        if not same(path, "regular", item, "0600" if item.get("secret") else "0644"):
            return False
        if not (item.get("if_missing") or holds(item, seen[path][4])):
            return False
    directories = all(same(item["path"], "directory", item, "0755") for item in payload["directories"])
    return directories and all(seen.get(path, [""])[0] == "none" for path in payload["absent"])


def holds(item: dict[str, Any], there: str) -> bool:
    """Whether the file's digest (or, for a merged file, its base64 content) is what `item` wants."""
    data = base64.b64decode(item["base64"]) if "base64" in item else str(item["content"]).encode()
    if not item.get("merge"):
        return there == hashlib.sha256(data).hexdigest()
    try:
        content = json.loads(base64.b64decode(there))
    except ValueError:
        return False
    if not isinstance(content, dict):
        return False
    return content == overlay(content, with_defaults(content, json.loads(data), item.get("unless_set") or {}))


class ActionModule(ActionBase):  # type: ignore[misc]
    """The plugin."""

    _supports_check_mode = True
    _supports_diff = True
    _supports_async = False
    _requires_connection = True

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Render everything, send it once."""
        super().run(tmp, task_vars)
        task_vars = task_vars or {}
        _, args = self.validate_argument_spec(
            argument_spec={
                "files": {"type": "list", "elements": "dict", "default": []},
                "absent": {"type": "list", "elements": "str", "default": []},
                "directories": {"type": "list", "elements": "dict", "default": []},
            }
        )
        payload = {
            "files": [self._file(item, task_vars) for item in args["files"]],
            "absent": args["absent"],
            "directories": args["directories"],
        }
        if in_place(payload, ask(self, probe(payload))):
            return {"changed": False, "changed_files": [], "backups": {}, "diff": []}
        # One opaque argument, marked no_log in the module: no content reaches the host's log, whatever it is.
        result: dict[str, Any] = self._execute_module(
            module_name="managed_files", module_args={"payload": json.dumps(payload)}, task_vars=task_vars
        )
        result.pop("invocation", None)
        return result

    def _file(self, item: dict[str, Any], task_vars: dict[str, Any]) -> dict[str, Any]:
        dest = item.get("dest")
        if unknown := sorted(set(item) - _KEYS):
            raise AnsibleActionFail(f"managed_files: {dest}: unknown key {unknown[0]}")
        sources = [key for key in ("src", "content", "host_program") if item.get(key) not in (None, False)]
        if not dest or len(sources) != 1:
            raise AnsibleActionFail(
                f"managed_files: {dest}: give dest and one of src, content or host_program, not {sources}"
            )
        file: dict[str, Any] = {key: item[key] for key in _SENT if item.get(key) is not None}
        file |= {key: boolean(file[key]) for key in _SWITCHES if key in file}
        file["dest"] = str(dest)
        if item.get("host_program"):
            return {**file, "base64": base64.b64encode(build()).decode()}
        content = self._render(str(item["src"]), item, task_vars) if item.get("src") else item["content"]
        return {
            **file,
            "content": content if isinstance(content, str) else json.dumps(content, indent=2, sort_keys=True) + "\n",
        }

    def _render(self, src: str, item: dict[str, Any], task_vars: dict[str, Any]) -> str:
        ours = TEMPLATES / src
        source = str(ours) if ours.is_file() else self._find_needle("templates", src)
        search = [str(TEMPLATES), str(Path(source).parent), *task_vars.get("ansible_search_path", [])]
        scope = {"ansible_managed": MANAGED, **task_vars, "template_path": src, **(item.get("vars") or {})}
        templar = self._templar.copy_with_new_env(searchpath=search, available_variables=scope)
        text = templar.template(
            trust_as_template(self._loader.get_text_file_contents(source)),
            escape_backslashes=False,
            overrides={"trim_blocks": True, "lstrip_blocks": False, "newline_sequence": "\n"},
        )
        return "" if text is None else str(text)
