"""The metrics that kvjax shows to Prometheus: what each is, and how it is read from the stats of an offloader.

`METRICS` is the one list from which the collector and `docs/metrics.md` are made. `prometheus_client` is imported
when metrics are registered, and not before: it is the extra `metrics`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from kvjax._checks import shown
from kvjax.observe.durations import DurationCounts
from kvjax.observe.stats_fields import GroupStatsFields, StatsFields, TierStatsFields

if TYPE_CHECKING:
    from kvjax.observe.prometheus import StatsCollector

GROUP_LABEL = "group"
TIER_LABEL = "tier"
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")


@dataclass(frozen=True, slots=True)
class Metric:
    """A counter or a gauge of the whole.

    Args:
        name: as Prometheus shows it; a counter's ends in `_total`.
        kind: counters never fall.
        unit: of its values.
        meaning: one sentence without a full stop.
        read: takes it from the stats.
    """

    name: str
    kind: Literal["counter", "gauge"]
    unit: str
    meaning: str
    read: Callable[[StatsFields], int]


@dataclass(frozen=True, slots=True)
class GroupMetric:
    """A counter or a gauge of each cached group, with the label `group`; the arguments are those of `Metric`."""

    name: str
    kind: Literal["counter", "gauge"]
    unit: str
    meaning: str
    read: Callable[[GroupStatsFields], int]


@dataclass(frozen=True, slots=True)
class TierMetric:
    """A counter or a gauge of each tier below the host pool, with the label `tier`; arguments as of `Metric`."""

    name: str
    kind: Literal["counter", "gauge"]
    unit: str
    meaning: str
    read: Callable[[TierStatsFields], int]


@dataclass(frozen=True, slots=True)
class HistogramMetric:
    """Durations in buckets; the arguments are those of `Metric`."""

    name: str
    meaning: str
    read: Callable[[StatsFields], DurationCounts]
    kind: Literal["histogram"] = "histogram"
    unit: str = "seconds"


AnyMetric = Metric | GroupMetric | TierMetric | HistogramMetric

METRICS: tuple[AnyMetric, ...] = (
    Metric("kvjax_lookups_total", "counter", "requests", "prompts looked up", lambda s: s.lookups),
    Metric("kvjax_lookup_tokens_total", "counter", "tokens", "tokens of prompts looked up", lambda s: s.lookup_tokens),
    Metric(
        "kvjax_hit_tokens_total",
        "counter",
        "tokens",
        "tokens of prompts looked up that need no computing, what the device held included",
        lambda s: s.hit_tokens,
    ),
    GroupMetric(
        "kvjax_stored_chunks_total", "counter", "chunks", "chunks that became resident", lambda g: g.chunks_stored
    ),
    GroupMetric(
        "kvjax_stored_bytes_total",
        "counter",
        "bytes",
        "bytes of chunks that became resident, unpadded",
        lambda g: g.bytes_stored,
    ),
    GroupMetric("kvjax_loaded_chunks_total", "counter", "chunks", "chunks restored", lambda g: g.chunks_loaded),
    GroupMetric(
        "kvjax_loaded_bytes_total", "counter", "bytes", "bytes of chunks restored, unpadded", lambda g: g.bytes_loaded
    ),
    GroupMetric(
        "kvjax_evicted_chunks_total",
        "counter",
        "chunks",
        "chunks that made room for others",
        lambda g: g.chunks_evicted,
    ),
    GroupMetric(
        "kvjax_dropped_chunks_total",
        "counter",
        "chunks",
        "chunks not stored, as a block was freed before they were complete",
        lambda g: g.chunks_dropped,
    ),
    Metric(
        "kvjax_chunks_not_admitted_total",
        "counter",
        "chunks",
        "chunks that were not stored as they were asked for too seldom",
        lambda s: s.chunks_not_admitted,
    ),
    Metric(
        "kvjax_stale_chunks_total",
        "counter",
        "chunks",
        "chunks invalidated while they were written, and dropped",
        lambda s: s.stale_chunks,
    ),
    Metric(
        "kvjax_refused_stores_total",
        "counter",
        "stores",
        "times that the pool had no room for a store, or is smaller than all of one",
        lambda s: s.refused_stores,
    ),
    Metric(
        "kvjax_shared_loads_total",
        "counter",
        "loads",
        "loads that joined one under way for the same chunks",
        lambda s: s.shared_loads,
    ),
    Metric("kvjax_failed_jobs_total", "counter", "jobs", "loads and stores that ended badly", lambda s: s.failed_jobs),
    Metric("kvjax_cancelled_jobs_total", "counter", "jobs", "loads and stores cancelled", lambda s: s.cancelled_jobs),
    Metric("kvjax_late_jobs_total", "counter", "jobs", "loads and stores past their deadline", lambda s: s.late_jobs),
    Metric(
        "kvjax_outdated_stores_total",
        "counter",
        "stores",
        "stores of requests whose chunks were invalidated after they were looked up",
        lambda s: s.outdated_stores,
    ),
    HistogramMetric("kvjax_load_seconds", "from the issue of a load to its end", lambda s: s.load_seconds),
    HistogramMetric("kvjax_store_seconds", "from the issue of a store to its end", lambda s: s.store_seconds),
    Metric("kvjax_budget_bytes", "gauge", "bytes", "budget of the host pool", lambda s: s.budget_bytes),
    GroupMetric(
        "kvjax_held_bytes",
        "gauge",
        "bytes",
        "units of the pool in use times their bytes, chunks being written included",
        lambda g: g.bytes_held,
    ),
    GroupMetric("kvjax_resident_chunks", "gauge", "chunks", "chunks that a lookup finds", lambda g: g.resident_chunks),
    Metric("kvjax_open_requests", "gauge", "requests", "requests not finished", lambda s: s.open_requests),
    Metric("kvjax_open_jobs", "gauge", "jobs", "jobs not seen to end", lambda s: s.open_jobs),
    Metric(
        "kvjax_given_up_jobs",
        "gauge",
        "jobs",
        "jobs cancelled or late whose transfers go on",
        lambda s: s.given_up_jobs,
    ),
    Metric(
        "kvjax_most_staged_bytes", "gauge", "bytes", "the most that was staged at a time", lambda s: s.most_staged_bytes
    ),
    HistogramMetric("kvjax_promote_seconds", "from the start of a promotion to its end", lambda s: s.promote_seconds),
    Metric(
        "kvjax_promoted_bytes_total",
        "counter",
        "bytes",
        "bytes of chunks that came to the host pool from lower tiers, unpadded",
        lambda s: s.bytes_promoted,
    ),
    Metric(
        "kvjax_restored_requests_total",
        "counter",
        "requests",
        "requests that could be restored or computed, and were restored",
        lambda s: s.requests_restored,
    ),
    Metric(
        "kvjax_recomputed_requests_total",
        "counter",
        "requests",
        "requests that could be restored or computed, and were computed",
        lambda s: s.requests_recomputed,
    ),
    TierMetric("kvjax_tier_up", "gauge", "0 or 1", "whether the tier is asked at present", lambda t: int(t.is_up)),
    TierMetric(
        "kvjax_tier_written_bytes_total", "counter", "bytes", "bytes of chunks written", lambda t: t.bytes_written
    ),
    TierMetric(
        "kvjax_tier_read_bytes_total",
        "counter",
        "bytes",
        "bytes of chunks read, and found to be what was written",
        lambda t: t.bytes_read,
    ),
    TierMetric(
        "kvjax_tier_missing_chunks_total",
        "counter",
        "chunks",
        "chunks that were gone when they were to be read",
        lambda t: t.missing_chunks,
    ),
    TierMetric(
        "kvjax_tier_bad_chunks_total",
        "counter",
        "chunks",
        "entries that were not what they should be, and were removed",
        lambda t: t.bad_chunks,
    ),
    TierMetric(
        "kvjax_tier_dropped_chunks_total",
        "counter",
        "chunks",
        "chunks not written, as too many others waited or the tier was down",
        lambda t: t.dropped_chunks,
    ),
    TierMetric(
        "kvjax_tier_full_chunks_total",
        "counter",
        "chunks",
        "chunks for which the tier had no room",
        lambda t: t.full_chunks,
    ),
    TierMetric("kvjax_tier_errors_total", "counter", "operations", "operations that failed", lambda t: t.errors),
    TierMetric(
        "kvjax_tier_waiting_chunks", "gauge", "chunks", "chunks that wait to be written", lambda t: t.waiting_chunks
    ),
    TierMetric(
        "kvjax_tier_pending_bytes",
        "gauge",
        "bytes",
        "memory of chunks that left the pool or are being written",
        lambda t: t.pending_bytes,
    ),
)


class Registry(Protocol):
    """What `register_metrics` asks of a registry; a `prometheus_client.CollectorRegistry` has it."""

    def register(self, collector: Any) -> None:
        """Takes a collector of `prometheus_client`."""
        ...


def register_metrics(
    stats: Callable[[], StatsFields],
    *,
    labels: Mapping[str, str] | None = None,
    registry: Registry | None = None,
) -> "StatsCollector":
    """Shows the metrics in a registry of `prometheus_client`, and returns their collector, for `registry.unregister`.

    Args:
        stats: returns the stats. It is called at each scrape, one call at a time, on the thread that scrapes.
        labels: constant labels of every metric: a model, a rank, say.
        registry: a `CollectorRegistry`; the default one of `prometheus_client` if `None`. It takes the metrics of one
            offloader.

    Raises:
        ImportError: `prometheus_client` is not installed.
        ValueError: `stats` cannot be called; a label's name is no label name, begins with `__`, or is `group`, `tier`
            or `le`; a label's value is no string; or the registry has the metrics of another offloader.
    """
    if not callable(stats):
        raise ValueError(f"`stats` must be a function that returns them, such as `offloader.stats`, got {shown(stats)}")
    constant = checked_labels(labels or {})
    try:
        import prometheus_client
    except ImportError:
        raise ImportError(
            'kvjax.observe.metrics needs prometheus_client, which is not installed: pip install "kvjax[metrics]"'
        ) from None
    from kvjax.observe.prometheus import StatsCollector

    collector = StatsCollector(stats, constant)
    (prometheus_client.REGISTRY if registry is None else registry).register(collector)
    return collector


def checked_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Returns the labels.

    Raises:
        ValueError: see `register_metrics`.
    """
    for name, value in labels.items():
        if not isinstance(name, str) or not _LABEL.fullmatch(name) or name in (GROUP_LABEL, TIER_LABEL, "le"):
            raise ValueError(
                f"`labels` must have names of letters, digits and `_` that do not begin with `__` and are not "
                f"{GROUP_LABEL!r}, {TIER_LABEL!r} or 'le', got {shown(name)}"
            )
        if not isinstance(value, str):
            raise ValueError(f"`labels` must have strings as values, got {shown(value)} for {name!r}")
    return dict(labels)


def label_of(metric: AnyMetric) -> str:
    """Returns the label that tells the values of a metric apart, empty if it has one value."""
    if isinstance(metric, GroupMetric):
        return GROUP_LABEL
    return TIER_LABEL if isinstance(metric, TierMetric) else ""


def metrics_table() -> str:
    """Returns the metrics as the Markdown table of `docs/metrics.md`."""
    rows = ["| name | type | unit | labels | meaning |", "|---|---|---|---|---|"]
    for metric in METRICS:
        name = label_of(metric)
        label = f"`{name}`" if name else ""
        rows.append(f"| `{metric.name}` | {metric.kind} | {metric.unit} | {label} | {metric.meaning} |")
    return "\n".join(rows) + "\n"
