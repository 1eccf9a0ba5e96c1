"""The catalogue in Prometheus' text format. Holds its own registry; nothing is registered globally."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    SummaryMetricFamily,
)
from prometheus_client.metrics_core import Metric as MetricFamily
from prometheus_client.registry import Collector

from cygnet.base.messages import EngineStats
from cygnet.metrics.catalogue import FROM_STATS, Metric
from cygnet.metrics.recorder import Recorder


class _Families(Collector):
    """Builds all metric families anew at every scrape: the engine's counters are cumulative already, so there is
    nothing to keep between scrapes."""

    def __init__(self, stats: Callable[[], EngineStats], recorder: Recorder, model_name: str) -> None:
        self._stats = stats
        self._recorder = recorder
        self._model = model_name

    def describe(self) -> Iterable[MetricFamily]:
        return ()

    def collect(self) -> Iterator[MetricFamily]:
        stats = self._stats()
        for metric in FROM_STATS:
            yield self._from_stats(metric, stats)
        for metric in self._recorder.metrics:
            yield self._histogram(metric) if metric.kind == "histogram" else self._counter(metric)

    def _labels(self, metric: Metric) -> tuple[str, ...]:
        return ("model_name", *metric.labels)

    def _from_stats(self, metric: Metric, stats: EngineStats) -> MetricFamily:
        assert metric.from_stats is not None
        samples = metric.from_stats(stats)
        if metric.kind == "summary":
            summary = SummaryMetricFamily(metric.name, metric.help, labels=self._labels(metric))
            (_, count), (_, total) = samples
            summary.add_metric((self._model,), count_value=int(count), sum_value=total)
            return summary
        build = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        family = build(metric.name, metric.help, labels=self._labels(metric))
        for labels, value in samples:
            family.add_metric((self._model, *labels), value)
        return family

    def _counter(self, metric: Metric) -> MetricFamily:
        family = CounterMetricFamily(metric.name, metric.help, labels=self._labels(metric))
        for labels, value in self._recorder.counters(metric).items():
            family.add_metric((self._model, *labels), value)
        return family

    def _histogram(self, metric: Metric) -> MetricFamily:
        family = HistogramMetricFamily(metric.name, metric.help, labels=self._labels(metric))
        for labels, histogram in self._recorder.histograms(metric).items():
            family.add_metric((self._model, *labels), histogram.cumulative(), sum_value=histogram.total)
        return family


class Exposition:
    """What `/metrics` answers: the engine's snapshot and the recorded metrics of one served model."""

    def __init__(self, stats: Callable[[], EngineStats], recorder: Recorder, model_name: str) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Families(stats, recorder, model_name))

    def render(self) -> tuple[bytes, str]:
        """The exposition and its content type. Always the classic text format: the client library's OpenMetrics encoder
        writes `vllm_` for `vllm:`, so a scraper's Accept header would change the names."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST
