"""Open WebUI in the plan: what it talks to, with which key, where it listens, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from specrig.plan import HostPlan, plan_gateway, plan_host, plan_hosts, render
from tests.unit.plan.tiny import tiny, tiny_lock

ALLOW: dict[str, Any] = {"rig_allow_from": ["192.0.2.0/24"]}


def planned(webui: Any = None, gateway: bool = False, lock: Any = None, **host: Any) -> HostPlan:
    declaration = tiny() | {"rig_webui": {} if webui is None else webui} | host
    return plan_host("alpha", declaration, lock or tiny_lock(), gateway=gateway)


def codes(plan: HostPlan) -> list[str]:
    return [found.code for found in plan.refusals]


def test_undeclared_it_is_not_there_and_changes_nothing_else() -> None:
    without = plan_host("alpha", tiny(), tiny_lock())
    assert without.host["webui"] is None
    assert [image["declared"] for image in planned().images] == [
        *(image["declared"] for image in without.images),
        "openwebui/open-webui:0.12.4-slim",
    ]


def test_beside_services_it_asks_each_of_them_with_its_own_key() -> None:
    services = [*tiny().get("rig_services", []), {**SERVICE, "name": "other", "port": 8001, "bind": "192.0.2.10"}]
    webui = planned(rig_services=services, rig_api_key="0123456789abcdef", **ALLOW).host["webui"]
    assert [(one["url"], one["key_file"]) for one in webui["endpoints"]] == [
        ("http://127.0.0.1:8000/v1", "/etc/specrig/services/tiny/api-key"),
        ("http://192.0.2.10:8001/v1", "/etc/specrig/services/other/api-key"),
    ]
    assert webui["env"]["OPENAI_API_BASE_URLS"] == "http://127.0.0.1:8000/v1;http://192.0.2.10:8001/v1"


SERVICE = {"target": {"repo": "specrig-lab/tiny-target"}, "device": "cpu", "version": "0.32.0", "image": "x/y:0.32.0"}


@pytest.mark.parametrize(
    ("gateway", "url", "ca", "name", "address"),
    [
        ({}, "http://127.0.0.1:8080/v1", False, "", "127.0.0.1"),
        ({"bind": "0.0.0.0"}, "http://127.0.0.1:8080/v1", False, "", "127.0.0.1"),
        ({"bind": "::1", "port": 90}, "http://[::1]:90/v1", False, "", "::1"),
        ({"server_name": "llm.lan"}, "https://llm.lan:443/v1", True, "llm.lan", "127.0.0.1"),
        (
            {"server_name": "llm.example.com", "tls": "acme", "bind": "192.0.2.10"},
            "https://llm.example.com:443/v1",
            False,
            "llm.example.com",
            "192.0.2.10",
        ),
    ],
)
def test_on_a_gateway_it_is_one_of_its_clients(gateway: Any, url: str, ca: bool, name: str, address: str) -> None:
    webui = planned(gateway=True, rig_gateway=gateway).host["webui"]
    [endpoint] = webui["endpoints"]
    assert (endpoint["url"], bool(endpoint["ca_file"])) == (url, ca)
    assert (endpoint["name"], endpoint["address"]) == (name, address)
    declaration = tiny() | {"rig_webui": {}, "rig_gateway": gateway | {"clients": ["laptop"]}}
    clients = plan_gateway("alpha", declaration, {"alpha": declaration}, tiny_lock()).clients
    assert clients == ("laptop", "webui") and endpoint["key_file"] == "/etc/specrig/gateway/clients/webui"


def test_a_client_that_goes_with_the_interface() -> None:
    declaration = tiny() | {"rig_webui": {"state": "absent"}}
    assert plan_gateway("alpha", declaration, {"alpha": declaration}, tiny_lock()).clients == ("default",)


def test_which_hosts_are_gateways_is_told() -> None:
    plans = plan_hosts({name: tiny() | {"rig_webui": {}} for name in "ab"}, tiny_lock(), gateways=["b"])
    assert [plan.host["webui"]["endpoints"][0]["url"] for plan in plans.values()] == [
        "http://127.0.0.1:8000/v1",
        "http://127.0.0.1:8080/v1",
    ]


def test_it_runs_by_the_locks_digest() -> None:
    image = "openwebui/open-webui:0.12.4-slim"
    entry = {"digest": f"sha256:{'a' * 64}", "size": 7, "layers": []}
    plan = planned(lock=tiny_lock() | {"images": {image: entry}})
    assert plan.host["webui"]["image"] == f"{image}@sha256:{'a' * 64}"
    assert {"image": f"{image}@sha256:{'a' * 64}", "declared": image, "size": 7, "layers": []} in plan.images
    assert "IMAGE_UNLOCKED" in {w.code for w in planned().warnings if w.cause.startswith("rig_webui: ")}


def test_off_loopback_it_is_behind_the_firewall_and_told_of() -> None:
    plan = planned({"bind": "192.0.2.10"}, **ALLOW)
    assert plan.host["firewall"]["ports"] == [{"bind": "192.0.2.10", "port": 3000, "unit": "specrig-webui.service"}]
    assert "WEBUI_CLEAR_TEXT" in {w.code for w in plan.warnings}
    assert planned().host["firewall"]["ports"] == []


@pytest.mark.parametrize(
    ("webui", "code"),
    [
        ({"bind": "192.0.2.10"}, "BIND_EXPOSED_TO_ALL"),
        ({"bind": "rig.example"}, "BIND_INVALID"),
        ({"port": 8000}, "PORT_CLASH"),
        ({"bind": "0.0.0.0", "port": 8000}, "PORT_CLASH"),
        ({"port": 80}, "PORT_INVALID"),
        ({"image": "openwebui/open-webui:main"}, "IMAGE_LATEST"),
        ({"image": "openwebui/open-webui"}, "IMAGE_LATEST"),
        ({"image": "a b"}, "IMAGE_INVALID"),
        ({"env": {"OPENAI_API_KEY": "x"}}, "SECRET_IN_ENV"),
        ({"env": {"WEBUI_SECRET_KEY": "x"}}, "SECRET_IN_ENV"),
        ({"env": {"OPENAI_API_BASE_URL": "http://elsewhere"}}, "ENV_OWNED"),
        ({"env": {"ENABLE_PERSISTENT_CONFIG": "true"}}, "ENV_OWNED"),
        ({"env": {"A B": "x"}}, "ENV_NAME_INVALID"),
        ({"env": {"WEBUI_NAME": "a\nb"}}, "CONTROL_CHARACTER"),
        ({"server_name": "x"}, "UNKNOWN_FIELD"),
    ],
)
def test_refused(webui: Any, code: str) -> None:
    plan = planned(webui, **(ALLOW if webui.get("bind") == "0.0.0.0" else {}))
    assert code in codes(plan), plan.refusals


def test_the_gateways_port_is_taken() -> None:
    assert codes(planned({"port": 8080}, gateway=True)) == ["PORT_CLASH"]
    assert codes(planned({"port": 8080})) == []


def test_defaults_may_be_overruled() -> None:
    env = planned({"env": {"OFFLINE_MODE": "false", "WEBUI_NAME": "ours"}}).host["webui"]["env"]
    assert (env["OFFLINE_MODE"], env["WEBUI_NAME"], env["ENABLE_SIGNUP"]) == ("false", "ours", "false")


def test_absent_asks_for_nothing() -> None:
    plan = planned({"state": "absent", "bind": "192.0.2.10", "port": 8000})
    assert plan.ok and plan.host["firewall"]["ports"] == [] and len(plan.images) == len(planned().images) - 1
    assert "data stays in /var/lib/specrig-webui" in render.table({"alpha": plan})


def test_a_person_reads_where_it_is_and_whom_it_asks() -> None:
    text = render.table({"alpha": planned()})
    assert "Open WebUI at http://127.0.0.1:3000" in text and "asks     http://127.0.0.1:8000/v1" in text
