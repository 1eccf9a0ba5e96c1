"""Numbers of a run, with the definitions and names of vLLM's bench where the meaning is the same."""

from collections import Counter
from collections.abc import Sequence

import msgspec

from cygnet.cli.bench.client import Result

PERCENTILES = (50, 90, 99)


class Spread(msgspec.Struct, frozen=True):
    """Distribution of one measure, in milliseconds."""

    mean: float
    median: float
    p90: float
    p99: float
    count: int


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """All numbers of a run. Tokens count for successful requests only."""

    completed: int
    failed: int
    failures: dict[str, int]
    """By kind, such as `HTTP 429`, `timeout`, `connect`."""
    failure_examples: dict[str, str]
    duration_s: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int | None
    """Prompt tokens that the server says it took from its cache; `None` when it says nothing."""
    request_throughput: float
    output_throughput: float
    total_throughput: float
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    itl_ms: Spread | None
    e2el_ms: Spread | None

    @property
    def cached_share(self) -> float | None:
        """Cached tokens per prompt token."""
        return self.cached_tokens / self.input_tokens if self.cached_tokens is not None and self.input_tokens else None


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Percentile of sorted values, interpolated linearly between neighbours."""
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread_ms(seconds: Sequence[float]) -> Spread | None:
    """Distribution of durations given in seconds; `None` of none."""
    if not seconds:
        return None
    ordered = sorted(value * 1e3 for value in seconds)
    median, p90, p99 = (percentile(ordered, percent) for percent in PERCENTILES)
    return Spread(sum(ordered) / len(ordered), median, p90, p99, len(ordered))


def summarize(results: Sequence[Result], duration_s: float) -> Summary:
    """Add up a run that took `duration_s`."""
    good = [result for result in results if not result.error]
    bad = [result for result in results if result.error]
    input_tokens, output_tokens = sum(r.prompt_tokens for r in good), sum(r.output_tokens for r in good)
    cached = [result.cached_tokens for result in good if result.cached_tokens is not None]
    return Summary(
        completed=len(good),
        failed=len(bad),
        failures=dict(Counter(result.error for result in bad).most_common()),
        failure_examples={result.error: result.error_detail for result in reversed(bad)},
        duration_s=duration_s,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cached_tokens=sum(cached) if cached else None,
        request_throughput=len(good) / duration_s,
        output_throughput=output_tokens / duration_s,
        total_throughput=(input_tokens + output_tokens) / duration_s,
        ttft_ms=spread_ms([result.ttft for result in good]),
        tpot_ms=spread_ms([tpot for result in good if (tpot := result.tpot) is not None]),
        itl_ms=spread_ms([gap for result in good for gap in result.itl]),
        e2el_ms=spread_ms([result.latency for result in good]),
    )


def parse_metrics(text: str) -> dict[str, float]:
    """Counters of a Prometheus page that count what a serving engine does, label sets of one name added up."""
    kinds: dict[str, str] = {}
    totals: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ", 3)
            kinds[name] = kind.strip()
        elif line.startswith(("vllm:", "cygnet:", "sglang:")):
            name = line.partition("{")[0].partition(" ")[0]
            sample = line.rpartition("}")[2].split() if "{" in line else line.split()[1:]
            if sample and "counter" in (kinds.get(name), kinds.get(name.removesuffix("_total"))):
                totals[name] = totals.get(name, 0.0) + float(sample[0])
    return {name: value for name, value in totals.items() if not name.endswith("_created")}


def metrics_delta(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What each counter grew by; those that did not are left out."""
    return {name: value - before.get(name, 0.0) for name, value in after.items() if value != before.get(name, 0.0)}
