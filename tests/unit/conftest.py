"""Unit tests mean the same however they are started."""

import pytest


@pytest.fixture(autouse=True)
def not_from_the_front_door(monkeypatch: pytest.MonkeyPatch) -> None:
    """`./rig test` says where it was typed; relative paths of a test count from the test's own directory."""
    monkeypatch.delenv("RIG_CWD", raising=False)
