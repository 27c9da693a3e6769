"""Upgrades that go wrong, on the demo's host with the real engine. The broken images are stand-ins, labelled as such: lab/standins.py."""

from __future__ import annotations

import json
import re
import subprocess
import time
from typing import Any

import pytest

from specrig.lab import Lab, standins
from specrig.plan.catalog import profiles
from specrig.verbs.demo import LAB
from tests.e2e.conftest import UNIT, Rig

pytestmark = pytest.mark.nightly
NAME = UNIT.removesuffix(".service")
FILE = f"/etc/systemd/system/{UNIT}"


@pytest.fixture(scope="module")
def broken() -> dict[str, str]:
    """Images of the real engine with one layer that breaks it."""
    return standins.ensure(Lab(LAB).client, ["renamed", "dies", "never"])


@pytest.fixture(scope="module", autouse=True)
def as_declared(rig: Rig) -> None:
    """Begin with the demo's own plan."""
    assert rig.rig("up").returncode == 0


def up(rig: Rig, **service: Any) -> subprocess.CompletedProcess[str]:
    return rig.rig("up", "-e", json.dumps({"rig_services": [{"name": "tiny", **service}]}))


def what_runs(rig: Rig) -> tuple[int, str]:
    """(process of the engine, content of the unit)."""
    return rig.engine_pid(), rig.must("cat", FILE)


def test_an_image_that_does_not_exist_stops_nothing(rig: Rig, seconds: dict[str, float]) -> None:
    """Upgrade to an image that no registry has | refused before anything is stopped."""
    before = what_runs(rig)
    failed = up(rig, image="specrig-lab-hub:5000/engine-vllm-cpu:0.32.0-nosuch")
    assert failed.returncode == 1 and "PULL_NOT_FOUND" in failed.stdout, failed.stdout
    assert what_runs(rig) == before, "the old service was touched"
    assert rig.complete() is not None
    seconds["test_an_image_that_does_not_exist_stops_nothing"] = 0  # the very same process


def test_an_image_whose_parser_refuses_stops_nothing(
    rig: Rig, broken: dict[str, str], seconds: dict[str, float]
) -> None:
    """Upgrade to an image whose own parser refuses the plan's arguments | refused before anything is stopped.

    The image is a stand-in: the real engine, one option of its parser renamed.
    """
    before = what_runs(rig)
    failed = up(rig, image=broken["renamed"])
    assert failed.returncode == 1 and "ARGUMENTS_REFUSED" in failed.stdout, failed.stdout
    assert "--max-num-seqs" in failed.stdout, "in the parser's own words"
    assert what_runs(rig) == before, "the old service was touched"
    assert rig.complete() is not None
    seconds["test_an_image_whose_parser_refuses_stops_nothing"] = 0  # the very same process


def undone(rig: Rig, image: str, limit: int, **service: Any) -> tuple[str, float]:
    """An upgrade to `image` that has to be taken back; what it said, and for how long nothing answered. `limit`: the start time-out in seconds."""
    text, unit = rig.complete("You may", 40), rig.must("cat", FILE)
    begin = time.monotonic()
    failed = up(rig, image=image, start_timeout_s=limit, **service)
    wall = time.monotonic() - begin
    assert failed.returncode == 1 and "UPGRADE_UNDONE" in failed.stdout, failed.stdout
    down = re.search(r"nothing answered for (\d+) s", failed.stdout)
    assert down and 0 < int(down[1]) <= wall, failed.stdout
    print(
        f"\n{image.rpartition(':')[2]}: the old service was down for {down[1]} s (start time-out {limit} s), {wall:.0f} s in all"
    )
    assert rig.must("cat", FILE) == unit and rig.active() == "active"
    assert rig.inspect(NAME)["Config"]["Image"] != image
    assert rig.complete("You may", 40) == text, "the old service says what it said before"
    status = rig.rig("status")
    assert f"upgrade to {image} undone" in status.stdout, status.stdout
    before = what_runs(rig)
    again = up(rig, image=image, start_timeout_s=limit, **service)
    assert again.returncode == 1 and "UPGRADE_HELD" in again.stdout, again.stdout
    assert what_runs(rig) == before, "0 s: the same is not tried again by itself"
    return failed.stdout, float(down[1])


def test_an_image_that_starts_and_dies_is_taken_back(
    rig: Rig, broken: dict[str, str], seconds: dict[str, float]
) -> None:
    """Upgrade to an image that starts and dies | the old one runs again, with the same text; the same plan is not tried again by itself.

    The image is a stand-in: the real engine with a layer that ends it.
    """
    said, down = undone(rig, broken["dies"], 900)
    assert "stand-in: no kernel image is available" in said, "with the last words of the one that died"
    seconds["test_an_image_that_starts_and_dies_is_taken_back"] = down


def test_an_image_that_never_gets_ready_is_taken_back(
    rig: Rig, broken: dict[str, str], seconds: dict[str, float]
) -> None:
    """Upgrade to an image that never gets ready, with a start time-out of 30 s | as before.

    The image is a stand-in: the real engine with a layer that makes it wait for ever.
    """
    _, seconds["test_an_image_that_never_gets_ready_is_taken_back"] = undone(rig, broken["never"], 30)


def test_a_failed_upgrade_that_is_tried_again_on_purpose(
    rig: Rig, broken: dict[str, str], seconds: dict[str, float]
) -> None:
    """The same failed upgrade, asked for again with `--retry` | it is tried, and taken back again."""
    before = what_runs(rig)
    declared = json.dumps({"rig_services": [{"name": "tiny", "image": broken["never"], "start_timeout_s": 30}]})
    failed = rig.rig("up", "--retry", "-e", declared)
    assert failed.returncode == 1 and "UPGRADE_UNDONE" in failed.stdout, failed.stdout
    down = re.search(r"nothing answered for (\d+) s", failed.stdout)
    assert down and int(down[1]) > 0, failed.stdout
    after = what_runs(rig)
    assert after[0] != before[0] and after[1] == before[1] and rig.complete() is not None
    assert "UPGRADE_HELD" in up(rig, image=broken["never"], start_timeout_s=30).stdout, "once, not from now on"
    seconds["test_a_failed_upgrade_that_is_tried_again_on_purpose"] = float(down[1])


def test_the_proven_plan_again_forgets_the_setback(rig: Rig) -> None:
    before = what_runs(rig)
    assert rig.rig("up").returncode == 0 and what_runs(rig) == before
    assert "undone" not in rig.rig("status").stdout


def test_a_good_upgrade_and_the_way_back(rig: Rig, seconds: dict[str, float]) -> None:
    """Upgrade that is good (K=3 instead of 5) | proven by the engine's own counters; `./rig rollback` leads back to the same unit and key."""
    unit, key = rig.must("cat", FILE), rig.must("cat", "/etc/specrig/services/tiny/api-key")
    done = up(rig, k=3)
    assert done.returncode == 0, done.stdout
    proven = re.search(
        r"tiny is ready after .*; nothing answered for (\d+) s; α (0\.\d+), (\d+) of (\d+) drafted", done.stdout
    )
    assert proven and int(proven[4]) > int(proven[3]) > 0, done.stdout
    print(f"\nK=3: {proven[0]}")
    seconds["test_a_good_upgrade_and_the_way_back"] = float(proven[1])
    again = up(rig, k=3)
    assert "changed=0" in again.stdout, "what is proven is not proven again"
    back = rig.rig("rollback")
    assert back.returncode == 0 and "To stay: declare for tiny: k: 5" in back.stdout, back.stdout + back.stderr
    print(back.stdout)
    assert rig.must("cat", FILE) == unit and rig.must("cat", "/etc/specrig/services/tiny/api-key") == key
    assert rig.complete() is not None
    status = rig.rig("status")
    assert "rolled back by hand" in status.stdout and "./rig up would move it forward again" in status.stdout


def test_two_services_exchange_their_ports(rig: Rig, seconds: dict[str, float]) -> None:
    """Two services exchange their ports by one run of `./rig up` | each answers at its new port, with the key it had."""
    plain = {key: value for key, value in profiles()["cpu_demo"].services[0].items() if key not in ("draft", "vocab")}

    def declared(first: int, second: int) -> list[str]:
        other = {**plain, "name": "second", "port": second, "method": "ngram"}
        return ["-e", json.dumps({"rig_services": [{"name": "tiny", "port": first}, other]})]

    def ports() -> dict[str, str]:
        names = ("specrig-tiny", "specrig-second")
        bound = {name: rig.inspect(name)["HostConfig"]["PortBindings"] for name in names}
        return {name: one["HostPort"] for name, rows in bound.items() for [one] in rows.values()}

    keys = ["sha256sum", "/etc/specrig/services/tiny/api-key", "/etc/specrig/services/second/api-key"]
    try:
        done = rig.rig("up", *declared(8000, 8001))
        assert done.returncode == 0 and ports() == {"specrig-tiny": "8000", "specrig-second": "8001"}, done.stdout
        had = rig.must(*keys)
        done = rig.rig("up", *declared(8001, 8000))
        assert done.returncode == 0 and ports() == {"specrig-tiny": "8001", "specrig-second": "8000"}, done.stdout
        down = [float(one) for one in re.findall(r"nothing answered for (\d+) s", done.stdout)]
        assert len(down) == 2, done.stdout
        assert rig.must(*keys) == had and rig.complete() is None, "the key of `tiny` opened the port of `second`"
        again = rig.rig("up", *declared(8001, 8000))
        assert again.returncode == 0 and "changed=0" in again.stdout, again.stdout
        seconds["test_two_services_exchange_their_ports"] = max(down)
    finally:
        assert rig.rig("up").returncode == 0
    assert rig.complete() is not None


def test_images_are_pruned_only_where_nothing_uses_them(rig: Rig, broken: dict[str, str]) -> None:
    running = rig.inspect(NAME)["Image"]
    told = rig.rig("images", "prune")
    assert broken["dies"] in told.stdout and "--apply removes them" in told.stdout, told.stdout
    assert rig.rig("images", "prune", "--apply").returncode == 0
    left = rig.must("docker", "images", "--no-trunc", "--quiet").splitlines()
    assert running in left and rig.ask("docker", "image", "inspect", broken["dies"]).returncode != 0
