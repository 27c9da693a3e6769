"""`./rig demo`: a bare machine becomes a speculative-decoding endpoint, here, in containers, with the real roles and a real engine.

Everything that a real rig gets is real: systemd, Docker, apt, the playbook, vLLM, speculation. Labelled as what they are: the host is a container,
the hub is a double that speaks the same endpoints, the models are tiny ones made for the purpose, the engine is vLLM's CPU build.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from specrig import runner
from specrig.bench.client import Completion, Endpoint, complete, since, speculation
from specrig.console import CannotRun, confirm, say
from specrig.host.acceptance import Acceptance
from specrig.lab import Lab, cleanup, engine, hosts, rigs

LAB, HOST, SERVICE, PORT = "demo", "demo", "tiny", 8000
PROMPT, TOKENS = "What does the License grant?", 400
PLAN = """\
This will, on this machine:
  - install and start a Docker Engine when none answers (package docker.io)
  - build three container images (a Debian host, a hub double, vLLM for the CPU): about 2.5 GB of disk, 600 MB of downloads
  - start two containers, and in one of them run playbooks/site.yml as on a real rig
Everything it makes is labelled and goes away with ./rig demo --destroy."""


def register(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb."""
    verb = verbs.add_parser("demo", help="watch a bare host become an endpoint, here, without a GPU")
    verb.add_argument("--yes", action="store_true", help="do not ask")
    verb.add_argument("--keep", action="store_true", help="leave the host running at the end")
    verb.add_argument(
        "--destroy", action="store_true", help="remove everything that a demo has made, images and caches too"
    )
    verb.set_defaults(run=run)


@dataclass
class Clock:
    """Says what begins, and at the end how long each part took."""

    started: float
    parts: list[tuple[str, float]]

    @contextlib.contextmanager
    def part(self, title: str) -> Iterator[None]:
        """Time one part."""
        say(f"\n── {title}")
        begin = time.monotonic()
        yield
        self.parts.append((title, time.monotonic() - begin))

    def summary(self) -> str:
        """One line per part, and the sum."""
        rows = [f"  {seconds:6.0f} s  {title}" for title, seconds in self.parts]
        return "\n".join([*rows, f"  {time.monotonic() - self.started:6.0f} s  in all"])


def run(options: argparse.Namespace) -> int:
    """Build, converge, measure, tell."""
    if options.destroy:
        return destroy()
    say(PLAN)
    if not confirm("Go on?", yes=options.yes or bool(os.environ.get("CI"))):
        raise CannotRun("the demo was not agreed to", "./rig demo --yes", "NOT_AGREED")
    clock = Clock(time.monotonic(), [])
    with clock.part("A bare host, a hub, an engine image"):
        inventory = rigs.up(Lab(LAB, assume_yes=True), {HOST: "debian-13"})
    with clock.part("Converge, speculation off (K=0)"):
        converge(inventory, speculation=False)
    plain, _ = measure()
    with clock.part("Converge, speculation on (K=5): one switch"):
        converge(inventory, speculation=True)
    spec, accepted = measure()
    report(plain, spec, accepted)
    say("\n── systemctl status")
    on_host("systemctl", "status", "--no-pager", "--lines", "0", f"specrig-{SERVICE}.service")
    say(f"\n── Time\n{clock.summary()}")
    if options.keep:
        say(WHERE_NEXT.format(inventory=inventory.relative_to(runner.ROOT)))
    else:
        Lab(LAB).down()
        say(
            "\nThe host is gone; images and caches stay for the next time (./rig demo --destroy removes them). --keep leaves the host running."
        )
    return 0 if same_text(plain, spec) and accepted.accepted else 1


def destroy() -> int:
    """Remove the demo; images and caches too, unless another lab uses them."""
    client = engine.connect()
    if client is None:
        say("no Docker Engine answers: nothing of a demo is here")
        return 0
    Lab(LAB, client=client).down()
    if others := sorted({h.lab for h in hosts.find(client)}):
        say(f"the demo's host is gone; images and caches stay for the lab {', '.join(others)} (./rig lab down --all)")
        return 0
    say("removed: " + ", ".join(f"{number} {what}" for what, number in cleanup.everything(client).items()))
    return 0


WHERE_NEXT = """
Where to look next (the host runs on):
  ./rig status -i {inventory}
  ./rig plan -i {inventory}
  ./rig lab ssh --lab demo demo          then: systemctl cat specrig-tiny; journalctl -u specrig-tiny
  ./rig up -i {inventory} --check --diff    nothing to change
  ./rig demo --destroy"""


def converge(inventory: Path, *, speculation: bool) -> None:
    """Run the site playbook, as `./rig up` does."""
    words = ["-e", f"{{rig_speculation: {str(speculation).lower()}}}"]
    if runner.playbook("site", inventory, words):
        raise CannotRun(
            "the playbook did not end well (its own words are above)",
            "./rig demo --keep, then ./rig lab ssh --lab demo demo",
            "DEMO_FAILED",
        )


def host() -> hosts.Host:
    """The demo's host."""
    return next(h for h in Lab(LAB).hosts() if h.name == HOST)


def on_host(*command: str) -> str:
    """Run a command on the demo host as root, show what it says, return it."""
    done = subprocess.run(hosts.ssh_command(host(), ["sudo", *command]), check=False, capture_output=True, text=True)
    say(done.stdout.rstrip())
    return done.stdout


@contextlib.contextmanager
def endpoint() -> Iterator[Endpoint]:
    """The service, which listens on the host's loopback, through an SSH tunnel: how a person reaches it too."""
    ssh = hosts.ssh_command(host())

    def read(path: str) -> str:
        return subprocess.run([*ssh, "sudo", "cat", path], check=True, capture_output=True, text=True).stdout

    key = read(f"/etc/specrig/services/{SERVICE}/api-key").strip()
    [service] = json.loads(read("/etc/specrig/plan.json"))["services"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        local = probe.getsockname()[1]
    tunnel = subprocess.Popen(
        [*ssh[:-1], "-N", "-o", "ExitOnForwardFailure=yes", "-L", f"127.0.0.1:{local}:127.0.0.1:{PORT}", ssh[-1]]
    )
    try:
        wait_for_port(local)
        yield Endpoint(f"http://127.0.0.1:{local}", SERVICE, key, service["metrics"])
    finally:
        tunnel.terminate()
        tunnel.wait()


def wait_for_port(port: int, timeout: float = 20) -> None:
    """Return when something listens on loopback."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise CannotRun("the tunnel to the demo host did not open", "./rig lab ssh --lab demo demo", "DEMO_TUNNEL")


def measure() -> tuple[list[Completion], Acceptance]:
    """A warm-up, then two greedy completions, the first one shown as it streams."""
    with endpoint() as server:
        complete(server, PROMPT, 16)
        before = speculation(server)
        say(f"\n> {PROMPT}")
        done = [
            complete(server, PROMPT, TOKENS, lambda piece: print(piece, end="", flush=True)),
            complete(server, PROMPT, TOKENS),
        ]
        say("")
        return done, since(server, before)


def same_text(plain: list[Completion], spec: list[Completion]) -> bool:
    """Speculation must not change what greedy decoding says."""
    return len({c.text for c in [*plain, *spec]}) == 1


def report(plain: list[Completion], spec: list[Completion], accepted: Acceptance) -> None:
    """The comparison, from the server's own counters."""
    off, on = (max(c.decode_tps for c in runs) for runs in (plain, spec))
    identical = "identical" if same_text(plain, spec) else "DIFFERENT (this is a fault)"
    say(
        f"\n── Speculation, measured (tiny models on this CPU: the ratio shows the mechanism, not what a card does)"
        f"\n  K=0  {off:7.1f} t/s decode   ({TOKENS} tokens, better of 2)"
        f"\n  K=5  {on:7.1f} t/s decode   {on / off:.2f}×"
        f"\n  α = {accepted.rate or 0:.2f} ({accepted.accepted} of {accepted.drafted} drafted tokens accepted)"
        f", mean acceptance length {accepted.mean_length or 1:.2f}"
        f"\n  greedy output: {identical}"
    )
