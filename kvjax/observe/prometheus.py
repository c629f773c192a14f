"""The collector of `kvjax.observe.metrics`: the one file that needs `prometheus_client`."""

import threading
from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kvjax.observe.durations import BOUNDS_SECONDS, DurationCounts
from kvjax.observe.metrics import METRICS, AnyMetric, GroupMetric, HistogramMetric, Metric, TierMetric, label_of
from kvjax.observe.stats_fields import StatsFields


class _Rising:
    """Keeps a figure from falling: where its source begins anew, at less than it was, it goes on from there."""

    def __init__(self):
        self._last = 0.0
        self._before = 0.0

    def __call__(self, value: float) -> float:
        if value < self._last:
            self._before += self._last
        self._last = value
        return self._before + value


class StatsCollector(Collector):
    """Makes Prometheus metrics of the stats at each scrape. Thread-safe.

    A counter never falls: if the stats begin anew, as those of another offloader, it goes on from where it was.

    Args:
        stats: see `register_metrics`.
        labels: constant labels of every metric.
    """

    def __init__(self, stats: Callable[[], StatsFields], labels: Mapping[str, str]):
        self._stats = stats
        self._names, self._values = list(labels), list(labels.values())
        self._rising: dict[tuple[str, ...], _Rising] = {}
        self._lock = threading.Lock()

    def describe(self) -> Iterator[Family]:
        """Yields the metrics without a value, as a registry asks for when they are registered."""
        for metric in METRICS:
            yield self._family(metric)

    def collect(self) -> Iterator[Family]:
        """Yields the metrics as of now."""
        with self._lock:
            stats = self._stats()
            families = [self._filled(metric, stats) for metric in METRICS]
        yield from families

    def _filled(self, metric: AnyMetric, stats: StatsFields) -> Family:
        family = self._family(metric)
        if isinstance(family, HistogramMetricFamily) and isinstance(metric, HistogramMetric):
            buckets, total = self._durations(metric.name, metric.read(stats))
            family.add_metric(self._values, buckets, total)
        elif isinstance(metric, Metric):
            self._add(family, metric, self._values, metric.read(stats))
        elif isinstance(metric, GroupMetric):
            for group in stats.groups:
                self._add(family, metric, [*self._values, group.name], metric.read(group))
        elif isinstance(metric, TierMetric):
            for tier in stats.tiers:
                self._add(family, metric, [*self._values, tier.name], metric.read(tier))
        return family

    def _add(self, family: Family, metric: AnyMetric, labels: list[str], value: float) -> None:
        if isinstance(family, CounterMetricFamily):
            family.add_metric(labels, self._risen((metric.name, *labels), value))
        elif isinstance(family, GaugeMetricFamily):
            family.add_metric(labels, value)

    def _durations(self, name: str, durations: DurationCounts) -> tuple[list[tuple[str, float]], float]:
        """The cumulative counts by upper bound, as Prometheus has them, and the sum."""
        bounds = [*(floatToGoString(bound) for bound in BOUNDS_SECONDS), "+Inf"]
        below = 0.0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip(bounds, durations.counts, strict=True):
            below += self._risen((name, bound), count)
            buckets.append((bound, below))
        return buckets, self._risen((name, "sum"), durations.total_seconds)

    def _risen(self, key: tuple[str, ...], value: float) -> float:
        return self._rising.setdefault(key, _Rising())(value)

    def _family(self, metric: AnyMetric) -> Family:
        label = label_of(metric)
        names = [*self._names, label] if label else self._names
        made = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
        return made[metric.kind](metric.name, f"{metric.meaning} ({metric.unit})", labels=names)
