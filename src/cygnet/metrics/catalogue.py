"""Every metric Cygnet publishes: name, kind, meaning, labels, buckets, and where the value comes from.

Where a metric means what vLLM's metric of the same purpose means, it has vLLM's literal name (prefix `vllm:`), so that
dashboards, routers and benchmark tools made for vLLM work unchanged. What vLLM does not have is named `cygnet:`.
Every sample carries a `model_name` label besides those listed here. Counters are named without the `_total` that the
text format adds.

A metric with `from_stats` is derived from the engine's own snapshot; the others are recorded where they happen
(`cygnet.metrics.recorder`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from cygnet.base.messages import EngineStats, PoolStats

Kind = Literal["counter", "gauge", "histogram", "summary"]
Labels = tuple[str, ...]
Samples = Iterable[tuple[Labels, float]]


@dataclass(frozen=True)
class Metric:
    """One entry of the catalogue. `from_stats` yields (label values in the order of `labels`, value) pairs; for a
    summary it yields exactly two, the count and the sum."""

    name: str
    kind: Kind
    help: str
    labels: Labels = ()
    buckets: tuple[float, ...] = ()
    from_stats: Callable[[EngineStats], Samples] | None = None


LATENCY_BUCKETS = (0.1, 0.25, 0.5, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
FIRST_TOKEN_BUCKETS = (
    0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
)  # fmt: skip
TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0)
LENGTH_BUCKETS = tuple(float(2**i) for i in range(21))


def _one(value: Callable[[EngineStats], float]) -> Callable[[EngineStats], Samples]:
    return lambda stats: [((), value(stats))]


def kv_usage(stats: EngineStats) -> float:
    """Part of the tighter pool that running requests hold, 0 to 1. Cached blocks count as free: they can be evicted."""
    return max((pool.used / pool.num_blocks for pool in (stats.full, stats.swa) if pool.num_blocks), default=0.0)


def _pools(stats: EngineStats) -> tuple[tuple[str, PoolStats], ...]:
    return (("full", stats.full), ("swa", stats.swa))


def _pool_blocks(stats: EngineStats) -> Samples:
    for name, pool in _pools(stats):
        yield (name, "used"), pool.used
        yield (name, "cached"), pool.cached
        yield (name, "free"), pool.free


def _pool_block_bytes(stats: EngineStats) -> Samples:
    return [((name,), pool.block_bytes) for name, pool in _pools(stats)]


def _evicted(stats: EngineStats) -> Samples:
    return [(("full_block",), stats.evicted_full_blocks_total), (("window",), stats.evicted_windows_total)]


FROM_STATS = (
    Metric(
        "vllm:num_requests_running",
        "gauge",
        "Sequences in the running batch.",
        from_stats=_one(lambda s: s.num_running),
    ),
    Metric(
        "vllm:num_requests_waiting",
        "gauge",
        "Sequences waiting to be scheduled.",
        from_stats=_one(lambda s: s.num_waiting),
    ),
    Metric(
        "vllm:kv_cache_usage_perc",
        "gauge",
        "Part of the tighter KV pool held by running requests (1 = all of it).",
        from_stats=_one(kv_usage),
    ),
    Metric(
        "vllm:prefix_cache_queries",
        "counter",
        "Prompt tokens looked up in the prefix cache.",
        from_stats=_one(lambda s: s.prefix_query_tokens_total),
    ),
    Metric(
        "vllm:prefix_cache_hits",
        "counter",
        "Prompt tokens not computed because of the prefix cache (the effective hit).",
        from_stats=_one(lambda s: s.effective_hit_tokens_total),
    ),
    Metric(
        "vllm:prompt_tokens", "counter", "Prompt tokens processed.", from_stats=_one(lambda s: s.prompt_tokens_total)
    ),
    Metric(
        "vllm:generation_tokens", "counter", "Tokens generated.", from_stats=_one(lambda s: s.generation_tokens_total)
    ),
    Metric(
        "vllm:num_preemptions",
        "counter",
        "Times a running sequence was set back to waiting.",
        from_stats=_one(lambda s: s.preemptions_total),
    ),
    Metric(
        "vllm:iteration_tokens_total",
        "summary",
        "Tokens per engine step (count of steps, sum of tokens).",
        from_stats=lambda s: [(("count",), s.steps_total), (("sum",), s.computed_tokens_total)],
    ),
    Metric(
        "cygnet:full_hit_tokens",
        "counter",
        "Tokens of the longest prefixes whose full-attention KV was live.",
        from_stats=_one(lambda s: s.full_hit_tokens_total),
    ),
    Metric(
        "cygnet:window_safe_hit_tokens",
        "counter",
        "Tokens of the longest prefixes from which a request could resume without replay.",
        from_stats=_one(lambda s: s.window_safe_hit_tokens_total),
    ),
    Metric(
        "cygnet:effective_hit_tokens",
        "counter",
        "Prompt tokens not computed because of the cache, after window rebuilds.",
        from_stats=_one(lambda s: s.effective_hit_tokens_total),
    ),
    Metric(
        "cygnet:rebuilt_tokens",
        "counter",
        "Tokens replayed to rebuild lost windows.",
        from_stats=_one(lambda s: s.rebuilt_tokens_total),
    ),
    Metric(
        "cygnet:truncated_tokens",
        "counter",
        "Tokens of full hits not reused because their window was lost.",
        from_stats=_one(lambda s: s.truncated_tokens_total),
    ),
    Metric(
        "cygnet:computed_tokens",
        "counter",
        "Tokens run through the model: prompt, replayed and generated.",
        from_stats=_one(lambda s: s.computed_tokens_total),
    ),
    Metric(
        "cygnet:pool_blocks",
        "gauge",
        "KV blocks by pool and state (used: held by running requests).",
        ("pool", "state"),
        from_stats=_pool_blocks,
    ),
    Metric("cygnet:pool_block_bytes", "gauge", "Bytes of one block.", ("pool",), from_stats=_pool_block_bytes),
    Metric("cygnet:tree_blocks", "gauge", "Blocks in the prefix tree.", from_stats=_one(lambda s: s.tree_blocks)),
    Metric(
        "cygnet:retained_windows",
        "gauge",
        "SWA windows kept in the prefix tree.",
        from_stats=_one(lambda s: s.tree_windows),
    ),
    Metric("cygnet:evictions", "counter", "Evicted full blocks and SWA windows.", ("kind",), from_stats=_evicted),
    Metric(
        "cygnet:last_step_seconds",
        "gauge",
        "Duration of the latest engine step.",
        from_stats=_one(lambda s: s.last_step_ms / 1000.0),
    ),
)

REQUEST_SUCCESS = Metric("vllm:request_success", "counter", "Finished sequences by reason.", ("finished_reason",))
TIME_TO_FIRST_TOKEN = Metric(
    "vllm:time_to_first_token_seconds",
    "histogram",
    "From the request's arrival to its first token.",
    buckets=FIRST_TOKEN_BUCKETS,
)
QUEUE_TIME = Metric(
    "vllm:request_queue_time_seconds",
    "histogram",
    "From the request's arrival in the engine to its admission.",
    buckets=LATENCY_BUCKETS,
)
INTER_TOKEN_LATENCY = Metric(
    "vllm:inter_token_latency_seconds",
    "histogram",
    "Between two tokens of one sequence.",
    buckets=TOKEN_BUCKETS,
)
TIME_PER_OUTPUT_TOKEN = Metric(
    "vllm:request_time_per_output_token_seconds",
    "histogram",
    "Mean time per token after the first, one observation per sequence.",
    buckets=TOKEN_BUCKETS,
)
E2E_LATENCY = Metric(
    "vllm:e2e_request_latency_seconds",
    "histogram",
    "From the request's arrival to its last token.",
    buckets=LATENCY_BUCKETS,
)
REQUEST_PROMPT_TOKENS = Metric(
    "vllm:request_prompt_tokens", "histogram", "Prompt tokens per sequence.", buckets=LENGTH_BUCKETS
)
REQUEST_GENERATION_TOKENS = Metric(
    "vllm:request_generation_tokens", "histogram", "Generated tokens per sequence.", buckets=LENGTH_BUCKETS
)
HTTP_REQUESTS = Metric("cygnet:http_requests", "counter", "HTTP responses by route and status.", ("route", "status"))

RECORDED = (
    REQUEST_SUCCESS,
    TIME_TO_FIRST_TOKEN,
    QUEUE_TIME,
    INTER_TOKEN_LATENCY,
    TIME_PER_OUTPUT_TOKEN,
    E2E_LATENCY,
    REQUEST_PROMPT_TOKENS,
    REQUEST_GENERATION_TOKENS,
    HTTP_REQUESTS,
)

CATALOGUE = FROM_STATS + RECORDED
