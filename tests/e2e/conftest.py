"""The demo's host, made once by the README's own command, for all end-to-end tests."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specrig import runner
from specrig.lab import Lab, hosts
from specrig.verbs.demo import HOST, LAB, SERVICE
from tests.e2e import faults

UNIT = f"specrig-{SERVICE}.service"
KEY_FILE = f"/etc/specrig/services/{SERVICE}/api-key"
COMPLETION = (
    "import json,sys,urllib.request as u;"
    "key=open('/etc/specrig/services/tiny/api-key').read().strip();"
    "body=json.dumps({'model':'tiny','prompt':sys.argv[1],'max_tokens':int(sys.argv[2]),'temperature':0,'ignore_eos':True}).encode();"
    "r=u.Request('http://127.0.0.1:8000/v1/completions',body,{'Content-Type':'application/json','Authorization':'Bearer '+key});"
    "print(json.load(u.urlopen(r,timeout=60))['choices'][0]['text'].encode().hex())"
)


class Rig:
    """The demo host as the tests use it."""

    def __init__(self, lab: str = LAB, host: str = HOST) -> None:
        self.inventory: Path = runner.ROOT / ".rig" / "lab" / lab / "inventory.yml"
        self.host = next(h for h in Lab(lab).hosts() if h.name == host)

    def ask(self, *command: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
        """Run a command on the host as root."""
        words = ["sudo", *(f"'{w}'" if re.search(r"[^\w./:=@,+-]", w) else w for w in command)]
        return subprocess.run(
            hosts.ssh_command(self.host, words), capture_output=True, text=True, timeout=timeout, check=False
        )

    def must(self, *command: str) -> str:
        """The output of a command that has to succeed."""
        done = self.ask(*command)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def rig(self, *words: str) -> subprocess.CompletedProcess[str]:
        """`./rig WORDS -i <the demo's inventory>` as a person would type it."""
        command = [str(runner.ROOT / "rig"), *words, "-i", str(self.inventory)]
        return subprocess.run(command, cwd=runner.ROOT, capture_output=True, text=True, timeout=1200, check=False)

    def active(self) -> str:
        """What `systemctl is-active` says."""
        return self.ask("systemctl", "is-active", UNIT).stdout.strip()

    def complete(self, prompt: str = "The License", tokens: int = 1) -> str | None:
        """A completion's text (hex), or None when none came back."""
        done = self.ask("python3", "-c", COMPLETION.replace("'", '"'), prompt, str(tokens))
        return done.stdout.strip() if done.returncode == 0 else None

    def wait(self, what: str, true: Callable[[], bool], timeout: float = 300) -> float:
        """Seconds until `true()`; fails with the journal's last lines."""
        begin = time.monotonic()
        while time.monotonic() - begin < timeout:
            if true():
                return time.monotonic() - begin
            time.sleep(1)
        pytest.fail(
            f"{what}: not within {timeout:.0f} s\n{self.ask('journalctl', '-u', UNIT, '-n', '40', '--no-pager').stdout}"
        )

    def get(self, path: str, key_file: str = "", *more: str) -> tuple[int, str]:
        """(status, text) of the service's page; the key goes from its file to curl's standard input."""
        key = f"sed 's/^/Authorization: Bearer /' {key_file} | " if key_file else ": | "
        curl = f"{key}curl -sS -H @- -w '\\n%{{http_code}}' {' '.join(more)} http://127.0.0.1:8000{path}"
        text, _, status = self.must("sh", "-c", curl.replace("'", '"')).rpartition("\n")
        return int(status), text

    def metrics(self) -> dict[str, float]:
        """Speculation counters of the running engine."""
        status, page = self.get("/metrics", KEY_FILE)
        assert status == 200, page
        return {
            m[1]: float(m[2])
            for m in re.finditer(r"^vllm:(spec_decode_num_\w+?)_total\{[^}]*\} (\S+)$", page, re.MULTILINE)
        }

    def engine_pid(self) -> int:
        """Process of the container's first process, as the host numbers it."""
        return int(self.must("docker", "inspect", "--format", "{{.State.Pid}}", UNIT.removesuffix(".service")))

    def inspect(self, name: str) -> Any:
        """`docker inspect` of a container."""
        return json.loads(self.must("docker", "inspect", name))[0]


@pytest.fixture(scope="session")
def demo_output() -> Iterator[str]:
    """What `./rig demo --yes --keep` says; it has to end well."""
    command = [str(runner.ROOT / "rig"), "demo", "--yes", "--keep"]
    lines = []
    with subprocess.Popen(
        command, cwd=runner.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as demo:
        assert demo.stdout
        for line in demo.stdout:
            sys.stdout.write(line)
            lines.append(line)
    assert demo.returncode == 0
    yield "".join(lines)
    Lab(LAB).down()


@pytest.fixture(scope="session")
def rig(request: pytest.FixtureRequest) -> Rig:
    """The host that the demo has left running; or, while one works on a test, a lab host that is up: SPECRIG_E2E_RIG=lab/host."""
    if where := os.environ.get("SPECRIG_E2E_RIG"):
        return Rig(*where.split("/"))
    assert request.getfixturevalue("demo_output")
    return Rig()


@pytest.fixture(scope="session")
def seconds() -> Iterator[dict[str, float]]:
    """Where tests leave what they measured, by their names; written to docs/evidence/faults.md at the end when that is asked for."""
    measured: dict[str, float] = {}
    yield measured
    if os.environ.get("SPECRIG_EVIDENCE"):
        faults.write(measured)
