"""What an engine is doing while it starts, read from its own log lines."""

from __future__ import annotations

import re

# Engines' own words (vLLM 0.6 to 0.32, llama.cpp, SGLang), after a "(process) LEVEL time [file:line]" prefix; the first that matches
# names the phase.
PHASES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), phase)
    for pattern, phase in (
        (
            r"initializing an? (v\d+ )?llm engine|api server version|non-default args|resolved architecture",
            "starting the engine",
        ),
        (
            r"starting to load model|loading model weights|loading drafter model|loading weights|load weight begin"
            r"|loading model '|load_tensors",
            "loading weights",
        ),
        (r"torch\.compile|bytecode transform|compiling a graph|start compiling|compile range", "compiling"),
        (r"captur\w* (the )?(cuda |model )?graph|capturing the model|graph capturing", "capturing graphs"),
        (r"(?<!specrig: )warm(ing)?[ -]?up", "warming up"),
        (r"kv cache|memory profiling|# (gpu|cpu|cuda) blocks", "sizing the KV cache"),
        (r"specrig: warming", "first token"),
        (r"starting vllm (api )?server|application startup|available routes|server is listening", "opening the port"),
    )
)
_PREFIX = re.compile(r"^.*?\[[\w.]+:\d+\] *")
# Lines that name a phase and do not begin it: what is switched off, and the statistics of a running engine.
_NOT_A_PHASE = re.compile(r"disabl|throughput|enforce.eager", re.IGNORECASE)
_SHARDS = re.compile(r"\d+% Completed \| (\d+/\d+)")


def phase_of(text: str) -> tuple[str, str] | None:
    """(phase, detail) that a log line announces, or None."""
    if match := _SHARDS.search(text):
        return "loading weights", f"{match[1]} shards"
    text = _PREFIX.sub("", text)
    if _NOT_A_PHASE.search(text):
        return None
    return next(((phase, "") for pattern, phase in PHASES if pattern.search(text)), None)
