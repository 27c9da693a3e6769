"""What a person reads when Ansible cannot read an inventory, or not start: one cause, one fix, no line of the inventory."""

from __future__ import annotations

from pathlib import Path

import pytest

from specrig import runner
from specrig.console import CannotRun
from specrig.faults import fault, slip

# Ansible 2.19's own words, shortened.
DUPLICATE = """\
[WARNING]: Failed to parse inventory with 'auto' plugin: YAML parsing failed: Found duplicate mapping key 'rig_profile'.

Origin: {path}:4:7

2   hosts:
3     alpha: {{rig_api_key: hush}}
4     alpha: {{rig_api_key: hush}}
      ^ column 7

[ERROR]: Completely failed to parse inventory source {path}
"""
NO_GROUP = """\
[WARNING]: Failed to parse inventory with 'auto' plugin: no root 'plugin' key found
[WARNING]: Failed to parse inventory with 'yaml' plugin: Invalid "hosts" entry for "rigs" group, requires a dictionary
[WARNING]: Failed to parse inventory with 'ini' plugin: Failed to parse inventory: Invalid host pattern 'rigs:'
[ERROR]: Completely failed to parse inventory source {path}
"""
TAG = """\
[WARNING]: Failed to parse inventory with 'yaml' plugin: YAML parsing failed: Could not determine a constructor for the tag '!hush'.
Origin: {path}:4:20
"""
INI = """\
[WARNING]: Failed to parse inventory with 'ini' plugin: Failed to parse inventory: {words}
[ERROR]: Completely failed to parse inventory source {{path}}
"""
TRACEBACK = """\
ERROR: Unable to create local directories '/h/.ansible/tmp': [Errno 30] Read-only file system: b'/h'

Traceback (most recent call last):
  File "x.py", line 86, in makedirs_safe
ansible.errors.AnsibleError: Unable to create local directories '/h/.ansible/tmp'
"""


@pytest.mark.parametrize(
    ("name", "text", "said", "cause"),
    [
        ("h.yml", "a:\n  b: hush\n  b: hush\n", DUPLICATE, "{path}:3:3: b stands there twice"),
        ("h.yml", "a:\n  b: hush\n c: hush\n", DUPLICATE, "{path}:3:2: "),
        ("h.yml", "a: *hush\n", DUPLICATE, "{path}:1:4: found undefined alias"),
        ("h.yml", "a: !hush\n", TAG, "{path}:4:20: Could not determine a constructor"),
        ("h.yml", "rigs: {hosts: [a]}\n", NO_GROUP, '{path}: Invalid "hosts" entry for "rigs" group'),
        ("h.ini", "x", INI.format(words="Error parsing host definition 'a k=hush': No closing quotation"), "{path}: Error"),
        ("h.ini", "x", INI.format(words="Expected key=value, got: hush x"), "{path}: Expected key=value"),
    ],
)  # fmt: skip
def test_a_slip_is_one_line_with_its_place_and_no_source(
    tmp_path: Path, name: str, text: str, said: str, cause: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    told = fault(path, said.format(path=path))
    assert told.code == "BAD_INVENTORY" and told.cause.startswith(cause.format(path=path))
    assert "hush" not in str(told) and len(str(told).splitlines()) == 2


def test_a_slip_in_variables_of_a_group_names_that_file(tmp_path: Path) -> None:
    (tmp_path / "hosts.yml").write_text("rigs: {hosts: {a: }}\n")
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars/rigs").write_text("k: hush\nk: hush\n")
    for inventory in (tmp_path / "hosts.yml", tmp_path):
        said = "[ERROR]: YAML parsing failed: Found duplicate mapping key 'k'.\n"
        assert fault(inventory, said).cause == f"{tmp_path}/group_vars/rigs:2:1: k stands there twice"


def test_vaulted_and_merged_values_are_no_slip(tmp_path: Path) -> None:
    path = tmp_path / "hosts.yml"
    path.write_text(
        "a: !vault |\n  $ANSIBLE_VAULT;1.1;AES256\n  30\nb: &b {x: 1}\nc: {<<: *b, x: 2}\nd: [{x: 1}, {x: 1}]\n"
    )
    assert slip(path) == ""


@pytest.mark.parametrize(
    ("said", "code", "fix"),
    [
        (TRACEBACK, "HOME_NOT_WRITABLE", "export HOME="),
        ("[ERROR]: The vault password file /no was not found\n", "VAULT_PASSWORD", "ANSIBLE_VAULT_PASSWORD_FILE"),
        ("[ERROR]: Attempting to decrypt but no vault secrets found.\n", "VAULT_PASSWORD", "vault_password_file in ansible.cfg"),
        ("Traceback (most recent call last):\nModuleNotFoundError: No module named 'jinja2'\n", "ANSIBLE_BROKEN", "--version"),
    ],
)  # fmt: skip
def test_what_the_inventory_is_not_to_blame_for(tmp_path: Path, said: str, code: str, fix: str) -> None:
    told = fault(tmp_path / "hosts.yml", said)
    assert told.code == code and fix in told.fix and len(str(told).splitlines()) == 2


def test_ansible_starts_in_any_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "xx_YY")
    assert runner.environment()["LC_ALL"] == "C.UTF-8"


def test_refusals_are_read_back_from_a_message() -> None:
    both = [CannotRun("14 against 12", "k: 5", "K_TOO_LARGE"), CannotRun("a: b", "c", "PORT_CLASH")]
    assert CannotRun.all_in("\n".join(map(str, both))) == both
    assert CannotRun.all_in("the disk is full") == [] == CannotRun.all_in(f"{both[0]}\nand more")
