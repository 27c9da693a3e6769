"""The plan of a gateway: which rigs serve which model, under what address each is reached, who may ask. Pure.

A gateway is a host of the group `gateways`; it may be a rig as well. Its pools come from the rigs' own plans, so that a rig that is
declared is served, and nothing is said twice.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from specrig.plan.command import TARGET_PATH
from specrig.plan.declare import host_declaration, nearest_word, show, shown
from specrig.plan.exposure import TLS_PORT, address_of, gateway_socket, key_faults, same_socket, url_host
from specrig.plan.planner import plan_hosts
from specrig.plan.refusals import CODES, finding
from specrig.plan.types import Finding, GatewayDecl, HostPlan, ServicePlan
from specrig.plan.webui import CLIENT as WEBUI_CLIENT

# Names that no public certificate authority answers for (RFC 2606, RFC 6762, RFC 8375, ICANN's .internal).
_PRIVATE_NAMES = ("local", "localhost", "internal", "lan", "home", "corp", "test", "invalid", "example", "home.arpa")
# Where the relay reads a rig's API key: systemd hands it the key of a service on its own host, the others lie in files of its own.
CREDENTIALS = "/run/credentials/specrig-gateway-relay.service"
UPSTREAMS = "/etc/specrig/gateway/upstreams"
IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IPNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network
_RIG_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z", re.ASCII)
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,252}\Z|::[0-9a-f:.]*\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class GatewayPlan:
    """Everything that will be true of one gateway, or why it can not be."""

    name: str
    listen: Mapping[str, Any]
    pools: tuple[Mapping[str, Any], ...] = ()
    clients: tuple[str, ...] = ()
    refusals: tuple[Finding, ...] = ()
    warnings: tuple[Finding, ...] = ()

    @property
    def ok(self) -> bool:
        """True when nothing was refused."""
        return not self.refusals

    def as_json(self) -> dict[str, Any]:
        """The plan as a JSON object; `plan_hash` is the sha256 of its canonical form without itself."""
        plan: dict[str, Any] = {
            "ok": self.ok,
            "name": self.name,
            "refusals": [found.as_json() for found in self.refusals],
            "warnings": [found.as_json() for found in self.warnings],
            "listen": dict(self.listen),
            "pools": [dict(pool) for pool in self.pools],
            "clients": list(self.clients),
        }
        canonical = json.dumps(plan, sort_keys=True, separators=(",", ":"))
        return plan | {"plan_hash": hashlib.sha256(canonical.encode()).hexdigest()}

    @classmethod
    def from_json(cls, plan: Mapping[str, Any]) -> GatewayPlan:
        """The inverse of `as_json`."""
        return cls(
            name=plan["name"],
            listen=plan["listen"],
            pools=tuple(plan["pools"]),
            clients=tuple(plan["clients"]),
            refusals=tuple(Finding(**found) for found in plan["refusals"]),
            warnings=tuple(Finding(**found) for found in plan["warnings"]),
        )


def plan_gateway(
    name: str,
    declaration: Mapping[str, Any],
    rigs: Mapping[str, Mapping[str, Any]],
    lock: Mapping[str, Any] | None = None,
    plans: Mapping[str, HostPlan] | None = None,
) -> GatewayPlan:
    """The plan of gateway `name`. `rigs`: all rigs' variables by name, with `ansible_host`; `plans`: theirs, when they are made already."""
    decl, found, unread = host_declaration(declaration)
    read = "rig_gateway" not in unread
    wanted = decl.rig_gateway or GatewayDecl()
    if decl.rig_webui is not None and name not in rigs:
        found.append(finding("GATEWAY_WEBUI_NO_RIG", f"{name} has rig_webui and is not in the group rigs"))
    elif decl.rig_webui is not None and decl.rig_webui.state == "present" and WEBUI_CLIENT not in wanted.clients:
        wanted = wanted.model_copy(update={"clients": [*wanted.clients, WEBUI_CLIENT]})
    chosen = [rig for rig in (wanted.rigs if wanted.rigs is not None else rigs) if rig in rigs]
    for rig in [rig for rig in wanted.rigs or [] if rig not in rigs]:
        found.append(finding("GATEWAY_RIG_UNKNOWN", f"rig_gateway.rigs names {show(rig)}{nearest_word(rig, rigs)}"))
    plans = plans or plan_hosts({rig: rigs[rig] for rig in {*chosen, *([name] if name in rigs else [])}}, lock)
    listen = _listen(name, declaration, wanted)
    own = plans[name].services if name in plans else ()
    found += [*(_listening(wanted, listen, own) if read else ()), *_keys(wanted, decl.rig_gateway_keys, read)]
    own_address = _address(name, declaration, wanted)
    unchecked: dict[str, None] = {}
    pools: dict[str, dict[str, Any]] = {}
    for rig in chosen:
        plan = plans[rig]
        if not plan.ok:
            codes = ", ".join(dict.fromkeys(f.code for f in plan.refusals))
            found.append(finding("GATEWAY_RIG_REFUSED", f"the plan of {rig} is refused: {codes}", f"./rig plan {rig}"))
        for service in plan.services:
            if wanted.models is not None and service.served_name not in wanted.models:
                continue
            found += _join(pools, name, rig, rigs[rig], service)
            if rig != name and (networks := _kept_to(rigs[rig], service)):
                if own_address is None:
                    unchecked |= {} if any(network.prefixlen == 0 for network in networks) else {rig: None}
                elif not any(own_address in network for network in networks):
                    cause = f"{rig} lets in {', '.join(map(str, networks))}, and {name} is {own_address}"
                    found.append(finding("GATEWAY_NOT_ALLOWED", cause))
    if unchecked and read:
        rest = f" and {len(unchecked) - 3} more" if len(unchecked) > 3 else ""
        cause = (
            f"{name} is reached as {show(_where(name, declaration))}: whether rig_allow_from of"
            f" {', '.join([*unchecked][:3])}{rest} has its address is not known here"
        )
        found.append(finding("GATEWAY_ADDRESS_UNKNOWN", cause))
    if not pools and not found:
        found.append(finding("GATEWAY_EMPTY", "no rig serves anything behind this gateway"))
    for model in [model for model in wanted.models or [] if model not in pools]:
        cause = f"rig_gateway.models names {show(model)}, which no rig serves{nearest_word(model, pools)}"
        found.append(finding("GATEWAY_MODEL_UNSERVED", cause))
    found = list(dict.fromkeys(found))
    return GatewayPlan(
        name=name,
        listen=listen,
        pools=tuple(pools.values()),
        clients=tuple(wanted.clients),
        refusals=tuple(f for f in found if CODES[f.code].level == "refusal"),
        warnings=tuple(f for f in found if CODES[f.code].level == "warning"),
    )


def _where(name: str, variables: Mapping[str, Any]) -> str:
    """How a host is reached, as the inventory says."""
    address = variables.get("ansible_host")
    return str(address) if isinstance(address, str) and address else name


def _listen(name: str, declaration: Mapping[str, Any], wanted: GatewayDecl) -> dict[str, Any]:
    """Where the gateway listens, and the URL that clients use."""
    tls, port = gateway_socket(wanted)
    address = address_of(wanted.bind)
    host = wanted.server_name or (_where(name, declaration) if address and address.is_unspecified else wanted.bind)
    usual = TLS_PORT if tls else 80
    return {
        "bind": wanted.bind,
        "port": port,
        "server_name": wanted.server_name or "",
        "tls": tls,
        "email": wanted.email or "",
        "loopback": bool(address and address.is_loopback),
        "url": f"{'https' if tls else 'http'}://{url_host(host)}{'' if port == usual else f':{port}'}/v1",
    }


def _listening(wanted: GatewayDecl, listen: Mapping[str, Any], own: tuple[ServicePlan, ...]) -> Iterator[Finding]:
    address, port = address_of(wanted.bind), listen["port"]
    if address is None:
        yield finding("BIND_INVALID", f"rig_gateway.bind is {show(wanted.bind)}, not an IP address")
        return
    if wanted.tls and not wanted.server_name:
        yield finding("GATEWAY_TLS_NAME", f"rig_gateway.tls is {wanted.tls}, and there is no server_name")
    if wanted.email and wanted.tls != "acme":
        cause = f"rig_gateway.email is {show(wanted.email)}, and only a public authority (tls: acme) would be told it"
        yield finding("FIELD_UNUSED", cause, "leave email out, or tls: acme")
    if wanted.tls == "acme" and wanted.server_name:
        name = wanted.server_name.lower()
        if "." not in name or address_of(name) or name.endswith(tuple(f".{end}" for end in _PRIVATE_NAMES)):
            yield finding("GATEWAY_ACME_UNREACHABLE", f"server_name {show(name)} is no public name")
        elif port != TLS_PORT or address.is_loopback:
            yield finding(
                "GATEWAY_ACME_UNREACHABLE",
                f"it would be asked on port {TLS_PORT}; this is {url_host(wanted.bind)}:{port}",
            )
    if not listen["tls"] and not address.is_loopback:
        yield finding(
            "GATEWAY_PLAIN_HTTP", f"{url_host(wanted.bind)}:{port} is reachable from the network, without TLS"
        )
    for service in own:
        for taken in service.ports:
            if same_socket((wanted.bind, port), (taken["bind"], taken["port"])):
                yield finding("GATEWAY_PORT_CLASH", f"the gateway and {service.name} both listen on port {port}")


def _keys(wanted: GatewayDecl, keys: Any, read: bool) -> Iterator[Finding]:
    """Keys that a person chose belong to clients, and are as strong as a rig's. `read`: it is known who the clients are."""
    if keys is None:
        return
    if not isinstance(keys, Mapping):
        yield finding("GATEWAY_KEYS_INVALID", "rig_gateway_keys is not a mapping of client to key")
        return
    for client, key in keys.items():
        if read and client not in wanted.clients:
            cause = f"rig_gateway_keys has a key for {show(client)}, which rig_gateway.clients does not name"
            yield finding("GATEWAY_KEYS_INVALID", cause + nearest_word(str(client), wanted.clients))
        else:
            for fault in key_faults(f"rig_gateway_keys.{shown(client)}", key):
                yield finding("GATEWAY_KEYS_INVALID", fault)


def _address(name: str, declaration: Mapping[str, Any], wanted: GatewayDecl) -> IPAddress | None:
    """The address that the gateway comes from, as far as the inventory tells: where it is reached, else where it listens."""
    said = (address_of(_where(name, declaration)), address_of(wanted.bind))
    return next((one for one in said if one and not one.is_loopback and not one.is_unspecified), None)


def _kept_to(variables: Mapping[str, Any], service: ServicePlan) -> list[IPNetwork]:
    """The networks that the rig's firewall keeps a service to; none when there is no rule."""
    bind, allowed = address_of(service.ports[0]["bind"]), variables.get("rig_allow_from")
    if bind is None or bind.is_loopback or not isinstance(allowed, list):
        return []
    try:
        return [ipaddress.ip_network(network, strict=False) for network in allowed]
    except (ValueError, TypeError):
        return []  # the rig's own plan says so


def _join(
    pools: dict[str, dict[str, Any]], name: str, rig: str, variables: Mapping[str, Any], service: ServicePlan
) -> Iterator[Finding]:
    """Put a service into its model's pool, or say why it can not be reached or does not belong there."""
    port, model = service.ports[0], service.served_name
    bind, here = address_of(port["bind"]), rig == name
    if bind is None:
        return  # the rig's own plan says so
    host = port["bind"]
    if bind.is_unspecified:
        host = "127.0.0.1" if here else _where(rig, variables)
    elif bind.is_loopback and not here:
        cause = f"{service.name} of {rig} listens on {port['bind']}, which {name} can not reach"
        yield finding(
            "GATEWAY_UPSTREAM_LOOPBACK",
            cause,
            f"on {rig}: rig_services: [{{name: {service.name}, bind: its address}}], and rig_api_key",
        )
        return
    if not here and host in ("127.0.0.1", "localhost", "::1"):
        yield finding(
            "GATEWAY_UPSTREAM_LOOPBACK", f"{rig} is reached as {host} in the inventory, which {name} can not use"
        )
        return
    for what, text, pattern in (("name", rig, _RIG_NAME), ("address", host, _HOST)):
        if not pattern.match(text):
            yield finding("GATEWAY_RIG_NAME", f"the {what} {show(text)} can not be written into a file name or a URL")
            return
    target = next((m["artefact"] for m in service.models if m["path_in_container"] == TARGET_PATH), "")
    pool = pools.setdefault(model, {"model": model, "target": target, "max_model_len": None, "upstreams": []})
    if pool["target"] != target:
        first = pool["upstreams"][0]
        cause = f"{model} is {pool['target']} on {first['rig']} and {target} on {rig}"
        yield finding("GATEWAY_MIXED_TARGETS", cause)
        return
    length = service.vram.get("max_model_len")
    if length and (pool["max_model_len"] is None or length < pool["max_model_len"]):
        pool["max_model_len"] = length  # what every rig of the pool can take
    pool["upstreams"].append({
        "rig": rig,
        "service": service.name,
        "url": f"http://{url_host(host)}:{port['port']}",
        "key_file": None if not service.key_env else f"{CREDENTIALS}/{service.name}" if here else f"{UPSTREAMS}/{rig}",
        "metrics_path": service.metrics_path,
        "progress": service.progress,
        "patience_s": service.probe["patience_s"],
    })  # fmt: skip
