"""What looks like a secret in a text that somebody will read. The plan, on the controller, hides the same."""

from __future__ import annotations

import re

_SECRETS = (
    re.compile(r"\bhf_[A-Za-z0-9]{8,}"),
    re.compile(r"(?i)(\bbearer\s+)[^\s'\",]+"),
    re.compile(
        r"(?i)(\b(?:[a-z]+_)*(?:api[-_]?key|token|password|secret)['\"]?\s*[=:]\s*)(?:\[[^\]]*\]|['\"]?[^\s'\",\])}]+)"
    ),
    re.compile(r"(?i)(--[a-z][a-z_-]*(?:key|token|password|secret)\s+)\S+"),
    re.compile(r"(\w://)[^\s/]+(?=@)"),
)


def redact(text: str) -> str:
    """`text` with whatever looks like a key, a token or who somebody is in a URL replaced by `***`."""
    for pattern in _SECRETS:
        text = pattern.sub(lambda m: (m[1] if m.re.groups else "") + "***", text)
    return text
