"""What a gateway keeps when rigs, clients and settings misbehave: real Caddy, real systemd, two hosts. The engines are stand-ins.

Run by lifecycle.yml against the hosts that the scenario has converged.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
import statistics
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specrig.clients import Endpoint, settings
from specrig.lab import Lab, hosts
from specrig.runner import ROOT, environment, tool
from tests.load import Gateway, Load

LAB = os.environ.get("SPECRIG_MOLECULE_LAB", "molecule")
KEY = "chosen-key-of-ci-0123456789"
INVENTORY = ROOT / ".rig" / "lab" / LAB / "inventory.yml"
CONVERGE = ROOT / "molecule" / "gateway" / "converge.yml"
HOST = {host.name: host for host in Lab(LAB).hosts()}
GATEWAY = Gateway(HOST["trixie"].address, 8080, KEY)


def on(name: str, *command: str) -> str:
    """Run a command on a host as root."""
    done = subprocess.run(
        hosts.ssh_command(HOST[name], ["sudo", *command]), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout.strip()


def converge(*words: str, host: str = "trixie") -> subprocess.CompletedProcess[str]:
    """The scenario's converge on one host, with other settings."""
    command = [tool("ansible-playbook"), "-i", str(INVENTORY), str(CONVERGE), "--limit", host, *words]
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)


def state() -> dict[str, Any]:
    """What trixie's relay sees of each rig."""
    found = json.loads(on("trixie", "/usr/local/lib/specrig/specrig-host", "gateway").splitlines()[-1])
    return {row["rig"]: row for row in found["upstreams"]}


def until(what: str, true: Any, seconds: float = 30) -> float:
    """Seconds until `true()`."""
    begin = time.monotonic()
    while not true():
        assert time.monotonic() - begin < seconds, f"{what}: not within {seconds} s: {state()}"
        time.sleep(0.2)
    return time.monotonic() - begin


def ask(tokens: int = 8, key: str | None = None) -> tuple[int, str]:
    """(status, rig that answered) of one whole request."""
    return GATEWAY.ask(tokens, key)[:2]


@pytest.fixture(autouse=True)
def both_up() -> Iterator[None]:
    until("both rigs are up", lambda: all(row["state"] == "up" for row in state().values()))
    yield


def test_tls_with_an_authority_of_its_own() -> None:
    root = on("bookworm", "cat", "/var/lib/specrig-gateway-caddy/caddy/pki/authorities/local/root.crt")
    context = ssl.create_default_context(cadata=root)
    with (
        socket.create_connection((HOST["bookworm"].address, 443), 10) as plain,
        context.wrap_socket(plain, server_hostname="llm.lab.example") as secured,
    ):
        secured.sendall(
            f"GET /v1/models HTTP/1.1\r\nHost: llm.lab.example\r\nAuthorization: Bearer {KEY}\r\nConnection: close\r\n\r\n".encode()
        )
        assert secured.recv(65536).startswith(b"HTTP/1.1 200 ")
    with socket.create_connection((HOST["bookworm"].address, 443), 10) as plain, pytest.raises(ssl.SSLError):
        ssl.create_default_context().wrap_socket(plain, server_hostname="llm.lab.example")


def test_a_stream_arrives_token_by_token_through_both() -> None:
    link, answer = GATEWAY.stream(40)
    times = []
    while answer.read1(65536):
        times.append(time.monotonic())
    link.close()
    assert len(times) >= 30 and times[-1] - times[0] > 0.4, (len(times), times[-1] - times[0])


def test_wrong_keys_take_as_long_as_each_other() -> None:
    """Coarse, over the network: the median for a key that is nearly right and for one that is all wrong differ by less than their spread."""
    took: dict[str, list[float]] = {KEY[:-1] + "x": [], "x" * len(KEY): []}
    for _ in range(60):
        for key, times in took.items():
            begin = time.perf_counter()
            assert ask(key=key)[0] == 401
            times.append(time.perf_counter() - begin)
    near, far = (statistics.quantiles(times, n=4) for times in took.values())
    assert abs(near[1] - far[1]) < max(near[2] - near[0], far[2] - far[0]), (near, far)


def test_slow_clients_hold_up_nobody() -> None:
    slow = [GATEWAY.stream(3000) for _ in range(20)]
    stop = threading.Event()

    def drip(answer: http.client.HTTPResponse) -> None:
        while not stop.is_set() and answer.read1(1):
            stop.wait(1)

    threads = [threading.Thread(target=drip, args=(answer,)) for _, answer in slow]
    for thread in threads:
        thread.start()
    times = []
    for _ in range(10):
        begin = time.monotonic()
        assert ask()[0] == 200
        times.append(time.monotonic() - begin)
    stop.set()
    for thread in threads:
        thread.join()
    for link, _ in slow:
        link.close()
    assert statistics.median(times) < 2.0, times
    until("nobody generates for clients that left", lambda: not any(row["running"] for row in state().values()))


@pytest.mark.parametrize(("key", "size", "status"), [(KEY, 33 << 20, 413), ("wrong", 4 << 20, 401)])
def test_who_sends_too_much_is_told(key: str, size: int, status: int) -> None:
    link = GATEWAY.connection()
    link.request("POST", "/v1/completions", b"x" * size, GATEWAY.headers(key))
    answer = link.getresponse()
    assert answer.status == status and "error" in json.loads(answer.read())
    link.close()


@pytest.mark.parametrize("signal", ["KILL", "TERM"])
def test_a_rig_that_dies_under_load_costs_no_request_that_had_not_begun(signal: str) -> None:
    with Load(GATEWAY) as load:
        for _ in range(2):
            on("bookworm", "systemctl", "kill", f"--signal={signal}", "stand-in.service")
            time.sleep(3)
    assert load.failed == {} and load.results["ok"] > 20, load.results


def test_a_hung_rig_is_taken_out_by_its_probe_and_comes_back() -> None:
    with Load(GATEWAY) as load:
        on("bookworm", "systemctl", "kill", "--signal=STOP", "stand-in.service")
        try:
            until("it is out", lambda: state()["bookworm"]["state"] == "down", 20)
            time.sleep(2)
            assert Counter(ask()[1] for _ in range(6)) == {"trixie": 6}
        finally:
            on("bookworm", "systemctl", "kill", "--signal=CONT", "stand-in.service")
        until("it is back", lambda: state()["bookworm"]["state"] == "up", 20)
    assert load.failed == {}, load.results


def test_a_drained_rig_gets_nothing_new_and_ends_what_runs() -> None:
    program = "/usr/local/lib/specrig/specrig-host"
    running = [GATEWAY.stream(150) for _ in range(4)]
    try:
        done = json.loads(on("trixie", program, "drain", "bookworm", "--wait", "30").splitlines()[-1])
        assert done["changed"] and done["running"] == 0
        bodies = [answer.read() for _, answer in running]
        assert all(body.rstrip().endswith(b"data: [DONE]") for body in bodies), "what ran was cut"
        on("trixie", "systemctl", "restart", "specrig-gateway.service", "specrig-gateway-relay.service")
        assert state()["bookworm"]["state"] == "drained"
        assert Counter(ask()[1] for _ in range(6)) == {"trixie": 6}
        shown = subprocess.run(
            [str(ROOT / "rig"), "gateway", "-i", str(gateways())], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert "drained" in shown.stdout, shown.stdout + shown.stderr
    finally:
        on("trixie", program, "undrain", "bookworm")
    until("it gets requests again", lambda: ask()[1] == "bookworm")


def test_the_curl_line_that_clients_get_works_as_it_is_printed() -> None:
    one = Endpoint(
        "gateway/trixie", "trixie", "x", f"http://{HOST['trixie'].address}:8080/v1", False, "", {"tiny": None}, "/x"
    )
    done = subprocess.run(
        ["bash", "-c", settings(one)["curl"]["how"]],
        env=os.environ | {"OPENAI_API_KEY": KEY},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and json.loads(done.stdout)["choices"][0]["message"]["content"], (
        done.stdout + done.stderr
    )
    wrong = subprocess.run(
        ["bash", "-c", settings(one)["curl"]["how"]],
        env=os.environ | {"OPENAI_API_KEY": "wrong"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert wrong.returncode == 22 and "invalid_api_key" in wrong.stdout


def gateways() -> Path:
    """The lab's inventory with its group `gateways`."""
    folder = INVENTORY.parent / "gateways"
    folder.mkdir(exist_ok=True)
    (folder / "hosts.yml").write_text(INVENTORY.read_text() + "gateways: {hosts: {trixie: }}\n")
    return folder


def test_new_requests_wait_while_the_relay_restarts() -> None:
    results: list[int] = []
    threads = [threading.Thread(target=lambda: results.append(ask()[0])) for _ in range(12)]
    restart = threading.Thread(target=on, args=("trixie", "systemctl", "restart", "specrig-gateway-relay.service"))
    restart.start()
    time.sleep(0.4)
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in [restart, *threads]:
        thread.join()
    # What ran when the relay was told to end has ended well, and what came while there was none has waited.
    assert results == [200] * 12, results


def test_a_revoked_key_is_gone_for_good_and_nothing_that_runs_is_cut() -> None:
    old = on("trixie", "cat", "/etc/specrig/gateway/clients/laptop")
    assert ask(key=old)[0] == 200
    link, answer = GATEWAY.stream(900)
    done = converge("-e", '{"converge_clients": ["ci"]}')
    assert done.returncode == 0 and "changed=1 " in done.stdout, done.stdout
    assert ask(key=old)[0] == 401 and ask()[0] == 200
    assert answer.read().rstrip().endswith(b"data: [DONE]"), "a change of keys cut a stream"
    link.close()
    assert converge().returncode == 0
    assert ask(key=old)[0] == 401, "a key came back with its name"
    assert ask(key=on("trixie", "cat", "/etc/specrig/gateway/clients/laptop"))[0] == 200


def test_settings_that_caddy_cannot_start_with_are_taken_back() -> None:
    listen = {"bind": "192.0.2.77", "port": 8080, "tls": "", "server_name": "", "email": ""}
    before = on("trixie", "cat", "/etc/specrig/gateway/Caddyfile")
    done = converge("-e", json.dumps({"gateway_listen": listen}))
    assert done.returncode and "GATEWAY_START" in done.stdout, done.stdout
    assert on("trixie", "cat", "/etc/specrig/gateway/Caddyfile") == before
    assert ask()[0] == 200


def test_a_port_below_1024_is_bound_again_when_the_new_one_is_taken() -> None:
    """The unit of a port above lets Caddy bind none below: it goes back as well. 8001 is the stand-in's."""
    address = HOST["bookworm"].address
    listen = {"bind": address, "port": 8001, "tls": "internal", "server_name": "llm.lab.example", "email": ""}
    before = on("bookworm", "cat", "/etc/systemd/system/specrig-gateway.service")
    done = converge("-e", json.dumps({"gateway_listen": listen}), host="bookworm")
    assert done.returncode and "GATEWAY_START" in done.stdout, done.stdout
    assert on("bookworm", "cat", "/etc/systemd/system/specrig-gateway.service") == before
    socket.create_connection((address, 443), 10).close()


def test_a_caddyfile_that_is_none_does_not_replace_the_old_one() -> None:
    """Past the plan and its refusals, straight into the role: the filter stops it on the controller."""
    before = on("trixie", "sha256sum", "/etc/specrig/gateway/Caddyfile")
    listen = {"bind": "127.0.0.1 {\n respond {env.HOME}", "port": 8080, "tls": "", "server_name": "", "email": ""}
    done = converge("-e", json.dumps({"gateway_listen": listen}))
    assert done.returncode and "cannot be written into a Caddyfile" in done.stdout, done.stdout
    assert on("trixie", "sha256sum", "/etc/specrig/gateway/Caddyfile") == before
    assert ask()[0] == 200
