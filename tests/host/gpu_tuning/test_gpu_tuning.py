"""Each card is at its limit, the unit brings it back, and the machine does not sleep. On a lab host nvidia-smi is a stand-in that keeps limits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.host.conftest import HOST_PROGRAM, as_root, output

PLAN = "/etc/specrig/gpu-tuning.json"
UNIT = "specrig-gpu-tuning.service"


def limits(host: Any) -> dict[str, float]:
    """{uuid: W} as the driver tells."""
    told = output(host, "nvidia-smi", "--query-gpu=uuid,power.limit", "--format=csv,noheader,nounits").splitlines()
    return {uuid.strip(): float(watts) for uuid, _, watts in (line.partition(",") for line in told)}


def report(host: Any) -> list[dict[str, Any]]:
    """Each card, as the host program sees it: wanted_w, limit_w, how."""
    cards: list[dict[str, Any]] = json.loads(output(host, HOST_PROGRAM, "gpu-tuning", "--check", PLAN))["cards"]
    return cards


@pytest.fixture
def lab(host: Any) -> Iterator[None]:
    """Only where the cards are made up: nobody's running service is disturbed."""
    if "STAND-IN" not in as_root(host, "nvidia-smi").stdout:
        pytest.skip("only where nvidia-smi is a stand-in")
    yield
    output(host, "systemctl", "restart", UNIT)


def test_each_card_is_at_its_limit(host: Any) -> None:
    cards = report(host)
    there = limits(host)
    assert cards and [c for c in cards if c["wanted_w"] is not None]
    for card in cards:
        if card["how"] == "limit":
            assert there[card["uuid"]] == pytest.approx(card["wanted_w"], abs=0.5)


def test_nothing_is_left_to_do(host: Any) -> None:
    assert not json.loads(output(host, HOST_PROGRAM, "gpu-tuning", "--check", PLAN))["changed"]


def test_the_unit_comes_after_the_persistence_daemon_and_with_it(host: Any) -> None:
    assert output(host, "systemctl", "is-active", UNIT).strip() == "active"
    assert output(host, "systemctl", "is-enabled", UNIT).strip() == "enabled"
    shown = output(host, "systemctl", "show", "--property=After,PartOf,Before", UNIT)
    rows = dict(line.partition("=")[::2] for line in shown.splitlines())
    assert "nvidia-persistenced.service" in rows["After"] and "nvidia-persistenced.service" in rows["PartOf"]
    assert "docker.service" in rows["Before"]


def test_the_machine_does_not_sleep(host: Any) -> None:
    if not json.loads(host.file(PLAN).content_string)["mask_sleep"]:
        pytest.skip("sleep is left alone on this rig")
    for name in ("sleep", "suspend", "hibernate", "hybrid-sleep"):
        assert as_root(host, "systemctl", "is-enabled", f"{name}.target").stdout.strip() == "masked"


def back(host: Any, wanted: dict[str, float]) -> bool:
    """Whether the limits are `wanted` again within a quarter of a minute: the unit runs right after the daemon."""
    for _ in range(30):
        if limits(host) == wanted:
            return True
        output(host, "sleep", "0.5")
    return False


def test_the_daemon_may_be_restarted_or_stopped_and_started(host: Any, lab: None) -> None:
    before = limits(host)
    output(host, "systemctl", "restart", "nvidia-persistenced.service")
    assert back(host, before)
    output(host, "systemctl", "stop", "nvidia-persistenced.service")
    default = {card["uuid"]: card["default_w"] for card in report(host)}
    assert limits(host) == default and default != before
    done = as_root(host, HOST_PROGRAM, "gpu-tuning", PLAN)  # nobody holds the driver's state: a limit does not stay
    code = json.loads(done.stdout.splitlines()[-1])["error"]["code"]
    assert done.rc == 1 and code in ("TUNING_REFUSED", "TUNING_PERSISTENCE")
    output(host, "systemctl", "start", "nvidia-persistenced.service")
    assert back(host, before)
