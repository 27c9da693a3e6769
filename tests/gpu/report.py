"""Tables of a measurement: `python -m tests.gpu.report CASES.json RECORDS.jsonl [OUT.json]`.

Prints Markdown: the ledger beside the engine's own log, decode t/s with every repeat, ratios. OUT.json is the raw data
without the machine's paths.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

GIB = 1 << 30
RATIOS = [("planned", "article"), ("planned", "plain"), ("planned-32b", "article-32b"), ("planned-32b", "plain-32b")]


def ledger(cases: dict[str, Any], records: list[dict[str, Any]]) -> list[str]:
    """Weights, KV bytes per token and KV cache: the plan's against the engine's."""
    lines = [
        "| engine | weights, plan / engine GiB | off | KV bytes a token, plan / engine | off | KV cache, plan / engine GiB | tokens | off |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for record in (r for r in records if r["kind"] == "ready"):
        case, facts = cases[record["case"]], record["facts"]
        rows = [row for row in case["ledger"]["rows"] if "weights" in row["what"] or "loading" in row["what"]]
        weights = sum(row["mib"] for row in rows) / 1024
        token = case["ledger"]["kv_bytes_per_token"]
        overlay = case["overlay"]
        given = "--kv-cache-memory-bytes"
        size = int(overlay[overlay.index(given) + 1]) if given in overlay else facts["kv_gib"] * GIB
        measured = size / facts["kv_tokens"]
        words = [
            record["case"],
            f"{weights:.2f} / {facts['weights_gib']:.2f}",
            f"{weights / facts['weights_gib'] - 1:+.1%}",
            f"{token} / {measured:.0f}",
            f"{token / measured - 1:+.1%}",
        ]
        if "kv_gib" in facts:
            plan = case["ledger"]["kv_mib"] / 1024
            words += [
                f"{plan:.2f} / {facts['kv_gib']:.2f}",
                f"{case['ledger']['kv_tokens']} / {facts['kv_tokens']:.0f}",
                f"{plan / facts['kv_gib'] - 1:+.1%}",
            ]
        else:
            words += ["given", "", ""]
        lines.append("| " + " | ".join(words) + " |")
    return lines


def speeds(records: list[dict[str, Any]]) -> list[str]:
    """Decode t/s: median and every repeat; the time of a step, and how many tokens a step gave."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in (r for r in records if r["kind"] == "run"):
        groups.setdefault((record["set"], record["case"]), []).append(record)
    lines, medians = [], {}
    for name in dict.fromkeys(key[0] for key in groups):
        lines += [f"\n**{name}**\n", "| engine | median t/s | all repeats | ms a step, median (best) | tokens a step |"]
        lines.append("|---|---|---|---|---|")
        for (group, case), runs in groups.items():
            if group != name:
                continue
            tps = [run["tps"] for run in runs]
            steps = [1000 * run["seconds"] / (run.get("drafts") or run["completion_tokens"] - 1) for run in runs]
            drafts = sum(run.get("drafts", 0) for run in runs)
            length = 1 + sum(run.get("accepted_tokens", 0) for run in runs) / drafts if drafts else 1
            medians[group, case] = tps
            lines.append(
                f"| {case} | {statistics.median(tps):.1f} | {' '.join(f'{t:.1f}' for t in tps)} | "
                f"{statistics.median(steps):.1f} ({min(steps):.1f}) | {length:.2f} |"
            )
    lines += [
        "\n**ratios of medians**, and the median of the ratios within a round\n",
        "| | ratio | paired |",
        "|---|---|---|",
    ]
    for (group, case), tps in medians.items():
        for over, under in RATIOS:
            if case == over and (group, under) in medians:
                other = medians[group, under]
                paired = statistics.median(a / b for a, b in zip(tps, other, strict=False))
                ratio = statistics.median(tps) / statistics.median(other)
                lines.append(f"| {group}: {over} / {under} | {ratio:.2f} | {paired:.2f} |")
    return lines


def tidy(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records without places and without the harness's own steps."""
    kept = [r for r in records if r["kind"] in ("machine", "ready", "run", "trace", "failed", "note")]
    return [{k: v for k, v in r.items() if k not in ("tail", "kernel", "cpu")} for r in kept]


def main(argv: list[str]) -> int:
    """Print the tables."""
    document = json.loads(Path(argv[0]).read_text())
    records = [json.loads(line) for line in Path(argv[1]).read_text().splitlines()]
    print("\n".join([*ledger(document["cases"], records), *speeds(records)]))
    if len(argv) > 2:
        records_json = ",\n".join(json.dumps(record) for record in tidy(records))
        head = f'"version": {json.dumps(document["version"])},\n"cases": {json.dumps(document["cases"])}'
        text = f'{{{head},\n"records": [\n{records_json}\n]}}\n'
        Path(argv[2]).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
