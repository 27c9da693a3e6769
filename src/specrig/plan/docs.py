"""Writes docs/codes.md and docs/schema/*.json from the code: `python -m specrig.plan.docs`. A test holds them fresh."""

import json
import sys
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from specrig.host.errors import CODES as RIG_CODES
from specrig.plan.catalog import Drivers, Engine, Gpu, Model, Profile
from specrig.plan.refusals import CODES, Code, example_text
from specrig.plan.types import Facts, HostDecl, LockedModel, ServiceDecl


def codes_page() -> str:
    """docs/codes.md."""
    lines = [
        "# Codes",
        "",
        "Every refusal and warning of the plan, and what the program on a rig can say. Generated from",
        "`src/specrig/plan/catalog/codes.yml` and `src/specrig/host/errors.py` by",
        "`python -m specrig.plan.docs`; do not edit. `./rig explain CODE` prints one of them.",
        "A refusal stops `./rig up` before any host is touched (exit code 1). A warning does not, but for MODEL_UNLOCKED:",
        "a plan can be looked at before its models are locked, and `./rig up` waits for the lock.",
        "",
    ]
    for level in ("refusal", "warning"):
        chosen = [code for code in CODES.values() if code.level == level]
        lines += [f"## {level.capitalize()}s", "", "| code | means |", "|---|---|"]
        lines += [f"| [{code.code}](#{code.code.lower()}) | {code.title} |" for code in chosen]
        lines += ["", *(line for code in chosen for line in _entry(code))]
    lines += ["## Said on the rig", "", "The program on the rig names the figures and the next step with each.", ""]
    lines += ["| code | means |", "|---|---|", *(f"| {code} | {means} |" for code, means in RIG_CODES.items())]
    return "\n".join(lines).rstrip() + "\n"


def _entry(code: Code) -> list[str]:
    lines = [f"### {code.code}", "", f"{code.title}. {code.why}", "", f"Fix: {code.fix}", ""]
    if code.example is None:
        return lines
    besides = [name for name in ("lock", "facts", "rigs") if name in code.example]
    told = f"Provoked by (with {' and '.join(besides)} of its own, see codes.yml):" if besides else "Provoked by:"
    return [*lines, told, "", "```yaml", example_text(code).rstrip(), "```", ""]


def schemas() -> dict[str, Any]:
    """File name -> JSON schema: the declaration, facts and lock entries, and each catalog file."""
    catalog_files: dict[str, Any] = {
        "catalog-gpus": dict[str, Gpu],
        "catalog-models": dict[str, Model],
        "catalog-engines": dict[str, Engine],
        "catalog-drivers": Drivers,
        "catalog-profiles": dict[str, Profile],
    }
    told = {"host": HostDecl, "service": ServiceDecl, "facts": Facts, "lock-models": dict[str, LockedModel]}
    return {f"{name}.json": TypeAdapter(kind).json_schema() for name, kind in {**told, **catalog_files}.items()}


def pages() -> dict[str, str]:
    """Every generated file: path under docs/ -> text."""
    texts = {f"schema/{name}": json.dumps(schema, indent=2) + "\n" for name, schema in schemas().items()}
    return {"codes.md": codes_page(), **texts}


def main(root: Path) -> int:
    """Write them under `root`/docs."""
    for name, text in pages().items():
        path = root / "docs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path.cwd()))
