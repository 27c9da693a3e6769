"""Target and draft: may they speak to each other, and when does it pay?

The cost model: one pass at batch 1 takes the longer of reading the weights at `EFFICIENCY` of the card's bandwidth and
a latency floor per layer; the target's pass carries the scheduler and the sampler on top. With c = draft pass / target
pass and a = accepted / drafted tokens (vLLM's own acceptance rate), the speed-up over no speculation is
(1 + a K) / (1 + c K): it pays exactly when a > c, whatever K is.
"""

from collections.abc import Iterator
from typing import Any

from specrig.plan import vram
from specrig.plan.dialects import dialect
from specrig.plan.memory import sure_context
from specrig.plan.refusals import finding
from specrig.plan.resolve import Model, Service
from specrig.plan.types import MAX_K_UNMEASURED, Finding

EFFICIENCY = 0.7  # of the card's bandwidth (bench.md 3.1)
# Fitted to one H200, vLLM 0.26.0, 14B AWQ + 1.5B (docs/plan.md): 6.7 ms a step with graphs and 23.2 eager, 3-4 ms and
# 11 ms per drafted token; the 2.1 and 0.8 ms that reading takes there stay below the floor.
LAYER_MS, EAGER_LAYER_MS, STEP_MS = 0.12, 0.45, 0.9
ALL_REDUCE_MS = 0.03  # one all-reduce over PCIe, two per layer (bench.md 3.3: 15-40 us)
MEASURED = "vllm"  # the one engine whose passes were timed; nothing is guessed for others
PER_TOKEN = (0.6, 0.7, 0.8, 0.9)  # chances that one drafted token is accepted, for the table of best K


def tokenizers_match(s: Service) -> Iterator[Finding]:
    """Engines never check this: with two tokenizers of one size acceptance is silently near zero."""
    if not s.uses_draft or s.draft is None or s.method == "eagle3":
        return
    a, b = s.target, s.draft
    pair = f"{b.ref.repo} and {a.ref.repo}"
    if a.fingerprint and b.fingerprint:
        if a.fingerprint != b.fingerprint:
            cause = f"{pair} have different tokenizers ({b.fingerprint[:12]}, {a.fingerprint[:12]})"
            yield finding("TOKENIZER_DIFFERS", cause)
    elif a.tokenizer and b.tokenizer and a.tokenizer != b.tokenizer:
        yield finding("TOKENIZER_DIFFERS", f"{pair} have different tokenizers ({b.tokenizer}, {a.tokenizer})")
    else:
        yield finding("TOKENIZER_UNVERIFIED", f"{pair}: nobody has compared their tokenizers yet")
    if a.chat_template and b.chat_template and a.chat_template != b.chat_template:
        yield finding("CHAT_TEMPLATE_DIFFERS", f"{pair} were trained on different chat templates")


def vocabularies_meet(s: Service) -> Iterator[Finding]:
    """Every engine refuses a draft of another vocabulary width, unless it is padded or mapped."""
    if not s.uses_draft or s.draft is None or s.vocab in ("n/a", "same", "near") or not s.method_works:
        return
    t, d = s.target.config.vocab_size, s.draft.config.vocab_size
    widths = f"the draft has {d} rows, the target {t}"
    if s.vocab == "heterogeneous":
        if s.method != "draft_model":
            yield finding(
                "VOCAB_METHOD",
                f"{widths}; vocabulary mapping works with method draft_model, not {s.method}",
                "vocab: pad",
            )
        elif not s.speaking.traits["heterogeneous_vocab"]:
            why, way = _no_mapping(s)
            yield finding("VOCAB_MODE_VERSION", f"{widths}; {why}", "vocab: pad" if d < t else way)
        elif s.tp > 1:
            yield finding(
                "HETEROGENEOUS_UNTRIED",
                f"vocabulary mapping with tensor_parallel {s.tp} was never run by us",
                "vocab: pad",
            )
    elif s.target.file or s.draft.file:
        gap = s.speaking.traits["vocabulary_gap"]
        yield finding(
            "VOCAB_GAP",
            f"{widths}; {s.engine.title} takes a difference of {gap}, and a GGUF file can not be padded here",
        )
    elif s.vocab == "unlike":
        why, way = _no_mapping(s)
        yield finding("VOCAB_DRAFT_WIDER", f"{widths}; a draft can be padded, not cut, and {why}", way)
    elif d > t:
        way = "vocab: heterogeneous" if s.speaking.traits["heterogeneous_vocab"] else _no_mapping(s)[1]
        yield finding("VOCAB_PAD_IMPOSSIBLE", f"{widths}; padding widens a draft, it can not narrow one", way)


def _no_mapping(s: Service) -> tuple[str, str]:
    """That this version maps no vocabularies, and what to do about it: the engine's first version that does, if there is one."""
    can = [v for v in s.engine.versions if dialect(s.decl.engine, v).traits["heterogeneous_vocab"]]
    if not can:
        return f"{s.engine.title} can not map vocabularies", "another draft"
    why = f"{s.engine.title} {s.version} can not map vocabularies, {can[0]} is the first"
    return why, f"vocab: heterogeneous with version: {can[0]} or newer, or another draft"


def pair_makes_sense(s: Service) -> Iterator[Finding]:
    """A draft is another, smaller model with at least the target's context."""
    if s.draft is None:
        return
    if (s.draft.ref.repo, s.draft.file) == (s.target.ref.repo, s.target.file):
        yield finding("DRAFT_IS_TARGET", f"draft and target are both {s.target.ref.repo}")
        return
    if not s.uses_draft:
        return
    limit = s.draft.config.max_position_embeddings
    if limit < s.decl.max_model_len <= s.target.config.max_position_embeddings:
        cause = f"max_model_len is {s.decl.max_model_len}, the draft {s.draft.ref.repo} ends at {limit}"
        yield finding("DRAFT_CONTEXT_SHORT", cause, f"max_model_len: {sure_context(s) or limit}")
    small, large = _reads(s.draft), _reads(s.target)
    if small >= large:
        cause = f"the draft reads {small / 1e9:.2f} GB per token, the target {large / 1e9:.2f}"
        yield finding("DRAFT_NOT_SMALLER", cause)


def it_can_pay(s: Service) -> Iterator[Finding]:
    """Above this cost ratio even good drafts lose on ordinary text."""
    cost = payoff(s) if s.method_works else {}
    if cost and cost["break_even_acceptance"] > 0.6:
        cause = (
            f"a drafted token costs {cost['cost_ratio']:.2f} of a target step; accepted/drafted must stay above that"
        )
        yield finding("SPEC_MAY_NOT_PAY", cause)


def models_are_locked(s: Service) -> Iterator[Finding]:
    """Nothing can be staged without a revision, and the lock is the only source of one."""
    for model in [s.target, *([s.draft] if s.uses_draft and s.draft else [])]:
        repo = model.ref.repo
        if model.locked is None:
            yield finding(
                "MODEL_UNLOCKED",
                f"{repo} is not locked: its files and tokenizer are unknown, and ./rig up waits for the lock",
                "./rig models lock",
            )
        elif model.ref.revision and model.ref.revision != model.locked.revision:
            cause = f"{repo}: declared {model.ref.revision[:12]}, locked {model.locked.revision[:12]}"
            yield finding("REVISION_LOCK_MISMATCH", cause, "leave revision out, or ./rig models lock --update")


def _reads(model: Model) -> int:
    if model.file:  # the embedding is quantised as well: its share of all parameters
        config = model.config.model_copy(update={"quantization": None})
        table = 2 * config.vocab_size * config.hidden_size
        return int(model.weights * (1 - table / vram.weight_bytes(config)))
    return vram.read_bytes(model.config, model.weights)


def _pass_ms(model: Model, bandwidth: int, tp: int, eager: bool) -> float:
    layers = model.config.num_hidden_layers
    read = _reads(model) / tp / (bandwidth * 1e9 * EFFICIENCY) * 1e3
    floor = layers * (EAGER_LAYER_MS if eager else LAYER_MS)
    return max(read, floor) + (2 * layers * ALL_REDUCE_MS if tp > 1 else 0)


def payoff(s: Service) -> dict[str, Any]:
    """When speculation pays on these cards: {} without a draft or cards.

    Times in ms per pass at batch 1; `break_even_acceptance` = accepted / drafted; `best_k` per chance that one token is
    accepted, {chance: {k, speedup}} over K 1 to 6. An estimate: `assumptions` says of what.
    """
    if not s.uses_draft or s.draft is None or not s.cards or s.decl.engine != MEASURED:
        return {}
    bandwidth = min(card.gpu.bandwidth_gbs for card in s.cards)
    draft_eager = s.eager or (s.speaking.traits["engine"] == "V1" and not s.speaking.traits["draft_graphs"])
    target = STEP_MS + _pass_ms(s.target, bandwidth, s.tp, s.eager)
    draft = _pass_ms(s.draft, bandwidth, s.draft_tp, draft_eager)
    floor = _reads(s.draft) / s.draft_tp / (_reads(s.target) / s.tp)
    # One pass drafts everything where drafting is parallel.
    ratio = draft / target / (s.k if s.method == "pard" else 1)
    best = {}
    for chance in PER_TOKEN:
        gains = {k: _speedup(chance, k, draft / target, s.method == "pard") for k in range(1, MAX_K_UNMEASURED + 1)}
        k = max(gains, key=lambda n: gains[n])
        best[f"{chance:g}"] = {"k": k, "speedup": round(gains[k], 2)}
    return {
        "target_ms": round(target, 2),
        "draft_ms": round(draft, 2),
        "cost_ratio": round(ratio, 3),
        "cost_ratio_bandwidth_only": round(floor, 3),
        "break_even_acceptance": round(ratio, 3),
        "best_k": best,
        "assumptions": [
            f"batch 1; {EFFICIENCY:.0%} of {bandwidth} GB/s; {LAYER_MS:g} ms a layer or more ({EAGER_LAYER_MS:g} eager)"
            + (f"; {ALL_REDUCE_MS * 1000:g} us per all-reduce" if s.tp > 1 else ""),
            "acceptance = accepted / drafted; short context, so KV reads are left out",
        ],
    }


def _speedup(chance: float, k: int, ratio: float, parallel: bool) -> float:
    tokens = (1 - chance ** (k + 1)) / (1 - chance)
    return tokens / (1 + ratio * (1 if parallel else k))


def pair_json(s: Service) -> dict[str, Any]:
    """What the plan says of the pair: {} without a draft."""
    if not s.uses_draft or s.draft is None:
        return {}
    verified = bool(s.target.fingerprint and s.target.fingerprint == s.draft.fingerprint)
    return {
        "target": s.target.ref.repo,
        "draft": s.draft.ref.repo,
        "target_vocab": s.target.config.vocab_size,
        "draft_vocab": s.draft.config.vocab_size,
        "vocab": s.vocab,
        "tokenizer": "identical" if verified else "unverified",
        "draft_context": s.draft.config.max_position_embeddings,
        "draft_tensor_parallel": s.draft_tp,
        "payoff": payoff(s),
    }
