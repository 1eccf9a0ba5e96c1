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


def _pools(stats: EngineStats) -> Iterable[tuple[Labels, PoolStats]]:
    yield ("device", "full"), stats.full
    yield ("device", "swa"), stats.swa
    if stats.host_full.num_blocks:
        yield ("host", "full"), stats.host_full
    if stats.host_swa.num_blocks:
        yield ("host", "swa"), stats.host_swa


def _pool_blocks(stats: EngineStats) -> Samples:
    for names, pool in _pools(stats):
        yield (*names, "used"), pool.used
        yield (*names, "cached"), pool.cached
        yield (*names, "free"), pool.free


def _pool_block_bytes(stats: EngineStats) -> Samples:
    return [(names, pool.block_bytes) for names, pool in _pools(stats)]


def _evicted(stats: EngineStats) -> Samples:
    yield ("device", "full_block"), stats.evicted_full_blocks_total
    yield ("device", "window"), stats.evicted_windows_total
    yield ("host", "full_block"), stats.evicted_host_full_blocks_total
    yield ("host", "window"), stats.evicted_host_windows_total


def _device_hits(stats: EngineStats) -> int:
    return stats.effective_hit_tokens_total - stats.host_hit_tokens_total - stats.store_hit_tokens_total


def _hit_tokens(stats: EngineStats) -> Samples:
    yield ("device",), _device_hits(stats)
    yield ("host",), stats.host_hit_tokens_total
    yield ("store",), stats.store_hit_tokens_total


def _loaded_bytes(stats: EngineStats) -> int:
    full, swa = stats.loaded_full_blocks_total, stats.loaded_swa_blocks_total
    return full * stats.full.block_bytes + swa * stats.swa.block_bytes


def _saved_bytes(stats: EngineStats) -> int:
    full, swa = stats.saved_full_blocks_total, stats.saved_swa_blocks_total
    return full * stats.full.block_bytes + swa * stats.swa.block_bytes


def _copied_blocks(stats: EngineStats) -> Samples:
    yield ("load", "full"), stats.loaded_full_blocks_total
    yield ("load", "swa"), stats.loaded_swa_blocks_total
    yield ("save", "full"), stats.saved_full_blocks_total
    yield ("save", "swa"), stats.saved_swa_blocks_total


def _store_objects(stats: EngineStats) -> Samples:
    yield ("found",), stats.store_found_objects_total
    yield ("fetched",), stats.store_fetched_objects_total
    yield ("lost",), stats.store_lost_objects_total
    yield ("stored",), stats.store_stored_objects_total
    yield ("failed",), stats.store_failed_objects_total


def _store_waiting(stats: EngineStats) -> Samples:
    yield ("fetch",), stats.store_waiting_fetches
    yield ("put",), stats.store_waiting_puts


def _store_bytes(stats: EngineStats) -> Samples:
    yield ("read",), stats.store_read_bytes_total
    yield ("written",), stats.store_written_bytes_total


def _store_seconds(stats: EngineStats) -> Samples:
    yield ("fetch",), stats.store_fetch_seconds_total
    yield ("put",), stats.store_put_seconds_total


ENGINE = (
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
        "Prompt tokens not computed because of the prefix cache on the device.",
        from_stats=_one(_device_hits),
    ),
    Metric(
        "vllm:external_prefix_cache_queries",
        "counter",
        "Prompt tokens that the device did not have and that the tiers below it were asked for.",
        from_stats=_one(
            lambda s: s.prefix_query_tokens_total - _device_hits(s) if s.host_full.num_blocks else 0,
        ),
    ),
    Metric(
        "vllm:external_prefix_cache_hits",
        "counter",
        "Prompt tokens not computed because host or store had them.",
        from_stats=_one(lambda s: s.host_hit_tokens_total + s.store_hit_tokens_total),
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
        "Prompt tokens not computed because of the cache, of all tiers, after window rebuilds.",
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
        "KV blocks by tier, group and state (used: held by running requests or copies).",
        ("tier", "group", "state"),
        from_stats=_pool_blocks,
    ),
    Metric("cygnet:pool_block_bytes", "gauge", "Bytes of one block.", ("tier", "group"), from_stats=_pool_block_bytes),
    Metric(
        "cygnet:tree_blocks",
        "gauge",
        "Blocks in the prefix tree.",
        ("tier",),
        from_stats=lambda s: [(("device",), s.tree_blocks), (("host",), s.host_tree_blocks)],
    ),
    Metric(
        "cygnet:retained_windows",
        "gauge",
        "SWA windows kept in the prefix tree.",
        ("tier",),
        from_stats=lambda s: [(("device",), s.tree_windows), (("host",), s.host_tree_windows)],
    ),
    Metric(
        "cygnet:evictions", "counter", "Evicted full blocks and SWA windows.", ("tier", "kind"), from_stats=_evicted
    ),
    Metric(
        "cygnet:last_step_seconds",
        "gauge",
        "Duration of the latest engine step.",
        from_stats=_one(lambda s: s.last_step_ms / 1000.0),
    ),
)

LOWER_TIERS = (
    Metric(
        "cygnet:hit_tokens",
        "counter",
        "Prompt tokens not computed because of the cache, by the tier that had them.",
        ("tier",),
        from_stats=_hit_tokens,
    ),
    Metric(
        "vllm:kv_offload_load_bytes",
        "counter",
        "Bytes copied from host to device.",
        from_stats=_one(_loaded_bytes),
    ),
    Metric(
        "vllm:kv_offload_store_bytes",
        "counter",
        "Bytes copied from device to host.",
        from_stats=_one(_saved_bytes),
    ),
    Metric(
        "cygnet:copied_blocks",
        "counter",
        "Blocks copied from host to device (load) and from device to host (save).",
        ("direction", "group"),
        from_stats=_copied_blocks,
    ),
    Metric(
        "cygnet:refused_blocks",
        "counter",
        "Blocks not copied to the host, as there was no room.",
        from_stats=_one(lambda s: s.refused_blocks_total),
    ),
    Metric(
        "cygnet:store_lookups",
        "counter",
        "Times the store was asked what it has of a prompt.",
        from_stats=_one(lambda s: s.store_lookups_total),
    ),
    Metric(
        "cygnet:store_timeouts",
        "counter",
        "Requests that stopped waiting for the store.",
        from_stats=_one(lambda s: s.store_timeouts_total),
    ),
    Metric(
        "cygnet:store_objects",
        "counter",
        "Objects found by lookups; fetched, or lost (late, torn, missing); stored, or failed (not taken).",
        ("outcome",),
        from_stats=_store_objects,
    ),
    Metric(
        "cygnet:store_waiting_objects",
        "gauge",
        "Objects on their way from the store (fetch) and to it (put).",
        ("direction",),
        from_stats=_store_waiting,
    ),
    Metric(
        "cygnet:store_queued_writes",
        "gauge",
        "Paths and windows whose turn to be put has not come.",
        from_stats=_one(lambda s: s.store_queued_writes),
    ),
    Metric(
        "cygnet:store_dropped_writes",
        "counter",
        "Paths and windows never put, as too many were waiting.",
        from_stats=_one(lambda s: s.store_dropped_writes_total),
    ),
    Metric("cygnet:store_bytes", "counter", "Bytes read and written.", ("direction",), from_stats=_store_bytes),
    Metric(
        "cygnet:store_seconds", "counter", "Time spent fetching and putting.", ("direction",), from_stats=_store_seconds
    ),
    Metric(
        "cygnet:store_hung_calls",
        "gauge",
        "Calls into the store that were given up and have not returned.",
        from_stats=_one(lambda s: s.store_hung_calls),
    ),
)
"""Of the tiers below the device; 0 where there are none."""

FROM_STATS = ENGINE + LOWER_TIERS

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
