"""Rules over the VRAM ledger: what fits, and the smallest change that would."""

from collections.abc import Iterator
from dataclasses import replace

from specrig.plan import vram
from specrig.plan.refusals import finding
from specrig.plan.resolve import Host, Service, cpu_cache, demand
from specrig.plan.types import Finding

SHARED = 0.95  # of a card, for all services on it together


def _gib(mib: int) -> str:
    return f"{mib / 1024:.1f} GiB"


def sure_context(s: Service) -> int:
    """The largest max_model_len that is planned without a warning about memory; 0: none, or no account is kept."""
    if s.ledger is None:
        return 0
    asked = replace(s.ledger.demand, graphs=True) if s.eager_forced else s.ledger.demand
    return vram.largest_context(asked, s.ledger.band_mib)


def _ways_out(s: Service, account: vram.Ledger) -> str:
    """Every single change that makes the asked context start, the smallest first."""
    ways: list[str] = []
    tightest = account.tightest
    sure, most = sure_context(s), account.largest_max_model_len
    if most:
        ways.append(f"max_model_len: {sure or most}" + (f" ({most} if the estimates hold)" if 0 < sure < most else ""))
    need = max(vram.needed_utilization(card, account.demand.max_model_len) for card in account.cards)
    if need <= vram.highest_utilization(tightest):
        ways.append(f"gpu_memory_utilization: {need:g}")
    if s.uses_draft and vram.starts(demand(s, with_draft=False, graphs=not s.eager)):
        ways.append("rig_speculation: false")
    return ", or ".join(ways) or "a smaller or quantised model, or more cards (tensor_parallel)"


def it_fits(s: Service) -> Iterator[Finding]:
    """One full-length sequence must fit beside the models: the engine starts on no other condition."""
    account = s.ledger
    if account is None or len(s.cards) != s.tp:
        return
    card = account.tightest
    if card.kv_mib <= 0:
        cause = (
            f"{_gib(card.inside_mib)} of models and overhead, {_gib(card.budget_mib)} of budget on card {card.index}"
            f" ({card.card.title} at {account.demand.utilization:g})"
        )
        yield finding("VRAM_MODELS_DO_NOT_FIT", cause, _ways_out(s, account))
    elif not account.fits and s.decl.max_model_len <= s.target.config.max_position_embeddings:
        cause = (
            f"max_model_len {s.decl.max_model_len} needs {s.decl.max_model_len} tokens of KV cache, card {card.index}"
            f" has room for {card.kv_tokens}; the largest that fits is {account.largest_max_model_len}"
        )
        yield finding("VRAM_OVERCOMMIT", cause, _ways_out(s, account))
    elif account.tight:
        room = f"room for {card.kv_tokens} tokens, context {s.decl.max_model_len}"
        cause = f"{room}: within the error band of {account.band_mib} MiB"
        loads = (account.demand.target, account.demand.draft)
        ways = [f"max_model_len: {sure}"] if (sure := sure_context(s)) else []
        ways += ["./rig models lock, whose sizes are exact"] if any(load and not load.exact for load in loads) else []
        yield finding("VRAM_TIGHT", cause, ", or ".join(ways) or "a smaller model, or more cards (tensor_parallel)")
    worst = min(account.cards, key=lambda a: a.spare_mib)
    if worst.spare_mib < 0:
        highest = vram.highest_utilization(worst)
        cause = (
            f"gpu_memory_utilization {account.demand.utilization:g} leaves"
            f" {_gib(worst.card.visible_mib - worst.budget_mib)} outside the budget, {_gib(worst.outside_mib)} must fit"
        )
        yield finding("UTIL_TOO_HIGH", cause, f"gpu_memory_utilization: {highest:g}")


def graphs_are_kept(s: Service) -> Iterator[Finding]:
    """Eager mode is the dearest flag there is, except where an old engine needs it to verify in one pass."""
    if not s.cuda or not s.eager or s.speaking.traits["budget"] != "share":
        return
    if s.eager_forced:
        cause = f"CUDA graphs do not fit beside a context of {s.decl.max_model_len}: eager, 2-3 times slower"
        sure = sure_context(s)
        yield finding("EAGER_LAST_RESORT", cause, f"max_model_len: {sure}, and the graphs come back" if sure else "")
    elif s.speculates and s.speaking.traits["eager_scorer"]:
        yield finding(
            "EAGER_TRADE",
            f"{s.version} verifies all drafted tokens in one pass only when eager; without graphs each pass costs more",
        )
    else:
        yield finding(
            "EAGER_ON_GPU",
            "eager is true: without CUDA graphs decoding ran at 43 instead of 150 t/s (one H200, 14B AWQ)",
        )


def cpu_cache_fits(s: Service) -> Iterator[Finding]:
    """On a CPU the cache is a number of GiB that a person sets."""
    if s.cuda or s.decl.engine != "vllm":
        return
    cache = cpu_cache(s)
    if cache["kv_tokens"] < s.decl.max_model_len:
        per_token = cache["kv_bytes_per_token"]
        need = -(-s.decl.max_model_len * per_token // (1 << 30))
        cause = f"max_model_len {s.decl.max_model_len} in a cache of {cache['kv_tokens']} tokens"
        yield finding("CPU_CACHE_TOO_SMALL", cause, f'env: {{VLLM_CPU_KVCACHE_SPACE: "{need}"}}')


def estimate(s: Service) -> Iterator[Finding]:
    """Engines without an account of their own: what they hold at least, against what the cards have."""
    if not s.cuda or not s.cards or s.ledger is not None:
        return
    models = [s.target, *([s.draft] if s.uses_draft and s.draft else [])]
    weights = sum(model.weights for model in models) // vram.MIB
    # llama.cpp takes the cache of all its slots when it starts; the others must hold one full sequence.
    sequences = s.decl.max_num_seqs if s.target.format == "gguf" else 1
    per_token = sum(vram.kv_bytes_per_token(model.config, 1) for model in models)
    cache = per_token * s.decl.max_model_len * sequences // vram.MIB
    have = sum(card.ledger_card.visible_mib - card.ledger_card.display_mib for card in s.cards)
    held = f"{_gib(weights)} of weights and {_gib(cache)} of KV cache ({sequences} x {s.decl.max_model_len} tokens), {_gib(have)} on the cards"
    if weights + cache > have:
        fits = max(0, have - weights) * vram.MIB // (per_token * sequences)
        fits = min(fits, s.target.config.max_position_embeddings) // vram.STEP * vram.STEP
        fix = (
            f"max_model_len: {fits}, or fewer max_num_seqs"
            if fits >= vram.STEP
            else "a smaller or quantised model, or more cards"
        )
        yield finding("VRAM_MODELS_DO_NOT_FIT", held, fix)
    else:
        yield finding("VRAM_ESTIMATE", f"{held}; {s.engine.title}'s own overhead is not in this")


def context_is_known(s: Service) -> Iterator[Finding]:
    """No model answers beyond its own positions."""
    limit = s.target.config.max_position_embeddings
    if s.decl.max_model_len > limit:
        cause = f"max_model_len is {s.decl.max_model_len}, {s.target.ref.repo} ends at {limit}"
        sure = sure_context(s)
        fix = f"max_model_len: {sure}, which the cards hold" if 0 < sure < limit else f"max_model_len: {limit}"
        yield finding("CONTEXT_TOO_LONG", cause, fix)


def cards_are_shared_within_bounds(host: Host, services: list[Service]) -> Iterator[Finding]:
    """Services on one card share its memory."""
    for card in host.cards:
        # An exclusive service never runs beside another one on its cards.
        on = [s for s in services if s.cuda and card in s.cards and not s.decl.exclusive]
        total = sum(s.utilization for s in on)
        if len(on) > 1 and total > SHARED:
            # The smallest ones run beside each other, as many as fit; one alone always does.
            together: list[Service] = []
            for s in sorted(on, key=lambda s: s.utilization):
                if not together or sum(t.utilization for t in together) + s.utilization <= SHARED:
                    together.append(s)
            alone = ", ".join(s.name for s in on if s not in together)
            cause = (
                f"card {card.index}: {' and '.join(s.name for s in on)} ask for {total:.2f} of it, {SHARED} is there"
            )
            yield finding(
                "GPU_OVERCOMMIT",
                cause,
                f"exclusive: true for {alone} (./rig switch), other gpus, or a gpu_memory_utilization of each that add up to {SHARED}",
            )
