"""Settings with which clients use an endpoint. Pure: text from what the plan says; no key is in it, only where it lies."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import yaml

from specrig.plan import GatewayPlan, HostPlan
from specrig.plan.exposure import url_host
from specrig.plan.webui import GATEWAY_CA

KEY = "OPENAI_API_KEY"
CA_FILE = "specrig-ca.crt"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One OpenAI endpoint as a person reaches it. `url` ends in /v1; `loopback`: only its own host reaches it."""

    name: str
    host: str
    ssh: str
    url: str
    loopback: bool
    tls: str
    models: Mapping[str, int | None]  # served name -> longest context in tokens, None where the plan does not know
    key_path: str  # on `host`; empty: the engine takes no key

    @property
    def model(self) -> str:
        """The first served name."""
        return next(iter(self.models))

    @property
    def tunnel(self) -> str:
        """The ssh line that brings a loopback endpoint to this machine; empty when none is needed."""
        parts = urlsplit(self.url)
        if not self.loopback:
            return ""
        inside = url_host(parts.hostname or "")
        return f"ssh -N -L 127.0.0.1:{parts.port}:{inside}:{parts.port} {shlex.quote(self.ssh)}"

    @property
    def base(self) -> str:
        """The URL that clients on this machine use."""
        parts = urlsplit(self.url)
        return f"http://127.0.0.1:{parts.port}/v1" if self.loopback else self.url

    @property
    def fetch_key(self) -> str:
        """A shell line that puts the key into the environment without showing it."""
        if not self.key_path:
            return f"export {KEY}=none    # this engine takes no key"
        return f'export {KEY}="$(ssh {shlex.quote(self.ssh)} sudo cat {self.key_path})"'

    @property
    def fetch_ca(self) -> str:
        """A shell line that fetches the authority's root, which clients must trust; empty when there is none."""
        return f"ssh {shlex.quote(self.ssh)} sudo cat {GATEWAY_CA} > {CA_FILE}" if self.tls == "internal" else ""


def address(name: str, variables: Mapping[str, Any]) -> str:
    """How ssh names a host: user@address as far as the inventory says so in plain text."""

    def plain(key: str) -> str:
        value = variables.get(key)
        return value if isinstance(value, str) and "{{" not in value else ""

    user = plain("ansible_user")
    return (f"{user}@" if user else "") + (plain("ansible_host") or name)


def endpoints(
    rigs: Mapping[str, HostPlan],
    gateways: Mapping[str, GatewayPlan],
    variables: Mapping[str, Mapping[str, Any]],
    client: str | None = None,
) -> Iterator[Endpoint]:
    """The gateways' endpoints, then each service's own. `client`: whose key at a gateway; default: its first client's."""
    for name, gateway in gateways.items():
        if not gateway.ok:
            continue
        listen = gateway.listen
        models = {pool["model"]: pool["max_model_len"] for pool in gateway.pools}
        who = client if client in gateway.clients else gateway.clients[0]
        ssh = address(name, variables.get(name, {}))
        key = f"/etc/specrig/gateway/clients/{who}"
        yield Endpoint(f"gateway/{name}", name, ssh, listen["url"], listen["loopback"], listen["tls"], models, key)
    for name, plan in rigs.items():
        for service in plan.services if plan.ok else ():
            port = service.ports[0]
            bind = str(port["bind"])
            loopback = bind.startswith("127.") or bind == "::1"
            ssh = address(name, variables.get(name, {}))
            host = ssh.rpartition("@")[2] if bind in ("0.0.0.0", "::") else bind  # noqa: S104  # compared, not bound
            url = f"http://{url_host(host)}:{port['port']}/v1"
            key = f"/etc/specrig/services/{service.name}/api-key" if service.key_env else ""
            models = {service.served_name: service.vram.get("max_model_len")}
            yield Endpoint(f"{name}/{service.name}", name, ssh, url, loopback, "", models, key)


def settings(e: Endpoint) -> dict[str, dict[str, Any]]:
    """Client -> {how: text for a person, file?: where it goes, note?: what to know, usable: whether it can work at all}."""
    length = e.models[e.model]
    asked = {"model": e.model, "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 32}
    ca = f" --cacert {CA_FILE}" if e.fetch_ca else ""
    trust = {"SSL_CERT_FILE": CA_FILE} if e.fetch_ca else {}
    continue_config = {
        "name": "specrig",
        "version": "0.0.1",
        "schema": "v1",
        "models": [
            {
                "name": e.model,
                "provider": "openai",
                "model": e.model,
                "apiBase": e.base,
                "apiKey": "${{ secrets." + KEY + " }}",
                "roles": ["chat", "edit", "apply"],
                **({"defaultCompletionOptions": {"contextLength": length}} if length else {}),
            }
        ],
    }
    told: dict[str, dict[str, Any]] = {
        "curl": {
            # printf is the shell's own: the key is in no command line.
            "how": f'printf \'header = "Authorization: Bearer %s"\\n\' "${KEY}" | curl --fail-with-body --silent --show-error{ca} --config - \\\n'
            f"  --header 'Content-Type: application/json' --data {shlex.quote(json.dumps(asked))} {e.base}/chat/completions",
        },
        "env": {
            "how": "\n".join([f"export OPENAI_BASE_URL={e.base}", *(f"export {n}={v}" for n, v in trust.items())]),
            "note": f"what most programs read; {KEY} as above",
        },
        "openai-python": {
            "how": "from openai import OpenAI\n\n"
            f"client = OpenAI(base_url={json.dumps(e.base)})  # the key: {KEY}\n"
            f"answer = client.chat.completions.create(model={json.dumps(e.model)}, messages={json.dumps(asked['messages'])})\n"
            "print(answer.choices[0].message.content)",
            **({"note": f"trust the gateway's authority: export SSL_CERT_FILE={CA_FILE}"} if trust else {}),
        },
        "openai-js": {
            "how": 'import OpenAI from "openai";\n\n'
            f"const client = new OpenAI({{ baseURL: {json.dumps(e.base)} }}); // the key: {KEY}\n"
            f"const answer = await client.chat.completions.create({{ model: {json.dumps(e.model)}, messages: {json.dumps(asked['messages'])} }});\n"
            "console.log(answer.choices[0].message.content);",
            **({"note": f"trust the gateway's authority: export NODE_EXTRA_CA_CERTS={CA_FILE}"} if trust else {}),
        },
        "cline": {
            "how": f"API Provider: OpenAI Compatible\nBase URL: {e.base}\nAPI Key: {_typed(e)}\nModel ID: {e.model}"
            + (f"\nContext Window Size: {length}" if length else ""),
            "note": "Cline keeps them in its own settings; there is no file to write",
        },
        "openhands": {
            "how": "\n".join(
                [
                    f"export LLM_MODEL={shlex.quote('openai/' + e.model)}",
                    f"export LLM_BASE_URL={e.base}",
                    f'export LLM_API_KEY="${KEY}"',
                    "openhands --override-with-envs",
                ]
            ),
            "note": "the command line is no longer maintained upstream; in the web interface: Custom Model openai/NAME, Base URL, API key"
            + ("; a tunnel must be open where its containers can reach it" if e.loopback else ""),
        },
        "continue": {
            "how": yaml.safe_dump(continue_config, sort_keys=False).rstrip(),
            "file": "~/.continue/config.yaml",
            "note": f"legacy: development ended in June 2026, the repository is read-only; the key goes into ~/.continue/.env as {KEY}=…",
        },
        "cursor": _cursor(e),
        "open-webui": {
            "how": f"rig_webui: {{}}    # of {e.host}, in the inventory; then ./rig up",
            "note": "chats and accounts in a browser, run by the rig itself: docs/webui.md",
        },
    }
    return {name: {"usable": True, **one} for name, one in told.items()}


def _typed(e: Endpoint) -> str:
    return f"ssh {shlex.quote(e.ssh)} sudo cat {e.key_path}" if e.key_path else "anything; this engine takes none"


def _cursor(e: Endpoint) -> dict[str, Any]:
    """Cursor's servers make the call, not the machine that it runs on."""
    if e.loopback or e.tls != "acme":
        what = "listens on loopback" if e.loopback else "has no certificate of a public authority"
        note = f"not possible here: Cursor's own servers call the endpoint, and this one {what}. "
        note += "It needs rig_gateway with a public server_name and tls: acme"
        return {"usable": False, "how": "", "note": note}
    return {
        "how": f"Settings > Models > OpenAI API Key: {_typed(e)}\nOverride OpenAI Base URL: {e.base}\nAdd model: {e.model}",
        "note": "your prompts and this key pass through Cursor's servers, and the override holds for all of its OpenAI models",
    }
