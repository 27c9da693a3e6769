"""Waiting for the cards' memory, on the recorded answer of an H200's nvidia-smi with other figures in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from specrig.host import gate
from specrig.host.machine import Answer, Machine

from .docker import Docker

XML = (Path(__file__).parent / "fixtures/nvidia-smi-h200.xml").read_text()
HOLDER = """<processes><process_info><pid>4711</pid><type>C</type><process_name>/usr/bin/python3</process_name>
<used_memory>18432 MiB</used_memory></process_info></processes>"""
UUID = "GPU-"


def smi(free: int, holder: bool = False) -> Answer:
    """The recorded answer with so many MiB free, and perhaps a process that holds some."""
    head, _, rest = XML.partition("<fb_memory_usage>")
    memory, end, tail = rest.partition("</fb_memory_usage>")
    before, _, after = memory.partition("<free>")
    text = f"{head}<fb_memory_usage>{before}<free>{free} MiB{after[after.index('</free>') :]}{end}{tail}"
    if holder:
        start = text.index("<processes>") if "<processes>" in text else text.index("<processes")
        stop = (
            text.index("</processes>") + len("</processes>") if "</processes>" in text else text.index("/>", start) + 2
        )
        text = text[:start] + HOLDER + text[stop:]
    return Answer(0, text, "")


@pytest.fixture
def wait(tmp_path: Path) -> Callable[..., tuple[str, list[str], int]]:
    def run(
        *answers: Answer | None, needs: dict[str, int] | None = None, timeout: float = 60
    ) -> tuple[str, list[str], int]:
        said: list[str] = []
        clock = [0.0]
        left: Iterator[Answer | None] = iter(answers)
        last = answers[-1]

        def pause(seconds: float) -> bool:
            clock[0] += seconds
            return False

        machine = Machine(tmp_path, lambda *_: next(left, last))
        why = gate.wait(needs or {"0": 20_000}, pause, said.append, lambda: clock[0], machine, timeout)
        return why, said, int(clock[0])

    return run


def test_free_and_still_is_enough(wait: Callable[..., tuple[str, list[str], int]]) -> None:
    assert wait(smi(21_000)) == ("", ["waiting for VRAM: what is free on card 0 is still changing"] * 2, 2)


def test_memory_that_is_just_given_back_is_waited_for(wait: Callable[..., tuple[str, list[str], int]]) -> None:
    why, said, seconds = wait(*(smi(mib) for mib in (2_000, 20_500, 60_000, 100_000, 140_000)))
    assert why == "" and seconds == 6
    assert "1.95" not in said[0] and "2.0 GiB free, 19.5 GiB are needed" in said[0]


def test_the_holder_is_named_with_its_unit(tmp_path: Path, wait: Callable[..., tuple[str, list[str], int]]) -> None:
    cgroup = tmp_path / "proc/4711/cgroup"
    cgroup.parent.mkdir(parents=True)
    cgroup.write_text("0::/system.slice/ollama.service\n")
    why, _, seconds = wait(smi(3_000, holder=True), timeout=5)
    assert why.endswith("held by python3 (process 4711, ollama.service, 18.0 GiB)") and 5 <= seconds <= 7


@pytest.mark.parametrize(
    ("cgroup", "named"),
    [
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/jupyter.service", "jupyter.service"),
        ("0::/user.slice/user-1000.slice/session-3.scope", "session-3.scope"),
        ("0::/init.scope/x", "init.scope"),
        ("12:memory:/docker/{id}\n0::/docker/{id}", "container specrig-chat"),
        ("0::/system.slice/docker-{id}.scope", "container specrig-chat"),
        ("", ""),
    ],
)
def test_owners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cgroup: str, named: str) -> None:
    path = tmp_path / "proc/7/cgroup"
    path.parent.mkdir(parents=True)
    path.write_text(cgroup.replace("{id}", "c" * 64))
    with Docker(tmp_path, monkeypatch) as docker:
        docker.containers["c" * 64] = {"Name": "/specrig-chat"}
        assert gate.owner(7, Machine(tmp_path)) == named


def test_a_driver_that_is_not_there_yet_is_waited_for(wait: Callable[..., tuple[str, list[str], int]]) -> None:
    why, said, _ = wait(Answer(9, "", "NVIDIA-SMI has failed"), None, smi(21_000))
    assert why == "" and said[:2] == [
        "waiting for the driver: NVIDIA-SMI has failed",
        "waiting for the driver: nvidia-smi is not here",
    ]


def test_a_card_that_the_driver_does_not_know(wait: Callable[..., tuple[str, list[str], int]]) -> None:
    assert "waiting for card 1: the driver knows 1 cards" in wait(smi(21_000), needs={"1": 1}, timeout=2)[0]
