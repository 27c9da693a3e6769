"""Where a card's memory goes: weights, draft, KV cache, activations, CUDA graphs, context, display.

Sizes are MiB unless a name says bytes. Formulae and constants are estimates with an error band; real bytes of a locked
model replace the weight formula. Held in tests against vLLM 0.26.0 on an H200, 14B AWQ and 1.5B draft: 13.04 GiB of
weights, KV bytes per token, 1.61-1.79 GiB peak activation at 16384 profiled tokens, 0.25 GiB context, 0.23 GiB graphs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from specrig.plan.catalog import ModelConfig

MIB = 1 << 20
BLOCK = 16  # tokens; the engine hands out KV cache in blocks of this
STEP = 256  # tokens; a proposed max_model_len is a multiple of this
AWQ_GROUP = 128
QUANTISED_4BIT = ("awq", "gptq", "awq_marlin", "gptq_marlin")
CONTEXT_MIB = 350  # CUDA context and cuBLAS workspaces (0.25 GiB measured on one H200; GeForce a little more, recall)
NCCL_MIB = 400  # more of it per card when tensor parallel (recall)
START_MIB = 400  # what a fresh process already misses of the card (0.5 of 139.8 GiB measured on one H200)
# Loading a model takes more than its bytes: repacked quantised weights, rotary tables, the allocator's rounding. Per model
# and card, fitted to 9.56 GiB for the 14B AWQ (9.29 of bytes) and 3.48 for the 1.5B (3.31).
LOAD_MIB, LOAD_SHARE = 118, 0.017
LARGE_CARD_MIB, LARGE_CARD_TOKENS = 70 * 1024, 8192  # V1 takes larger prefill chunks on such cards
DISPLAY_MIB = 900  # a desktop session (bench.md 4.2: 15-20 % of the context of a 24 GB card)
UNMEASURED_BAND = 3  # times the band, for an engine that shares vLLM's account but was never measured
BAND_MIB, BAND_SHARE = 400, 0.02  # error band: fixed part, and the share of formula-sized weights


@lru_cache(maxsize=1024)
def weight_bytes(config: ModelConfig) -> int:
    """Size of the weights from the shape. Reproduces the published AWQ repositories of this family to 10 MB."""
    h, layers = config.hidden_size, config.num_hidden_layers
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    i = config.intermediate_size or 4 * h
    linears = [(h, q), (h, kv), (h, kv), (q, h), (h, i), (h, i), (i, h)]
    if config.quantization in QUANTISED_4BIT:
        # 4-bit weights, an fp16 scale and a 4-bit zero point per group
        linear = sum(a * b / 2 + a / AWQ_GROUP * b * 2 + a / AWQ_GROUP * b / 2 for a, b in linears)
    elif config.quantization == "fp8":
        linear = float(sum(a * b for a, b in linears))
    else:
        linear = 2.0 * sum(a * b for a, b in linears)
    bias = q + 2 * kv if config.attention_bias else 0
    return int(layers * (linear + 2 * (bias + 2 * h)) + 2 * h + 2 * embedding_rows(config) * h)


def embedding_rows(config: ModelConfig) -> int:
    """Rows of the input embedding and, when it is not shared, of the output head."""
    return config.vocab_size * (1 if config.tie_word_embeddings else 2)


def read_bytes(config: ModelConfig, weights: int) -> int:
    """Bytes read per decoded token at batch 1: everything but the input embedding table."""
    return weights - (0 if config.tie_word_embeddings else 2 * config.vocab_size * config.hidden_size)


def kv_bytes_per_token(config: ModelConfig, tp: int) -> int:
    """Key and value, 16 bit, of one token on one card."""
    return 2 * config.num_hidden_layers * max(1, config.num_key_value_heads // tp) * config.head_dim * 2


@dataclass(frozen=True, slots=True)
class Card:
    """A card as the ledger sees it."""

    name: str
    title: str
    total_mib: int
    visible_mib: int  # what the engine's own query returns
    display_mib: int


@dataclass(frozen=True, slots=True)
class Load:
    """One model's part: its config, the bytes of all its weights, and how many cards share it."""

    config: ModelConfig
    weights: int
    exact: bool
    tp: int


@dataclass(frozen=True, slots=True)
class Demand:
    """Everything the ledger depends on."""

    cards: tuple[Card, ...]
    target: Load
    draft: Load | None
    k: int
    max_model_len: int
    max_num_seqs: int
    utilization: float
    graphs: bool
    traits: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the ledger. `inside`: counted in gpu_memory_utilization's budget."""

    what: str
    mib: int
    inside: bool
    note: str = ""


@dataclass(frozen=True, slots=True)
class CardLedger:
    """One card's account."""

    index: int
    card: Card
    budget_mib: int
    rows: tuple[Row, ...]
    kv_token_bytes: int
    spare_mib: int  # visible memory that neither the budget nor anything outside it takes; negative: too much asked

    @property
    def inside_mib(self) -> int:
        """What the budget pays before the KV cache."""
        return sum(row.mib for row in self.rows if row.inside)

    @property
    def outside_mib(self) -> int:
        """What must fit beside the budget."""
        return sum(row.mib for row in self.rows if not row.inside)

    @property
    def kv_mib(self) -> int:
        """What the budget leaves for the KV cache; negative: the models alone do not fit."""
        return self.budget_mib - self.inside_mib

    @property
    def kv_tokens(self) -> int:
        """Tokens that fit into the KV cache, whole blocks."""
        return self.tokens_beside(0)

    def tokens_beside(self, spare_mib: int) -> int:
        """The same, with so much of it left alone."""
        return max(0, (self.kv_mib - spare_mib) * MIB // self.kv_token_bytes // BLOCK * BLOCK)


@dataclass(frozen=True, slots=True)
class Ledger:
    """The account of one service."""

    demand: Demand
    cards: tuple[CardLedger, ...]
    band_mib: int
    largest_max_model_len: int

    @property
    def tightest(self) -> CardLedger:
        """The card that decides."""
        return min(self.cards, key=lambda account: (account.kv_tokens, account.kv_mib))

    @property
    def fits(self) -> bool:
        """Does one full-length sequence fit? The engine itself starts on no other condition."""
        return self.tightest.kv_tokens >= self.demand.max_model_len

    @property
    def tight(self) -> bool:
        """Does it fit only if the estimates hold?"""
        sure = min(account.tokens_beside(self.band_mib) for account in self.cards)
        return self.fits and sure < self.demand.max_model_len

    def as_json(self) -> dict[str, Any]:
        """For the plan: MiB, tokens, bytes."""
        return {
            "device": "cuda",
            "gpu_memory_utilization": self.demand.utilization,
            "max_model_len": self.demand.max_model_len,
            "kv_tokens": self.tightest.kv_tokens,
            "full_length_sequences": round(self.tightest.kv_tokens / self.demand.max_model_len, 2),
            "largest_max_model_len": self.largest_max_model_len,
            "cuda_graphs": self.demand.graphs,
            "fits": self.fits,
            "error_band_mib": self.band_mib,
            "gpus": [
                {
                    "index": account.index,
                    "card": account.card.name,
                    "total_mib": account.card.total_mib,
                    "visible_mib": account.card.visible_mib,
                    "budget_mib": account.budget_mib,
                    "rows": [
                        {"what": row.what, "mib": row.mib, "inside_budget": row.inside, "note": row.note}
                        for row in account.rows
                    ],
                    "kv_mib": account.kv_mib,
                    "kv_bytes_per_token": account.kv_token_bytes,
                    "kv_tokens": account.kv_tokens,
                    "spare_mib": account.spare_mib,
                }
                for account in self.cards
            ],
        }


def activation_mib(demand: Demand) -> int:
    """Peak of the profiling pass: the widest layer's activations and the sampler's fp32 logits; or, when the V1 engine
    compiles for the first time, a copy of the input embedding and two activations, where that is more (docs/evidence:
    1.61 GiB in three cold starts at 8192 tokens, 0.95 when eager)."""
    chunk = int(demand.traits["profile_tokens"])
    if chunk and all(card.visible_mib >= LARGE_CARD_MIB for card in demand.cards):
        chunk = max(chunk, LARGE_CARD_TOKENS)
    tokens = max(chunk, demand.max_num_seqs) if chunk else max(demand.max_model_len, 2048)
    config, tp = demand.target.config, demand.target.tp
    layer = tokens * 2 * (3 * (config.intermediate_size or 4 * config.hidden_size) // tp + 3 * config.hidden_size)
    logits = demand.max_num_seqs * (1 + demand.k) * config.vocab_size * 4 * 3
    running = layer + logits
    if demand.graphs and demand.traits["engine"] == "V1":
        running = max(running, 2 * config.vocab_size * config.hidden_size // tp + 4 * tokens * config.hidden_size)
    return running // MIB


def graphs_mib(demand: Demand) -> int:
    """CUDA graph pool: about 9 MiB per captured batch size of a 48-layer model, over a fixed part."""
    largest = min(512, 2 * demand.max_num_seqs * (1 + demand.k))
    sizes = 3 + largest // 8
    return 100 + 9 * sizes * demand.target.config.num_hidden_layers // 48


def _load_mib(weights_mib: int) -> int:
    return LOAD_MIB + int(LOAD_SHARE * weights_mib)


def _account(demand: Demand, index: int) -> CardLedger:
    card, target, draft = demand.cards[index], demand.target, demand.draft
    traits, tp = demand.traits, demand.target.tp
    rows = [
        Row("target weights", target.weights // tp // MIB, True, "real bytes" if target.exact else "from the shape")
    ]
    token = kv_bytes_per_token(target.config, tp)
    rows.append(Row("loading the target", _load_mib(rows[0].mib), True, "packing, tables, rounding"))
    if draft and index < draft.tp:
        note = "real bytes" if draft.exact else "from the shape"
        inside = bool(traits["draft_in_budget"])
        rows.append(Row("draft weights", draft.weights // draft.tp // MIB, inside, note))
        rows.append(Row("loading the draft", _load_mib(rows[-1].mib), inside, "packing, tables, rounding"))
        token += kv_bytes_per_token(draft.config, draft.tp)
    rows.append(Row("activations", activation_mib(demand), True, "peak while profiling"))
    rows.append(Row("CUDA context", CONTEXT_MIB + (NCCL_MIB if tp > 1 else 0), True, "with NCCL" if tp > 1 else ""))
    if demand.graphs:
        rows.append(Row("CUDA graphs", graphs_mib(demand), bool(traits["graphs_in_budget"])))
    rows.append(Row("free at start", START_MIB, False, "must stay outside the budget"))
    if card.display_mib:
        rows.append(Row("display and others", card.display_mib, False))
    budget = int(card.visible_mib * demand.utilization)
    outside = sum(row.mib for row in rows if not row.inside)
    return CardLedger(index, card, budget, tuple(rows), token, card.visible_mib - budget - outside)


def _kv_tokens(demand: Demand, spare_mib: int = 0) -> int:
    """Tokens that each card holds, with `spare_mib` of its cache left alone."""
    return min(account.tokens_beside(spare_mib) for account in accounts(demand))


def accounts(demand: Demand) -> tuple[CardLedger, ...]:
    """Every card's account, in order."""
    return tuple(_account(demand, index) for index in range(len(demand.cards)))


def starts(demand: Demand) -> bool:
    """Does one full-length sequence fit? (`ledger(demand).fits`, cheaper.)"""
    return _kv_tokens(demand) >= demand.max_model_len


def _largest(holds: Callable[[int], bool], limit: int) -> int:
    """The largest multiple of STEP up to `limit` that holds, 0 when none does. `holds` must be monotone."""
    low, high = 0, limit // STEP
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle * STEP) else (low, middle - 1)
    return low * STEP


def largest_context(demand: Demand, spare_mib: int = 0) -> int:
    """The largest max_model_len (multiple of 256) that starts, beside `spare_mib`, with everything else as it is; 0: none."""
    limits = [demand.target.config.max_position_embeddings]
    if demand.draft:
        limits.append(demand.draft.config.max_position_embeddings)
    if demand.traits["profile_tokens"]:  # the cache does not depend on the context
        return min([_kv_tokens(demand, spare_mib), *limits]) // STEP * STEP
    return _largest(lambda n: _kv_tokens(replace(demand, max_model_len=n), spare_mib) >= n, min(limits))


def ledger(demand: Demand) -> Ledger:
    """The account of a demand."""
    guessed = sum(
        load.weights // load.tp // MIB for load in (demand.target, demand.draft) if load is not None and not load.exact
    )
    return Ledger(
        demand=demand,
        cards=accounts(demand),
        band_mib=int(
            (BAND_MIB + BAND_SHARE * guessed) * (1 if demand.traits.get("measured", True) else UNMEASURED_BAND)
        ),
        largest_max_model_len=largest_context(demand),
    )


def highest_utilization(account: CardLedger) -> float:
    """The largest gpu_memory_utilization (2 digits) that leaves room for what lies outside the budget."""
    free = account.card.visible_mib - account.outside_mib
    return max(0.0, free * 100 // account.card.visible_mib / 100)


def needed_utilization(account: CardLedger, tokens: int) -> float:
    """The smallest gpu_memory_utilization (2 digits) whose KV cache holds `tokens`."""
    need = account.inside_mib + -(-(tokens + BLOCK) * account.kv_token_bytes // MIB)
    return -(-need * 100 // account.card.visible_mib) / 100
