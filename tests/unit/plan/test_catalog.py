"""The data files: shapes, sources, and windows that leave no gap."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from specrig.plan import versions
from specrig.plan.catalog import catalog, gpu_from_lspci, gpu_named, profiles_for, read
from specrig.plan.dialects import dialect, method_works, option_accepted
from specrig.plan.types import ServiceDecl
from tests.unit.plan.tiny import r1, tiny_lock

SCHEMAS = Path(__file__).parents[3] / "docs" / "schema"
TABLES = read("dialects/vllm.yml")
VERSIONS = catalog().engines["vllm"].versions


def _schema(name: str) -> Any:
    return json.loads((SCHEMAS / f"{name}.json").read_text("utf-8"))


@pytest.mark.parametrize("name", ["gpus", "models", "engines", "profiles"])
def test_catalog_files_follow_their_published_schema(name: str) -> None:
    jsonschema.validate(read(f"catalog/{name}.yml")[name], _schema(f"catalog-{name}"))
    spoilt = json.loads(json.dumps(read(f"catalog/{name}.yml")[name]))
    next(iter(spoilt.values()))["surprise"] = 1
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(spoilt, _schema(f"catalog-{name}"))


def test_declarations_follow_their_published_schema() -> None:
    jsonschema.validate(read("catalog/drivers.yml"), _schema("catalog-drivers"))
    jsonschema.validate(r1(k=3), _schema("host"))
    jsonschema.validate(tiny_lock()["models"], _schema("lock-models"))
    for profile in catalog().profiles.values():
        for service in profile.services:
            jsonschema.validate(service, _schema("service"))
    for broken in ({"rig_profile": 1}, {"rig_unknown": 1}, {"rig_gpus": [{"name": "x", "count": 0}]}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(broken, _schema("host"))


def test_every_table_row_has_a_source() -> None:
    for part in ("entrypoints", "flags", "speculative_config", "env", "known"):
        assert all(len(row["source"]) > 8 for row in TABLES[part]), part
    for part in ("methods", "traits"):
        assert all(len(row["source"]) > 8 for row in TABLES[part].values()), part


def test_windows_leave_no_gap_and_do_not_overlap() -> None:
    for version in VERSIONS:
        at = versions.key(version)
        for name, trait in TABLES["traits"].items():
            assert sum(versions.within(at, row) for row in trait["values"]) == 1, (version, name)
        assert sum(versions.within(at, row) for row in TABLES["entrypoints"]) == 1
    for part in ("flags", "known", "env"):
        for row in TABLES[part]:
            for end in ("since", "until"):
                assert versions.parse(row.get(end, "0.0.0")) is not None


def test_versions_are_in_order() -> None:
    assert all(versions.key(a) < versions.key(b) for a, b in pairwise(VERSIONS))
    images = catalog().engines["vllm"].images
    assert all(versions.key(a.since) < versions.key(b.since) for a, b in pairwise(images))
    assert images[0].since == VERSIONS[0]
    assert {image.cuda for image in images} <= set(catalog().drivers.cuda)


@pytest.mark.parametrize(
    ("method", "first", "missing"),
    [
        ("draft_model", "0.6.4.post1", {"0.10.0", "0.12.0", "0.14.1"}),
        ("ngram", "0.6.4.post1", set()),
        ("pard", "0.16.0", {"0.15.1"}),
        ("eagle3", "0.11.2", {"0.9.2"}),
        ("none", "0.6.4.post1", set()),
    ],
)
def test_method_windows(method: str, first: str, missing: set[str]) -> None:
    works = [version for version in VERSIONS if method_works("vllm", method, version)]
    assert works[0] == first and works[-1] == VERSIONS[-1]
    assert missing.isdisjoint(works)


@pytest.mark.parametrize(
    ("version", "has", "lacks"),
    [
        (
            "0.6.4.post1",
            {"--speculative-model", "--disable-log-requests"},
            {"--speculative-config", "--reasoning-parser"},
        ),
        ("0.8.2", {"--speculative-config", "--enable-reasoning"}, {"--speculative-model"}),
        ("0.9.2", {"--speculative-config", "--reasoning-parser", "--model"}, {"--enable-reasoning"}),
        ("0.10.2", {"--model"}, {"--disable-log-requests"}),
        ("0.11.2", set(), {"--model"}),
        ("0.33.0", {"--shutdown-timeout"}, {"--disable-log-requests", "--swap-space"}),
    ],
)
def test_flags_of_a_version(version: str, has: set[str], lacks: set[str]) -> None:
    written = {flag for flag, _ in dialect("vllm", version).flags}
    assert has <= written and lacks.isdisjoint(written)


@pytest.mark.parametrize(
    ("option", "version", "accepted"),
    [
        ("--swap-space", "0.15.1", True),
        ("--swap-space", "0.16.0", True),  # between two that were asked: lenient
        ("--swap-space", "0.19.1", False),
        ("--enable-prefix-caching", "0.33.0", True),
        ("--seed", "0.6.4.post1", True),
        ("--no-such-flag", "0.33.0", False),
    ],
)
def test_options_of_the_real_parsers(option: str, version: str, accepted: bool) -> None:
    assert option_accepted("vllm", option, version) is accepted


@pytest.mark.parametrize(
    "version", ["0.6.4.post1", "0.7.3", "0.8.2", "0.8.5", "0.9.2", "0.10.2", "0.15.1", "0.26.0", "0.33.0"]
)
def test_the_dialect_writes_only_what_the_real_parser_knows(version: str) -> None:
    for flag, _ in dialect("vllm", version).flags:
        assert not flag or option_accepted("vllm", flag, version), flag
    for flag, accepted in dialect("vllm", version).known.items():
        # FlexibleArgumentParser also takes --no- forms that it does not list
        assert flag.startswith("--no-") or accepted is option_accepted("vllm", flag, version), flag


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.6.4.post1", (0, 6, 4, 0, 1)),
        ("580.65.06", (580, 65, 6, 0, 0)),
        ("8.9", (8, 9, 0, 0, 0)),
        ("0.10.1.1", (0, 10, 1, 1, 0)),
        ("x", None),
        ("1.2.3.4.5", None),
        ("1.2\n", None),
        ("", None),
        ("٣.١", None),
    ],
)
def test_versions_parse(text: str, value: tuple[int, ...] | None) -> None:
    assert versions.parse(text) == value


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("01:00.0 VGA compatible controller: NVIDIA Corporation AD102 [GeForce RTX 4090] (rev a1)", "rtx_4090"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "rtx_4070_ti_super"),
        ("NVIDIA GeForce RTX 4070 Ti", "rtx_4070_ti"),
        ("NVIDIA GeForce RTX 4070", "rtx_4070"),
        ("NVIDIA GeForce RTX 3090 Ti", "rtx_3090_ti"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H200", "h200"),
        ("Matrox G200", None),
    ],
)
def test_cards_are_recognised(text: str, key: str | None) -> None:
    assert gpu_named(text) == gpu_from_lspci(text) == key


def test_profiles_that_fit() -> None:
    assert profiles_for({"rtx_4090": 1})[0] == "rtx4090_r1_14b"
    assert profiles_for({"rtx_3090": 2})[0] == "dual_rtx3090_r1_32b_tp2"
    assert profiles_for({}) == []  # a real machine without a card gets no profile: the CPU one is the lab's


def test_profiles_are_as_promised() -> None:
    named = catalog().profiles
    for base in ("rtx4090_r1_14b", "dual_rtx3090_r1_32b_tp2", "12gb_r1_7b"):
        article = ServiceDecl.model_validate(named[f"{base}_article"].services[0])
        assert article.version == "0.6.4.post1"
        assert any(note.startswith("deviation: ") for note in article.notes)
        assert ServiceDecl.model_validate(named[base].services[0]).eager is None
    assert all(entry.source for entry in named.values())
