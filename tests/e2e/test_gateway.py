"""Two rigs with the real engine behind one gateway, which is one of the rigs: the same `./rig up` as everywhere, and a rig dies under load."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from specrig.lab import Lab, rigs
from tests.e2e.conftest import UNIT, Rig
from tests.load import Gateway, Load

pytestmark = pytest.mark.nightly
LAB, PORT = "pair", 8080
RIG_KEY = "chosen-key-of-both-rigs-0123456789"
# The CPU engine speculates only at temperature 0.
ASKED: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Rig, Rig]]:
    """Alpha, a rig and the gateway, its service on loopback; beta, a rig that lets alpha in. SPECRIG_E2E_KEEP=1 leaves them."""
    alpha_beta = rigs.up(Lab(LAB, assume_yes=True), {"alpha": "debian-13", "beta": "debian-12"})
    alpha, beta = Rig(LAB, "alpha"), Rig(LAB, "beta")
    alpha.inventory = beta.inventory = declare(alpha_beta, alpha.host.address, beta.host.address)
    up = alpha.rig("up")
    assert up.returncode == 0, up.stdout + up.stderr
    yield alpha, beta
    if not os.environ.get("SPECRIG_E2E_KEEP"):
        Lab(LAB).down()


def declare(inventory: Path, alpha: str, beta: str) -> Path:
    """The lab's hosts as a person declares a gateway and its rigs, in an inventory beside the lab's own."""
    declared = yaml.safe_load(inventory.read_text())
    declared["rigs"]["hosts"]["beta"] |= {
        "rig_services": [{"name": "tiny", "bind": beta}],
        "rig_allow_from": [f"{alpha}/32"],
        "rig_api_key": RIG_KEY,
    }
    declared["gateways"] = {"hosts": {"alpha": {"rig_gateway": {"bind": alpha, "clients": ["laptop"]}}}}
    path = inventory.parent / "gateway.yml"
    path.write_text(yaml.safe_dump(declared, sort_keys=False))
    return path


@pytest.fixture
def gateway(pair: tuple[Rig, Rig]) -> Gateway:
    """The gateway as the client `laptop` knows it, with both rigs up."""
    alpha, _ = pair
    alpha.wait("both rigs are up", lambda: all(r["state"] == "up" for r in seen(alpha).values()), 900)
    return Gateway(alpha.host.address, PORT, alpha.must("cat", "/etc/specrig/gateway/clients/laptop"))


def seen(alpha: Rig) -> dict[str, dict[str, Any]]:
    """What the gateway sees of each rig."""
    found = json.loads(alpha.must("/usr/local/lib/specrig/specrig-host", "gateway").splitlines()[-1])
    return {row["rig"]: row for row in found["upstreams"]}


def rig(alpha: Rig, *words: str) -> subprocess.CompletedProcess[str]:
    """A verb that has to end well."""
    done = alpha.rig(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_a_second_run_changes_nothing(pair: tuple[Rig, Rig], gateway: Gateway) -> None:
    said = rig(pair[0], "up").stdout
    assert said.count("changed=0") == 2, said


def test_both_rigs_answer_with_the_same_text_and_speculate(pair: tuple[Rig, Rig], gateway: Gateway) -> None:
    alpha, _ = pair
    answers = [gateway.ask(40, **ASKED) for _ in range(6)]
    assert Counter(status for status, _, _ in answers) == {200: 6}
    assert {name for _, name, _ in answers} == {"alpha", "beta"}
    assert len({json.loads(body)["choices"][0]["text"] for _, _, body in answers}) == 1
    assert seen(alpha)["alpha"]["answered"] and seen(alpha)["beta"]["answered"]
    assert alpha.metrics()["spec_decode_num_accepted_tokens"] > 0


def test_no_key_and_a_wrong_key_are_refused_here_and_at_the_rig(pair: tuple[Rig, Rig], gateway: Gateway) -> None:
    alpha, beta = pair
    assert gateway.ask(key="")[0] == gateway.ask(key="wrong")[0] == 401
    link = gateway.connection()
    link.request("GET", "/metrics", headers=gateway.headers())
    assert link.getresponse().status == 404, "nothing but /v1/ is there"
    link.close()
    rigs_own = Gateway(beta.host.address, 8000, gateway.key)
    with pytest.raises(OSError):  # this machine is not in rig_allow_from
        rigs_own.ask()
    asked = f'curl -s -o /dev/null -w %{{http_code}} -H "Authorization: Bearer {gateway.key}" http://{beta.host.address}:8000/v1/models'
    assert alpha.must("sh", "-c", asked) == "401", "a client's key opens no rig"


def test_a_rig_that_is_killed_under_load_costs_no_request_that_had_not_begun(
    pair: tuple[Rig, Rig], gateway: Gateway
) -> None:
    _, beta = pair
    before = beta.engine_pid()
    with Load(gateway, clients=6, tokens=24, more=ASKED) as load:
        time.sleep(5)
        beta.must("kill", "-9", str(before))
        time.sleep(10)
        fell_to = Counter(gateway.ask()[1] for _ in range(4))
    print(f"\nkilled under load: {dict(load.results)}, answered by {dict(load.served)}")
    assert load.failed == {} and load.results["ok"] > 10, load.results
    assert load.served["beta"], "it did serve before"
    assert fell_to == {"alpha": 4}
    took = beta.wait("beta serves through the gateway again", lambda: gateway.ask()[1] == "beta", 900)
    print(f"beta is back after {took:.0f} s")
    assert beta.engine_pid() != before


def test_a_drained_rig_gets_nothing_new(pair: tuple[Rig, Rig], gateway: Gateway) -> None:
    alpha, _ = pair
    said = rig(alpha, "drain", "alpha", "--wait", "60").stdout
    assert "alpha gets no new requests; nothing runs there" in said, said
    try:
        assert Counter(gateway.ask()[1] for _ in range(6)) == {"beta": 6}
        assert "drained" in rig(alpha, "gateway").stdout
    finally:
        rig(alpha, "undrain", "alpha")
    alpha.wait("alpha gets requests again", lambda: gateway.ask()[1] == "alpha", 60)


def test_clients_get_settings_that_work(pair: tuple[Rig, Rig], gateway: Gateway) -> None:
    """The curl line of `./rig clients`, typed into a shell with the key of `laptop`."""
    alpha, _ = pair
    shown = json.loads(rig(alpha, "clients", "--json").stdout)["endpoints"]
    line = shown["gateway/alpha"]["clients"]["curl"]["how"]
    done = subprocess.run(
        ["bash", "-c", line],
        env={"OPENAI_API_KEY": gateway.key, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and json.loads(done.stdout)["choices"][0]["message"]["content"], (
        done.stdout + done.stderr
    )


def test_its_own_checks_pass(pair: tuple[Rig, Rig], gateway: Gateway) -> None:
    done = pair[0].rig("verify")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_the_gateway_is_there_after_a_reboot(pair: tuple[Rig, Rig], gateway: Gateway) -> None:
    """The rig that is the gateway boots: both its service and the gateway are back, and the other rig was never away."""
    alpha, _ = pair
    alpha.ask("systemctl", "reboot")
    time.sleep(5)

    def serves() -> bool:
        try:
            return gateway.ask()[0] == 200
        except OSError:
            return False

    took = alpha.wait("the gateway answers", serves, 300)
    print(f"\nthe gateway answers {took:.0f} s after its host went down")
    alpha.wait("alpha's own service too", lambda: alpha.active() == "active", 900)
    assert alpha.must("systemctl", "is-active", "specrig-gateway.service") == "active", UNIT
