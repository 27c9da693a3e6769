"""What stood against Ansible, as one cause and one fix. No line of an inventory is repeated: a secret may stand in it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from specrig.console import CannotRun

VAULT_FIX = (
    "export ANSIBLE_VAULT_PASSWORD_FILE=FILE with the vault's password in it (or vault_password_file in ansible.cfg, "
    "or ANSIBLE_ASK_VAULT_PASS=1)"
)
_VAULT = re.compile(r"vault (?:password|secrets)|Decryption failed|undecryptable", re.IGNORECASE)
_YAML = {".yml", ".yaml", ".json"}


def vault(words: str) -> bool:
    """Whether Ansible's words are about a vault that it cannot open."""
    return bool(_VAULT.search(words))


def fault(inventory: Path, said: str) -> CannotRun:
    """What Ansible said on standard error, `said`, when it could not read `inventory` or not even start."""
    if vault(said):
        return CannotRun(f"{inventory} has vaulted values: {_last(said)}", VAULT_FIX, "VAULT_PASSWORD")
    if "Unable to create local directories" in said:
        fix = "export HOME=DIRECTORY that you can write (ssh finds your keys without it)"
        return CannotRun(f"Ansible needs a directory for its files: {_error(said)}", fix, "HOME_NOT_WRITABLE")
    if "Traceback (most recent call last)" in said or "ERROR: Ansible " in said:
        cause = f"Ansible does not start: {_last(said)}"
        return CannotRun(cause, ".venv/bin/ansible --version must work: correct what it names", "ANSIBLE_BROKEN")
    where = next((told for path in files(inventory) if (told := slip(path))), "")
    return CannotRun(where or _unread(inventory, said), "correct what it names", "BAD_INVENTORY")


def files(inventory: Path) -> Iterator[Path]:
    """The YAML files that make up `inventory`, those of its groups and hosts included."""
    folder = inventory if inventory.is_dir() else inventory.parent
    for path in sorted(folder.iterdir()) if inventory.is_dir() else [inventory]:
        if path.is_file() and path.suffix in _YAML:
            yield path
    for name in ("group_vars", "host_vars"):
        yield from (
            path for path in sorted((folder / name).rglob("*")) if path.is_file() and path.suffix in {"", *_YAML}
        )


def slip(path: Path) -> str:
    """ "FILE:LINE:COLUMN: what", of the first slip in a YAML file; empty when there is none."""
    try:
        document = yaml.compose(path.read_text())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        # An alias or a tag is what a value that begins with * or ! is taken for.
        what = re.sub(r"(alias|tag|handle|anchor) .*", r"\1", error.problem or "no YAML")
        return f"{path}{at}: {what}"
    except (yaml.YAMLError, ValueError):
        return f"{path}: no YAML, or not UTF-8"
    except OSError as error:
        return f"{path}: {error.strerror}"
    return next((f"{path}:{at.line + 1}:{at.column + 1}: {key} stands there twice" for key, at in _twice(document)), "")


def _twice(node: yaml.Node | None) -> Iterator[tuple[str, yaml.Mark]]:
    """(key, where) of each key that its mapping has had before; YAML itself takes the last one in silence."""
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    yield key.value, key.start_mark
                seen.add(key.value)
            yield from _twice(value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _twice(item)


def _unread(inventory: Path, said: str) -> str:
    """Why Ansible took a file for no inventory: what the plugin says that the file is meant for."""
    plugin = "yaml" if inventory.suffix in _YAML else r"\w+"
    told = re.findall(rf"Failed to parse inventory with '{plugin}' plugin: (.*)", said)
    what = re.sub(r"(?:Failed to parse inventory|YAML parsing failed): ", "", told[-1] if told else _last(said))
    # What follows is the line's own text.
    what = re.sub(r"(?:,? got:| '| for the tag) .*|(?<=definition) .*", "", what)
    at = re.search(r"^Origin: (/.*:\d+)$", said, re.MULTILINE)
    return f"{at[1] if at else inventory}: {what}"


def _error(said: str) -> str:
    """The first line that Ansible calls an error."""
    return next((m[1] for m in re.finditer(r"^\[?ERROR\]?: (.*)", said, re.MULTILINE)), _last(said))


def _last(said: str) -> str:
    """The last line with words in it, without Ansible's label."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return re.sub(r"^\[?ERROR\]?: ", "", lines[-1]) if lines else "it said nothing"
