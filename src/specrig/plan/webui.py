"""Open WebUI beside a host's services: where it listens, what it talks to, with which keys, what it is told. Pure.

What its variables do was read in the source of Open WebUI 0.12.4 (env.py, config.py, routers/auths.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from specrig.plan.compat import image_fault, unlocked
from specrig.plan.declare import show
from specrig.plan.exposure import (
    address_of,
    gateway_socket,
    leaks,
    masked_env,
    reached_here,
    same_socket,
    variable_fault,
)
from specrig.plan.refusals import finding
from specrig.plan.resolve import Host, Lock, Service, by_digest, image_row
from specrig.plan.types import Finding, GatewayDecl, WebuiDecl

# The slim one downloads nothing and holds no models of its own; its name on Docker Hub has no v.
IMAGE = "openwebui/open-webui:0.12.4-slim"
UNIT = "specrig-webui.service"
# Of the gateway on the same host: a key of its own, which goes when the interface goes.
CLIENT = "webui"
CLIENT_KEY = f"/etc/specrig/gateway/clients/{CLIENT}"
GATEWAY_CA = "/var/lib/specrig-gateway-caddy/caddy/pki/authorities/local/root.crt"
# A number that no person has and no engine either, in group 0, which owns its keys and its data.
USER = "61001:0"
DATA, DATA_IN_CONTAINER = "/var/lib/specrig-webui", "/app/backend/data"
# As the image starts it; the wrapper that hands it the keys takes the place of its entrypoint.
COMMAND = ["bash", "start.sh"]

# What a person may overrule with rig_webui.env. Nothing is downloaded, and nobody is told that it runs.
_DEFAULTS = {
    "OFFLINE_MODE": "true",
    "HF_HUB_OFFLINE": "1",
    "ENABLE_VERSION_UPDATE_CHECK": "false",
    "ENABLE_COMMUNITY_SHARING": "false",
    "ANONYMIZED_TELEMETRY": "false",
    "DO_NOT_TRACK": "true",
    "SCARF_NO_ANALYTICS": "true",
    # A document goes into the prompt as it is: there is no model here that could index it.
    "BYPASS_EMBEDDING_AND_RETRIEVAL": "true",
    "RAG_EMBEDDING_MODEL": "",
    # The first account is taken all the same, and is the administrator's; after it an administrator adds people.
    "ENABLE_SIGNUP": "false",
}


def plan_webui(
    host: Host, services: list[Service], lock: Lock, gateway: bool
) -> tuple[dict[str, Any] | None, list[dict[str, Any]], list[Finding]]:
    """(the interface or None, its image in a list, what is wrong)."""
    decl = host.decl.rig_webui
    if decl is None:
        return None, [], []
    declared = decl.image or IMAGE
    locked, faults = lock.image(declared)
    image = by_digest(declared, locked)
    endpoints = [_gateway(host.decl.rig_gateway or GatewayDecl())] if gateway else [_service(s) for s in services]
    env = masked_env(decl.env) if leaks(_environment(decl)) else decl.env
    interface = {
        "state": decl.state,
        "unit": UNIT,
        "image": image,
        "user": USER,
        "command": COMMAND,
        "env": _DEFAULTS | env | _decided(decl, endpoints),
        "ports": [{"bind": decl.bind, "port": decl.port}],
        "url": f"http://{reached_here(decl.bind)}:{decl.port}",
        "health_path": "/health",
        "endpoints": endpoints,
        "data": DATA,
        "data_in_container": DATA_IN_CONTAINER,
    }
    if decl.state == "absent":
        return interface, [], []
    found = [*faults, *_findings(host, decl, services, image, gateway)]
    return interface, [image_row(image, declared, locked)], [replace(f, cause=f"rig_webui: {f.cause}") for f in found]


def published(webui: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Ports that the firewall guards, as `exposure.published` has them."""
    ports = webui["ports"] if webui and webui["state"] == "present" else []
    return [port | {"unit": UNIT} for port in ports if (at := address_of(port["bind"])) and not at.is_loopback]


def _decided(decl: WebuiDecl, endpoints: list[dict[str, Any]]) -> dict[str, str]:
    """What the plan alone decides. The declaration is true at each start: what somebody clicked does not outlive it."""
    return {
        "HOST": decl.bind,
        "PORT": str(decl.port),
        "DATA_DIR": DATA_IN_CONTAINER,
        "STATIC_DIR": "/tmp/static",  # noqa: S108  in the container, whose image is read-only
        "HOME": "/tmp",  # noqa: S108
        "USER": "webui",
        "LOGNAME": "webui",
        "ENABLE_PERSISTENT_CONFIG": "false",
        "ENABLE_OLLAMA_API": "false",
        "ENABLE_OPENAI_API": "true",
        "OPENAI_API_BASE_URLS": ";".join(endpoint["url"] for endpoint in endpoints),
    }


def _gateway(wanted: GatewayDecl) -> dict[str, Any]:
    """The gateway on this host. Its name leads to it without DNS, and its own authority is trusted."""
    tls, port = gateway_socket(wanted)
    here = reached_here(wanted.bind)
    name = wanted.server_name or ""
    return {
        "url": f"{'https' if tls else 'http'}://{name or here}:{port}/v1",
        "key_file": CLIENT_KEY,
        "ca_file": GATEWAY_CA if tls == "internal" else "",
        "name": name,
        "address": here.strip("[]"),
    }


def _service(s: Service) -> dict[str, Any]:
    return {
        "url": f"http://{reached_here(s.decl.bind)}:{s.decl.port}/v1",
        "key_file": f"/etc/specrig/services/{s.name}/api-key" if s.engine.key_env else "",
        "ca_file": "",
        "name": "",
        "address": "",
    }


def _findings(host: Host, decl: WebuiDecl, services: list[Service], image: str, gateway: bool) -> Iterator[Finding]:
    if fault := image_fault(image, IMAGE):
        yield fault
    yield from unlocked(image)
    yield from _environment(decl)
    address = address_of(decl.bind)
    if address is None:
        yield finding("BIND_INVALID", f"bind is {show(decl.bind)}, not an IP address")
        return
    ours = (decl.bind, decl.port)
    others = [(s.name, (s.decl.bind, s.decl.port)) for s in services]
    if gateway:
        wanted = host.decl.rig_gateway or GatewayDecl()
        others.append(("the gateway", (wanted.bind, gateway_socket(wanted)[1])))
    for name, socket in others:
        if same_socket(ours, socket):
            cause = f"it and {name} both listen on port {decl.port} ({socket[0]}, {decl.bind})"
            yield finding("PORT_CLASH", cause, "rig_webui: {port: another one}")
    if address.is_loopback:
        return
    if not host.decl.rig_allow_from:
        yield finding(
            "BIND_EXPOSED_TO_ALL",
            f"bind is {decl.bind}, reachable from the network, and rig_allow_from does not say who may come",
        )
    yield finding("WEBUI_CLEAR_TEXT", f"bind is {decl.bind}, and it speaks plain HTTP")


def _environment(decl: WebuiDecl) -> Iterator[Finding]:
    decided = _decided(decl, [])
    for name, value in decl.env.items():
        if fault := variable_fault(name, value, f"leave {name} out: its keys are handed over as files"):
            yield fault
        elif name in decided or name in ("OPENAI_API_BASE_URL", "OLLAMA_BASE_URL", "OLLAMA_BASE_URLS"):
            yield finding("ENV_OWNED", f"env has {name}, which the plan writes")
