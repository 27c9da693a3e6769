"""Hostile values at every place where a person writes text: refused with a code, or carried into the plan unchanged."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specrig.ansible.filter.caddy import PLAIN, caddy_quote
from specrig.plan import plan_gateway, plan_host
from tests.hostile import HOSTILE, NUL
from tests.unit.plan.tiny import tiny, tiny_lock

VALUES = pytest.mark.parametrize("value", [*HOSTILE.values(), NUL], ids=[*HOSTILE, "nul"])
# Where it can only be refused: each of these becomes a name, a path, a URL or a site.
NAMES: dict[str, Any] = {
    "service name": lambda v: {
        "rig_profile": "cpu_demo",
        "rig_services": [{"name": v, "target": {"repo": "specrig-lab/tiny-target"}}],
    },
    "served name": lambda v: tiny(served_name=v),
    "repository": lambda v: tiny(target={"repo": v}),
    "revision": lambda v: tiny(target={"repo": "specrig-lab/tiny-target", "revision": v}),
    "address": lambda v: tiny(bind=v),
    "variable": lambda v: tiny(env={v: "x"}),
    "models root": lambda v: {**tiny(), "rig_models_root": f"/srv/{v}"},
    "hub": lambda v: {**tiny(), "rig_hub_endpoint": f"https://hub.example/{v}\n"},
    "profile": lambda v: {"rig_profile": v},
    "card": lambda v: {**tiny(), "rig_gpus": [{"name": v}]},
}
GATEWAY: dict[str, Any] = {
    "server name": lambda v: {"rig_gateway": {"server_name": v}},
    "e-mail": lambda v: {"rig_gateway": {"server_name": "a.example.org", "email": v}},
    "address": lambda v: {"rig_gateway": {"bind": v}},
    "client": lambda v: {"rig_gateway": {"clients": [v]}},
    "rig": lambda v: {"rig_gateway": {"rigs": [v]}},
    "model": lambda v: {"rig_gateway": {"models": [v]}},
    "key's client": lambda v: {"rig_gateway_keys": {v: "0123456789abcdef"}},
}


@VALUES
@pytest.mark.parametrize("place", NAMES)
def test_a_name_is_refused(place: str, value: str) -> None:
    if place == "models root" and value == "--privileged":
        pytest.skip("a plain path")
    plan = plan_host("alpha", NAMES[place](value), tiny_lock())
    assert plan.refusals and all(found.code and found.fix for found in plan.refusals)
    told = "".join(found.cause for found in plan.refusals)
    assert len(told) < 4000 and not {c for c in told if ord(c) < 32}, "the message itself is an injection"


@VALUES
@pytest.mark.parametrize("place", GATEWAY)
def test_a_gateways_name_is_refused(place: str, value: str) -> None:
    declaration = {"rig_profile": "cpu_demo", **GATEWAY[place](value)}
    plan = plan_gateway("alpha", declaration, {"alpha": {"rig_profile": "cpu_demo"}})
    assert plan.refusals and all(found.code and found.fix for found in plan.refusals)
    told = "".join(found.cause for found in plan.refusals)
    assert len(told) < 4000 and not {c for c in told if ord(c) < 32}


@VALUES
@pytest.mark.parametrize("where", ["name", "address"])
def test_a_rigs_own_name_and_address(where: str, value: str) -> None:
    rig: dict[str, Any] = {
        "rig_profile": "cpu_demo",
        "rig_api_key": "0123456789abcdef",
        "rig_allow_from": ["0.0.0.0/0"],
    }
    rig |= {
        "rig_services": [{"name": "tiny", "bind": "0.0.0.0"}],
        "ansible_host": value if where == "address" else "192.0.2.10",
    }
    plan = plan_gateway("front", {}, {value if where == "name" else "alpha": rig})
    if where == "address" and not value:
        assert plan.pools[0]["upstreams"][0]["url"] == "http://alpha:8000"  # no address: its name
        return
    assert [found.code for found in plan.refusals] in (["GATEWAY_RIG_NAME"], ["GATEWAY_RIG_NAME", "GATEWAY_EMPTY"])
    assert not plan.pools


@VALUES
@pytest.mark.parametrize("place", ["argument", "variable"])
def test_free_text_is_refused_or_carried_unchanged(place: str, value: str) -> None:
    over = {"extra_args": ["--generation-config", value]} if place == "argument" else {"env": {"NOTE": value}}
    plan = plan_host("alpha", tiny(**over), tiny_lock())
    usual = plan_host("alpha", tiny(), tiny_lock()).services[0]
    if plan.refusals:
        assert {f.code for f in plan.refusals} <= {
            "CONTROL_CHARACTER", "TOO_LONG", "FLAG_UNKNOWN", "FLAG_NOT_IN_VERSION", "FLAG_OWNED", "SECRET_IN_ARGS",
        }  # fmt: skip
        return
    service = plan.services[0]
    if place == "argument":
        assert service.argv == [*usual.argv, "--generation-config", value] and service.env == usual.env
    else:
        assert service.env == {**usual.env, "NOTE": value} and service.argv == usual.argv
    assert json.loads(json.dumps(plan.as_json()))["services"][0]["argv"] == service.argv


@VALUES
def test_nothing_hostile_is_a_word_of_a_caddyfile(value: str) -> None:
    if PLAIN.fullmatch(value):  # odd, and yet one word
        assert caddy_quote(value) == value
        value += "\n"
    with pytest.raises(ValueError, match="cannot be written into a Caddyfile"):
        caddy_quote(value)
