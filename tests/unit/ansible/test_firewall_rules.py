"""The rules that guard published ports, as text. iptables itself, and other machines that ask: molecule/docker_lifecycle."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from specrig.runner import ROOT

ALLOW = ["192.0.2.0/24", "2001:db8::/32"]


def rules(family: str, *ports: tuple[str, int], allow: list[str] | None = None) -> list[str]:
    """Rendered as the role renders it: rule lines only."""
    environment = Environment(
        loader=FileSystemLoader(ROOT / "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    scope: dict[str, Any] = {
        "ansible_managed": "x",
        "family": family,
        "docker_published": [{"bind": bind, "port": port} for bind, port in ports],
        "docker_allow_from": ALLOW if allow is None else allow,
    }
    text = environment.get_template("etc/specrig/firewall/rules.j2").render(scope)
    assert text.endswith("COMMIT\n")
    return [line for line in text.splitlines() if line.startswith("-A")]


@pytest.mark.parametrize(
    ("bind", "four", "six"),
    [
        ("0.0.0.0", "--dst-type LOCAL", ""),
        ("192.0.2.10", "-d 192.0.2.10", ""),
        ("2001:db8::1", "", "-d 2001:db8::1"),
        ("::", "--dst-type LOCAL", "--dst-type LOCAL"),  # docker-proxy may take IPv4 on it as well
    ],
)
def test_a_port_is_guarded_in_the_families_that_reach_it(bind: str, four: str, six: str) -> None:
    for family, where in (("iptables", four), ("ip6tables", six)):
        asked = [line for line in rules(family, (bind, 8000)) if "--dport 8000" in line]
        assert len(asked) == bool(where)
        assert not asked or (where in asked[0] and asked[0].endswith("-j SPECRIG-FROM"))


def test_networks_go_to_their_family_and_all_others_are_dropped() -> None:
    for family, network in (("iptables", ALLOW[0]), ("ip6tables", ALLOW[1])):
        lines = [line for line in rules(family, ("0.0.0.0", 8000)) if line.startswith("-A SPECRIG-FROM")]
        assert lines == [f"-A SPECRIG-FROM -s {network} -j RETURN", "-A SPECRIG-FROM -j DROP"]


def test_nobody_named_means_nobody_but_this_machine() -> None:
    lines = [line for line in rules("iptables", ("0.0.0.0", 8000), allow=[]) if "DIRECT" not in line]
    assert lines[0] == "-A SPECRIG -i lo -j RETURN" and lines[-1] == "-A SPECRIG-FROM -j DROP" and len(lines) == 3


def test_a_containers_own_address_is_closed_whatever_is_published() -> None:
    for family in ("iptables", "ip6tables"):
        [line] = [line for line in rules(family) if line.startswith("-A SPECRIG-DIRECT")]
        assert "! --ctstate DNAT" in line and line.endswith("-j DROP"), "what came by a published port is let through"


def test_the_program_is_a_shell_script() -> None:
    subprocess.run(["sh", "-n", ROOT / "templates/usr/local/lib/specrig/firewall"], check=True)
