"""What was planned is what runs: the command line, the cards, the padded draft. Only on the lab's hosts with made-up cards."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.host.conftest import as_root, output

Plan = dict[str, Any]


@pytest.fixture
def plan(host: Any) -> Plan:
    """The applied plan."""
    if not host.file("/etc/stand-in-whole-site").exists:
        pytest.skip("only in the scenario whole_site")
    found: Plan = json.loads(host.file("/etc/specrig/plan.json").content_string)
    return found


def test_the_engine_got_the_planned_command_line(host: Any, plan: Plan) -> None:
    for service in plan["services"]:
        url = f"http://127.0.0.1:{service['ports'][0]['port']}/stand-in/argv"
        assert json.loads(output(host, "curl", "-fsS", url))["argv"] == [*service["entrypoint"], *service["argv"]]


def test_lspci_shows_the_planned_cards(host: Any, plan: Plan) -> None:
    shown = output(host, "lspci", "-d", "10de:")
    assert len(shown.splitlines()) == len(plan["host"]["gpus"])
    assert all(gpu["title"] in shown for gpu in plan["host"]["gpus"])


def test_the_driver_is_the_planned_one(host: Any, plan: Plan) -> None:
    assert plan["driver"]["source"] == "distro"
    told = output(host, "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split()
    assert {version.split(".")[0] for version in told} == {str(plan["driver"]["branch"])}


def test_each_container_has_the_cards_of_its_service(host: Any, plan: Plan) -> None:
    mode = plan["host"]["container_toolkit"]["mode"]
    for service in plan["services"]:
        name = service["unit"].removesuffix(".service")
        asked = json.loads(output(host, "docker", "inspect", "--format", "{{json .HostConfig.DeviceRequests}}", name))
        if mode == "cdi":
            assert [request["DeviceIDs"] for request in asked] == [[f"nvidia.com/gpu={gpu}"] for gpu in service["gpus"]]
            output(host, "docker", "exec", name, "test", "-c", "/dev/nvidia0")
        else:
            assert asked[0]["DeviceIDs"] == [str(gpu) for gpu in service["gpus"]]


def test_two_cards_do_not_talk_over_pcie(host: Any, plan: Plan) -> None:
    for service in plan["services"]:
        name = service["unit"].removesuffix(".service")
        inside = json.loads(output(host, "docker", "inspect", "--format", "{{json .Config.Env}}", name))
        shm = int(output(host, "docker", "inspect", "--format", "{{.HostConfig.ShmSize}}", name))
        several = len(service["gpus"]) > 1
        assert ("NCCL_P2P_DISABLE=1" in inside) is several
        assert ("--disable-custom-all-reduce" in service["argv"]) is several
        assert shm == (10240 if several else 1024) << 20


def test_the_draft_was_padded_on_the_rig(host: Any, plan: Plan) -> None:
    padded = [model for model in plan["models"] if model["derive"]]
    assert padded
    for model in padded:
        config = json.loads(output(host, "cat", f"{model['path']}/config.json"))
        assert config["vocab_size"] == model["derive"]["vocab_size"] == 152064


def test_an_engine_that_gets_another_command_line_ends_with_2(host: Any, plan: Plan) -> None:
    """The stand-in is not one that takes anything."""
    image = plan["services"][0]["image"]
    done = as_root(host, "docker", "run", "--rm", "--entrypoint", "vllm", image, "serve", "/models/target")
    assert done.rc == 2 and "not a planned command line" in done.stderr
