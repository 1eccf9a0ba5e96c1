"""What a simulation measured: a row per request, and what they add up to. Definitions are those of vLLM's bench."""

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from cygnet.base.messages import EngineStats

Column = NDArray[np.int64]
COLUMNS = (
    "arrival_ns", "queued_ns", "first_ns", "end_ns", "prompt_tokens", "output_tokens", "cached_tokens", "host_tokens",
    "store_tokens", "handover_ns",
)  # fmt: skip
"""`cached_tokens` is the effective hit, of which `host_tokens` and `store_tokens` came from there. Of `handover_ns` see
`Results.handover_ms`."""
SUMMED = (
    "steps_total",
    "computed_tokens_total",
    "prefix_query_tokens_total",
    "full_hit_tokens_total",
    "window_safe_hit_tokens_total",
    "effective_hit_tokens_total",
    "rebuilt_tokens_total",
    "preemptions_total",
    "host_hit_tokens_total",
    "store_hit_tokens_total",
    "evicted_full_blocks_total",
    "evicted_windows_total",
)
"""Counters of `EngineStats` that are added up over the workers."""


class Cached(NamedTuple):
    """Tokens that a request did not compute: all of them, and those that came from the host and from the store."""

    total: int = 0
    host: int = 0
    store: int = 0


class Recorder:
    """Finished requests, 80 bytes each, and how many were refused for which reason."""

    def __init__(self) -> None:
        self._columns = tuple(array("q") for _ in COLUMNS)
        self.refused: Counter[str] = Counter()

    @property
    def num_finished(self) -> int:
        return len(self._columns[0])

    def record(
        self, arrival_ns: int, queued_ns: int, first_ns: int, end_ns: int, prompt: int, output: int, cached: Cached,
        handover_ns: int = 0,
    ) -> None:  # fmt: skip
        """One finished request, in the order of `COLUMNS`."""
        row = (arrival_ns, queued_ns, first_ns, end_ns, prompt, output, *cached, handover_ns)
        for column, value in zip(self._columns, row, strict=True):
            column.append(value)

    def refuse(self, reason: str) -> None:
        self.refused[reason] += 1

    def columns(self) -> dict[str, Column]:
        """Every column by name, in the order in which requests finished."""
        return {name: np.array(column, dtype=np.int64) for name, column in zip(COLUMNS, self._columns, strict=True)}


class Spread(msgspec.Struct, frozen=True):
    """Distribution of one measure, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, nanoseconds: NDArray[np.float64] | Column) -> "Spread | None":
        """`None` of nothing. Percentiles are interpolated linearly."""
        if not len(nanoseconds):
            return None
        low, middle, high = np.percentile(nanoseconds, (50, 90, 99))
        return cls(*(round(float(value) / 1e6, 3) for value in (nanoseconds.mean(), low, middle, high)))


class Goals(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a request must meet to count as good; 0 means no such goal."""

    ttft_ms: float = 0.0
    tpot_ms: float = 0.0


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """All numbers of a run. Rates are per second of simulated time, from the first arrival to the last answer."""

    finished: int
    refused: dict[str, int]
    duration_s: float
    input_tokens: int
    output_tokens: int
    request_rate: float
    input_rate: float
    output_rate: float
    goodput: float | None
    """Requests per second that met all goals; `None` without goals."""
    good_share: float | None
    full_hit: float
    """Part of the prompt tokens looked up whose full-attention KV was cached."""
    window_safe_hit: float
    """Part from which one could resume at once."""
    effective_hit: float
    """Part that was really not computed."""
    host_hit: float
    """Part that came from host memory."""
    store_hit: float
    """Part that came from the store."""
    rebuilt_share: float
    """Tokens replayed to rebuild windows, per prompt token."""
    preemptions: int
    evicted_full_blocks: int
    evicted_windows: int
    steps: int
    computed_tokens: int
    busy_share: float
    """Part of the time that workers were in a step, mean over workers."""
    waiting_share: float
    """Part of the steps' time that ranks waited for slower ones of their replica."""
    step_input_rate: float
    """Prompt tokens per second of one rank in steps, waiting included, idle time not; of workers that prefill."""
    decode_busy_share: float | None
    """`busy_share` is of workers that prefill, this of those that decode; `None` where all do both."""
    decoding: float | None
    """Requests that one of those decodes at once, in the mean."""
    handover_ms: Spread | None
    """From the end of a prefill to its request's place at the worker that decodes it."""
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    e2el_ms: Spread | None
    queue_ms: Spread | None


def time_per_output_token(columns: dict[str, Column]) -> NDArray[np.float64]:
    """Nanoseconds per token after the first one; requests with one token have none."""
    several = columns["output_tokens"] > 1
    decoding = (columns["end_ns"] - columns["first_ns"])[several]
    return decoding / (columns["output_tokens"][several] - 1)


def summarize(
    columns: dict[str, Column],
    stats: Sequence[EngineStats],
    decode_stats: Sequence[EngineStats] = (),
    *,
    refused: dict[str, int],
    busy_ns: Sequence[int],
    decode_busy_ns: Sequence[int] = (),
    step_ns: int = 0,
    waiting_share: float = 0.0,
    goals: Goals | None = None,
) -> Results:
    """Add up a run. `stats` and `busy_ns` are the workers', apart from those that only decode: hits are the others'.
    `step_ns` is what the workers' ranks spent in steps."""
    finished = len(columns["arrival_ns"])
    start = int(columns["arrival_ns"].min()) if finished else 0
    span_ns = int(columns["end_ns"].max()) - start if finished else 0
    seconds = span_ns / 1e9 or 1.0
    totals = {name: sum(getattr(one, name) for one in stats) for name in SUMMED}
    queried = totals["prefix_query_tokens_total"] or 1
    good = _good(columns, goals) if goals else None
    ttft = columns["first_ns"] - columns["arrival_ns"]
    both = [*stats, *decode_stats]
    return Results(
        finished=finished,
        refused=refused,
        duration_s=span_ns / 1e9,
        input_tokens=int(columns["prompt_tokens"].sum()),
        output_tokens=int(columns["output_tokens"].sum()),
        request_rate=finished / seconds,
        input_rate=float(columns["prompt_tokens"].sum()) / seconds,
        output_rate=float(columns["output_tokens"].sum()) / seconds,
        goodput=None if good is None else good / seconds,
        good_share=None if good is None or not finished else good / finished,
        full_hit=totals["full_hit_tokens_total"] / queried,
        window_safe_hit=totals["window_safe_hit_tokens_total"] / queried,
        effective_hit=totals["effective_hit_tokens_total"] / queried,
        host_hit=totals["host_hit_tokens_total"] / queried,
        store_hit=totals["store_hit_tokens_total"] / queried,
        rebuilt_share=totals["rebuilt_tokens_total"] / queried,
        preemptions=sum(one.preemptions_total for one in both),
        evicted_full_blocks=totals["evicted_full_blocks_total"],
        evicted_windows=totals["evicted_windows_total"],
        steps=sum(one.steps_total for one in both),
        computed_tokens=sum(one.computed_tokens_total for one in both),
        busy_share=sum(busy_ns) / (len(busy_ns) * span_ns) if span_ns else 0.0,
        waiting_share=waiting_share,
        step_input_rate=float(columns["prompt_tokens"].sum()) / (step_ns / 1e9) if step_ns else 0.0,
        decode_busy_share=sum(decode_busy_ns) / (len(decode_busy_ns) * span_ns) if decode_busy_ns and span_ns else None,
        decoding=_decoding(columns) / (len(decode_busy_ns) * span_ns) if decode_busy_ns and span_ns else None,
        handover_ms=Spread.of(columns["handover_ns"][columns["output_tokens"] > 1]) if decode_busy_ns else None,
        ttft_ms=Spread.of(ttft),
        tpot_ms=Spread.of(time_per_output_token(columns)),
        e2el_ms=Spread.of(columns["end_ns"] - columns["arrival_ns"]),
        queue_ms=Spread.of(columns["queued_ns"]),
    )


def _decoding(columns: dict[str, Column]) -> int:
    """Nanoseconds that requests spent with workers that decode, waiting not counted."""
    return int((columns["end_ns"] - columns["first_ns"] - columns["handover_ns"]).sum())


def _good(columns: dict[str, Column], goals: Goals) -> int | None:
    """Requests that met all goals; `None` where there are none."""
    if not goals.ttft_ms and not goals.tpot_ms:
        return None
    met = np.ones(len(columns["arrival_ns"]), dtype=bool)
    if goals.ttft_ms:
        met &= columns["first_ns"] - columns["arrival_ns"] <= goals.ttft_ms * 1e6
    if goals.tpot_ms:
        after_first = np.maximum(columns["output_tokens"] - 1, 1)
        met &= columns["end_ns"] - columns["first_ns"] <= goals.tpot_ms * 1e6 * after_first
    return int(met.sum())
