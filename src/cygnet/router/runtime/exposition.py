"""The router's `/metrics`, in Prometheus' text format."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as MetricFamily
from prometheus_client.registry import Collector

from cygnet.metrics.catalogue import Labels, Metric
from cygnet.metrics.recorder import Recorder

Gauges = Callable[[], Iterable[tuple[Metric, Labels, float]]]


class _Families(Collector):
    def __init__(self, recorder: Recorder, gauges: Gauges) -> None:
        self._recorder = recorder
        self._gauges = gauges

    def describe(self) -> Iterable[MetricFamily]:
        return ()

    def collect(self) -> Iterator[MetricFamily]:
        families: dict[str, GaugeMetricFamily] = {}
        for metric, labels, value in self._gauges():
            family = families.setdefault(
                metric.name, GaugeMetricFamily(metric.name, metric.help, labels=metric.labels or None)
            )
            family.add_metric(labels, value)
        yield from families.values()
        for metric in self._recorder.metrics:
            if metric.kind == "counter":
                counter = CounterMetricFamily(metric.name, metric.help, labels=metric.labels or None)
                series = self._recorder.counters(metric) or ({} if metric.labels else {(): 0.0})
                for labels, value in series.items():
                    counter.add_metric(labels, value)
                yield counter
            else:
                histogram = HistogramMetricFamily(metric.name, metric.help)
                for observed in self._recorder.histograms(metric).values():
                    histogram.add_metric((), observed.cumulative(), sum_value=observed.total)
                yield histogram


def render(recorder: Recorder, gauges: Gauges) -> tuple[bytes, str]:
    """The exposition and its content type."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(recorder, gauges))
    return generate_latest(registry), CONTENT_TYPE_LATEST
