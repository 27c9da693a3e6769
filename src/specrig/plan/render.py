"""The plan as a person reads it: `./rig plan`."""

import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from specrig.plan.exposure import url_host
from specrig.plan.gateway import GatewayPlan
from specrig.plan.types import Finding, HostPlan, ServicePlan

WIDTH = 118
TALK = {
    "nvlink": "over NVLink",
    "pcie": "over PCIe, peer to peer",
    "off": "through the host's memory; peer access over PCIe is off (p2p)",
}
DRIVER = {
    "none": "there already, or yours to install",
    "distro": "which specrig installs from the distribution",
    "nvidia": "which specrig installs from NVIDIA's repository",
}
_PLAIN = re.compile(r"[A-Za-z0-9_./:@%+=,-]+\Z")


def table(plans: Mapping[str, HostPlan]) -> str:
    """Every host's services, command lines, memory, driver, warnings and refusals, as text for a terminal."""
    return "\n\n".join(_text(_host(name, plan)) for name, plan in plans.items()) + "\n"


def gateways(plans: Mapping[str, GatewayPlan]) -> str:
    """Every gateway's endpoint, clients and pools, as text for a terminal; empty when there is none."""
    return "".join("\n" + _text(_gateway(name, plan)) + "\n" for name, plan in plans.items())


def _text(lines: Iterator[str]) -> str:
    """Lines for a terminal: what would do something to it (a refused plan may hold such) is spelt out."""
    return "\n".join(line if line.isprintable() else "".join(map(_spelt, line)) for line in lines)


def _spelt(character: str) -> str:
    return character if character.isprintable() else ascii(character)[1:-1]


def _gateway(name: str, plan: GatewayPlan) -> Iterator[str]:
    state = "" if plan.ok else f"    REFUSED ({len(plan.refusals)})"
    yield f"{name}    gateway at {plan.listen['url']}{state}"
    yield f"  listens    {url_host(plan.listen['bind'])}:{plan.listen['port']}, {plan.listen['tls'] or 'no'} TLS; clients: {', '.join(plan.clients)}"
    for pool in plan.pools:
        yield f"  {pool['model']}    {pool['target']}"
        for upstream in pool["upstreams"]:
            yield f"    {upstream['rig']}/{upstream['service']}    {upstream['url']}"
    for title, found in (("warnings", plan.warnings), ("refusals", plan.refusals)):
        if found:
            yield f"  {title}"
            for entry in found:
                yield from _finding(entry)


def flags(argv: list[str]) -> list[str]:
    """`argv` with one flag per line, its value beside it, quoted where a shell would need it."""
    lines: list[str] = []
    open_flag = False
    for word in argv:
        text = word if _PLAIN.match(word) else "'" + word.replace("'", "'\\''") + "'"
        if open_flag and not word.startswith("--"):
            lines[-1] += f" {text}"
        else:
            lines.append(text)
        open_flag = word.startswith("--")
    return lines


def _host(name: str, plan: HostPlan) -> Iterator[str]:
    gpus = plan.host.get("gpus", [])
    cards = ", ".join(f"{n} × {title}" for title, n in _counted(gpu["title"] for gpu in gpus))
    cards = cards or ("no GPU" if plan.services else "")  # without a service nobody knows what was meant
    state = "" if plan.ok else f"    REFUSED ({len(plan.refusals)})"
    yield f"{name}    {plan.host.get('profile') or 'no profile'}{' on ' if cards else ''}{cards}{state}"
    if plan.driver:
        parts = [f"branch {plan.driver['branch']}"]
        parts += [f"{word} {plan.driver[word]}" for word in ("version", "installed") if plan.driver[word]]
        parts += [DRIVER[plan.driver["source"]]] if not plan.driver["installed"] else []
        yield f"  driver     {', '.join(parts)}; {plan.driver['reason']}"
    if tuning := plan.host.get("gpu_tuning"):
        yield f"  tuning     {_tuning(tuning)}"
    for service in plan.services:
        yield ""
        yield from _service(service)
    if webui := plan.host.get("webui"):
        yield ""
        yield from _webui(webui)
    for title, found in (("warnings", plan.warnings), ("refusals", plan.refusals)):
        if found:
            yield ""
            yield f"  {title}"
            for entry in found:
                yield from _finding(entry)
    if not plan.ok:
        yield ""
        yield "  nothing was touched; ./rig explain CODE says more"


def _tuning(job: Mapping[str, Any]) -> str:
    if job["state"] == "absent":
        return "the cards' own limits, and sleep as it was"
    limits = []
    for card in job["cards"]:
        if card["watts"] is None and card["percent"] is None:
            continue  # refused: the refusal says so
        limit = f"{card['watts']} W" if card["watts"] is not None else f"{card['percent']} % of the default limit"
        clocks = f", or {card['clocks_mhz'][0]} to {card['clocks_mhz'][1]} MHz" if card["clocks_mhz"] else ""
        which = "all cards" if card["gpu"] == "all" else f"card {card['gpu']}"
        limits.append(f"{which} {limit}{clocks}")
    for fans in job["fans"]:
        which = "all cards" if fans["gpu"] == "all" else f"card {fans['gpu']}"
        limits.append(
            f"fans of {which} {', '.join(f'{percent} % at {celsius} °C' for celsius, percent in fans['curve'])}"
        )
    return "; ".join([*limits, *(["no sleep"] if job["mask_sleep"] else [])]) or "nothing"


def _webui(webui: Mapping[str, Any]) -> Iterator[str]:
    if webui["state"] == "absent":
        yield f"  webui    none; data stays in {webui['data']}"
        return
    yield f"  webui    Open WebUI at {webui['url']}"
    yield f"    image    {webui['image']}"
    yield f"    asks     {', '.join(endpoint['url'] for endpoint in webui['endpoints'])}"
    yield f"    unit     {webui['unit']}; data in {webui['data']}"


def _counted(titles: Iterator[str]) -> list[tuple[str, int]]:
    every = list(titles)
    return [(title, every.count(title)) for title in dict.fromkeys(every)]


def _finding(found: Finding) -> Iterator[str]:
    yield from _wrap(f"{found.code}  {found.cause}", 4)
    yield from _wrap(f"fix: {found.fix}", 8)


def _wrap(text: str, indent: int) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=" " * indent, subsequent_indent=" " * (indent + 4))


def _service(s: ServicePlan) -> Iterator[str]:
    speculation = f"{s.method}, K={s.k}" if s.k else "no speculation"
    yield f"  {s.name}    {s.engine} {s.version} on {s.device}, {speculation}"
    yield f"    image    {s.image}"
    for model in s.models:
        yield f"    {'target' if model['path_in_container'] == '/models/target' else 'draft':<8} {model['artefact']}"
    yield from _pair(s.pair)
    for port in s.ports:
        yield f"    listens  {url_host(port['bind'])}:{port['port']} as {s.served_name}"
    yield f"    unit     {s.unit}"
    if s.p2p:
        yield f"    cards    talk {TALK[s.p2p]}"
    for key, value in s.env.items():
        yield f"    env      {key}={value}"
    inside = "    (in the container: its --host and --port are not the machine's)" if "--host" in s.argv else ""
    yield f"    command  {' '.join(s.entrypoint)}{inside}"
    for line in flags(s.argv):
        yield f"               {line}"
    for file in s.files:
        yield f"    file     {file['path_in_container']}"
        yield from (f"               {line}" for line in file["content"].splitlines())
    yield from _memory(s.vram)
    for note in s.notes:
        yield from _wrap(f"note: {note}", 4)


def _pair(pair: Mapping[str, Any]) -> Iterator[str]:
    if not pair:
        return
    how = {
        "pad": f"padded from {pair['draft_vocab']} to {pair['target_vocab']} tokens",
        "same": f"both {pair['target_vocab']} tokens",
        "near": f"{pair['draft_vocab']} and {pair['target_vocab']} tokens, which the engine takes",
        "heterogeneous": f"mapped by the engine, {pair['draft_vocab']} and {pair['target_vocab']} tokens",
    }.get(pair["vocab"], f"{pair['draft_vocab']} and {pair['target_vocab']} tokens")
    yield f"    pair     vocabulary {how}; tokenizer {pair['tokenizer']}"
    cost = pair["payoff"]
    if cost:
        yield (
            f"    pays     when accepted/drafted > {cost['break_even_acceptance']:.2f}"
            f" (draft {cost['draft_ms']:.1f} ms, target {cost['target_ms']:.1f} ms a pass; an estimate)"
        )
        best = ", ".join(f"{p}: K={b['k']} {b['speedup']:.2f}×" for p, b in cost["best_k"].items())
        yield f"    best K   by chance that a token is accepted: {best}"


def _memory(vram: Mapping[str, Any]) -> Iterator[str]:
    if vram.get("device") == "cpu":
        yield f"    memory   KV cache {_gib(vram['kv_mib'])} GiB: {vram['kv_tokens']} tokens"
        return
    if not vram:
        return
    accounts = vram["gpus"]
    same = len(accounts) > 1 and all(a["rows"] == accounts[0]["rows"] for a in accounts)
    for account in accounts[:1] if same else accounts:
        which = f"each of {len(accounts)} cards" if same else f"card {account['index']}"
        yield f"    memory of {which} ({account['card']}), GiB"
        inside = [row for row in account["rows"] if row["inside_budget"]]
        outside = [row for row in account["rows"] if not row["inside_budget"]]
        yield _line("visible to the engine", account["visible_mib"], f"of {_gib(account['total_mib'])} on the card")
        yield _line("budget", account["budget_mib"], f"gpu_memory_utilization {vram['gpu_memory_utilization']:g}")
        for row in inside:
            yield _line(f"  {row['what']}", row["mib"], row["note"])
        note = f"{account['kv_tokens']} tokens at {account['kv_bytes_per_token'] / 1024:g} KiB"
        yield _line("  left for the KV cache", account["kv_mib"], note)
        for row in outside:
            yield _line(f"outside: {row['what']}", row["mib"], row["note"])
        yield _line("unused", account["spare_mib"], "")
    graphs = "CUDA graphs kept" if vram["cuda_graphs"] else "no CUDA graphs"
    yield (
        f"    context  {vram['max_model_len']} asked, {vram['largest_max_model_len']} would fit;"
        f" {vram['full_length_sequences']:g} full-length sequences at once; {graphs};"
        f" ± {_gib(vram['error_band_mib'])} GiB"
    )


def _gib(mib: int) -> str:
    return f"{mib / 1024:.1f}"


def _line(what: str, mib: int, note: str) -> str:
    return f"      {what:<26}{_gib(mib):>7}  {note}".rstrip()
