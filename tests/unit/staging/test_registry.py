"""Images by digest: the lock, from a registry that answers as registries do."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from specrig import cli
from specrig.console import CannotRun
from specrig.plan import HostPlan, plan_host
from specrig.staging.registry import Registry, changes, lock_image, place
from specrig.verbs import images
from tests.unit.plan.tiny import tiny, tiny_lock

from .registry_double import RegistryDouble

TODAY = "2026-12-01"


@pytest.fixture
def double() -> Iterator[RegistryDouble]:
    with RegistryDouble() as one:
        one.tags["engine/vllm:v1"] = one.image([(100, "a"), (200, "b")])
        yield one


@pytest.fixture
def registry(double: RegistryDouble, tmp_path: Path) -> Registry:
    return Registry(at={"engines.test": double.url}, config=tmp_path / "config.json", pause=0.0)


def refused(registry: Registry, code: str, image: str = "engines.test/engine/vllm:v1") -> CannotRun:
    with pytest.raises(CannotRun) as caught:
        lock_image(image, registry, TODAY)
    assert caught.value.code == code, caught.value
    return caught.value


def test_a_tag_becomes_a_digest_with_its_layers(double: RegistryDouble, registry: Registry) -> None:
    entry = lock_image("engines.test/engine/vllm:v1", registry, TODAY)
    assert entry["digest"] == entry["manifest"] == double.tags["engine/vllm:v1"]
    assert (entry["size"], entry["date"]) == (300, TODAY)
    assert entry["layers"][1] == {"size": 200, "diff_id": "sha256:" + "b" * 64}


def test_an_index_is_locked_as_docker_records_it(double: RegistryDouble, registry: Registry) -> None:
    amd, arm = double.image([(5, "c")]), double.image([(6, "d")], "arm64")
    double.tags["engine/vllm:v2"] = double.index(arm64=arm, amd64=amd)
    entry = lock_image("engines.test/engine/vllm:v2", registry, TODAY)
    assert (entry["digest"], entry["manifest"], entry["size"]) == (double.tags["engine/vllm:v2"], amd, 5)


def test_another_platform_is_refused(double: RegistryDouble, registry: Registry) -> None:
    arm = double.image([(6, "d")], "arm64")
    double.tags |= {"engine/vllm:v1": arm, "engine/vllm:v2": double.index(arm64=arm)}
    assert "linux/arm64" in refused(registry, "REGISTRY_PLATFORM").cause
    assert "linux/arm64" in refused(registry, "REGISTRY_PLATFORM", "engines.test/engine/vllm:v2").cause


def test_a_token_is_fetched_once_and_goes_only_to_its_registry(double: RegistryDouble, registry: Registry) -> None:
    double.token = "secret"
    double.tags["engine/vllm:v2"] = double.tags["engine/vllm:v1"]
    lock_image("engines.test/engine/vllm:v1", registry, TODAY)
    lock_image("engines.test/engine/vllm:v2", registry, TODAY)
    assert [path.partition("?")[0] for path, _ in double.asked].count("/token") == 1
    assert [said for path, said in double.asked if path.startswith("/token")] == [""]


def test_a_stored_login_is_used_for_the_token(double: RegistryDouble, registry: Registry) -> None:
    double.token, double.login = "secret", "me:pass"
    assert "docker login engines.test" in refused(registry, "REGISTRY_DENIED").fix
    stored = base64.b64encode(b"me:pass").decode()
    registry.config.write_text(json.dumps({"auths": {"engines.test": {"auth": stored}}}))
    assert lock_image("engines.test/engine/vllm:v1", registry, TODAY)["size"] == 300


def test_a_busy_registry_is_waited_for_and_then_named(double: RegistryDouble, registry: Registry) -> None:
    double.busy = 2
    assert lock_image("engines.test/engine/vllm:v1", registry, TODAY)["size"] == 300
    double.busy = 99
    assert "HTTP 429" in refused(registry, "REGISTRY_BUSY").cause


def test_a_missing_tag_and_a_missing_registry(registry: Registry) -> None:
    assert "no engine/vllm v9" in refused(registry, "REGISTRY_NO_IMAGE", "engines.test/engine/vllm:v9").cause
    gone = Registry(at={"engines.test": "http://127.0.0.1:9"}, pause=0.0)
    assert "--at engines.test=" in refused(gone, "REGISTRY_UNREACHABLE").fix


def test_bytes_that_are_not_the_digest_are_refused(double: RegistryDouble, registry: Registry) -> None:
    double.damage = True
    refused(registry, "REGISTRY_DAMAGED")


@pytest.mark.parametrize(
    ("image", "where"),
    [
        ("vllm/vllm-openai:v1", ("docker.io", "vllm/vllm-openai", "v1")),
        ("debian:13", ("docker.io", "library/debian", "13")),
        ("lmsysorg.test:5000/sglang:v1@sha256:" + "a" * 64, ("lmsysorg.test:5000", "sglang", "sha256:" + "a" * 64)),
    ],
)
def test_names_are_taken_apart_as_docker_does(image: str, where: tuple[str, str, str]) -> None:
    found = place(image)
    assert (found.registry, found.repository, found.reference) == where


def test_addresses_have_tls_unless_they_are_loopback_or_named() -> None:
    registry = Registry(plain={"lan.test:5000"})
    assert registry.base("ghcr.test") == "https://ghcr.test"
    assert registry.base("lan.test:5000") == "http://lan.test:5000"
    assert registry.base("localhost:5000") == "http://localhost:5000"
    assert registry.base("localhost.evil.test") == "https://localhost.evil.test"


def test_changes_say_whether_our_platform_moved() -> None:
    old = {"digest": "sha256:1", "manifest": "sha256:m", "layers": [{"diff_id": "a", "size": 1}]}
    assert changes(old, old) == []
    assert "the same for linux/amd64" in changes(old, {**old, "digest": "sha256:2"})[0]
    new = {"digest": "sha256:2", "manifest": "sha256:n", "layers": [*old["layers"], {"diff_id": "b", "size": 7}]}
    assert "1 of 2 layers are new (7 bytes)" in changes(old, new)[1]


class Verb:
    """`./rig images lock` on one inventory; the plan is real, only Ansible is left out."""

    def __init__(self, double: RegistryDouble, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.declared: dict[str, Any] = tiny(image="engines.test/engine/vllm:v1")
        self.words = ["images", "lock", "-i", str(folder / "hosts.yml"), "--at", f"engines.test={double.url}"]
        self.path = folder / "images.lock.yml"
        (folder / "hosts.yml").touch()
        monkeypatch.setattr(images, "make_plans", self.plans)

    def plans(self, *_: object) -> dict[str, HostPlan]:
        lock = tiny_lock() | (yaml.safe_load(self.path.read_text()) if self.path.exists() else {})
        return {"alpha": plan_host("alpha", self.declared, lock)}

    def __call__(self, *more: str) -> int:
        return cli.main([*self.words, *more])


@pytest.fixture
def verb(double: RegistryDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Verb:
    return Verb(double, tmp_path, monkeypatch)


def test_the_plan_runs_the_locked_digest(verb: Verb, double: RegistryDouble) -> None:
    before = verb.plans()["alpha"]
    assert [w.code for w in before.warnings] == ["IMAGE_UNLOCKED"] and before.images[0]["size"] is None
    assert verb() == 0
    plan = verb.plans()["alpha"]
    assert plan.warnings == () and plan.refusals == ()
    assert plan.services[0].image == f"engines.test/engine/vllm:v1@{double.tags['engine/vllm:v1']}"
    assert plan.images[0]["size"] == 300 and plan.images[0]["declared"] == "engines.test/engine/vllm:v1"
    assert plan.services[0].cache_key != before.services[0].cache_key


def test_lock_leaves_what_is_locked_and_check_and_update_say_what_moved(
    verb: Verb, double: RegistryDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verb() == 0 and verb("--check") == 0
    text = verb.path.read_text()
    double.tags["engine/vllm:v1"] = double.image([(100, "a"), (250, "c")])
    assert verb() == 0 and verb.path.read_text() == text
    assert verb("--check") == 1 and verb.path.read_text() == text
    assert "1 of 2 layers are new (250 bytes)" in capsys.readouterr().out
    assert verb("--update") == 0 and double.tags["engine/vllm:v1"] in verb.path.read_text()


def test_check_says_that_an_image_is_gone(
    verb: Verb, double: RegistryDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verb() == 0
    double.tags.clear()
    assert verb("--check") == 1
    assert "REGISTRY_NO_IMAGE" in capsys.readouterr().out


@pytest.mark.parametrize("bad", ["images: [1]", "images: {'engines.test/engine/vllm:v1': {digest: latest, size: 1}}"])
def test_a_broken_lock_is_refused(verb: Verb, bad: str) -> None:
    verb.path.write_text(bad)
    assert "LOCK_INVALID" in [r.code for r in verb.plans()["alpha"].refusals]


def test_a_malformed_entry_is_locked_anew(verb: Verb) -> None:
    verb.path.write_text("images: {'engines.test/engine/vllm:v1': {digest: latest, size: 1}}")
    [refusal] = verb.plans()["alpha"].refusals
    assert "./rig images lock" in refusal.fix
    assert verb() == 0 and verb.plans()["alpha"].refusals == ()
