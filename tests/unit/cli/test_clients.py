"""Client settings: they say what the plan says, parse as what they are, and hold no key."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
import yaml

from specrig.clients import KEY, Endpoint, address, endpoints, settings
from specrig.plan import plan_gateway, plan_hosts

SECRET = "0123456789abcdef0123456789"


def rigs(**over: Any) -> dict[str, dict[str, Any]]:
    shared = {
        "rig_profile": "rtx4090_r1_14b",
        "rig_api_key": SECRET,
        "rig_allow_from": ["192.0.2.0/24"],
        "ansible_user": "you",
    }
    return {
        name: shared | {"ansible_host": host, "rig_services": [{"name": "r1-14b", "bind": host, **over}]}
        for name, host in (("alpha", "192.0.2.10"), ("beta", "192.0.2.11"))
    }


def found(
    gateway: dict[str, Any] | None = None, hosts: dict[str, dict[str, Any]] | None = None, **more: Any
) -> list[Endpoint]:
    declared = hosts or rigs()
    plans = plan_hosts(declared)
    gateways = {}
    if gateway is not None:
        own = declared["alpha"] | {"rig_gateway": gateway}
        gateways = {"alpha": plan_gateway("alpha", own, declared)}
        assert gateways["alpha"].ok, gateways["alpha"].refusals
    return list(endpoints(plans, gateways, declared, **more))


def test_the_gateway_comes_first_and_each_service_follows() -> None:
    assert [e.name for e in found({})] == ["gateway/alpha", "alpha/r1-14b", "beta/r1-14b"]
    one = found({"clients": ["laptop", "ci"]}, client="ci")[0]
    assert (one.url, one.base, one.model) == ("http://127.0.0.1:8080/v1", "http://127.0.0.1:8080/v1", "r1-14b")
    assert one.tunnel == "ssh -N -L 127.0.0.1:8080:127.0.0.1:8080 you@192.0.2.10"
    assert one.fetch_key.endswith('sudo cat /etc/specrig/gateway/clients/ci)"')
    assert found()[0].url == "http://192.0.2.10:8000/v1" and found()[0].tunnel == ""


def test_a_host_without_plain_address_is_named() -> None:
    assert address("alpha", {"ansible_host": "{{ secret }}"}) == "alpha"
    assert address("alpha", {"ansible_host": "h", "ansible_user": "me"}) == "me@h"


@pytest.mark.parametrize(
    "gateway",
    [
        {},
        {"server_name": "llm.lab.example", "bind": "192.0.2.10"},
        {"server_name": "llm.example.org", "tls": "acme", "bind": "0.0.0.0"},
        None,
    ],
)
def test_what_is_printed_parses(gateway: dict[str, Any] | None) -> None:
    for one in found(gateway):
        told = settings(one)
        editors = ["cline", "openhands", "continue", "cursor", "open-webui"]
        assert list(told) == ["curl", "env", "openai-python", "openai-js", *editors]
        assert yaml.safe_load(told["open-webui"]["how"]) == {"rig_webui": {}}
        assert SECRET not in json.dumps(told)
        compile(told["openai-python"]["how"], "openai-python", "exec")
        words = shlex.split(told["curl"]["how"].replace("\\\n", " "))
        body = json.loads(words[words.index("--data") + 1])
        assert body["model"] == one.model and words[-1] == f"{one.base}/chat/completions"
        assert not [w for w in words[words.index("curl") :] if KEY in w], "the key would be in curl's command line"
        config = yaml.safe_load(told["continue"]["how"])
        assert config["schema"] == "v1" and config["models"][0]["apiBase"] == one.base
        assert "legacy" in told["continue"]["note"]
        for name in ("env", "openhands"):
            assert all("=" in line or line.startswith("openhands ") for line in told[name]["how"].splitlines())
        assert f"openai/{one.model}" in told["openhands"]["how"]


def test_cursor_needs_a_public_address() -> None:
    assert "listens on loopback" in settings(found({})[0])["cursor"]["note"]
    assert settings(found({"server_name": "llm.lab.example", "bind": "192.0.2.10"})[0])["cursor"]["usable"] is False
    public = settings(found({"server_name": "llm.example.org", "tls": "acme", "bind": "0.0.0.0"})[0])["cursor"]
    assert public["usable"] and "https://llm.example.org/v1" in public["how"] and "Cursor's servers" in public["note"]


@pytest.mark.parametrize("served", ["a/b", "A.b_c-d", "x" * 128])
def test_odd_names_stay_one_word(served: str) -> None:
    one = found(hosts=rigs(served_name=served))[0]
    words = shlex.split(settings(one)["openhands"]["how"].splitlines()[0])
    assert words == ["export", f"LLM_MODEL=openai/{served}"]


def test_authority_of_its_own_is_fetched_and_trusted() -> None:
    one = found({"server_name": "llm.lab.example", "bind": "192.0.2.10"})[0]
    assert one.fetch_ca.startswith("ssh you@192.0.2.10 sudo cat /var/lib/specrig-gateway-caddy/")
    assert "--cacert" in settings(one)["curl"]["how"] and "SSL_CERT_FILE" in settings(one)["env"]["how"]
