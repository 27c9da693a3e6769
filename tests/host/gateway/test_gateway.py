"""The gateway: what runs, who may read what, what answers and what does not. Changes nothing."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.host.conftest import HOST_PROGRAM, as_root, output

UNITS = ("specrig-gateway.service", "specrig-gateway-relay.service")
FOLDER = "/etc/specrig/gateway"


@pytest.fixture(scope="module", autouse=True)
def only_on_gateways(host: Any) -> None:
    """A rig need not be a gateway."""
    if host.file("/etc/specrig/plan.json").exists and not host.file(f"{FOLDER}/relay.json").exists:
        pytest.skip("no gateway")


@pytest.fixture(scope="module")
def keys(host: Any) -> dict[str, str]:
    """All keys, clients' and rigs', by path."""
    lines = output(host, "grep", "-r", ".", f"{FOLDER}/clients", f"{FOLDER}/upstreams").splitlines()
    return dict(line.split(":", 1) for line in lines)


@pytest.fixture(scope="module")
def pools(host: Any) -> Any:
    """What the relay was told."""
    return json.loads(output(host, "cat", f"{FOLDER}/relay.json"))["pools"]


@pytest.fixture(scope="module")
def ask(host: Any) -> Any:
    """[(status, body)] of requests to the gateway on its own host, for each path."""
    text = output(host, "cat", f"{FOLDER}/Caddyfile")
    bind = re.search(r"^\tbind (\S+)$", text, re.MULTILINE)
    site = re.search(r"^(https?)://([^:]*):(\d+) \{$", text, re.MULTILINE)
    assert bind and site, text
    address = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(bind[1], bind[1])
    name = site[2] or address

    def call(paths: list[str], key: str | None = None, *more: str) -> list[tuple[int, str]]:
        # The key goes through a file that curl reads from standard input: not into a command line.
        said = f'header = "Authorization: Bearer {key}"' if key is not None else ""
        words = [
            "curl",
            "--silent",
            "--insecure",
            "--max-time",
            "20",
            "--write-out",
            "\\n%{http_code}\\x1e",
            "--config",
            "-",
        ]
        words += ["--connect-to", f"{name}:{site[3]}:{address}:{site[3]}", *more]
        words += [f"{site[1]}://{name}:{site[3]}{path}" for path in paths]
        command = " ".join("'" + word.replace("'", "'\\''") + "'" for word in words)
        done = host.run(f"printf '%s\\n' '{said}' | {command}")
        answers = [one.rpartition("\n") for one in done.stdout.replace("\\x1e", "\x1e").split("\x1e")[:-1]]
        return [(int(status), body) for body, _, status in answers]

    return call


@pytest.fixture(scope="module")
def client(keys: dict[str, str]) -> str:
    """A client's key."""
    return next(key for file, key in keys.items() if "/clients/" in file)


@pytest.mark.parametrize("unit", UNITS)
def test_runs_now_and_at_boot_within_bounds(host: Any, unit: str) -> None:
    level = re.search(r"level for \S+: ([0-9.]+)", output(host, "systemd-analyze", "security", "--no-pager", unit))
    assert level and float(level[1]) <= 4.0
    show = output(host, "systemctl", "show", "--property=User,ActiveState,UnitFileState", unit).split()
    assert {"ActiveState=active", "UnitFileState=enabled"} < set(show) and {"User=caddy", "User=specrig-gateway"} & set(
        show
    )


def test_the_packages_own_unit_is_off_or_somebody_elses(host: Any) -> None:
    assert not host.service("caddy.service").is_running or host.service("caddy.service").is_enabled


def test_keys_are_their_owners_only(host: Any, keys: dict[str, str]) -> None:
    assert keys
    for line in output(host, "stat", "--format", "%U %G %a", *keys).splitlines():
        assert line == "specrig-gateway specrig-gateway 600"
    assert output(
        host, "stat", "--format", "%a", f"{FOLDER}/clients", f"{FOLDER}/upstreams", "/run/specrig-gateway-relay.sock"
    ).split() == ["700", "700", "600"]


def test_no_key_is_anywhere_else(host: Any, keys: dict[str, str]) -> None:
    texts = {
        "Caddyfile": output(host, "cat", f"{FOLDER}/Caddyfile"),
        "relay.json": output(host, "cat", f"{FOLDER}/relay.json"),
        "journal": output(host, "journalctl", "--no-pager", "--unit=specrig-gateway*"),
        "units": output(host, "systemctl", "cat", *UNITS) + output(host, "systemctl", "show", *UNITS),
        "command lines": output(host, "ps", "-eww", "-o", "args"),
        "Caddy's own": output(
            host, "sh", "-c", "cat /proc/$(systemctl show --value -p MainPID specrig-gateway)/environ | tr '\\0' '\\n'"
        ),
    }
    for where, text in texts.items():
        assert not [path for path, key in keys.items() if key in text], f"a key is in {where}"


def test_caddy_accepts_its_file_and_formats_it_as_we_do(host: Any) -> None:
    assert (
        as_root(
            host,
            "env",
            "XDG_DATA_HOME=/tmp/specrig-caddy-check",
            "caddy",
            "validate",
            "--adapter",
            "caddyfile",
            "--config",
            f"{FOLDER}/Caddyfile",
        ).rc
        == 0
    )
    assert output(host, "caddy", "fmt", f"{FOLDER}/Caddyfile") == host.file(f"{FOLDER}/Caddyfile").content_string


@pytest.mark.parametrize("key", [None, "", "wrong", "x" * 43])
def test_without_a_right_key_401(ask: Any, key: str | None) -> None:
    answers = ask(["/v1/models", "/v1/completions", "/v1/anything"], key)
    assert [status for status, _ in answers] == [401] * 3
    assert {json.loads(body)["error"]["code"] for _, body in answers} == {"invalid_api_key"}


def test_a_rigs_key_is_no_clients(ask: Any, keys: dict[str, str]) -> None:
    for file, key in keys.items():
        if "/upstreams/" in file:
            assert ask(["/v1/models"], key)[0][0] == 401


def test_nothing_but_the_api_answers(ask: Any, client: str) -> None:
    paths = [
        "/metrics",
        "/health",
        "/",
        "/_specrig/state",
        "/config/",
        "/v1/../metrics",
        "/v1/%2e%2e/_specrig/state",
        "//metrics",
        "/v1",
    ]
    assert [status for status, _ in ask(paths, client, "--path-as-is")] == [404] * len(paths)


def test_every_model_is_listed(ask: Any, client: str, pools: Any) -> None:
    ((status, body),) = ask(["/v1/models"], client)
    assert status == 200 and [m["id"] for m in json.loads(body)["data"]] == [pool["model"] for pool in pools]


def test_a_completion_comes_back(ask: Any, client: str, pools: Any) -> None:
    asked = json.dumps({"model": pools[0]["model"], "prompt": "1, 2, 3,", "max_tokens": 2})
    ((status, body),) = ask(["/v1/completions"], client, "--data", asked, "--header", "Content-Type: application/json")
    assert status == 200 and json.loads(body)["usage"]["completion_tokens"] == 2


def test_the_relay_tells_root_what_it_sees(host: Any) -> None:
    found = json.loads(output(host, HOST_PROGRAM, "gateway").splitlines()[-1])
    assert found["upstreams"] and all(row["state"] in ("up", "drained") for row in found["upstreams"]), found
