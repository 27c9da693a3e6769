"""What the plan of a gateway says of keys, and of firewalls between it and its rigs."""

from typing import Any

import pytest

from specrig.plan import GatewayPlan, plan_gateway
from specrig.plan.types import Finding

RIG: dict[str, Any] = {
    "ansible_host": "192.0.2.10",
    "rig_profile": "cpu_demo",
    "rig_api_key": "0123456789abcdef0123",
    "rig_allow_from": ["198.51.100.0/24"],
    "rig_services": [{"name": "tiny", "bind": "192.0.2.10"}],
}


def gateway(declaration: dict[str, Any], **rig: Any) -> GatewayPlan:
    return plan_gateway("front", declaration, {"alpha": {**RIG, **rig}})


def test_a_client_that_is_there_twice_and_a_short_key_are_told_as_what_they_are() -> None:
    wanted = {"rig_gateway": {"clients": ["laptop", "laptop"]}, "rig_gateway_keys": {"laptop": "short"}}
    plan = gateway({"ansible_host": "gw.lan", **wanted})
    found = plan.refusals
    assert "GATEWAY_ADDRESS_UNKNOWN" not in {one.code for one in plan.warnings}, "nobody read where it listens"
    assert found == (
        Finding("VALUE_OUT_OF_RANGE", "rig_gateway.clients is a list: 'laptop' is there twice", "name each once"),
        Finding("GATEWAY_KEYS_INVALID", "rig_gateway_keys.laptop has 5 characters, 16 are the least", found[1].fix),
    )


@pytest.mark.parametrize(
    ("where", "bind", "code"),
    [
        ("192.0.2.12", "127.0.0.1", "GATEWAY_NOT_ALLOWED"),
        ("gw.lan", "192.0.2.12", "GATEWAY_NOT_ALLOWED"),
        ("127.0.0.1", "192.0.2.12", "GATEWAY_NOT_ALLOWED"),
        ("gw.lan", "198.51.100.7", ""),
        ("198.51.100.7", "127.0.0.1", ""),
        ("gw.lan", "127.0.0.1", "GATEWAY_ADDRESS_UNKNOWN"),
        ("gw.lan", "0.0.0.0", "GATEWAY_ADDRESS_UNKNOWN"),
        ("", "127.0.0.1", "GATEWAY_ADDRESS_UNKNOWN"),
    ],
)
def test_whether_a_rigs_firewall_lets_the_gateway_in(where: str, bind: str, code: str) -> None:
    plan = gateway({"ansible_host": where, "rig_gateway": {"bind": bind}})
    told = [found.code for found in (*plan.refusals, *plan.warnings) if found.code != "GATEWAY_PLAIN_HTTP"]
    assert told == [code] * bool(code)
    assert plan.ok == (code != "GATEWAY_NOT_ALLOWED")


def test_where_everybody_may_come_nothing_is_to_be_checked() -> None:
    assert not gateway({"ansible_host": "gw.lan"}, rig_allow_from=["0.0.0.0/0"]).warnings
