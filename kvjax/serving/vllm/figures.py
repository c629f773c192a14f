"""What vLLM is told of the books after each step: by how much counters rose, and gauges that changed.

Plain dicts of ints, which pass between vLLM's processes; of durations nothing, as their buckets cannot be added to a
histogram of vLLM's.
"""

from collections.abc import Mapping

from kvjax.observe.metrics import METRICS, GroupMetric, HistogramMetric, Metric, TierMetric
from kvjax.observe.stats_fields import StatsFields

# By the name of a metric, and by the value of its label (a group or a tier, or "" for a metric of the whole).
Figures = dict[str, dict[str, int]]

SHOWN = tuple(metric for metric in METRICS if not isinstance(metric, HistogramMetric))
_COUNTERS = frozenset(metric.name for metric in SHOWN if metric.kind == "counter")


class Meter:
    """Tells what is new since it was last asked."""

    def __init__(self):
        self._told: Figures = {}

    def new(self, stats: StatsFields) -> Figures:
        """Returns the rises of counters and the values of gauges; what is the same as before is left out."""
        now = figures_of(stats)
        found: Figures = {}
        for name, values in now.items():
            before = self._told.get(name, {})
            changed = {label: value for label, value in values.items() if value != before.get(label, 0)}
            if name in _COUNTERS:
                changed = {label: value - before.get(label, 0) for label, value in changed.items()}
            if changed:
                found[name] = changed
        self._told = now
        return found


def figures_of(stats: StatsFields) -> Figures:
    """Returns the values of all metrics but durations."""
    found: Figures = {}
    for metric in SHOWN:
        if isinstance(metric, Metric):
            found[metric.name] = {"": metric.read(stats)}
        elif isinstance(metric, GroupMetric):
            found[metric.name] = {group.name: metric.read(group) for group in stats.groups}
        elif isinstance(metric, TierMetric):
            found[metric.name] = {tier.name: metric.read(tier) for tier in stats.tiers}
    return found


def joined(earlier: Mapping[str, Mapping[str, int]], later: Mapping[str, Mapping[str, int]]) -> Figures:
    """Returns what two calls of `Meter.new` told, as one would have: rises add up, the later gauge counts."""
    found = {name: dict(values) for name, values in earlier.items()}
    for name, values in later.items():
        known = found.setdefault(name, {})
        for label, value in values.items():
            known[label] = value + known.get(label, 0) if name in _COUNTERS else value
    return found


def summary(figures: Mapping[str, Mapping[str, int]]) -> dict[str, int | float]:
    """Returns what vLLM writes into its log every few seconds, in words and whole units."""

    def total(name: str) -> int:
        return sum(figures.get(name, {}).values())

    asked, hit = total("kvjax_lookup_tokens_total"), total("kvjax_hit_tokens_total")
    told: dict[str, int | float] = {
        "prompts looked up": total("kvjax_lookups_total"),
        "tokens looked up": asked,
        "tokens hit": hit,
        "hit share": round(hit / asked, 3) if asked else 0.0,
        "MiB loaded": round(total("kvjax_loaded_bytes_total") / 2**20, 1),
        "MiB stored": round(total("kvjax_stored_bytes_total") / 2**20, 1),
        "chunks evicted": total("kvjax_evicted_chunks_total"),
    }
    failed = total("kvjax_failed_jobs_total")
    return told | {"moves failed": failed} if failed else told
