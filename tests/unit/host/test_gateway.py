"""The relay behind Caddy, over real sockets, with stand-ins for the engines (tests/stand_in_engine.py)."""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import http.client
import json
import resource
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specrig.host import gateway, ready, upstreams
from specrig.host.errors import HostError
from specrig.host.upstreams import Fleet, Upstream
from tests.stand_in_engine import Engine

KEY = "client-key-of-forty-characters-0123456789"


class Place:
    """A relay before two stand-ins, alpha and beta, that serve `tiny`, and gamma, that serves `other`."""

    def __init__(
        self, folder: Path, shows: dict[str, Any] | None = None, listener: socket.socket | None = None
    ) -> None:
        self.folder, self.stop, self.shows = folder, threading.Event(), shows or {}
        self.engines: dict[str, Engine] = {}
        for name, model in (("alpha", "tiny"), ("beta", "tiny"), ("gamma", "other")):
            self.start(name, model)
        (folder / "clients").mkdir()
        (folder / "clients" / "laptop").write_text(KEY + "\n")
        self.settings = {"probe_s": 0.2, "probe_timeout_s": 0.6, "wait_s": 1.0}
        self.configure()
        self.path = folder / "relay.sock"
        listener = listener or socket.socket(socket.AF_UNIX)
        listener.bind(str(self.path))
        listener.listen(64)
        self.fleet = Fleet(folder / "relay.json", folder / "drained.json")
        arguments = (listener, self.fleet, gateway.Keys(folder / "clients"), self.stop)
        self.thread = threading.Thread(target=gateway.serve, args=arguments, daemon=True)
        self.thread.start()
        self.until(lambda: all(u.up for u in self.fleet.upstreams) and len(self.fleet.upstreams) == 3)

    def start(self, name: str, model: str = "tiny", port: int = 0) -> None:
        engine = Engine(("127.0.0.1", port), model, name, f"rig-key-of-{name}", 0.01)
        (self.folder / f"{name}.key").write_text(f"rig-key-of-{name}\n")
        self.engines[name] = engine
        threading.Thread(target=engine.serve_forever, args=(0.02,), daemon=True).start()

    def kill(self, name: str) -> int:
        """The port is free afterwards, and nothing listens on it."""
        engine = self.engines.pop(name)
        engine.shutdown()
        engine.server_close()
        port: int = engine.server_address[1]
        return port

    def configure(self) -> None:
        pools: dict[str, list[dict[str, Any]]] = {}
        for name, engine in self.engines.items():
            row = {"rig": name, "service": engine.model, "url": f"http://127.0.0.1:{engine.server_address[1]}"}
            pools.setdefault(engine.model, []).append(row | {"key_file": str(self.folder / f"{name}.key")} | self.shows)
        told = [{"model": model, "max_model_len": 4096, "upstreams": rows} for model, rows in pools.items()]
        part = self.folder / "part"
        part.write_text(json.dumps({"pools": told} | self.settings))
        part.replace(self.folder / "relay.json")

    def until(self, true: Any, seconds: float = 5) -> None:
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, self.fleet.state()
            time.sleep(0.01)

    def connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(10)
        connection.connect(str(self.path))
        return connection

    def send(
        self, body: Any, key: str | None = KEY, path: str = "/v1/completions", method: str = "POST"
    ) -> socket.socket:
        """Ask, and return the connection with the answer to come."""
        connection = self.connect()
        data = b"" if body is None else json.dumps(body).encode()
        lines = [
            f"{method} {path} HTTP/1.1",
            "Host: x",
            f"Content-Length: {len(data)}",
            "Content-Type: application/json",
        ]
        lines += [f"Authorization: Bearer {key}"] if key is not None else []
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + data)
        return connection

    def raw(self, *args: Any, **options: Any) -> tuple[int, str, str]:
        """(status, head, body as it came)."""
        with self.send(*args, **options) as connection:
            data = b""
            while piece := connection.recv(65536):
                data += piece
        head, _, body = data.decode().partition("\r\n\r\n")
        return int(head.split()[1]), head, body

    def ask(self, prompt: str = "hello", model: str = "tiny", **more: Any) -> tuple[int, Any]:
        status, _, body = self.raw({"model": model, "prompt": prompt, "max_tokens": 4, **more})
        return status, json.loads(body)

    def who(self, **options: Any) -> str:
        status, answer = self.ask(**options)
        assert status == 200, answer
        return str(answer["choices"][0]["text"].split()[0])

    def one(self, rig: str) -> Upstream:
        return next(u for u in self.fleet.upstreams if u.rig == rig)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.stop.set()
    made.thread.join(3)


# -- keys ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, "", "wrong", KEY[:-1], KEY + "0", KEY.upper(), "rig-key-of-alpha", "é", "a b"])
@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/metrics")])
def test_without_the_right_key_nothing_is_answered(place: Place, key: str | None, method: str, path: str) -> None:
    status, head, body = place.raw({"model": "tiny", "prompt": "x"}, key=key, path=path, method=method)
    assert status == 401 and "WWW-Authenticate: Bearer" in head
    assert json.loads(body)["error"]["code"] == "invalid_api_key"
    assert not any(engine.served for engine in place.engines.values())


def test_a_refused_client_gets_its_answer_although_its_body_is_large(place: Place) -> None:
    with place.connect() as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {4 << 20}\r\n\r\n".encode()
        sender = threading.Thread(target=connection.sendall, args=(head + b"x" * (4 << 20),))
        sender.start()
        assert connection.recv(65536).startswith(b"HTTP/1.1 401 ")
        sender.join()


def test_keys_come_and_go_without_a_restart(place: Place) -> None:
    clients = place.folder / "clients"
    (clients / "ci").write_text("another-key-0123456789")
    assert place.raw(None, key="another-key-0123456789", path="/v1/models", method="GET")[0] == 200
    (clients / "laptop").unlink()
    assert place.raw(None, path="/v1/models", method="GET")[0] == 401
    assert place.raw(None, key="another-key-0123456789", path="/v1/models", method="GET")[0] == 200


def test_every_key_is_compared_whole_by_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of code: each known digest, all 32 bytes, also after one was found, and nothing but digests."""
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text(f"key-of-{name}-0123456789")
    seen: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        seen.append((one, other))
        return real(one, other)

    keys = gateway.Keys(tmp_path)
    monkeypatch.setattr(hmac, "compare_digest", compare)
    for header, client in (
        ("Bearer key-of-a-0123456789", "a"),
        ("Bearer no", None),
        (None, None),
        ("Basic key-of-a-0123456789", None),
    ):
        seen.clear()
        assert keys.client(header) == client
        assert len(seen) == 3 and all(len(one) == len(other) == 32 for one, other in seen)


def test_time_says_nothing_about_a_key(tmp_path: Path) -> None:
    """Coarse: a key that is right but for its last character takes no longer than one that is all wrong (medians within a fifth)."""
    (tmp_path / "a").write_text("k" * 4096)
    keys = gateway.Keys(tmp_path)
    wrong = {"near": "Bearer " + "k" * 4095 + "x", "far": "Bearer " + "x" * 4096}
    took: dict[str, list[int]] = {"near": [], "far": []}
    for _ in range(600):
        for name, header in wrong.items():
            begin = time.perf_counter_ns()
            assert keys.client(header) is None
            took[name].append(time.perf_counter_ns() - begin)
    near, far = (sorted(took[name])[300] for name in ("near", "far"))
    assert 0.8 < near / far < 1.25, (near, far)


# -- what is passed on -----------------------------------------------------------------------------------------------


def test_models_of_all_rigs(place: Place) -> None:
    status, _, body = place.raw(None, path="/v1/models", method="GET")
    assert status == 200 and [m["id"] for m in json.loads(body)["data"]] == ["tiny", "other"]
    status, _, body = place.raw(None, path="/v1/models/tiny", method="GET")
    assert status == 200 and json.loads(body)["max_model_len"] == 4096
    assert place.raw(None, path="/v1/models/none", method="GET")[0] == 404


def test_the_model_in_the_body_chooses_the_pool(place: Place) -> None:
    assert {place.who(model="tiny") for _ in range(6)} == {"alpha", "beta"}
    assert {place.who(model="other") for _ in range(3)} == {"gamma"}
    status, answer = place.ask(model="none")
    assert status == 404 and "'none'" in answer["error"]["message"] and "tiny, other" in answer["error"]["message"]


@pytest.mark.parametrize(
    "path", ["/metrics", "/health", "/v1/load_lora_adapter", "/v1/../metrics", "/tokenize", "/v1/completions/x"]
)
def test_other_paths_are_not_there(place: Place, path: str) -> None:
    for method in ("GET", "POST"):
        assert place.raw({"model": "tiny", "prompt": "x"}, path=path, method=method)[0] == 404


def test_the_rig_gets_its_own_key_and_the_body_as_it_was(place: Place) -> None:
    asked = {"model": "tiny", "prompt": "!echo", "max_tokens": 2, "extra": {"a": ["é", None, 1.5]}}
    _, _, body = place.raw(asked, path="/v1/chat/completions")
    told = json.loads(body)
    assert told["path"] == "/v1/chat/completions" and told["body"] == asked
    assert told["headers"]["Authorization"] in ("Bearer rig-key-of-alpha", "Bearer rig-key-of-beta")
    assert KEY not in body


@pytest.mark.parametrize("body", ["text", [], {"prompt": "x"}, {"model": 5}, {"model": None}, {"model": {"a": 1}}])
def test_a_body_without_a_model_is_refused(place: Place, body: Any) -> None:
    assert place.raw(body)[0] in (400, 404)


def test_a_chunked_request_and_one_that_is_too_large(place: Place) -> None:
    data = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 1}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n".encode()
    with place.connect() as connection:
        parts = b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in (data[:7], data[7:])) + b"0\r\n\r\n"
        connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n" + parts)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
    for rest, status in (
        (b"Content-Length: 99999999999\r\n\r\n", b"413"),
        (b"Content-Length: -5\r\n\r\n", b"400"),
        (b"Content-Length: x\r\n\r\n", b"400"),
    ):
        with place.connect() as connection:
            connection.sendall(head + rest)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(65536).split()[1] == status


# -- streams ---------------------------------------------------------------------------------------------------------


def test_a_stream_arrives_chunk_by_chunk(place: Place) -> None:
    for engine in place.engines.values():
        engine.delay = 0.1
    with place.send({"model": "tiny", "prompt": "x", "max_tokens": 8, "stream": True}) as connection:
        times = []
        while piece := connection.recv(65536):
            times += [time.monotonic()] * (piece.count(b"data: ") > 0)
    assert len(times) >= 2 and times[-1] - times[0] > 0.3, "it came in one piece"  # a busy machine reads some together


def test_a_stream_that_breaks_off_is_seen_to(place: Place) -> None:
    _, _, body = place.raw({"model": "tiny", "prompt": "!break", "max_tokens": 8, "stream": True})
    assert "word" in body and not body.endswith("0\r\n\r\n"), "a truncated stream looks whole"


def test_a_client_that_reads_nothing_holds_up_nobody(place: Place) -> None:
    slow = [place.send({"model": "tiny", "prompt": "x", "max_tokens": 400, "stream": True}) for _ in range(12)]
    begin = time.monotonic()
    assert place.who() in ("alpha", "beta")
    assert time.monotonic() - begin < 1.0
    for connection in slow:
        connection.close()
    place.until(lambda: not any(u.running for u in place.fleet.upstreams))


class High(socket.socket):
    """Its connections have descriptors past 1024, as of some 500 requests at once."""

    def accept(self) -> tuple[socket.socket, Any]:
        connection, address = super().accept()
        with connection:
            return socket.socket(fileno=fcntl.fcntl(connection.fileno(), fcntl.F_DUPFD_CLOEXEC, 1100)), address


def test_descriptors_past_1024_are_as_good_as_any(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip(f"this process may have {hard} descriptors")
    with contextlib.ExitStack() as after:
        after.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
        place = Place(tmp_path, listener=High(socket.AF_UNIX))
        after.callback(place.stop.set)
        assert place.who() in ("alpha", "beta")
        place.engines["gamma"].frozen.set()
        connection = place.send({"model": "other", "prompt": "x", "max_tokens": 4})
        place.until(lambda: bool(place.one("gamma").running))
        connection.close()
        place.until(lambda: not place.one("gamma").running, 2)
        place.engines["gamma"].frozen.clear()


def test_slow_clients_take_no_room_from_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those without a key have little of it; all together have no more than there is, and who comes then is told."""
    monkeypatch.setattr(gateway, "MAX_STRANGERS", 2)
    monkeypatch.setattr(gateway, "MAX_CONNECTIONS", 5)
    relays: list[gateway.Relay] = []

    class Known(gateway.Relay):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            relays.append(self)

    monkeypatch.setattr(gateway, "Relay", Known)
    place = Place(tmp_path)
    before = set(threading.enumerate())

    def connections() -> int:
        return sum(thread.name.endswith("(answer)") for thread in set(threading.enumerate()) - before)

    with contextlib.ExitStack() as open_ones:
        open_ones.callback(place.stop.set)

        def begin(key: str) -> socket.socket:
            connection = open_ones.enter_context(place.connect())
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: 9\r\n\r\n"
            )
            with contextlib.suppress(BrokenPipeError):  # turned away already
                connection.sendall(head.encode())
            return connection

        waiting = [begin("wrong") for _ in range(2)]
        place.until(lambda: not relays[0].strangers._value)
        for _ in range(8):
            place.until(lambda: connections() == 2)  # those before have gone
            assert begin("wrong").recv(65536).startswith(b"HTTP/1.1 401 ")
        place.until(lambda: connections() == 2)
        assert place.who() in ("alpha", "beta")
        assert select.select(waiting, [], [], 0)[0] == [], "a client without a key was not waited for"
        place.until(lambda: connections() == 2)
        waiting += [begin(KEY) for _ in range(3)]
        place.until(lambda: connections() == 5)
        answer = begin(KEY).recv(65536)
        assert answer.startswith(b"HTTP/1.1 503 ") and b"5 connections are open already" in answer
        waiting.pop().close()
        place.until(lambda: connections() == 4)
        assert place.who() in ("alpha", "beta")


def test_a_client_that_leaves_is_not_generated_for(place: Place) -> None:
    place.engines["alpha"].frozen.set()
    place.engines["beta"].frozen.set()
    connection = place.send({"model": "tiny", "prompt": "x", "max_tokens": 400})
    place.until(lambda: any(u.running for u in place.fleet.upstreams))
    connection.close()
    place.until(lambda: not any(u.running for u in place.fleet.upstreams), 2)
    place.engines["alpha"].frozen.clear()
    place.engines["beta"].frozen.clear()


# -- rigs that fail --------------------------------------------------------------------------------------------------


def test_the_least_busy_rig_gets_the_next_request(place: Place) -> None:
    place.engines["alpha"].delay = place.engines["beta"].delay = 0.2
    running = [place.send({"model": "tiny", "prompt": "x", "max_tokens": 40, "stream": True}) for _ in range(6)]
    place.until(lambda: sum(len(u.running) for u in place.fleet.upstreams) == 6)
    assert [len(place.one(rig).running) for rig in ("alpha", "beta", "gamma")] == [3, 3, 0]
    for connection in running:
        connection.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", ["!die", "!500"])
def test_a_request_that_fails_before_its_first_byte_goes_elsewhere(place: Place, fault: str, stream: bool) -> None:
    """Both stand-ins fail such a prompt: each is asked, not more than three times in all, and the client is told."""
    status, _, body = place.raw({"model": "tiny", "prompt": fault, "stream": stream, "max_tokens": 2})
    served = [place.engines[rig].served.count(fault) for rig in ("alpha", "beta")]
    assert min(served) >= 1 and sum(served) <= gateway.ATTEMPTS
    assert status == (500 if fault == "!500" else 503) and "error" in json.loads(body)
    place.until(lambda: all(u.up for u in place.fleet.upstreams))


def test_a_killed_rig_costs_no_request_that_had_not_begun(place: Place) -> None:
    """Under load, some waiting for their first byte: every one is answered, by the other rig where need be."""
    place.engines["alpha"].delay = place.engines["beta"].delay = 0.03
    results: list[tuple[int, Any]] = []

    def load() -> None:
        for _ in range(8):
            results.append(place.ask())

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    time.sleep(0.25)
    port = place.kill("alpha")
    for thread in threads:
        thread.join()
    assert [status for status, _ in results] == [200] * 64
    place.until(lambda: place.one("alpha").up is False)
    assert place.who() == "beta"
    place.start("alpha", port=port)
    place.until(lambda: place.one("alpha").up is True)
    assert {place.who() for _ in range(6)} == {"alpha", "beta"}


def test_a_hung_rig_is_taken_out_by_its_probe_and_its_waiting_requests_go_elsewhere(place: Place) -> None:
    place.engines["alpha"].frozen.set()
    begin = time.monotonic()
    answers = {place.who() for _ in range(4)}
    assert answers == {"beta"} and time.monotonic() - begin < 4
    place.until(lambda: place.one("alpha").up is False)
    assert "no token within" in place.one("alpha").why
    place.engines["alpha"].frozen.clear()
    place.until(lambda: place.one("alpha").up is True)


def test_a_busy_rig_is_not_taken_out(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe waits in the queue, but others get their tokens."""
    one = place.one("alpha")

    def late(*_: Any) -> str | None:
        one.heard = time.monotonic()
        raise TimeoutError

    monkeypatch.setattr(ready, "complete_one", late)
    assert upstreams.probe(one, 0.1)[0] == "up"


@pytest.mark.parametrize(
    "shows", [{"metrics_path": "/metrics", "progress": ["stand_in:decodes_total"]}, {"patience_s": 30}, {}]
)
def test_a_long_answer_without_a_stream_is_waited_for(tmp_path: Path, shows: dict[str, Any]) -> None:
    """One slot, so the probe waits. Counters move, or nothing tells and requests of ours run there. With neither the rig counts as hung."""
    place = Place(tmp_path, shows)
    gamma = place.engines["gamma"]
    gamma.slot = threading.Lock()
    with contextlib.closing(place.send({"model": "other", "prompt": "long", "max_tokens": 250})) as connection:
        downs: list[str] = []
        answer = b""
        connection.settimeout(0.05)
        while not answer.endswith(b"}"):
            with contextlib.suppress(TimeoutError):
                answer += connection.recv(65536) or b"}"
            downs += [place.one("gamma").why] * (place.one("gamma").up is False)
    assert bool(downs) is not bool(shows), downs
    if shows:
        assert answer.startswith(b"HTTP/1.1 200 ") and gamma.served == ["long"], "it was asked again"
    place.stop.set()


def test_a_rig_that_others_keep_busy_is_not_taken_out(tmp_path: Path) -> None:
    """Its one slot works for somebody who did not come this way."""
    place = Place(tmp_path, {"metrics_path": "/metrics", "progress": ["stand_in:decodes_total"]})
    gamma = place.engines["gamma"]
    gamma.slot = threading.Lock()
    link = http.client.HTTPConnection("127.0.0.1", gamma.server_address[1])
    body = json.dumps({"model": "other", "prompt": "direct", "max_tokens": 200})
    link.request("POST", "/v1/completions", body, {"Authorization": "Bearer rig-key-of-gamma"})
    place.until(lambda: "its counters move" in place.one("gamma").why)
    assert link.getresponse().status == 200 and place.one("gamma").up
    link.close()
    place.stop.set()


def test_patience_with_a_silent_rig_ends(tmp_path: Path) -> None:
    place = Place(tmp_path, {"patience_s": 1.5})
    place.engines["gamma"].frozen.set()
    begin = time.monotonic()
    with contextlib.closing(place.send({"model": "other", "prompt": "x", "max_tokens": 4})):
        place.until(lambda: place.one("gamma").up is False)
    assert time.monotonic() - begin > 1.0
    place.engines["gamma"].frozen.clear()
    place.stop.set()


def test_all_rigs_down_is_said_and_a_rig_that_comes_back_in_time_is_used(place: Place) -> None:
    port = place.kill("gamma")
    begin = time.monotonic()
    status, answer = place.ask(model="other")
    assert status == 503 and "no rig of other" in answer["error"]["message"]
    assert 0.9 < time.monotonic() - begin < 3
    threading.Timer(0.3, lambda: place.start("gamma", "other", port)).start()
    assert place.who(model="other") == "gamma"


# -- drained ---------------------------------------------------------------------------------------------------------


def test_a_drained_rig_ends_what_runs_and_gets_nothing_new(place: Place) -> None:
    place.engines["alpha"].delay = place.engines["beta"].delay = 0.05
    running = [place.send({"model": "tiny", "prompt": "old", "max_tokens": 30, "stream": True}) for _ in range(2)]
    place.until(lambda: len(place.one("alpha").running) == 1)
    assert upstreams.set_drained("alpha", True, place.folder / "drained.json")
    assert not upstreams.set_drained("alpha", True, place.folder / "drained.json")
    place.until(lambda: place.fleet.drained == {"alpha"})
    assert {place.who(prompt="new") for _ in range(4)} == {"beta"}
    for connection in running:
        data = b""
        while piece := connection.recv(65536):
            data += piece
        assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"), "what ran was cut"
    assert "new" not in place.engines["alpha"].served
    assert Fleet(place.folder / "relay.json", place.folder / "drained.json").refresh() and place.one("alpha").up
    upstreams.set_drained("alpha", False, place.folder / "drained.json")
    place.until(lambda: not place.fleet.drained)
    assert {place.who() for _ in range(6)} == {"alpha", "beta"}


def test_a_new_configuration_keeps_what_runs(place: Place) -> None:
    for engine in place.engines.values():
        engine.delay = 0.05
    connection = place.send({"model": "other", "prompt": "x", "max_tokens": 20, "stream": True})
    place.until(lambda: len(place.one("gamma").running) == 1)
    del place.engines["beta"]
    place.configure()
    place.until(lambda: len(place.fleet.upstreams) == 2)
    assert {place.who() for _ in range(3)} == {"alpha"}
    data = b""
    while piece := connection.recv(65536):
        data += piece
    assert data.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize(("grace_s", "whole"), [(10.0, True), (0.1, False)])
def test_what_runs_when_the_relay_is_told_to_end_may_end_in_time(
    place: Place, monkeypatch: pytest.MonkeyPatch, grace_s: float, whole: bool
) -> None:
    monkeypatch.setattr(gateway, "GRACE_S", grace_s)
    with place.send({"model": "tiny", "prompt": "x", "max_tokens": 60, "stream": True}) as connection:
        data = connection.recv(65536)
        place.stop.set()
        place.thread.join(15)
        assert not place.thread.is_alive(), "it does not end"
        connection.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while piece := connection.recv(65536):
                data += piece
    assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") is whole, data[-200:]


def test_state_is_told_without_secrets_and_only_here(place: Place) -> None:
    place.who()
    found = gateway.status(place.path)
    assert [row["rig"] for row in found["upstreams"]] == ["alpha", "beta", "gamma"] and found["clients"] == {
        "laptop": 1
    }
    assert KEY not in json.dumps(found) and "rig-key" not in json.dumps(found)
    with pytest.raises(HostError, match="GATEWAY_DOWN"):
        gateway.status(place.folder / "none.sock")
