"""Whether a running service speculates as it should: a few prompts through its own endpoint, and its own counters before and after.

An engine can take a draft model and not use it, without a word; or use it, and have every drafted token refused.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specrig.host import acceptance, ready
from specrig.host.acceptance import Acceptance
from specrig.host.errors import HostError
from specrig.host.progress import Progress

# Prose, arithmetic, code, and text that repeats itself: there a prompt-lookup draft has something to find.
PROMPTS = (
    "The License grants you the right to use, copy and change the work. You may",
    "Write the numbers from one to ten as words: one, two, three,",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return",
    "red green blue red green blue red green blue red green blue red green",
)
TOKENS = 48
# Counters may be written a moment after the answer; gauges of older engines every five to ten seconds.
SETTLE_S = 12.0
POLL_S = 0.5
TIMEOUT_S = 300.0


def url(service: Mapping[str, Any]) -> str:
    """Where a service answers on this host."""
    port = (service.get("ports") or [{}])[0]
    bind = str(port.get("bind") or "127.0.0.1")
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bind, bind)  # noqa: S104  compared, not bound
    return f"http://{f'[{host}]' if ':' in host else host}:{port.get('port')}"


class Prover:
    """Asks one service. `service` is its entry in the plan."""

    def __init__(self, service: Mapping[str, Any], key: str | None) -> None:
        self.service, self.key, self.url = service, key, url(service)
        self.metrics: Mapping[str, str] = service.get("metrics") or {}
        self.kind = self.metrics.get("kind", "none")
        self.path = str(service.get("completion_path") or "/v1/completions")

    def complete(self, prompt: str) -> str:
        """One greedy completion's JSON text. Raises HostError PROOF_FAILED."""
        body = {"model": self.service["served_name"], "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
        try:
            status, text = ready.call(self.url, self.path, body, self.key, TIMEOUT_S)
        except (OSError, http.client.HTTPException) as error:
            status, text = 0, repr(error)
        if status != 200:
            raise HostError(
                "PROOF_FAILED",
                f"{self.service['name']} did not complete a prompt: {f'HTTP {status}: ' if status else ''}{text.strip()[:200]}",
                f"journalctl -u {self.service['unit']} -n 100",
            )
        return text

    def read(self) -> Acceptance:
        """What the engine says now; unknown when it says nothing."""
        try:
            status, text = ready.call(self.url, str(self.metrics.get("path") or "/metrics"), None, self.key, 10)
        except (OSError, http.client.HTTPException):
            return Acceptance()
        if status != 200:
            return Acceptance()
        found = acceptance.read(text, self.metrics)
        # An engine that does not speculate has no such counters: nothing was drafted.
        return Acceptance(0, 0, 0) if self.kind == "counters" and found.drafted is None else found

    def measure(self, progress: Progress) -> Acceptance:
        """The acceptance over all prompts."""
        before = self.read() if self.kind != "response" else Acceptance()
        answers = []
        for number, prompt in enumerate(PROMPTS, 1):
            progress.update("proving speculation", message=f"prompt {number} of {len(PROMPTS)}")
            answers.append(self.complete(prompt))
        if self.kind == "response":
            return total([acceptance.read(text, self.metrics) for text in answers])
        deadline = time.monotonic() + (SETTLE_S if self.service.get("k") else POLL_S)
        while True:
            now = self.read()
            found = now.since(before) if self.kind == "counters" else now
            if found.drafted or found.rate or time.monotonic() > deadline:
                return found
            time.sleep(POLL_S)


def total(parts: list[Acceptance]) -> Acceptance:
    """Requests added up."""
    known = [(p.drafted, p.accepted) for p in parts if p.drafted is not None and p.accepted is not None]
    if not known:
        return Acceptance()
    drafted, accepted = (sum(pair[n] for pair in known) for n in (0, 1))
    return Acceptance(None, drafted, accepted, accepted / drafted if drafted else None, None)


def judge(service: Mapping[str, Any], found: Acceptance) -> dict[str, Any]:
    """{on, measured, drafted, accepted, acceptance, mean_length, bound, short, cause}: short when it is not as it should be."""
    on, bound = bool(service.get("k")), service.get("min_acceptance")
    rate, drafted = found.rate, found.drafted
    measured = drafted is not None or rate is not None or found.mean_length is not None
    cause = ""
    if not on and drafted:
        cause = f"speculation is switched off, and {drafted} tokens were drafted"
    elif on and measured and not drafted and not rate and not found.mean_length:
        cause = "speculation is on, and no token was drafted"
    elif on and rate is not None and rate <= 0:
        cause = (
            f"none of {drafted or 'the'} drafted tokens was accepted: every step pays for a draft that is thrown away"
        )
    elif on and bound is not None and rate is not None and rate < bound:
        cause = f"{rate:.2f} of the drafted tokens were accepted, less than min_acceptance {bound:g}"
    return {
        "on": on,
        "measured": measured,
        "drafted": drafted,
        "accepted": found.accepted,
        "acceptance": None if rate is None else round(rate, 4),
        "mean_length": None if found.mean_length is None else round(found.mean_length, 3),
        "bound": bound,
        "short": bool(cause),
        "cause": cause,
    }


def prove(service: Mapping[str, Any], key_file: Path | None, progress: Progress) -> dict[str, Any]:
    """Send the prompts and judge. Raises HostError PROOF_FAILED, READY_KEY."""
    prover = Prover(service, ready.read_key(key_file))
    return judge(service, prover.measure(progress))
