"""CUDA itself works, on the rig and within each service's container. Only where a card is; a lab host has none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.host.conftest import HOST_PROGRAM, output


@pytest.fixture(autouse=True)
def cards(host: Any) -> dict[str, str]:
    """{index: UUID} of the rig's cards, as the driver numbers them."""
    if not host.file("/dev/nvidiactl").exists:
        pytest.skip("no NVIDIA card on this host")
    listed = output(host, "nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader").splitlines()
    return {index.strip(): uuid.strip() for index, _, uuid in (line.partition(",") for line in listed)}


def test_cuda_works_on_the_rig(host: Any, cards: dict[str, str]) -> None:
    output(host, HOST_PROGRAM, "cuda-check", "--cards", str(len(cards)))


def test_each_service_computes_on_its_own_cards(host: Any, cards: dict[str, str]) -> None:
    plan = host.file("/etc/specrig/plan.json")
    if not plan.exists:
        pytest.skip("no applied plan on this host")
    for service in json.loads(plan.content_string)["services"]:
        if service["gpus"]:
            wanted = [word for gpu in service["gpus"] for word in ("--uuid", cards.get(str(gpu), str(gpu)))]
            output(host, HOST_PROGRAM, "cuda-check", "--container", service["unit"].removesuffix(".service"), *wanted)
