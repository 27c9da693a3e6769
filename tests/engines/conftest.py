"""A lab host with llama.cpp's server under the unit, made once for all tests here; its lab is called SPECRIG_ENGINES_LAB (engines)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specrig import runner
from specrig.lab import Lab, hosts, rigs

SERVICE = "tiny"
UNIT = f"specrig-{SERVICE}.service"
FIGURES = runner.ROOT / ".rig" / "engines" / "llama-cpp.json"
ASK = (
    "import json,sys,urllib.request as u;"
    "key=open('/etc/specrig/services/tiny/api-key').read().strip();"
    "body=sys.argv[2].encode() if len(sys.argv)>2 else None;"
    "r=u.Request('http://127.0.0.1:8000'+sys.argv[1],body,{'Content-Type':'application/json','Authorization':'Bearer '+key});"
    "print(u.urlopen(r,timeout=120).read().decode())"
)


class Rig:
    """The host as the tests use it."""

    def __init__(self, lab: Lab, inventory: Path) -> None:
        self.inventory = inventory
        self.host = next(h for h in lab.hosts() if h.name == "llama")

    def ask(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command on the host as root."""
        quoted = ["'" + word.replace("'", "'\\''") + "'" for word in command]
        words = hosts.ssh_command(self.host, ["sudo", *quoted])
        return subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)

    def must(self, *command: str) -> str:
        """The output of a command that has to succeed."""
        done = self.ask(*command)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def get(self, path: str, body: dict[str, Any] | None = None) -> str:
        """What the service answers, asked with its key."""
        return self.must("python3", "-c", ASK, path, *([json.dumps(body)] if body else []))

    def converge(self, *, speculation: bool) -> int:
        """The site playbook, as `./rig up` runs it."""
        return runner.playbook("site", self.inventory, ["-e", f"{{rig_speculation: {str(speculation).lower()}}}"])


@pytest.fixture(scope="session")
def figures() -> Iterator[dict[str, Any]]:
    """What was measured; kept for `python -m tests.engines.report`."""
    found: dict[str, Any] = {}
    yield found
    if found:
        FIGURES.parent.mkdir(parents=True, exist_ok=True)
        FIGURES.write_text(json.dumps(found, indent=1) + "\n")


@pytest.fixture(scope="session")
def rig() -> Iterator[Rig]:
    """A host on which nothing runs yet."""
    lab = Lab(os.environ.get("SPECRIG_ENGINES_LAB", "engines"), assume_yes=True)
    if lab.hosts():
        lab.down()  # left by a run that kept it: the first converge is to meet a bare host
    inventory = rigs.up(lab, {"llama": "debian-13"}, profile="cpu_demo_llama_cpp")
    yield Rig(lab, inventory)
    if not os.environ.get("SPECRIG_ENGINES_KEEP"):
        lab.down()
