"""After `model_store_state: absent`: units and partial files are gone, the models are still there."""

from __future__ import annotations

from typing import Any

from tests.host.conftest import as_root, output


def test_models_stay(host: Any) -> None:
    assert output(host, "find", "/srv/models", "-name", ".specrig-manifest.json").strip()


def test_units_are_gone(host: Any) -> None:
    for unit in ("specrig-scrub.timer", "specrig-scrub.service", "specrig-share.service"):
        assert as_root(host, "systemctl", "cat", unit).rc != 0, unit
        assert as_root(host, "systemctl", "is-active", unit).stdout.strip() == "inactive", unit
    assert not output(host, "find", "/etc/systemd", "-name", "specrig-s*", "-not", "-name", "*@*").strip()


def test_partial_files_are_gone(host: Any) -> None:
    assert not host.file("/srv/models/.partial").exists
