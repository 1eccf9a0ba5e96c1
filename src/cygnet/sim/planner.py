"""Capacity planning: what a model costs per token of context, what fits on how many accelerators, and what decoding is
bound by. Pure arithmetic on facts; pools are sized by the code that sizes them in the engine.

A *layout* is one replica: attention split over `tp` accelerators, experts over `ep`. `ep / tp` ranks run attention on
different requests (data-parallel attention) and share the experts.

    tp = 2, ep = 8      | rank 0: gpu 0 1 | rank 1: gpu 2 3 | rank 2: gpu 4 5 | rank 3: gpu 6 7 |
    attention, KV          requests a        requests b        requests c        requests d
    experts                e0 .. e7 spread over all eight
"""

from collections.abc import Iterator
from dataclasses import dataclass

from cygnet.base.errors import ConfigError
from cygnet.base.geometry import KVGeometry
from cygnet.kv.sizing import min_pools, plan_pools
from cygnet.sim.hardware import HardwareProfile
from cygnet.sim.model_facts import AttentionFacts, ModelFacts

MAX_GPUS = 1024
"""No replica larger than this is looked for."""
MAX_BATCH = 1 << 20


@dataclass(frozen=True)
class PlanSettings:
    """What is assumed besides the model and the accelerator."""

    context: int
    """Tokens of one session."""
    kv_bytes: int = 2
    """Bytes of one element of KV."""
    block_size: int = 16
    chunk: int = 8192
    """Tokens of one step: what the SWA pool must hold beside the window."""
    memory_share: float = 0.9
    """Of the accelerator's memory, for weights, activations and KV."""
    reserve_bytes: float = 4e9
    """Of that, for activations and CUDA graphs."""
    host_share: float = 0.8
    """Of a node's host memory, for KV."""
    sessions: int = 1
    """Sessions that a rank must hold to count as fitting."""
    windows_per_session: int = 2


@dataclass(frozen=True)
class ContextCost:
    """What one sequence of `tokens` costs, and what it would with full attention in every layer."""

    tokens: int
    kv_bytes: int
    uniform_kv_bytes: int
    attention_flops: int
    full_attention_flops: int

    @property
    def kv_ratio(self) -> float:
        """How many times more KV full attention everywhere would need."""
        return self.uniform_kv_bytes / self.kv_bytes

    @property
    def flops_ratio(self) -> float:
        return self.full_attention_flops / self.attention_flops


@dataclass(frozen=True)
class Layout:
    """One replica's shape, and what is left for KV on each of its accelerators."""

    tp: int
    ep: int
    gpus: int
    weight_bytes: float
    kv_budget: float
    """Bytes for KV per accelerator; negative where not even the weights fit."""


@dataclass(frozen=True)
class Turn:
    """Where decoding a batch at some context turns from reading weights to reading KV."""

    context: int
    batch: int | None
    """Smallest batch per rank that reads more KV than weights in a step; `None` if none below `MAX_BATCH`."""


@dataclass(frozen=True)
class Fit:
    """How one way of keeping KV fits: on the smallest layout, and what that holds."""

    layout: Layout | None
    """The smallest that fits; `None` if none of up to `MAX_GPUS` does."""
    tokens_per_gpu: int
    """Context that the KV of one accelerator holds, in whole-replica tokens divided by its accelerators."""
    concurrency: int
    """Sequences of the planned context that one rank runs at once."""


@dataclass(frozen=True)
class Plan:
    """Everything about one model on one kind of accelerator."""

    model: ModelFacts
    hardware: HardwareProfile
    settings: PlanSettings
    geometry: KVGeometry
    costs: tuple[ContextCost, ...]
    dual: Fit
    """With the SWA layers' KV kept for the window only."""
    uniform: Fit
    """With the SWA layers' KV kept for all tokens."""
    host_tokens: int
    """Context that a node's host memory holds."""
    turns: tuple[Turn, ...]


def context_lengths(limit: int) -> Iterator[int]:
    """1K, 4K, 16K ... below `limit`, then `limit`."""
    length = 1024
    while length < limit:
        yield length
        length *= 4
    yield limit


def context_cost(facts: ModelFacts, tokens: int, kv_bytes: int = 2) -> ContextCost:
    """KV and prefill attention of a sequence of `tokens`."""
    geometry = facts.kv_geometry(kv_bytes)
    return ContextCost(
        tokens,
        geometry.cached_bytes(tokens),
        tokens * geometry.uniform_token_bytes,
        facts.attention_flops(0, tokens),
        facts.full_attention_flops(0, tokens),
    )


def plan(facts: ModelFacts, hardware: HardwareProfile, settings: PlanSettings, *, tp: int | None = None) -> Plan:
    """Plan for a model. `tp` splits attention; by default over as many accelerators of a node as there are KV heads.

    Raises `ConfigError` for a context that the model does not have or a `tp` that can't split it.
    """
    if not 0 < settings.context <= facts.max_model_len:
        raise ConfigError(
            f"{facts.name} has contexts of 1 to {facts.max_model_len} tokens, not {settings.context}; change --context"
        )
    if tp is not None and (tp < 1 or tp & (tp - 1) or facts.full.num_heads % tp):
        raise ConfigError(
            f"--tp {tp} must be a power of two that divides the {facts.full.num_heads} attention heads of {facts.name}"
        )
    chosen = tp or default_tp(facts, hardware)
    geometry = facts.kv_geometry(settings.kv_bytes)
    layout = smallest_layout(facts, hardware, settings, tp=chosen, uniform=False)
    wide = smallest_layout(facts, hardware, settings, tp=chosen, uniform=True)
    lengths = sorted({min(8192, settings.context), min(65_536, settings.context), settings.context})
    return Plan(
        model=facts,
        hardware=hardware,
        settings=settings,
        geometry=geometry,
        costs=tuple(context_cost(facts, n, settings.kv_bytes) for n in context_lengths(settings.context)),
        dual=_fit(facts, settings, layout, uniform=False),
        uniform=_fit(facts, settings, wide, uniform=True),
        host_tokens=held_tokens(geometry, settings, hardware.host_memory_bytes * settings.host_share),
        turns=tuple(turn(facts, layout, settings, n) for n in lengths) if layout else (),
    )


def default_tp(facts: ModelFacts, hardware: HardwareProfile) -> int:
    """Attention split over a node as far as the full layers' KV heads go. MLA has one latent, which can't be split."""
    if not facts.full.shardable:
        return 1
    tp = 1
    while tp * 2 <= min(hardware.per_node, facts.full.num_kv_heads) and facts.full.num_heads % (tp * 2) == 0:
        tp *= 2
    return tp


def layouts(facts: ModelFacts, hardware: HardwareProfile, settings: PlanSettings, *, tp: int) -> Iterator[Layout]:
    """Replicas from small to large: without experts `tp` itself grows up to the given one, with experts `ep` grows."""
    if facts.moe is None:
        sizes = [(n, n) for n in _powers(1, tp)]
    else:
        sizes = [(min(tp, n), n) for n in _powers(1, MAX_GPUS) if n <= facts.moe.num_experts]
    for split, ep in sizes:
        weights = facts.resident_bytes(tp=split, ep=ep)
        budget = hardware.memory_bytes * settings.memory_share - settings.reserve_bytes - weights
        yield Layout(split, ep, max(split, ep), weights, budget)


def _powers(first: int, last: int) -> Iterator[int]:
    while first <= last:
        yield first
        first *= 2


def smallest_layout(
    facts: ModelFacts, hardware: HardwareProfile, settings: PlanSettings, *, tp: int, uniform: bool
) -> Layout | None:
    """The first layout whose ranks hold `settings.sessions` sequences of the planned context."""
    for layout in layouts(facts, hardware, settings, tp=tp):
        if layout.kv_budget >= needed_bytes(facts.kv_geometry(settings.kv_bytes, layout.tp), settings, uniform=uniform):
            return layout
    return None


def needed_bytes(geometry: KVGeometry, settings: PlanSettings, *, uniform: bool) -> int:
    """KV bytes per accelerator for the planned sessions: the engine's own minimum for one, a cached session for each
    other one."""
    if uniform:
        return settings.sessions * settings.context * geometry.uniform_token_bytes
    least = min_pools(
        geometry,
        block_size=settings.block_size,
        chunk=settings.chunk,
        model_max_len=settings.context,
        max_model_len=settings.context,
    )
    return least.num_bytes + (settings.sessions - 1) * geometry.cached_bytes(settings.context)


def held_tokens(geometry: KVGeometry, settings: PlanSettings, budget: float, *, uniform: bool = False) -> int:
    """Tokens of context that `budget` bytes hold; 0 where not even one chunk fits."""
    if budget <= 0:
        return 0
    if uniform:
        return int(budget) // geometry.uniform_token_bytes
    try:
        sizes = plan_pools(
            geometry,
            block_size=settings.block_size,
            budget_bytes=int(budget),
            chunk=min(settings.chunk, settings.context),
            model_max_len=settings.context,
            session_tokens=settings.context,
            windows_per_session=settings.windows_per_session,
        )
    except ConfigError:
        return 0
    return sizes.full_blocks * sizes.block_size


def _fit(facts: ModelFacts, settings: PlanSettings, layout: Layout | None, *, uniform: bool) -> Fit:
    if layout is None:
        return Fit(None, 0, 0)
    shard = facts.kv_geometry(settings.kv_bytes, layout.tp)
    held = held_tokens(shard, settings, layout.kv_budget, uniform=uniform)
    each = settings.context * shard.uniform_token_bytes if uniform else shard.cached_bytes(settings.context)
    return Fit(layout, held // layout.tp, int(layout.kv_budget) // each)


# ------------------------------------------------------------------- decoding


def decode_kv_bytes(facts: ModelFacts, context: int, *, kv_bytes: int, tp: int) -> float:
    """KV that one accelerator reads to decode one token of a sequence of `context` tokens."""
    if facts.full.index is None:
        return float(facts.kv_geometry(kv_bytes, tp).cached_bytes(context))
    return float(sum(sparse_token_bytes(facts.full, kv_bytes, context)))


def sparse_token_bytes(full: AttentionFacts, kv_bytes: int, context: int) -> tuple[int, int]:
    """Bytes that a decode with an index reads: all index keys, and the KV of the chosen tokens."""
    assert full.index is not None
    geometry = full.geometry(kv_bytes)
    index_share = geometry.token_bytes * full.index.dim // full.key_dim
    return context * index_share, min(context, full.index.top_k) * (geometry.token_bytes - index_share)


def decode_weight_bytes(facts: ModelFacts, layout: Layout, batch: int) -> float:
    """Weights that one accelerator reads in a step of `batch` tokens per rank, experts chosen evenly."""
    read = facts.always_bytes(layout.tp)
    if facts.moe:
        tokens = batch * max(1, layout.ep // layout.tp)
        touched = 1.0 - (1.0 - facts.moe.top_k / facts.moe.num_experts) ** tokens
        experts = facts.moe.num_experts / layout.ep
        read += facts.moe.num_layers * experts * touched * facts.expert_bytes()
    return read


def turn(facts: ModelFacts, layout: Layout, settings: PlanSettings, context: int) -> Turn:
    """The smallest batch per rank at which a decode step reads more KV than weights. KV grows with the batch, weights
    level off, so there is one such point."""
    each = decode_kv_bytes(facts, context, kv_bytes=settings.kv_bytes, tp=layout.tp)
    low, high = 0, 1
    while high * each <= decode_weight_bytes(facts, layout, high):
        if high >= MAX_BATCH:
            return Turn(context, None)
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        if middle * each > decode_weight_bytes(facts, layout, middle):
            high = middle
        else:
            low = middle
    return Turn(context, high)
