"""`./rig rollback` and what `status` and `images` say of upgrades."""

from __future__ import annotations

from typing import Any

import pytest

from specrig.console import CannotRun
from specrig.verbs import images, rollback, status

HOSTS = ["alpha", "beta"]
SPECULATION = {
    "on": True,
    "drafted": 100,
    "accepted": 40,
    "acceptance": 0.4,
    "mean_length": 2.2,
    "short": False,
    "cause": "",
}


@pytest.mark.parametrize(
    ("given", "hosts", "service"),
    [
        ([], HOSTS, ""),
        (["beta"], ["beta"], ""),
        (["chat"], HOSTS, "chat"),
        (["beta", "chat"], ["beta"], "chat"),
        (["beta", "alpha", "chat"], ["beta", "alpha"], "chat"),
    ],
)
def test_hosts_then_a_service(given: list[str], hosts: list[str], service: str) -> None:
    assert rollback.split(given, HOSTS) == (hosts, service)


@pytest.mark.parametrize("given", [["chat", "beta"], ["gamma", "chat"]])
def test_a_word_that_is_neither_is_refused(given: list[str]) -> None:
    with pytest.raises(CannotRun, match="alpha, beta"):
        rollback.split(given, HOSTS)


def test_it_says_what_runs_and_how_to_stay() -> None:
    report = {
        "service": "chat", "to": "engine:1", "downtime_s": 12.4, "speculation": SPECULATION, "stay": {"version": "1", "image": "engine:1"},
    }  # fmt: skip
    text = "\n".join(rollback.describe("alpha", report))
    assert "chat runs engine:1 again; nothing answered for 12 s" in text and "α 0.40" in text
    assert "To stay: declare for chat: version: 1, image: engine:1" in text
    waiting = "\n".join(rollback.describe("alpha", {**report, "alternate": True, "downtime_s": None}))
    assert "chat is not chosen, and will run engine:1 again" in waiting
    error = {"error": {"code": "ROLLBACK_NOTHING", "cause": "one generation", "fix": "./rig status"}}
    assert rollback.describe("alpha", error) == ["alpha: ROLLBACK_NOTHING: one generation", "  next: ./rig status"]


def unit(**upgrade: Any) -> dict[str, Any]:
    return {
        "unit": "specrig-chat.service", "state": "active", "restarts": 0, "since": "today", "health": {"ok": True}, "stale": False,
        "upgrade": {"proven": None, "previous": None, "speculation": None, "setback": None, **upgrade},
    }  # fmt: skip


def test_status_tells_proven_previous_and_setbacks() -> None:
    proven = {"at": 0, "image": "engine:2", "seconds": 3.0, "downtime_s": 4.0}
    lines = "\n".join(
        status.upgrade_lines(
            unit(proven=proven, previous={"at": 0, "image": "engine:1"}, speculation=SPECULATION)["upgrade"]
        )
    )
    assert "engine:2; α 0.40, 40 of 100 drafted tokens accepted" in lines and "./rig rollback goes back to it" in lines
    hand = {"by": "hand", "at": 0, "from": "engine:2", "to": "engine:1", "code": "BY_HAND", "cause": ""}
    assert "./rig up would move it forward again" in status.upgrade_lines({"setback": hand})[0]
    undone = {**hand, "by": "upgrade", "code": "START_TIMEOUT", "cause": "not active"}
    assert "upgrade to engine:1 undone" in status.upgrade_lines({"setback": undone})[0]
    assert status.upgrade_lines({}) == []


def test_images_are_listed_with_who_uses_them() -> None:
    report = {
        "images": [
            {"id": "sha256:1", "names": ["engine:1"], "bytes": 10**9, "used": ["proven of chat"]},
            {"id": "sha256:2", "names": [], "bytes": 1, "used": []},
        ],
        "archives": [{"path": "/a/x.tar", "bytes": 5, "used": [], "whole": False}],
        "free_bytes": 10**10,
    }  # fmt: skip
    text = "\n".join(images.describe("alpha", report))
    assert (
        "engine:1  1.0 GB  proven of chat" in text and "sha256:2  1 B  unused" in text and "unused, NOT WHOLE" in text
    )
    assert "--apply removes them" in "\n".join(
        images.describe("alpha", {"would_remove": [{"path": "engine:1", "bytes": 5}], "bytes": 5})
    )
