"""Four lab rigs come up at once: one copy of the models crosses the hub's line; then their models are listed, checked and cleaned up.

The same roles as `./rig up`, without the engine: Docker and the service have their own tests.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from specrig import runner
from specrig.lab import Lab, hubhost

LAB = "wan"
NAMES = ("r1", "r2", "r3", "r4")
PLAY = """
- hosts: rigs
  become: true
  gather_facts: false
  pre_tasks:
    - name: Plan
      rig_plan:
  roles:
    - role: model_store
      vars:
        model_store_endpoint: "{{ ansible_facts.rig_plan.host.hub_endpoint }}"
        model_store_artefacts: "{{ ansible_facts.rig_plan.models }}"
        model_store_share: "{{ ansible_host }}:8790"
        model_store_siblings: "{{ groups['rigs'] | reject('eq', inventory_hostname) | map('extract', hostvars, 'ansible_host')
          | map('regex_replace', '^(.*)$', 'http://\\\\1:8790') }}"
        model_store_rank: "{{ groups['rigs'].index(inventory_hostname) }}"
  post_tasks:
    - name: Applied
      managed_files:
        directories: [{path: /etc/specrig}]
        files: [{dest: /etc/specrig/plan.json, content: "{{ ansible_facts.rig_plan | ansible.builtin.to_nice_json }}\\n"}]
"""


def rig(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "specrig", *words],
        cwd=runner.ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def hub(path: str, method: str = "GET") -> Any:
    where = Lab(LAB).ensure_hub().hub_local
    with hubhost.local(urllib.request.Request(f"http://{where}{path}", method=method)) as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def inventory() -> Iterator[Path]:
    made = rig("lab", "up", "--yes", "--lab", LAB, "--no-engine", *NAMES)
    assert made.returncode == 0, made.stdout + made.stderr
    yield runner.ROOT / ".rig/lab" / LAB / "inventory.yml"
    Lab(LAB).down()


@pytest.fixture(scope="module")
def staged(inventory: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the hub sent while four rigs staged at once."""
    play = tmp_path_factory.mktemp("play") / "play.yml"
    play.write_text(PLAY)
    hub("/_stats", "DELETE")
    command = [runner.tool("ansible-playbook"), "-i", str(inventory), str(play)]
    done = subprocess.run(
        command, cwd=runner.ROOT, env=runner.environment(), capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    sent: dict[str, Any] = hub("/_stats")
    return sent


def test_four_rigs_take_one_copy_over_the_wan(inventory: Path, staged: dict[str, Any]) -> None:
    locked = yaml.safe_load(runner.lock_path(inventory).read_text())["models"]
    size = sum(entry["size"] for entry in locked.values())
    mine = {key: row for key, row in staged.items() if key.rpartition("/")[0] in locked}
    print(f"4 rigs: {sum(row['bytes'] for row in mine.values())} bytes from the hub, one copy is {size}")
    assert sum(row["bytes"] for row in mine.values()) == size


def test_the_verbs_see_them(inventory: Path, staged: dict[str, Any]) -> None:
    listed = rig("models", "list", "-i", str(inventory), "--json")
    assert listed.returncode == 0, listed.stdout + listed.stderr
    hosts = json.loads(listed.stdout)["hosts"]
    assert set(hosts) == set(NAMES) and all(len(h["models"]) == 3 for h in hosts.values())
    assert all(model["used"] for host in hosts.values() for model in host["models"])
    assert rig("models", "verify", "-i", str(inventory)).returncode == 0
    assert rig("models", "gc", "--apply", "-i", str(inventory)).stdout.count("nothing to do") == 4


def test_a_bundle_goes_from_one_rig_to_another(inventory: Path, staged: dict[str, Any]) -> None:
    made = rig("models", "bundle", "/var/tmp/models.tar", "r1", "-i", str(inventory))
    assert made.returncode == 0, made.stdout
    assert rig("models", "import", "/var/tmp/models.tar", "r1", "-i", str(inventory)).stdout == "r1: nothing to do\n"
    missing = rig("models", "import", "/var/tmp/none.tar", "r2", "-i", str(inventory))
    assert missing.stdout == "r2: nothing to do\n", "what is there needs no bundle"
