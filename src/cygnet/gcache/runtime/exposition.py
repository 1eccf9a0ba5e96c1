"""The server's metrics over HTTP, for Prometheus."""

import threading
from collections.abc import Callable, Iterable, Iterator
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from cygnet.base.errors import ConfigError
from cygnet.gcache.metrics import METRICS

Stats = Callable[[], dict[str, object]]


class _Families(Collector):
    """All metrics, made anew at every scrape."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for metric in METRICS:
            build = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = build(metric.name, metric.help, labels=[metric.label] if metric.label else [])
            value = stats[metric.statistic]
            if isinstance(value, dict):
                for label, number in value.items():
                    family.add_metric([label], number)
            elif isinstance(value, int | float):
                family.add_metric([], value)
            yield family


class Exposition:
    """Answers scrapes on a port of its own until `close`. Raises `ConfigError` when that is taken."""

    def __init__(self, stats: Stats, host: str, port: int) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Families(stats))
        try:
            self._server: WSGIServer
            self._thread: threading.Thread
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise ConfigError(
                f"can't publish metrics on {host}:{port}: {error.strerror}; choose another port"
            ) from None
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
