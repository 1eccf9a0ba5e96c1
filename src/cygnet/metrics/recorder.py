"""Counters and histograms in plain Python, without clock or global state, so that a simulation can fill them too."""

from bisect import bisect_left
from dataclasses import dataclass, field

from cygnet.metrics.catalogue import Labels, Metric


@dataclass
class Histogram:
    """Observations of one series. `counts[i]` is the number in bucket i (not cumulative); the last one is +Inf."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value` `times` times. O(log buckets)."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> list[tuple[str, float]]:
        """Pairs (upper bound as text, observations up to it), ending with `+Inf`."""
        pairs: list[tuple[str, float]] = []
        running = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            running += count
            pairs.append((bound, float(running)))
        return pairs


class Recorder:
    """Values of the recorded metrics of one process. Not thread-safe: one event loop or one simulation owns it.

    Invariants: a counter never falls; a series exists once something was recorded for its labels, and label-less
    metrics from the start (so that a scrape shows zeros rather than nothing).
    """

    def __init__(self, metrics: tuple[Metric, ...]) -> None:
        self.metrics = metrics
        self._counters: dict[str, dict[Labels, float]] = {m.name: {} for m in metrics if m.kind == "counter"}
        self._histograms: dict[str, dict[Labels, Histogram]] = {m.name: {} for m in metrics if m.kind == "histogram"}
        for metric in metrics:
            if metric.kind == "histogram" and not metric.labels:
                self._histograms[metric.name][()] = Histogram(metric.buckets)

    def add(self, metric: Metric, labels: Labels = (), amount: float = 1.0) -> None:
        """Add to a counter."""
        series = self._counters[metric.name]
        series[labels] = series.get(labels, 0.0) + amount

    def observe(self, metric: Metric, value: float, *, labels: Labels = (), times: int = 1) -> None:
        """Add to a histogram."""
        series = self._histograms[metric.name]
        if labels not in series:
            series[labels] = Histogram(metric.buckets)
        series[labels].observe(value, times)

    def counters(self, metric: Metric) -> dict[Labels, float]:
        """Values of a counter by labels."""
        return self._counters[metric.name]

    def histograms(self, metric: Metric) -> dict[Labels, Histogram]:
        """Histograms of a metric by labels."""
        return self._histograms[metric.name]
