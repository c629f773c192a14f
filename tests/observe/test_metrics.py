"""What Prometheus reads is what the stats say, under the names that the documentation has."""

import sys
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvjax import Offloader
from kvjax.observe.durations import BOUNDS_SECONDS, DurationCounts, Durations
from kvjax.observe.metrics import (
    METRICS,
    GroupMetric,
    HistogramMetric,
    Metric,
    TierMetric,
    metrics_table,
    register_metrics,
)
from kvjax.observe.stats_fields import StatsFields
from tests.support.layouts import UNIFORM

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


@dataclass(frozen=True)
class GroupStandIn:
    name: str = "full"
    resident_chunks: int = 1
    bytes_held: int = 2
    chunks_stored: int = 3
    bytes_stored: int = 4
    chunks_loaded: int = 5
    bytes_loaded: int = 6
    chunks_evicted: int = 7
    chunks_dropped: int = 8


@dataclass(frozen=True)
class TierStandIn:
    name: str = "disk"
    is_up: bool = True
    bytes_written: int = 2
    bytes_read: int = 3
    missing_chunks: int = 4
    bad_chunks: int = 5
    dropped_chunks: int = 6
    full_chunks: int = 7
    errors: int = 8
    waiting_chunks: int = 9
    pending_bytes: int = 10


def two_durations() -> DurationCounts:
    durations = Durations()
    durations.add(0.0003)
    durations.add(60)
    return durations.snapshot()


@dataclass(frozen=True)
class StandIn:
    budget_bytes: int = 11
    lookups: int = 12
    lookup_tokens: int = 13
    hit_tokens: int = 14
    refused_stores: int = 15
    chunks_not_admitted: int = 16
    stale_chunks: int = 17
    shared_loads: int = 18
    failed_jobs: int = 19
    cancelled_jobs: int = 20
    late_jobs: int = 21
    outdated_stores: int = 25
    given_up_jobs: int = 26
    open_requests: int = 22
    open_jobs: int = 23
    most_staged_bytes: int = 24
    load_seconds: DurationCounts = field(default_factory=two_durations)
    store_seconds: DurationCounts = field(default_factory=DurationCounts)
    promote_seconds: DurationCounts = field(default_factory=DurationCounts)
    bytes_promoted: int = 27
    requests_restored: int = 28
    requests_recomputed: int = 29
    groups: tuple[GroupStandIn, ...] = (GroupStandIn(), GroupStandIn("local", bytes_stored=40))
    tiers: tuple[TierStandIn, ...] = (TierStandIn(), TierStandIn("shared", is_up=False, bytes_read=30))


class Source:
    """Stats that a test replaces."""

    def __init__(self, stats: StatsFields):
        self.stats = stats

    def __call__(self) -> StatsFields:
        return self.stats


def registered(source, **options):
    registry = CollectorRegistry()
    register_metrics(source, registry=registry, **options)
    return registry


def test_every_metric_is_shown_with_the_value_of_its_field():
    registry = registered(StandIn)
    for metric in METRICS:
        match metric:
            case Metric():
                assert registry.get_sample_value(metric.name) == metric.read(StandIn()), metric.name
            case GroupMetric():
                for group in StandIn().groups:
                    shown = registry.get_sample_value(metric.name, {"group": group.name})
                    assert shown == metric.read(group), metric.name
            case TierMetric():
                for tier in StandIn().tiers:
                    assert registry.get_sample_value(metric.name, {"tier": tier.name}) == metric.read(tier), metric.name
            case HistogramMetric():
                assert registry.get_sample_value(f"{metric.name}_count") == metric.read(StandIn()).num_durations
                assert registry.get_sample_value(f"{metric.name}_sum") == metric.read(StandIn()).total_seconds


def test_every_field_of_the_stats_is_read_by_one_metric():
    """Values of the stand-ins are distinct, so a metric that reads the field of another is found."""
    scalars = [metric.read(StandIn()) for metric in METRICS if isinstance(metric, Metric)]
    assert sorted(scalars) == list(range(11, 30))
    of_group = [metric.read(GroupStandIn()) for metric in METRICS if isinstance(metric, GroupMetric)]
    assert sorted(of_group) == list(range(1, 9))
    of_tier = [metric.read(TierStandIn()) for metric in METRICS if isinstance(metric, TierMetric)]
    assert sorted(of_tier) == list(range(1, 11))


def test_names_say_their_units_and_counters_end_in_total():
    for metric in METRICS:
        assert metric.name.startswith("kvjax_")
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        if metric.unit in ("bytes", "tokens", "seconds"):
            assert f"_{metric.unit}" in metric.name
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_durations_are_cumulative_buckets():
    registry = registered(StandIn)
    shown = [
        registry.get_sample_value("kvjax_load_seconds_bucket", {"le": str(bound)})
        for bound in (*BOUNDS_SECONDS, "+Inf")
    ]
    assert shown == [float(bound >= 0.0003) for bound in BOUNDS_SECONDS] + [2.0]


def test_constant_labels_are_on_every_sample():
    registry = registered(StandIn, labels={"model": "m", "rank": "0"})
    samples = [sample for family in registry.collect() for sample in family.samples]
    assert samples
    assert all((sample.labels["model"], sample.labels["rank"]) == ("m", "0") for sample in samples)


def test_a_registry_takes_one_offloader():
    registry = registered(StandIn)
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        register_metrics(StandIn, registry=registry)


def test_a_counter_goes_on_where_it_was_when_the_stats_begin_anew():
    source = Source(StandIn())
    registry = registered(source)
    names = [
        ("kvjax_lookups_total", {}),
        ("kvjax_stored_bytes_total", {"group": "full"}),
        ("kvjax_load_seconds_sum", {}),
    ]
    names += [("kvjax_load_seconds_bucket", {"le": "+Inf"})]
    before = [registry.get_sample_value(*name) for name in names]
    groups = (GroupStandIn(bytes_stored=1), GroupStandIn("local"))
    source.stats = StandIn(lookups=2, groups=groups, load_seconds=DurationCounts(), budget_bytes=1)
    after = [registry.get_sample_value(*name) for name in names]
    assert after == [12 + 2, 4 + 1, before[2], 2]
    assert registry.get_sample_value("kvjax_budget_bytes") == 1, "a gauge may fall"
    source.stats = replace(source.stats, lookups=5)
    assert registry.get_sample_value("kvjax_lookups_total") == 12 + 5


def test_registering_reads_no_stats():
    def stats():
        raise AssertionError("not asked for")

    registered(stats)


def test_the_text_form_is_what_prometheus_reads():
    text = generate_latest(registered(StandIn, labels={"model": 'a"b'})).decode()
    assert 'kvjax_stored_bytes_total{group="local",model="a\\"b"} 40.0' in text
    assert "# TYPE kvjax_load_seconds histogram" in text


@pytest.mark.parametrize("name", ["group", "le", "__name", "1st", "a-b", "", 3])
def test_a_label_that_prometheus_or_kvjax_has_a_use_for_is_refused(name):
    with pytest.raises(ValueError, match="`labels` must have names of letters"):
        register_metrics(StandIn, labels={name: "x"}, registry=CollectorRegistry())


def test_a_label_that_is_no_string_is_refused():
    with pytest.raises(ValueError, match="`labels` must have strings as values, got 0 for 'rank'"):
        register_metrics(StandIn, labels={"rank": 0}, registry=CollectorRegistry())  # pyright: ignore[reportArgumentType]


def test_without_the_extra_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ImportError, match=r'pip install "kvjax\[metrics\]"'):
        register_metrics(StandIn)


def test_the_documentation_has_the_same_table():
    assert metrics_table() in DOCS.read_text(encoding="utf-8")


def test_what_an_offloader_counts_is_what_is_shown():
    """Fields that its stats have are taken from them, the others from a stand-in."""
    caches = {
        name: jnp.zeros((8, *leaf.block_shape), leaf.dtype, device=jax.devices()[0])
        for name, leaf in UNIFORM.leaves.items()
    }
    with Offloader(UNIFORM, caches, host_bytes=2**16, blocks_per_chunk=1) as offloader:

        def stats():
            known = {each.name: getattr(StandIn(), each.name) for each in fields(StandIn)}
            real = offloader.stats()
            return SimpleNamespace(**known | {each.name: getattr(real, each.name) for each in fields(real)})

        registry = registered(stats)
        offloader.lookup("a", list(range(9)))
        caches, _ = offloader.store(caches, "a", {"full": [0, 1, 2]}, 9, checkpoint=True)
        offloader.finish("a")
        offloader.wait()
        assert offloader.lookup("b", list(range(9))).hit_tokens == 8
        assert registry.get_sample_value("kvjax_budget_bytes") == 2**16
        assert registry.get_sample_value("kvjax_lookups_total") == 2
        assert registry.get_sample_value("kvjax_lookup_tokens_total") == 18
        assert registry.get_sample_value("kvjax_hit_tokens_total") == 8
        assert registry.get_sample_value("kvjax_open_requests") == 1
        assert registry.get_sample_value("kvjax_failed_jobs_total") == 0
