"""The real Open WebUI, the package of the index, under its unit on two lab hosts: beside a service, and behind a gateway with TLS.

The engine is a stand-in (tests/stand_in_engine.py). Its lab is called SPECRIG_WEBUI_LAB (webui-real); SPECRIG_ENGINES_KEEP leaves it up.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specrig import runner
from specrig.lab import Lab, hosts

UNIT = "specrig-webui.service"
PERSON = {"name": "Ada", "email": "ada@example.com", "password": "correct horse battery"}
# [[path, body or null, token]] on standard input; prints [[status, document]].
ASK = """
import json, os, sys, urllib.error, urllib.request
env = dict(line.split("=", 1) for line in json.loads(sys.argv[1]))
answers = []
for path, body, token in json.load(sys.stdin):
    request = urllib.request.Request(f"http://{env['HOST']}:{env['PORT']}{path}", None if body is None else json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            answers.append([answer.status, json.load(answer)])
    except urllib.error.HTTPError as error:
        answers.append([error.code, error.read().decode()])
print(json.dumps(answers))
"""
On = Callable[..., str]
Ask = Callable[..., list[tuple[int, Any]]]


@pytest.fixture(scope="module")
def inventory() -> Iterator[Path]:
    """Both hosts, converged by the playbook of the Molecule scenario with the real image."""
    lab = Lab(os.environ.get("SPECRIG_WEBUI_LAB", "webui-real"), assume_yes=True)
    if lab.hosts():
        lab.down()
    hub = lab.ensure_hub()
    image = lab.ensure_webui_image()
    inventory = lab.up({"trixie": "debian-13", "bookworm": "debian-12"})
    variables = {"converge_image": image, "converge_daemon_options": {"insecure-registries": [hub.registry]}}
    command = [
        runner.tool("ansible-playbook"),
        "-i",
        str(inventory),
        "molecule/webui/converge.yml",
        "-e",
        json.dumps(variables),
    ]
    subprocess.run(command, cwd=runner.ROOT, env=runner.environment(), check=True)
    yield inventory
    if not os.environ.get("SPECRIG_ENGINES_KEEP"):
        lab.down()


@pytest.fixture(scope="module", params=["trixie", "bookworm"])
def on(request: pytest.FixtureRequest, inventory: Path) -> On:
    """Run a command on a host as root."""
    lab = Lab(os.environ.get("SPECRIG_WEBUI_LAB", "webui-real"), assume_yes=True)
    host = next(host for host in lab.hosts() if host.name == request.param)

    def must(*command: str, stdin: str = "") -> str:
        quoted = ["'" + word.replace("'", "'\\''") + "'" for word in command]
        words = hosts.ssh_command(host, ["sudo", *quoted])
        done = subprocess.run(words, input=stdin, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    return must


@pytest.fixture(scope="module")
def ask(on: On) -> Ask:
    """Ask Open WebUI on its own host: [(path, body, token)] -> [(status, document)]."""
    env = on("docker", "inspect", "--format", "{{json .Config.Env}}", "specrig-webui")

    def asked(*requests: tuple[str, Any, str]) -> list[tuple[int, Any]]:
        said = on("python3", "-c", ASK, env, stdin=json.dumps(requests))
        return [(status, document) for status, document in json.loads(said)]

    return asked


@pytest.fixture(scope="module")
def token(ask: Ask) -> str:
    """Of the first person, who signs up by the API."""
    [(status, document)] = ask(("/api/v1/auths/signup", PERSON, ""))
    assert status == 200 and document["role"] == "admin", document
    return str(document["token"])


def test_what_verify_checks_holds(inventory: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/host/webui"]
    command += [f"--ansible-inventory={inventory}", "--hosts=ansible://trixie,ansible://bookworm"]
    subprocess.run(command, cwd=runner.ROOT, env=runner.environment(), check=True)


def test_the_first_person_is_the_administrator_and_sees_the_model(ask: Ask, token: str) -> None:
    [(status, models)] = ask(("/api/models", None, token))
    assert status == 200 and "tiny" in [model["id"] for model in models["data"]], models


def test_a_chat_completes(ask: Ask, token: str) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "stream": False, "max_tokens": 4}
    [(status, answer)] = ask(("/api/chat/completions", body, token))
    assert status == 200 and answer["choices"][0]["message"]["content"].endswith("word word word"), answer


def test_a_second_person_can_not_sign_up_also_after_a_restart(on: On, ask: Ask, token: str) -> None:
    """And the first one is still signed in: data and session key are kept."""
    other = PERSON | {"email": "eve@example.com"}
    assert ask(("/api/v1/auths/signup", other, ""))[0][0] == 403
    begin = time.monotonic()
    on("systemctl", "restart", UNIT)
    print(f"{UNIT} was up again after {time.monotonic() - begin:.0f} s")
    [(refused, _), (status, session)] = ask(("/api/v1/auths/signup", other, ""), ("/api/v1/auths/", None, token))
    assert (refused, status, session["role"]) == (403, 200, "admin")


def test_nothing_was_downloaded(on: On) -> None:
    """Neither models nor anything else beside its database and what a person uploads."""
    assert int(on("du", "--summarize", "--block-size=1M", "/var/lib/specrig-webui").split()[0]) < 20
    said = on("journalctl", "--no-pager", "--unit", UNIT)
    assert "Traceback" not in said, said[-3000:]
