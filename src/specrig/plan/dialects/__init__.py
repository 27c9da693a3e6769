"""How a resolved service is said in an engine's own words, version by version.

The tables (one file per engine) hold every difference between engines and versions; this module walks them.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import yaml

from specrig.plan import versions
from specrig.plan.catalog import read

Values = Mapping[str, Any]
"""What a flag's `from` may name: str, int, float, True, or None/False/"" for "leave it out"."""


@lru_cache(maxsize=8)
def _tables(engine: str) -> dict[str, Any]:
    tables: dict[str, Any] = read(f"dialects/{engine}.yml")
    return tables


@dataclass(frozen=True)
class Dialect:
    """One version of one engine. Built once per version (`dialect`)."""

    engine: str
    version: str
    entrypoint: tuple[str, ...]
    flags: tuple[tuple[str, str], ...]
    json_keys: tuple[tuple[str, str], ...]
    env_rows: tuple[tuple[str, str, str], ...]
    traits: Mapping[str, Any]
    refused_words: tuple[str, ...]  # how a line begins that says no to the command line; (): exit status 2 says it
    metrics: Mapping[str, str]  # where the acceptance is read (host/acceptance.py)
    progress: tuple[
        str, ...
    ]  # samples of the metrics page that move while it works; (): none does before an answer ends
    known: Mapping[str, bool]  # flags whose window was read exactly: is it accepted by this version?
    owned: Mapping[
        str, str
    ]  # flags that the plan writes, in any version, and the value it writes there; "": none, it is kept out
    owned_env: Mapping[str, str]  # variables a person may not set, and what to do instead
    short: Mapping[str, str]
    formats: Mapping[str, list[str]]  # file format -> quantisations that are read; "any"
    fields: frozenset[str]  # fields of a service that not every engine has a word for, and this one has
    file_rows: tuple[Mapping[str, Any], ...]

    def argv(self, values: Values) -> list[str]:
        """The arguments that follow the entry point."""
        spec = {key: values[name] for key, name in self.json_keys if values.get(name)}
        every = {**values, "spec_json": json.dumps(spec, separators=(",", ":")) if values.get("k") else None}
        argv: list[str] = []
        for flag, name in self.flags:
            value = every.get(name)
            if value is None or value is False or value == "":
                continue
            argv += [word for word in (flag, "" if value is True else str(value)) if word]
        return argv

    def env(self, values: Values) -> dict[str, str]:
        """The engine's environment; never a secret."""
        said = ((name, values.get(source), text) for name, source, text in self.env_rows)
        return {name: text or ("1" if value is True else str(value)) for name, value, text in said if value}

    def files(self, values: Values) -> dict[str, str]:
        """The engine's configuration files: name -> content."""
        return {
            row["name"]: _yaml(row, values) if row["format"] == "yaml" else _lines(row, values)
            for row in self.file_rows
        }


def _yaml(row: Mapping[str, Any], values: Values) -> str:
    document: dict[str, Any] = {}
    for entry in row["keys"]:
        value = values.get(entry["from"])
        if value is None or value is False or value == "":
            continue
        *parents, last = entry["key"].split(".")
        place = document
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return str(yaml.safe_dump(document, sort_keys=False))


def _lines(row: Mapping[str, Any], values: Values) -> str:
    lines = []
    for entry in row["lines"]:
        names = re.findall(r"\{(\w+)\}", entry["text"])
        if all(values.get(name) not in (None, False, "") for name in names):
            lines.append(re.sub(r"\{(\w+)\}", lambda match: str(values[match[1]]), entry["text"]))
    return "\n".join(lines) + "\n"


@lru_cache(maxsize=512)
def dialect(engine: str, version: str) -> Dialect:
    """The dialect of a version that the catalog lists."""
    tables, at = _tables(engine), versions.key(version)

    def now(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [row for row in rows if versions.within(at, row)]

    known = {row["flag"] for row in tables["known"]}
    return Dialect(
        engine=engine,
        version=version,
        entrypoint=tuple(now(tables["entrypoints"])[0]["argv"]),
        flags=tuple((row["flag"], row["from"]) for row in now(tables["flags"])),
        json_keys=tuple((row["key"], row["from"]) for row in now(tables["speculative_config"])),
        env_rows=tuple((row["name"], row["from"], row.get("value", "")) for row in now(tables["env"])),
        traits={name: now(trait["values"])[0]["value"] for name, trait in tables["traits"].items()},
        refused_words=tuple(tables.get("refused_words", [])),
        metrics=now(tables["metrics"])[0]["read"],
        progress=tuple(now(tables["progress"])[0]["samples"]),
        known={flag: any(row["flag"] == flag for row in now(tables["known"])) for flag in known},
        owned={
            flag: name
            for flag, name in [
                *((flag, "") for flag in tables["also_owned"]),
                *((row["flag"], row["from"]) for row in tables["flags"] if row["flag"]),
            ]
            if flag not in known
        },
        owned_env=tables["owned_env"],
        short=tables["short"],
        formats=tables["formats"],
        fields=frozenset(tables["fields"]),
        file_rows=tuple(now(tables.get("files", []))),
    )


@lru_cache(maxsize=4096)
def method_works(engine: str, method: str, version: str) -> bool:
    """Does `version` have this speculation method?"""
    at = versions.key(version)
    return any(
        versions.within(at, window) for window in _tables(engine)["methods"].get(method, {"windows": []})["windows"]
    )


def methods(engine: str) -> list[str]:
    """The methods that any version of an engine has."""
    return list(_tables(engine)["methods"])


def speculative_parts(engine: str) -> tuple[frozenset[str], frozenset[str]]:
    """The flags and variables that exist only for speculation: all that the one switch may change."""
    tables = _tables(engine)
    flags = frozenset(row["flag"] for row in tables["flags"] if row.get("speculative"))
    return flags, frozenset(row["name"] for row in tables["env"] if row.get("speculative"))


@lru_cache(maxsize=8)
def _options(engine: str) -> tuple[list[versions.Key], dict[str, list[tuple[versions.Key, versions.Key]]]]:
    """The versions whose parser was asked, and each option's spans of them (first, last)."""
    try:
        data = read(f"dialects/{engine}_options.yml")
    except FileNotFoundError:  # nobody asked its parser: `known` is all there is
        return [], {}
    spans = {
        option: [(versions.key(first), versions.key(last)) for first, last in (span.split("..") for span in row)]
        for option, row in data["options"].items()
    }
    return [versions.key(version) for version in data["asked"]], spans


def options(engine: str) -> Iterable[str]:
    """Every option of any version that was asked."""
    return _options(engine)[1]


def option_accepted(engine: str, option: str, version: str) -> bool:
    """Does the version's own parser take this option? Between two that were asked: when either does."""
    asked, spans = _options(engine)
    if not asked:
        return False
    at = versions.key(version)
    near = {max((a for a in asked if a <= at), default=asked[0]), min((a for a in asked if a >= at), default=asked[-1])}
    return any(first <= one <= last for one in near for first, last in spans.get(option, []))


def nearest(engine: str, known: list[str], version: str, method: str) -> list[str]:
    """The closest older and newer versions that have the method (none, one or two)."""
    works = [v for v in known if method_works(engine, method, v)]
    older = versions.newest(v for v in works if versions.key(v) < versions.key(version))
    newer = min((v for v in works if versions.key(v) > versions.key(version)), key=versions.key, default=None)
    return [v for v in (older, newer) if v]
