"""Asks a running engine for one token. An engine that is busy is not hung: then its token counters move meanwhile."""

from __future__ import annotations

import http.client
import re

from specrig.host import ready
from specrig.host.errors import HostError

OK, BUSY, FAILED = "ok", "busy", "failed"
# Prometheus samples about tokens, whatever the engine calls them: vLLM counts each step, prefill too.
_TOKENS = re.compile(r"^([A-Za-z_:][\w:]*token[\w:]*(?:\{[^}]*\})?) (\S+)", re.MULTILINE)


def tokens(url: str, path: str, key: str | None) -> dict[str, str] | None:
    """Every sample of the metrics page with `token` in its name, as text; None when there is no page."""
    if not path:
        return None
    try:
        status, page = ready.call(url, path, key=key, timeout=5)
    except (OSError, http.client.HTTPException):
        return None
    return dict(_TOKENS.findall(page)) if status == 200 else None


def probe(
    url: str, model: str, timeout: float, key: str | None, completion_path: str, metrics_path: str
) -> tuple[str, str]:
    """(ok | busy | failed, why) of one real completion within `timeout` seconds. Never raises."""
    before = tokens(url, metrics_path, key)
    try:
        why = ready.complete_one(url, model, key, timeout, completion_path)
    except HostError as error:
        return FAILED, error.cause
    except TimeoutError:
        why = f"no token within {timeout:.0f} s"
    except (OSError, http.client.HTTPException) as error:
        return FAILED, f"no answer: {error or type(error).__name__}"
    if why is None:
        return OK, ""
    if why.startswith("HTTP 429"):
        return BUSY, "the engine's queue is full"
    after = tokens(url, metrics_path, key)
    if before is not None and after is not None and before != after:
        return BUSY, f"{why}, and others get tokens"
    return FAILED, why
