"""Says when an engine really serves: `/health` answers and one token came back. A check by hand; units do it in `service`."""

from __future__ import annotations

import http.client
import json
import socket
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from specrig.host import docker_api
from specrig.host.errors import COULD_NOT_RUN, HostError
from specrig.host.progress import Progress

POLL_S = 0.5
# How long `docker run` may take to create the container before its absence means that it is gone.
APPEAR_S = 60.0
# A still phase is repeated in the journal this often: silence must mean trouble.
REPEAT_S = 30.0


def call(
    url: str, path: str, body: dict[str, Any] | None = None, key: str | None = None, timeout: float = 5
) -> tuple[int, str]:
    """GET or POST (`body`) `path` at `url`; return (status, text). No answer: OSError or HTTPException."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "127.0.0.1", parts.port, timeout=timeout)
    headers = {"Content-Type": "application/json"} if body is not None else {}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    try:
        data = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", parts.path.rstrip("/") + path, data, headers)
        response = connection.getresponse()
        return response.status, response.read(1 << 20).decode(errors="replace")
    finally:
        connection.close()


def read_key(path: Path | None) -> str | None:
    """The API key in `path`: its first line, or what follows `=` when it is an environment file."""
    if path is None:
        return None
    try:
        first = path.read_text().strip().splitlines()[0].strip()
    except (OSError, IndexError) as error:
        raise HostError("READY_KEY", f"cannot read the API key: {error!r}", f"ls -l {path}", COULD_NOT_RUN) from error
    return first.partition("=")[2].strip().strip("\"'") if first.startswith("VLLM_API_KEY=") else first


def _alive(container: str | None, main_pid: int | None, seen: bool, waited: float) -> bool:
    """True when the container is there and runs. Raises READY_GONE when the engine cannot come any more."""
    if main_pid and not Path(f"/proc/{main_pid}").exists():
        raise HostError("READY_GONE", f"the unit's main process {main_pid} has ended", "journalctl -u <unit> -n 50")
    if not container:
        return seen
    found = docker_api.inspect_container(container)
    if found is None:
        if seen or waited > APPEAR_S:
            cause = "was removed" if seen else f"did not appear within {APPEAR_S:.0f} s"
            raise HostError("READY_GONE", f"container {container} {cause}", "journalctl -u <unit> -n 50")
        return False
    state = found.get("State") or {}
    if state.get("Status") in ("exited", "dead", "removing"):
        why = "out of memory (killed by the kernel)" if state.get("OOMKilled") else str(state.get("Error") or "")
        cause = f"container {container} ended with exit code {state.get('ExitCode')}" + (f": {why}" if why else "")
        raise HostError("READY_GONE", cause, "journalctl -u <unit> -n 50")
    return True


def _port_open(url: str) -> bool:
    parts = urlsplit(url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "127.0.0.1", port), timeout=2).close()
    except OSError:
        return False
    return True


def complete_one(url: str, model: str, key: str | None, timeout: float, path: str = "/v1/completions") -> str | None:
    """Ask for one token. None when it came, else the engine's own words; raises what waiting will not cure."""
    body = {"model": model, "prompt": "1, 2, 3,", "max_tokens": 1, "temperature": 0}
    status, text = call(url, path, body, key, timeout)
    if status == 200:
        try:
            if json.loads(text)["usage"]["completion_tokens"] >= 1:
                return None
        except (ValueError, KeyError, TypeError):
            pass
        return "the answer held no token"
    if status in (401, 403):
        raise HostError(
            "READY_KEY", f"the engine refused the API key (HTTP {status})", "pass --key-file with the service's key"
        )
    if status == 404:
        _, models = call(url, "/v1/models", None, key)
        try:
            names = ", ".join(str(m["id"]) for m in json.loads(models)["data"])
        except (ValueError, KeyError, TypeError):
            names = "unknown"
        raise HostError(
            "READY_MODEL", f"no model {model!r} at {url}; served: {names}", "pass --model with a served name"
        )
    return f"HTTP {status}: {text.strip()[:200]}"


def ready(
    url: str,
    model: str | None,
    timeout: float,
    key_file: Path | None = None,
    container: str | None = None,
    main_pid: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Wait until `url` completes one token for `model`; print each phase. Returns {changed, ready, seconds, phases}.

    Without a model, until its health is good: what answers there is no engine.

    Raises READY_TIMEOUT, READY_GONE, READY_KEY or READY_MODEL.
    """
    key, start = read_key(key_file), time.monotonic()
    phase, since, said, note, seen = "", start, start, "", False
    phases: dict[str, float] = {}

    def enter(name: str) -> None:
        nonlocal phase, since, said
        now = time.monotonic()
        if progress:
            progress.update(name, message=note)
        if name != phase:
            if phase:
                phases[phase] = round(phases.get(phase, 0) + now - since, 1)
            phase, since = name, now
        elif now - said < REPEAT_S:
            return
        said = now
        print(f"specrig: {name}, {now - start:.0f} s" + (f" ({note})" if note else ""), flush=True)

    while True:
        waited = time.monotonic() - start
        seen = _alive(container, main_pid, seen, waited)
        left = timeout - waited
        if left <= 0:
            raise HostError(
                "READY_TIMEOUT",
                f"{phase or 'nothing'} after {timeout:.0f} s" + (f": {note}" if note else ""),
                "journalctl -u <unit>",
            )
        try:
            status, _ = call(url, "/health", timeout=min(5, left))
            if status == 200 and model is None:
                break
            if status == 200 and model:
                note = note if phase == "warming" else ""
                enter("warming")
                note = complete_one(url, model, key, min(120, left)) or ""
                if not note:
                    break
            else:
                note = f"/health says HTTP {status}"
                enter("loading")
        except (OSError, http.client.HTTPException) as error:
            # Docker's proxy takes the connection and drops it as long as nothing listens behind it.
            note = "" if isinstance(error, ConnectionError) else str(error)
            enter("loading" if phase == "warming" or _port_open(url) else "waiting for port")
        time.sleep(min(POLL_S, max(left, 0.05)))
    note = ""
    enter("ready")
    return {"changed": False, "ready": True, "seconds": round(time.monotonic() - start, 1), "phases": phases}
