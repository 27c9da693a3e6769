"""What the gateway's role restarts, and what it goes back to. The role on hosts: molecule/gateway."""

from __future__ import annotations

import shlex
from typing import Any

import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template

from specrig.runner import ROOT
from tests.unit.ansible.unit_file import lines

ROLE = ROOT / "roles" / "gateway"
UNIT = "/etc/systemd/system/specrig-gateway.service"


def load(name: str) -> Any:
    return yaml.safe_load((ROLE / name).read_text())


def read_at_start(*key_files: str | None) -> dict[str, list[str]]:
    """Unit -> the files that it is restarted for."""
    upstreams = [{"rig": f"rig-{n}", "key_file": file} for n, file in enumerate(key_files)]
    loop = load("tasks/service.yml")[0]["block"][0]["loop"]
    known = load("vars/main.yml")
    known = {name: trust_as_template(text) for name, text in known.items()}
    variables = known | {"gateway_pools": [{"model": "m", "upstreams": upstreams}]}
    templar = Templar(loader=DataLoader(), variables=variables)

    def said(value: Any) -> list[str]:
        return list(templar.template(trust_as_template(value)) if isinstance(value, str) else value)

    return {row["unit"]: said(row["after"]) for row in loop}


def test_a_new_key_of_a_service_on_the_same_host_reaches_the_relay() -> None:
    """It reads copies that systemd made at its start; keys of other hosts it reads from their files, each time."""
    here = "/run/credentials/specrig-gateway-relay.service"
    after = read_at_start(f"{here}/chat", "/etc/specrig/gateway/upstreams/beta", None, f"{here}/coder", f"{here}/chat")
    keys = [path for path in after["specrig-gateway-relay.service"] if path.endswith("/api-key")]
    assert keys == ["/etc/specrig/services/chat/api-key", "/etc/specrig/services/coder/api-key"]
    assert not any("api-key" in path for path in read_at_start()["specrig-gateway-relay.service"])


def test_whatever_caddy_started_with_is_kept_and_brought_back() -> None:
    """The unit as well: it is what may bind a port below 1024."""
    text = (ROOT / "templates" / f"{UNIT[1:]}.j2").read_text()
    directives = "\n".join(line for line in text.splitlines() if not line.startswith("{%"))
    copies = [shlex.split(value)[-2:] for _, name, value in lines(directives) if name == "ExecStartPost"]
    assert {source for source, _ in copies} == set(read_at_start()["specrig-gateway.service"])
    back = load("tasks/service.yml")[0]["rescue"][0]
    words = back["ansible.builtin.command"]["argv"]
    brought = [
        [word.replace("{{ item | basename }}", item.rpartition("/")[2]).replace("{{ item }}", item) for word in words]
        for item in back["loop"]
    ]
    assert sorted(command[-2:] for command in brought) == sorted([copy, source] for source, copy in copies)
    # systemd reads a unit again when its file is newer than what it has read.
    assert not any("timestamps" in word or "all" in word for word in words)
