"""The rules that guard published ports, as text. iptables itself, and other machines that ask: molecule/docker_lifecycle."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from specrig.ansible.filter.systemd import systemd_quote
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


def loads(tmp_path: Path, units: dict[str, str], *words: str) -> tuple[int, str]:
    """(status, what iptables-restore was given) of the program on a machine with these units; iptables itself says yes to all."""
    places = {"/etc/specrig/firewall": "rules", "/run/specrig/firewall": "loaded", "/etc/systemd/system": "units"}
    text = (ROOT / "templates/usr/local/lib/specrig/firewall").read_text().replace("/proc/net/if_inet6", "/nowhere")
    for place, here in places.items():
        (tmp_path / here).mkdir(exist_ok=True)
        text = text.replace(place, str(tmp_path / here))
    for name, content in units.items():
        (tmp_path / "units" / name).write_text(content)
    (tmp_path / "rules/iptables").write_text("*mangle\n:SPECRIG - [0:0]\n-A SPECRIG -i lo -j RETURN\nCOMMIT\n")
    (tmp_path / "bin").mkdir(exist_ok=True)
    for tool, does in (("iptables", "exit 0"), ("iptables-restore", f"cat > {tmp_path}/given")):
        (tmp_path / "bin" / tool).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / "bin" / tool).chmod(0o755)
    command = ["sh", "-c", text, "firewall", *words]
    done = subprocess.run(command, env={"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}, check=False)
    return done.returncode, (tmp_path / "given").read_text() if (tmp_path / "given").exists() else ""


def publishing(*where: str) -> str:
    """As the unit of a service has it."""
    return "ExecStart=x \\\n" + "".join(f"  --publish {systemd_quote(one)} \\\n" for one in where) + "  end\n"


def test_a_port_of_an_installed_unit_is_guarded_planned_or_not(tmp_path: Path) -> None:
    """The service of before goes on publishing it until the new one takes its place; or for good, when that fails."""
    units = {
        "specrig-old.service": publishing("0.0.0.0:8001:8000", "[::]:8002:8000", "192.0.2.1:8003:8000"),
        "specrig-own.service": publishing("127.0.0.1:8004:8000", "[::1]:8005:8000"),
        "other.service": publishing("0.0.0.0:8006:8000"),
    }
    status, given = loads(tmp_path, units)
    lines = [line for line in given.splitlines() if "--dport" in line]
    assert status == 0 and [line.split("--dport ")[1][:5] for line in lines] == ["8001 ", "8002 ", "8003 "]
    assert all(line.endswith("-j SPECRIG-FROM") for line in lines) and given.endswith("COMMIT\n")
    assert loads(tmp_path, units, "--check")[0] == 0
    (tmp_path / "units/specrig-old.service").unlink()
    units.pop("specrig-old.service")
    assert loads(tmp_path, units, "--check")[0] == 3, "the old port is free for other use again"
    assert "--dport" not in loads(tmp_path, units)[1] and loads(tmp_path, units, "--check")[0] == 0


def test_the_program_is_a_shell_script() -> None:
    subprocess.run(["sh", "-n", ROOT / "templates/usr/local/lib/specrig/firewall"], check=True)
