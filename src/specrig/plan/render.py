"""The plan as a person reads it: `./rig plan`."""

import json
import textwrap
from collections.abc import Mapping
from typing import Any

from specrig.plan.types import Finding, HostPlan, ServicePlan

WIDTH = 118


def table(plans: Mapping[str, HostPlan]) -> str:
    """Every host's services, command lines, memory, driver, warnings and refusals, as text for a terminal."""
    return "\n\n".join(_host(name, plan) for name, plan in plans.items()) + "\n"


def _host(name: str, plan: HostPlan) -> str:
    gpus = ", ".join(gpu["title"] for gpu in plan.host.get("gpus", [])) or "no GPU"
    lines = [f"{name}: {plan.host.get('profile') or 'no profile'} on {gpus}" + ("" if plan.ok else "  REFUSED")]
    if plan.driver:
        have = (
            f"has {plan.driver['have']}" if plan.driver["have"] else f"branch {plan.driver['branch']} to be installed"
        )
        lines.append(f"  driver: {have}; {plan.driver['reason']}")
    for service in plan.services:
        lines += ["", *_service(service)]
    for title, found in (("warnings", plan.warnings), ("refusals", plan.refusals)):
        if found:
            lines += ["", f"  {title}", *(line for f in found for line in _finding(f))]
    return "\n".join(lines)


def _finding(f: Finding) -> list[str]:
    return [*_wrap(f"{f.code}: {f.cause}", 4), *_wrap(f"fix: {f.fix}", 6)]


def _wrap(text: str, indent: int) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=" " * indent, subsequent_indent=" " * (indent + 2))


def flags(argv: list[str]) -> list[str]:
    """One line per flag, its value beside it, quoted where a shell would need it."""
    lines: list[str] = []
    for word in argv:
        value = (
            word if word.replace("_", "").replace("/", "").replace(".", "").replace("-", "").isalnum() else f"'{word}'"
        )
        if lines and not word.startswith("--") and lines[-1].startswith("--") and " " not in lines[-1]:
            lines[-1] += f" {value}"
        else:
            lines.append(value)
    return lines


def _service(s: ServicePlan) -> list[str]:
    speculation = f"{s.method}, K={s.k}" if s.k else "no speculation"
    lines = [f"  {s.name}: {s.engine} {s.version} ({s.device}), {speculation}", f"    image   {s.image}"]
    lines += [f"    {m['path_in_container']}  {m['artefact']}" for m in s.models]
    lines += [f"    listens {p['bind']}:{p['port']}" for p in s.ports]
    lines += [f"    env     {key}={value}" for key, value in s.env.items()]
    lines += [f"    command {' '.join(s.entrypoint)}", *(f"              {line}" for line in flags(s.argv))]
    lines += _memory(s.vram)
    lines += _pair(s.pair)
    return lines + [line for note in s.notes for line in _wrap(f"note: {note}", 4)]


def _pair(pair: Mapping[str, Any]) -> list[str]:
    return [f"    pair    {json.dumps(pair)}"] if pair else []


def _memory(vram: Mapping[str, Any]) -> list[str]:
    return [f"    memory  {json.dumps(vram)}"] if vram else []
