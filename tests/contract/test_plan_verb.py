"""`./rig plan` as a person types it: real shell script, real Ansible. Here and not under unit because each run takes seconds."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from specrig.runner import ROOT
from tests.unit.plan.tiny import r1, tiny, tiny_lock

TARGET = {"repo": "specrig-lab/tiny-target"}
OTHER = {"name": "other", "device": "cpu", "image": "x/cpu:0.32.0", "version": "0.32.0", "max_model_len": 2048}
VAULTED = "$ANSIBLE_VAULT;1.1;AES256\n        " + (
    "30636235663466306563333464623336303239656236363664333463396638346135616333343636\n        "
    "3330653663373434303361386462323665633937313333390a626266633066643730323965616663\n        "
    "65323263633862613537633530336530343838393336656664613935636630396262636138376664\n        "
    "3837346636393738650a336531393465623666363066323238386430653135333333333231666665\n        "
    "31306362653264346364663331636663626662623539656564383631393436303139"
)
BAD: dict[str, tuple[Any, str]] = {
    "unknown-profile": ({"rig_profile": "rtx4091"}, "PROFILE_UNKNOWN"),
    "k-zero": (r1(k=0), "K_ZERO_WITH_DRAFT"),
    "k-forty": (r1(k=40), "K_TOO_LARGE"),
    "draft-is-target": (tiny(draft=TARGET), "DRAFT_IS_TARGET"),
    "tp-two": (r1(tensor_parallel=2), "TP_EXCEEDS_GPUS"),
    "tokenizers": ({"rig_profile": "cpu_demo"}, "TOKENIZER_DIFFERS"),
    "ports": ({"rig_profile": "cpu_demo", "rig_services": [{**OTHER, "target": TARGET}]}, "PORT_CLASH"),
    "branch": (
        r1(target={"repo": "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B", "revision": "main"}),
        "REVISION_NOT_COMMIT",
    ),
    "latest": (r1(image="vllm/vllm-openai:latest"), "IMAGE_LATEST"),
    "nothing": ({"rig_gpus": [{"name": "rtx_4090", "count": 1}]}, "NOTHING_DECLARED"),
    "bare": ({}, "NOTHING_DECLARED"),
    "unused": (r1(host={"rig_driver": {"reboot": "ask"}}), "FIELD_UNUSED"),
    "docker": (r1(host={"rig_docker_daemon_options": {"log-opts": {"max-file": 3}}}), "DOCKER_OPTION_TYPE"),
}


def rig(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "rig"), "plan", *words]
    done = subprocess.run(command, cwd=cwd, env=os.environ.copy(), capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    return done


def write(path: Path, hosts: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump({"rigs": {"hosts": hosts}}, sort_keys=False))
    return path


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    (folder / "models.lock.yml").write_text(yaml.safe_dump(tiny_lock(fingerprints=("a", "b"))))
    return write(folder / "inventory.yml", {name: declared for name, (declared, _) in BAD.items()})


def test_bad_inputs_are_refused_with_code_and_fix(bad: Path) -> None:
    done = rig("-i", str(bad))
    assert done.returncode == 1, done.stderr
    for name, (_, code) in BAD.items():
        block = re.search(rf"^{name} .*?nothing was touched", done.stdout, re.MULTILINE | re.DOTALL)
        assert block, name
        assert re.search(rf"^    {code}  \S.*\n(?:        .*\n)*?        fix: \S", block[0], re.MULTILINE), block[0]


def test_bad_inputs_as_json(bad: Path) -> None:
    done = rig("-i", str(bad), "--json")
    assert done.returncode == 1, done.stderr
    plans = json.loads(done.stdout)["hosts"]
    assert list(plans) == list(BAD)
    for name, (_, code) in BAD.items():
        assert not plans[name]["ok"]
        assert code in {refusal["code"] for refusal in plans[name]["refusals"] if refusal["cause"] and refusal["fix"]}


def test_templates_are_resolved_and_paths_are_meant_from_where_one_stands(tmp_path: Path) -> None:
    hosts = {
        # The first two are a playbook's own, which `-e` gives to every host.
        "alpha": {"rig_serial": 1, "rig_retry": True, "size": "14b", "rig_profile": "rtx4090_r1_{{ size }}", "len": 4096, "rig_services": [
            {"name": "r1-14b", "max_model_len": "{{ len }}", "served_name": "{{ inventory_hostname }}-r1"}]},
        "beta": {"rig_profile": "nope"},
    }  # fmt: skip
    write(tmp_path / "deep/rigs.yml", hosts)
    done = rig("-i", "deep/rigs.yml", "alpha", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    plans = json.loads(done.stdout)["hosts"]
    assert list(plans) == ["alpha"], "only who is named"
    service = plans["alpha"]["services"][0]
    assert service["served_name"] == "alpha-r1"
    assert service["argv"][service["argv"].index("--max-model-len") + 1] == "4096"


@pytest.mark.parametrize(
    ("text", "code", "names"),
    [
        ("rigs: {\n", "BAD_INVENTORY", "broken.yml"),
        ("others: {hosts: {a: }}\n", "NO_HOSTS", "rigs:"),
        ('rigs: {hosts: {a: {rig_profile: "{{ nope }}"}}}\n', "PLAN_FAILED", "a: rig_profile: 'nope' is undefined"),
        (
            "rigs:\n  hosts:\n    a:\n      rig_api_key: hush\n      rig_api_key: hush\n",
            "BAD_INVENTORY",
            "broken.yml:5:7: ",
        ),
        (
            f"rigs:\n  hosts:\n    a:\n      rig_api_key: !vault |\n        {VAULTED}\n",
            "VAULT_PASSWORD",
            "a: rig_api_key: ",
        ),
    ],
)
def test_an_inventory_that_can_not_be_read(tmp_path: Path, text: str, code: str, names: str) -> None:
    (tmp_path / "broken.yml").write_text(text)
    done = rig("-i", str(tmp_path / "broken.yml"))
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"{code}: ") and names in done.stderr and "next: " in done.stderr
    assert len(done.stderr.splitlines()) == 2 and "hush" not in done.stderr


def test_up_repeats_no_line_beside_a_template_that_fails(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.yml"
    hosts.write_text('rigs:\n  hosts:\n    a:\n      rig_api_key: hush\n      rig_profile: "{{ nope }}"\n')
    command = [str(ROOT / "rig"), "up", "-i", str(hosts)]
    done = subprocess.run(command, env=os.environ.copy(), capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "a: rig_profile: 'nope' is undefined" in done.stdout
    assert "hush" not in done.stdout + done.stderr


def test_a_lock_that_can_not_be_read_and_a_host_that_is_not_there(tmp_path: Path) -> None:
    inventory = write(tmp_path / "hosts.yml", {"alpha": {"rig_profile": "cpu_demo"}})
    (tmp_path / "models.lock.yml").write_text("models: {\n")
    broken = rig("-i", str(inventory))
    assert broken.returncode == 2 and broken.stderr.startswith(f"LOCK_INVALID: {tmp_path}/models.lock.yml:2:1: ")
    unknown = rig("-i", str(inventory), "alhpa")
    assert unknown.returncode == 2 and "UNKNOWN_HOST: alhpa" in unknown.stderr and "alpha" in unknown.stderr


def test_a_gateway_outside_the_group_is_not_ignored(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.yml"
    gateway = {"gateway": {"hosts": {"gw": {"rig_gateway": {"bind": "192.0.2.1"}}}}}  # the group is `gateways`
    hosts.write_text(yaml.safe_dump({"rigs": {"hosts": {"alpha": {"rig_profile": "cpu_demo"}}}, **gateway}))
    done = rig("-i", str(hosts))
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("GATEWAY_NOT_IN_GROUP: gw has rig_gateway") and "next: put gw under" in done.stderr
