"""`./rig status [HOST…]`: what runs, since when, and whether it is what was planned."""

from __future__ import annotations

import argparse
import time
from typing import Any

from specrig import runner
from specrig.host.switch import words
from specrig.plan import HostPlan
from specrig.verbs.answers import add_host_arguments, error_lines, exit_code, reports, result
from specrig.verbs.plan import make_plans


def register(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    verb = verbs.add_parser("status", help="what runs on each host, and whether it is what was planned")
    add_host_arguments(verb)
    verb.set_defaults(run=run)


def shortfalls(report: dict[str, Any], plan: HostPlan) -> list[str]:
    """What is not as it should be: no answer, a planned unit that is missing, a unit that is not up or does not answer."""
    if "error" in report:
        return ["{code}: {cause}".format_map(report["error"])]
    planned, wanted = [service.unit for service in plan.services], plan.as_json()["plan_hash"]
    units = {unit["unit"]: unit for unit in report.get("units", [])}
    going = [
        f"{name} is not in the plan any more: ./rig up stops and removes it"
        for name, unit in units.items()
        if unit.get("ours") and name not in planned
    ]
    missing = [f"{name} is planned and not there" for name in planned if name not in units]
    down = [
        f"{name} is {unit['state']}" + (f": {unit['status']}" if unit.get("status") else "") + _diagnosed(unit)
        for name, unit in units.items()
        if unit["state"] != "active" and not unit.get("alternate")
    ]
    degraded = [f"{name} is {unit['status']}" for name, unit in units.items() if _degraded(unit)]
    deaf = [
        f"{name} does not answer" for name, unit in units.items() if unit["state"] == "active" and not healthy(unit)
    ]
    old = [
        f"{name} runs with settings from before they were written: ./rig up"
        for name, u in units.items()
        if u.get("stale")
    ]
    slow = [
        f"{name}: {speculation['cause']}"
        for name, u in units.items()
        if (speculation := (u.get("upgrade") or {}).get("speculation") or {}).get("short")
    ]
    web = report.get("webui") or {}
    if web and not web["there"]:
        missing.append(f"{web['unit']} is planned and not there")
    elif web and web["state"] != "active":
        down.append(f"{web['unit']} is {web['state']}: journalctl -u {web['unit']}")
    elif web and not healthy(web):
        deaf.append(f"{web['unit']} does not answer")
    elif web and web["stale"]:
        old.append(f"{web['unit']} runs with settings from before they were written: ./rig up")
    drift = [] if report.get("plan_hash") == wanted else ["what runs is not what is planned now"]
    return going + missing + down + degraded + deaf + old + slow + drift


def _degraded(unit: dict[str, Any]) -> bool:
    return unit["state"] == "active" and str(unit.get("status", "")).startswith("degraded")


def _diagnosed(unit: dict[str, Any]) -> str:
    return f"; why: sudo less {unit['diagnosis']}" if unit["state"] == "failed" and unit.get("diagnosis") else ""


def healthy(unit: dict[str, Any]) -> bool:
    """Whether the unit's service answered its health request."""
    return bool((unit.get("health") or {}).get("ok"))


def describe(host: str, report: dict[str, Any], plan: HostPlan) -> list[str]:
    """Lines for a person."""
    if "error" in report:
        return error_lines(host, report["error"])
    applied, wanted = report.get("plan_hash"), plan.as_json()["plan_hash"]
    drift = "as planned" if applied == wanted else "the plan has changed since it was applied: ./rig up"
    lines = [f"{host}: {drift if applied else 'no plan applied yet: ./rig up'}"]
    for unit in report.get("units", []):
        answer = "answers" if healthy(unit) else "not chosen" if unit.get("alternate") else "does not answer"
        lines.append(unit_line(unit, answer))
        if unit.get("status") and unit["state"] != "inactive":
            lines.append(f"    {unit['status']}")
        lines += upgrade_lines(unit.get("upgrade") or {})
    if web := report.get("webui"):
        lines.append(unit_line(web, "answers" if healthy(web) else "does not answer"))
    for model in report.get("models", []):
        lines.append(f"  {model['path']}  {model['bytes'] / 1e9:.2f} GB{'  made here' if model['derived'] else ''}")
    return lines


def unit_line(unit: dict[str, Any], answer: str) -> str:
    """One unit on one line."""
    return f"  {unit['unit']:<32} {unit['state']:<12} {answer:<16} restarts {unit['restarts']}  since {unit['since']}"


def upgrade_lines(upgrade: dict[str, Any]) -> list[str]:
    """What was proven, what could be gone back to, and what was undone."""
    lines = []
    if now := upgrade.get("proven"):
        lines.append(f"    proven {moment(now['at'])}: {now['image']}; {words(upgrade.get('speculation') or {})}")
    if previous := upgrade.get("previous"):
        lines.append(
            f"    before: {previous['image']}, proven {moment(previous['at'])}: ./rig rollback goes back to it"
        )
    if setback := upgrade.get("setback"):
        if setback["by"] == "hand":
            told = f"rolled back by hand {moment(setback['at'])} from {setback['from']}; ./rig up would move it forward again"
        else:
            told = f"upgrade to {setback['to']} undone {moment(setback['at'])}: {setback['code']}: {setback['cause']}"
        lines.append(f"    {told}")
    return lines


def moment(at: float) -> str:
    """A time of the epoch as people say it, in this machine's zone."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


def run(options: argparse.Namespace) -> int:
    """Ask each host; 1 when a service is missing or not up, or a host does not answer."""
    inventory = runner.inventory_path(options.inventory)
    plans = make_plans(inventory, options.hosts)
    limit = ["--limit", ",".join(options.hosts)] if options.hosts else []
    found = reports(runner.playbook_json("status", inventory, limit), plans)
    short = {host: shortfalls(report, plans[host]) for host, report in found.items()}
    lines: list[str] = []
    for host, report in found.items():
        lines += describe(host, report, plans[host])
        lines += [f"  falls short: {line}" for line in short[host]] if "error" not in report else []
    document = {"hosts": {host: report | {"failures": short[host]} for host, report in found.items()}}
    result(options, document, lines)
    return exit_code(found, short=any(short.values()))
