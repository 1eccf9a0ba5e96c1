"""What the API process and the engine process say to each other (msgpack by msgspec; never pickle).

API → engine:  AddRequest, AbortRequests, FlushCache, InspectCache, WatchCache, Shutdown
engine → API:  EngineProgress while loading, EngineReady once, then StepOutputs after every step that has something to
               say, CacheFlushed and CacheInspected as answers, CacheChanged while it is watched, EngineFailed at a
               fatal end
"""

import msgspec

from cygnet.base.cache_report import CacheReport, FlushReport
from cygnet.base.config import Config
from cygnet.base.geometry import KVGeometry
from cygnet.base.residency import CacheChange, PromptCached
from cygnet.base.sampling import SamplingParams


class AddRequest(msgspec.Struct, frozen=True, tag="add", array_like=True):
    """Start one sequence. `prompt_token_ids` is final: the engine neither adds BOS nor truncates."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    cache_salt: str = ""
    """Requests share cached prefixes only with requests of the same salt (tenant isolation)."""
    arrival_ns: int = 0
    """Set by the engine process on receipt when 0."""
    message_starts: list[int] = []
    """Tokens at which a chat's messages begin, but for the first; ascending, empty where that is unknown."""


class AbortRequests(msgspec.Struct, frozen=True, tag="abort", array_like=True):
    """Stop sequences and free their blocks at the next step; unknown ids are ignored."""

    request_ids: list[str]


class FlushCache(msgspec.Struct, frozen=True, tag="flush", array_like=True):
    """Drop every cached block of device and host that no running request holds."""

    store: bool = False
    """And all that the store has of this model."""
    ticket: int = 0
    """Comes back with the answer, a `CacheFlushed`."""


class InspectCache(msgspec.Struct, frozen=True, tag="inspect", array_like=True):
    """Ask what is cached where; answered between two steps by a `CacheInspected`."""

    limit: int
    """Most sequences to describe."""
    ticket: int = 0


class WatchCache(msgspec.Struct, frozen=True, tag="watch", array_like=True):
    """Tell what is cached, all of it now and then every change, in `CacheChanged`; or (`on` false) no more."""

    on: bool


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown", array_like=True):
    """End the engine process. With `drain`, only after all requests have finished."""

    drain: bool = False


EngineInput = AddRequest | AbortRequests | FlushCache | InspectCache | WatchCache | Shutdown


class PositionLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities (of the unmodified distribution, natural log) at one output position."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]
    """The likeliest tokens and their log probabilities, likeliest first."""


class RequestOutput(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one sequence, in order. The last one of a sequence has `finish_reason`.

    A token that stopped the sequence (EOS or a stop id) is included in `token_ids` and named in `stop_token_id`;
    it is not part of the text.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    """`stop`, `length`, `abort` or `error`."""
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    """Prompt tokens reused from the cache (the effective hit), the same in every output of a sequence."""
    queued_ns: int = 0
    """Time from arrival in the engine to admission, the same in every output of a sequence."""
    error: str | None = None
    error_type: str | None = None
    """Class of `base.errors` that the engine raised, when `error` is set."""
    num_host_tokens: int = 0
    """Those of `num_cached_tokens` that were loaded from host memory."""
    num_store_tokens: int = 0
    """Those that were fetched from the store for this sequence."""


class PoolStats(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of one pool: total = free + used + cached. `used` blocks belong to running requests (locked)."""

    num_blocks: int = 0
    free: int = 0
    used: int = 0
    cached: int = 0
    block_bytes: int = 0


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Snapshot of the engine. Names ending in `_total` are counters since the start."""

    num_running: int = 0
    num_waiting: int = 0
    full: PoolStats = PoolStats()
    swa: PoolStats = PoolStats()
    tree_blocks: int = 0
    tree_windows: int = 0
    """Retained windows (checkpoints) in the prefix tree."""
    steps_total: int = 0
    computed_tokens_total: int = 0
    """All tokens run through the model: prompt, replayed and generated ones."""
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    prefix_query_tokens_total: int = 0
    """Prompt tokens looked up in the prefix tree (each request once, at its first admission)."""
    full_hit_tokens_total: int = 0
    """Longest prefix with live full KV."""
    window_safe_hit_tokens_total: int = 0
    """Longest prefix from which one may resume without replay."""
    effective_hit_tokens_total: int = 0
    """Prompt tokens not computed because of the cache."""
    rebuilt_tokens_total: int = 0
    """Tokens replayed to rebuild lost windows."""
    truncated_tokens_total: int = 0
    """Tokens of full hits that were not reused because their window was lost (full hit - effective hit)."""
    preemptions_total: int = 0
    evicted_full_blocks_total: int = 0
    evicted_windows_total: int = 0
    last_step_tokens: int = 0
    last_step_ms: float = 0.0

    # The tiers below the device; all 0 without them.
    host_full: PoolStats = PoolStats()
    host_swa: PoolStats = PoolStats()
    host_tree_blocks: int = 0
    host_tree_windows: int = 0
    host_hit_tokens_total: int = 0
    """Those of `effective_hit_tokens_total` that were loaded from host memory."""
    store_hit_tokens_total: int = 0
    """Those that were fetched from the store."""
    loaded_full_blocks_total: int = 0
    """Blocks copied from host to device."""
    loaded_swa_blocks_total: int = 0
    saved_full_blocks_total: int = 0
    """Blocks copied from device to host."""
    saved_swa_blocks_total: int = 0
    refused_blocks_total: int = 0
    """Blocks of either group that were not copied to the host, as there was no room."""
    evicted_host_full_blocks_total: int = 0
    evicted_host_windows_total: int = 0
    store_lookups_total: int = 0
    store_timeouts_total: int = 0
    """Requests that stopped waiting for the store because their time was over."""
    store_found_objects_total: int = 0
    store_fetched_objects_total: int = 0
    store_lost_objects_total: int = 0
    """Objects asked for that came late, torn or not at all."""
    store_stored_objects_total: int = 0
    store_failed_objects_total: int = 0
    """Objects that the store did not take."""
    store_dropped_writes_total: int = 0
    """Paths and windows that were never put, as too many were waiting."""
    store_waiting_fetches: int = 0
    """Objects on their way from the store now."""
    store_waiting_puts: int = 0
    """Objects on their way to the store now."""
    store_queued_writes: int = 0
    """Paths and windows whose turn to be put has not come."""
    store_read_bytes_total: int = 0
    store_written_bytes_total: int = 0
    store_fetch_seconds_total: float = 0.0
    """Time in which objects were being fetched."""
    store_put_seconds_total: float = 0.0
    store_hung_calls: int = 0
    """Calls into the store that have been given up and have not returned."""


class StepOutputs(msgspec.Struct, frozen=True, tag="outputs", array_like=True):
    """What one engine step produced; `stats` comes along a few times per second."""

    outputs: list[RequestOutput]
    stats: EngineStats | None = None


class CacheFlushed(msgspec.Struct, frozen=True, tag="flushed", array_like=True):
    """Answer to a `FlushCache`."""

    ticket: int
    dropped: FlushReport


class CacheInspected(msgspec.Struct, frozen=True, tag="inspected", array_like=True):
    """Answer to an `InspectCache`."""

    ticket: int
    report: CacheReport


class CacheChanged(msgspec.Struct, frozen=True, tag="changed", array_like=True):
    """What is cached, or (`whole` false) what has changed since the telling with the number before."""

    sequence: int
    whole: bool
    changes: list[CacheChange]
    """In order. A whole consists of additions."""
    prompts: list[PromptCached]
    """Prompts that were computed meanwhile."""


class EngineReady(msgspec.Struct, frozen=True, tag="ready", array_like=True, kw_only=True):
    """The engine has loaded the model and sized its pools."""

    max_model_len: int
    vocab_size: int
    max_requests: int
    """Most requests running and waiting at once; more are refused."""
    block_size: int
    geometry: KVGeometry
    stats: EngineStats
    summary: str
    """A few lines for people: model, dtype, pools, lower tiers."""
    tiers: tuple[str, ...] = ("device",)
    """Where KV is cached: `device`, then maybe `host`, then maybe `store`."""
    rebuild: bool = True
    """Lost SWA windows are rebuilt from full KV."""


class EngineFailed(msgspec.Struct, frozen=True, tag="failed", array_like=True, kw_only=True):
    """The engine can't start or can't go on; `message` says why and what to do."""

    message: str


class EngineProgress(msgspec.Struct, frozen=True, tag="progress", array_like=True):
    """How far the start has come; `total` 0 means that the amount is unknown."""

    stage: str
    done: int
    total: int


EngineOutput = StepOutputs | CacheFlushed | CacheInspected | CacheChanged | EngineReady | EngineFailed | EngineProgress


class EngineStart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """First line on an engine process's standard input (JSON)."""

    config: Config
    address: str
    """ZeroMQ address of the socket that the API process has bound."""
    eos_token_ids: list[int]
    log_level: str = "info"
