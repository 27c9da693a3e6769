"""One grammar for every role. What each rule is for stands in CONTRIBUTING.md."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.playbook.block import Block
from ansible.playbook.handler import Handler
from ansible.playbook.task import Task

from specrig.docs import CHANGES
from specrig.host.status import OWN as OWN_UNITS
from specrig.plan.types import ModelRef, ServiceDecl, ServicePlan
from specrig.runner import ROOT

ROLES = sorted(path for path in (ROOT / "roles").iterdir() if path.is_dir())
PLAYBOOKS = sorted((ROOT / "playbooks").glob("*.yml"))
TEMPLATES = sorted(path for path in (ROOT / "templates").rglob("*") if path.is_file())
OWN = {path.stem for path in (ROOT / "src/specrig/ansible/action").glob("[!_]*.py")}
KEYWORDS = {*Task.fattributes, *Block.fattributes, *Handler.fattributes, "block", "rescue", "always"}
CONTENTS = {
    f"ansible.builtin.{name}"
    for name in ("import_tasks", "include_tasks", "import_role", "include_role", "include_vars", "meta")
}
each_role = pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def flat(tasks: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Tasks, blocks too, with what is in the blocks."""
    for task in tasks or []:
        yield task
        for part in ("block", "rescue", "always"):
            yield from flat(task.get(part, []))


def tasks_of(role: Path, *folders: str) -> list[tuple[str, dict[str, Any]]]:
    """(where, task) of every task in the role's `folders`."""
    files = sorted(path for folder in folders for path in (role / folder).glob("*.yml"))
    return [(f"{path.relative_to(ROOT)}: {task.get('name')}", task) for path in files for task in flat(load(path))]


def play_tasks() -> list[tuple[str, dict[str, Any]]]:
    return [
        (f"{path.relative_to(ROOT)}: {task.get('name')}", task)
        for path in PLAYBOOKS
        for play in load(path)
        for part in ("pre_tasks", "tasks", "post_tasks", "handlers")
        for task in flat(play.get(part, []))
    ]


def every_task() -> list[tuple[str, dict[str, Any]]]:
    return [found for role in ROLES for found in tasks_of(role, "tasks", "handlers")] + play_tasks()


def action(task: Mapping[str, Any]) -> str | None:
    """The module of a task; None for a block."""
    found = [key for key in task if key not in KEYWORDS and not key.startswith("with_")]
    assert len(found) <= 1, f"{task.get('name')}: {found}"
    return found[0] if found else None


def conditions(task: Mapping[str, Any]) -> str:
    when = task.get("when", "")
    return " and ".join(map(str, when)) if isinstance(when, list) else str(when)


def test_there_is_something_to_hold_to_the_grammar() -> None:
    assert ROLES and PLAYBOOKS and TEMPLATES and {"managed_files", "host_job", "packages", "rig_plan"} <= OWN


@each_role
def test_defaults_and_argument_specs_are_one(role: Path) -> None:
    defaults = load(role / "defaults/main.yml")
    options = load(role / "meta/argument_specs.yml")["argument_specs"]["main"]["options"]
    assert set(defaults) == {name for name, option in options.items() if not option.get("required")}
    assert defaults == {name: option["default"] for name, option in options.items() if not option.get("required")}
    assert not [name for name in options if not name.startswith(f"{role.name}_")], "variables carry their role's name"
    assert options[f"{role.name}_state"]["choices"] == ["present", "absent"], "absent undoes the role"


@each_role
def test_main_is_a_table_of_contents(role: Path) -> None:
    acting = [t.get("name") for t in flat(load(role / "tasks/main.yml")) if action(t) not in CONTENTS]
    assert len(acting) <= 1, f"these belong into files of their own: {acting}"


@each_role
def test_tasks_are_named_area_and_action(role: Path) -> None:
    area = role.name.replace("_", " ").capitalize()
    odd = [where for where, task in tasks_of(role, "tasks") if not re.match(rf"{area} \| \S", str(task.get("name")))]
    assert not odd, f"not '{area} | …': {odd}"


def test_playbook_tasks_are_named_area_and_action() -> None:
    assert not [where for where, task in play_tasks() if not re.match(r"[A-Z][a-z ]+ \| \S", str(task.get("name")))]


@each_role
def test_handlers_leave_check_mode_alone(role: Path) -> None:
    path = role / "handlers/main.yml"
    handlers = list(flat(load(path))) if path.exists() else []
    odd = [h.get("name") for h in handlers if "ansible_check_mode" not in conditions(h)]
    assert not odd, f"{path.relative_to(ROOT)}: without `when: not ansible_check_mode`: {odd}"


def test_modules_have_their_full_name_or_are_ours() -> None:
    names = [(where, action(task)) for where, task in every_task()]
    odd = [(where, name) for where, name in names if name and name not in OWN and name.count(".") < 2]
    assert not odd


def test_no_shell_no_ignored_errors() -> None:
    for where, task in every_task():
        assert action(task) not in {"ansible.builtin.shell", "ansible.builtin.raw", "ansible.builtin.script"}, where
        assert not {"ignore_errors", "ignore_unreachable"} & set(task), where


def test_nothing_reboots_unasked() -> None:
    for where, task in every_task():
        assert action(task) != "ansible.builtin.reboot" or conditions(task), where


@each_role
def test_distributions_differ_in_vars_only(role: Path) -> None:
    odd = [w for w, t in tasks_of(role, "tasks", "handlers") if re.search(r"distribution|os_family", conditions(t))]
    assert not odd, f"put these differences into vars/<os>.yml: {odd}"


def test_nothing_knows_that_it_is_tested() -> None:
    files = [path for folder in ("roles", "playbooks", "templates") for path in (ROOT / folder).rglob("*")]
    odd = [p for p in files if p.suffix in {".yml", ".j2", ""} and p.is_file() and "molecule" in p.read_text().lower()]
    assert not odd


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_templates_say_who_writes_them_and_are_used(path: Path) -> None:
    head = path.read_text(encoding="utf-8").splitlines()[:2]
    assert any("Managed by specrig" in line or "ansible_managed" in line for line in head), head
    name = str(path.relative_to(ROOT / "templates"))
    files = [task["managed_files"].get("files", []) for _, task in every_task() if "managed_files" in task]
    assert name in {file.get("src") for listed in files if isinstance(listed, list) for file in listed}, (
        f"nothing puts {name} on a host"
    )


@each_role
def test_role_is_proved_and_explained(role: Path) -> None:
    assert (ROOT / "molecule" / role.name / "molecule.yml").exists(), "one Molecule scenario per role"
    assert (ROOT / "docs/roles" / f"{role.name}.md").exists(), "python -m specrig.docs"
    assert CHANGES in (role / "README.md").read_text(encoding="utf-8")


def test_units_of_our_own_are_no_services() -> None:
    """`status`, `verify` and `choose` list services; and no service may take such a name."""
    names = {path.name.removesuffix(".j2") for path in TEMPLATES if path.parent.name == "system"}
    ours = {name for name in names if re.fullmatch(r"specrig-[^@]+[.]service", name)} - {"specrig-service.service"}
    assert ours and ours <= set(OWN_UNITS)
    for unit in ours:
        with pytest.raises(ValueError, match="taken"):
            ServiceDecl(name=unit[len("specrig-") : -len(".service")], target=ModelRef(repo="a/b"))


def test_the_service_role_takes_every_field_of_a_planned_service() -> None:
    """`./rig up` hands a planned service over as it is; a field that the role does not know ends the play."""
    options = load(ROOT / "roles/inference_service/meta/argument_specs.yml")["argument_specs"]["main"]["options"]
    assert {field.name for field in fields(ServicePlan)} <= set(options["inference_service_list"]["options"])
