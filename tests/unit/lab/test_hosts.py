"""Hosts are found by label, inventories are written from what runs, clean-up takes only what is the lab's."""

from __future__ import annotations

import io
import ipaddress
import tarfile
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from docker.errors import APIError

from specrig.lab import cleanup, hosts, paths
from specrig.lab.errors import LabError
from specrig.lab.parallel import parallel


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIG_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class Container:
    """What the lab asks of one container."""

    def __init__(self, name: str, address: str, labels: dict[str, str], status: str = "running") -> None:
        self.name, self.labels, self.status = name, labels, status
        self.attrs = {"NetworkSettings": {"Networks": {hosts.NETWORK: {"IPAddress": address}}}}

    def get_archive(self, path: str) -> tuple[list[bytes], dict[str, Any]]:
        text, out = f"ssh-ed25519 KEY-{self.name} comment\n".encode(), io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as archive:
            entry = tarfile.TarInfo(Path(path).name)
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text))
        return [out.getvalue()], {}


def host(lab: str, name: str, address: str, status: str = "running") -> Container:
    labels = {"specrig.lab": lab, "specrig.host": name, "specrig.os": "debian-13"}
    return Container(f"specrig-{lab}-{name}", address, labels, status)


def engine(*there: Container) -> Any:
    def listing(all: bool, filters: dict[str, list[str]], ignore_removed: bool) -> list[Container]:
        wanted = [label.partition("=") for label in filters["label"]]
        return [c for c in there if all and ignore_removed and matches(c, wanted)]

    def matches(container: Container, wanted: list[tuple[str, str, str]]) -> bool:
        return all(k in container.labels and (not eq or container.labels[k] == v) for k, eq, v in wanted)

    by_name = {c.name: c for c in there}
    return SimpleNamespace(containers=SimpleNamespace(list=listing, get=by_name.__getitem__))


def test_find_sorts_and_filters_by_lab() -> None:
    client = engine(host("b", "x", "10.0.0.3"), host("a", "z", "10.0.0.2"), host("a", "y", "10.0.0.1"))
    assert [h.name for h in hosts.find(client, "a")] == ["y", "z"]
    assert [(h.lab, h.name) for h in hosts.find(client)] == [("a", "y"), ("a", "z"), ("b", "x")]


def test_inventory_and_known_hosts_hold_what_runs(tmp_path: Path) -> None:
    client = engine(host("a", "alpha", "10.0.0.1"), host("a", "beta", "10.0.0.2"), host("a", "off", "", "exited"))
    inventory = hosts.write_inventory(client, "a", tmp_path / "key")
    rigs = yaml.safe_load(inventory.read_text())["rigs"]
    assert rigs["hosts"] == {"alpha": {"ansible_host": "10.0.0.1"}, "beta": {"ansible_host": "10.0.0.2"}}
    assert rigs["vars"]["ansible_user"] == "rig"
    known = (inventory.parent / "known_hosts").read_text()
    assert known == "10.0.0.1 ssh-ed25519 KEY-specrig-a-alpha\n10.0.0.2 ssh-ed25519 KEY-specrig-a-beta\n"
    assert "StrictHostKeyChecking" not in inventory.read_text()


def test_a_host_is_reached_at_the_address_that_a_reboot_does_not_change() -> None:
    lasting, older = host("a", "new", "10.0.0.1"), host("a", "old", "10.0.0.2")
    lasting.attrs["NetworkSettings"]["Networks"][hosts.ADDRESSES] = {"IPAddress": "10.9.0.1"}
    assert [h.address for h in hosts.find(engine(lasting, older))] == ["10.9.0.1", "10.0.0.2"]


def test_an_address_follows_from_the_name_and_another_one_can_be_had() -> None:
    subnet = ipaddress.IPv4Network("10.9.0.0/28")
    taken = {hosts.address_of(f"specrig-a-{n}", subnet, attempt) for n in range(100) for attempt in range(4)}
    assert taken == {f"10.9.0.{n}" for n in range(2, 15)}  # not the network, its gateway or its broadcast
    assert hosts.address_of("specrig-a-x", subnet) == hosts.address_of("specrig-a-x", subnet)


class Starting:
    """A container that does not run, on an Engine where the addresses `taken` are in use."""

    def __init__(self, taken: set[str], words: str = "Address already in use") -> None:
        self.name, self.taken, self.words, self.address, self.started = "specrig-a-x", taken, words, "", False
        self.attrs: dict[str, Any] = {"NetworkSettings": {"Networks": {}}}
        self.networks = SimpleNamespace(get=lambda name: self)

    def reload(self) -> None:
        self.attrs["NetworkSettings"]["Networks"] = {hosts.ADDRESSES: {}} if self.address else {}

    def connect(self, container: Any, ipv4_address: str) -> None:
        assert not self.address, "it is connected already"
        self.address = ipv4_address

    def disconnect(self, container: Any, force: bool) -> None:
        if not self.address:
            raise APIError("not connected")
        self.address = ""

    def start(self) -> None:
        if self.address in self.taken:
            raise APIError("x", explanation=self.words)
        self.started = True


def test_a_taken_address_makes_it_take_the_next_one_and_no_other_failure_does() -> None:
    subnet = ipaddress.IPv4Network("10.9.0.0/16")
    first, second = (hosts.address_of("specrig-a-x", subnet, attempt) for attempt in (0, 1))
    it = Starting({first})
    hosts._start(it, it, subnet)
    assert (it.started, it.address) == (True, second)
    broken = Starting({first}, "no such image")
    with pytest.raises(APIError):
        hosts._start(broken, broken, subnet)
    assert broken.address == first
    with pytest.raises(LabError) as seen:
        hosts._start(full := Starting({hosts.address_of("specrig-a-x", subnet, n) for n in range(16)}), full, subnet)
    assert seen.value.code == "LAB_HOST_ADDRESS"


@pytest.mark.parametrize("name", ["", "Alpha", "-a", "a-", "a.b", "a b", "x" * 33, "../a"])
def test_a_bad_name_is_refused(name: str) -> None:
    with pytest.raises(LabError) as seen:
        hosts.check_name(name)
    assert seen.value.code == "LAB_NAME"


def test_another_system_under_the_same_name_is_refused() -> None:
    with pytest.raises(LabError) as seen:
        hosts.up(engine(host("a", "alpha", "10.0.0.1")), "a", {"alpha": "debian-12"})
    assert seen.value.code == "LAB_HOST_EXISTS"


def test_the_key_is_made_once() -> None:
    key, public = hosts.ensure_key()
    assert public.startswith("ssh-ed25519 ")
    assert hosts.ensure_key() == (key, public)
    assert key.stat().st_mode & 0o777 == 0o600


def test_clean_up_takes_the_labs_images_only() -> None:
    removed: list[str] = []
    tags = [
        "debian:13",
        "specrig-lab/hub:1",
        "127.0.0.1:32768/engine-vllm-cpu:0.32.0-x",
        "127.0.0.1:5000/mine:1",
        "specrig/other:1",
    ]
    listed = [SimpleNamespace(tags=[tag]) for tag in tags]
    client = SimpleNamespace(images=SimpleNamespace(list=lambda: listed, remove=removed.append))
    assert cleanup._remove_images(client) == 2
    assert removed == ["specrig-lab/hub:1", "127.0.0.1:32768/engine-vllm-cpu:0.32.0-x"]


def test_parallel_keeps_order_counts_and_raises_the_first_error() -> None:
    seen: list[int] = []
    assert parallel([partial(pow, n, 2) for n in range(40)], seen.append) == [n * n for n in range(40)]
    assert seen == list(range(1, 41))

    def fail() -> int:
        raise LabError("X", "y", "z")

    with pytest.raises(LabError):
        parallel([fail, lambda: 1])
    assert parallel([]) == []


def test_a_lock_is_held_against_a_second_thread() -> None:
    order: list[str] = []

    def second() -> None:
        with paths.exclusive("thing:1"):
            order.append("second")

    assert not paths.held("thing:1")
    with paths.exclusive("thing:1"):
        assert paths.held("thing:1")
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.1)
        order.append("first")
    thread.join(2)
    assert order == ["first", "second"]
