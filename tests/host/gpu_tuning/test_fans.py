"""Fans follow the curve, and whatever ends that, the card has them again. On a lab host the driver's library is a stand-in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.host.conftest import HOST_PROGRAM, as_root, output

PLAN = "/etc/specrig/gpu-tuning.json"
UNIT = "specrig-gpu-fans.service"
CARD = "/etc/stand-in-nvml/0"
SPEEDS = "$(cat /dev/shm/stand-in-nvml/0.* | sort -u)"


@pytest.fixture(autouse=True)
def planned(host: Any) -> None:
    if not json.loads(host.file(PLAN).content_string).get("fans"):
        pytest.skip("no fan curve on this rig")


@pytest.fixture
def lab(host: Any) -> Iterator[None]:
    """Only where the card is made up."""
    if not host.file(CARD).exists:
        pytest.skip("only where libnvidia-ml.so.1 is a stand-in")
    yield
    output(
        host, "sh", "-ec", f"echo 50 > {CARD}/temperature; rm -f {CARD}/error {CARD}/refuse; systemctl restart {UNIT}"
    )


def until(host: Any, condition: str, *before: str) -> None:
    """Do `before`, then wait until a shell's condition is true."""
    words = "; ".join([*before, f"for i in $(seq 150); do if {condition}; then exit 0; fi; sleep 0.1; done"])
    done = as_root(
        host,
        "sh",
        "-c",
        f"{words}; systemctl status --no-pager --lines=20 {UNIT}; cat /dev/shm/stand-in-nvml/*; exit 1",
    )
    assert done.rc == 0, f"not in time: {condition}\n{done.stdout}{done.stderr}"


def is_speed(words: str) -> str:
    return f'[ "{SPEEDS}" = "{words}" ]'


def test_the_unit_watches_and_says_what_it_sees(host: Any) -> None:
    shown = output(
        host, "systemctl", "show", "--property=ActiveState,UnitFileState,StatusText,After,WatchdogUSec", UNIT
    )
    rows = dict(line.partition("=")[::2] for line in shown.splitlines())
    assert (rows["ActiveState"], rows["UnitFileState"]) == ("active", "enabled") and "°C" in rows["StatusText"]
    assert "specrig-gpu-tuning.service" in rows["After"] and rows["WatchdogUSec"] not in ("0", "infinity")


def test_each_card_with_a_curve_can_follow_it(host: Any) -> None:
    fans = json.loads(output(host, HOST_PROGRAM, "fan-curve", "--check", PLAN))["fans"]
    assert fans
    for card in fans:
        if card["curve"][0][0] <= card["temperature_c"] <= card["curve"][-1][0]:
            assert card["manual"] and min(card["asked_percent"]) >= card["takes_percent"][0]
        if card["temperature_c"] < card["curve"][0][0] - 5:
            assert not card["manual"]


def test_it_follows_and_gives_back_on_every_way_out(host: Any, lab: None) -> None:
    until(host, is_speed("manual 40"))
    until(host, is_speed("manual 80"), f"echo 75 > {CARD}/temperature")
    # Stopped in good order.
    output(host, "systemctl", "stop", UNIT)
    assert output(host, "sh", "-c", f"echo {SPEEDS}; systemctl is-failed {UNIT} || true").split() == [
        "auto",
        "0",
        "inactive",
    ]
    # Killed: automatic, and started again.
    until(host, is_speed("manual 80"), f"systemctl start {UNIT}")
    until(host, is_speed("auto 0"), f"kill -9 $(systemctl show --property=MainPID --value {UNIT})")
    until(host, is_speed("manual 80"))
    # The card stops answering: automatic until it does again.
    until(host, is_speed("auto 0"), f"echo 15 > {CARD}/error")
    assert "FANS_LOST" in output(host, "journalctl", "--no-pager", "--lines=40", f"--unit={UNIT}")
    until(host, is_speed("manual 80"), f"rm {CARD}/error")


def test_a_card_that_refuses_is_not_asked_for_ever(host: Any, lab: None) -> None:
    until(
        host,
        f"systemctl is-failed --quiet {UNIT}",
        f"systemctl stop {UNIT}",
        f"echo 3 > {CARD}/refuse",
        f"systemctl start {UNIT}",
    )
    shown = output(host, "systemctl", "show", "--property=ExecMainStatus,NRestarts", UNIT).split()
    assert "ExecMainStatus=2" in shown
    until(host, "true", f"rm {CARD}/refuse", f"systemctl reset-failed {UNIT}")
