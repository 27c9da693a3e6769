"""Action plugins through a real ansible-playbook. Here and not under unit because each run takes seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from specrig.runner import ROOT
from tests.unit.host.models import write_model

PLAYBOOK = """
- hosts: localhost
  connection: local
  gather_facts: false
  vars:
    where: "%(where)s"
    secret: "{{ lookup('ansible.builtin.env', 'TEST_SECRET') }}"
    ansible_python_interpreter: "{{ ansible_playbook_python }}"
  tasks:
    - name: Files
      managed_files:
        directories: [{path: "{{ where }}/d", mode: "0755"}]
        files:
          - {host_program: true, dest: "{{ where }}/d/specrig-host", mode: "0755"}
          - {src: "%(where)s/t.j2", dest: "{{ where }}/d/t", vars: {items: [a, b]}}
          - {content: "{{ secret }}", dest: "{{ where }}/d/key", secret: true, if_missing: true}
    - name: Pad
      host_job:
        id: pad
        argv: [pad, "{{ where }}/in", "{{ where }}/out", --vocab-size, "20"]
        program: "{{ where }}/d/specrig-host"
      register: padded
    - name: Stage
      host_job:
        id: stage
        argv: [stage, "-"]
        stdin: {root: "{{ where }}/models", endpoint: "http://x", artefacts: []}
        program: "{{ where }}/d/specrig-host"
    - name: Fails
      host_job:
        id: fails
        argv: [ready, --url, "http://127.0.0.1:1", --model, m, --timeout, "0.1"]
        program: "{{ where }}/d/specrig-host"
      when: not ansible_check_mode
"""


def playbook(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "HOME": str(path), "TEST_SECRET": "hunter22"}
    env["SPECRIG_RUN_DIR"] = str(path / "run")
    command = [
        str(Path(sys.executable).with_name("ansible-playbook")),
        "-i",
        "localhost,",
        str(path / "play.yml"),
        *options,
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env, cwd=ROOT, timeout=60)


def test_both_plugins_through_ansible(tmp_path: Path) -> None:
    write_model(tmp_path / "in")
    (tmp_path / "t.j2").write_text(
        "# {{ ansible_managed }}\n{% for i in items %}\n- {{ i }}\n{% endfor %}\n{{ secret | length }}\n"
    )
    (tmp_path / "play.yml").write_text(PLAYBOOK % {"where": tmp_path})
    blank = playbook(tmp_path, "--check", "--diff", "-vvv")
    assert blank.returncode == 0, blank.stdout + blank.stderr
    assert "changed=3" in blank.stdout and not (tmp_path / "d").exists()
    first = playbook(tmp_path, "--diff", "-vvv")
    assert "READY_TIMEOUT: waiting for port after 0 s" in first.stdout, first.stdout + first.stderr
    assert (tmp_path / "d/t").read_text() == (
        "# Managed by specrig. Changes made here are replaced by its next run.\n- a\n- b\n8\n"
    )
    assert (tmp_path / "d/key").read_text() == "hunter22"
    assert json.loads((tmp_path / "out/config.json").read_text())["vocab_size"] == 20
    assert "changed=2" in first.stdout and "failed=1" in first.stdout
    assert "hunter22" not in blank.stdout + first.stdout + first.stderr, "the secret was shown"
    again = playbook(tmp_path, "--check", "-vvv")
    assert "changed=0" in again.stdout and again.returncode == 0, again.stdout + again.stderr
    assert "Using module file" not in again.stdout, "what is in place costs one question, no module"
