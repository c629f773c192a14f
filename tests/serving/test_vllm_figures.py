"""What vLLM is told of the books: rises of counters, gauges that changed; together they are the stats."""

import importlib
import json

import numpy as np
import prometheus_client
import pytest

from kvjax.serving.vllm.figures import SHOWN, Meter, figures_of, joined, summary
from tests.serving import vllm_interface
from tests.serving.test_vllm_engine import BLOCKS, MIXED, STATES, Unreliable, conversations, engine_of, request_of

KINDS = {metric.name: metric.kind for metric in SHOWN}


@pytest.fixture
def package(monkeypatch):
    vllm_interface.install(monkeypatch)
    return importlib.import_module("kvjax.serving.vllm")


@pytest.fixture
def telemetry(package):
    assert package.KvjaxConnector
    return importlib.import_module("kvjax.serving.vllm.telemetry")


def without_zeros(figures):
    found = {name: {label: value for label, value in values.items() if value} for name, values in figures.items()}
    return {name: values for name, values in found.items() if values}


def test_what_is_told_step_by_step_is_what_the_books_hold_in_the_end(package, telemetry):
    rng = np.random.default_rng(5)
    engine = engine_of(package.KvjaxConnector, STATES, num_blocks=BLOCKS[3], host_bytes=14 * 1024)
    engine.worker._worker.mover = Unreliable(engine.worker._worker.mover, rng, fails=0.2)
    told, calls = telemetry.KvjaxStats(), []
    step = engine.step

    def step_and_ask():
        nonlocal told
        step()
        new = engine.scheduler.get_kv_connector_stats()
        assert engine.scheduler.get_kv_connector_stats() is None, "nothing is told twice"
        assert engine.worker.get_kv_connector_stats() is None
        if new is not None:
            calls.append(json.loads(json.dumps(new.to_dict())))
            told = told.aggregate(package.KvjaxConnector.build_kv_connector_stats(calls[-1]))

    engine.step = step_and_ask
    conversations(engine, rng, turns=4)
    stats = engine.scheduler._books.books.stats()
    assert without_zeros(told.data) == without_zeros(figures_of(stats))
    assert min(stats.failed_jobs, stats.evicted_chunks, stats.hit_tokens, stats.chunks_loaded) > 0
    assert stats.open_jobs == stats.open_requests == 0
    assert any("kvjax_open_jobs" in call for call in calls)
    assert all(
        value > 0 for call in calls for name in call if KINDS[name] == "counter" for value in call[name].values()
    )
    assert not told.is_empty()
    told.reset()
    assert told.is_empty()


def test_nothing_is_told_before_there_are_books(package):
    engine = engine_of(package.KvjaxConnector, MIXED)
    assert engine.scheduler.get_kv_connector_stats() is None
    assert engine.worker.get_kv_connector_stats() is None


def test_a_gauge_that_falls_is_told(package):
    engine = engine_of(package.KvjaxConnector, MIXED)
    engine.add(request_of(engine, "a", list(range(40))))
    engine.run()
    books, meter = engine.scheduler._books.books, Meter()
    assert meter.new(books.stats())["kvjax_resident_chunks"]["full0"] > 0
    books.invalidate()
    assert meter.new(books.stats())["kvjax_resident_chunks"]["full0"] == 0
    assert meter.new(books.stats()) == {}


def test_rises_add_up_and_the_later_gauge_counts():
    earlier = {"kvjax_hit_tokens_total": {"": 3}, "kvjax_held_bytes": {"full0": 7, "sliding1": 1}}
    later = {"kvjax_hit_tokens_total": {"": 4}, "kvjax_held_bytes": {"full0": 2}, "kvjax_lookups_total": {"": 1}}
    assert joined(earlier, later) == {
        "kvjax_hit_tokens_total": {"": 7},
        "kvjax_held_bytes": {"full0": 2, "sliding1": 1},
        "kvjax_lookups_total": {"": 1},
    }
    assert earlier["kvjax_held_bytes"] == {"full0": 7, "sliding1": 1}


def test_the_log_has_shares_and_whole_units():
    told = summary(
        {
            "kvjax_lookups_total": {"": 2},
            "kvjax_lookup_tokens_total": {"": 300},
            "kvjax_hit_tokens_total": {"": 100},
            "kvjax_loaded_bytes_total": {"full0": 2**20, "sliding1": 2**19},
        }
    )
    assert told == {
        "prompts looked up": 2,
        "tokens looked up": 300,
        "tokens hit": 100,
        "hit share": 0.333,
        "MiB loaded": 1.5,
        "MiB stored": 0.0,
        "chunks evicted": 0,
    }
    assert summary({"kvjax_failed_jobs_total": {"": 2}})["moves failed"] == 2


def test_metrics_have_the_labels_of_vllm_and_their_own(package, monkeypatch):
    registry = prometheus_client.CollectorRegistry()
    types = {
        "counter": lambda **options: prometheus_client.Counter(registry=registry, **options),
        "gauge": lambda **options: prometheus_client.Gauge(registry=registry, **options),
    }
    engines = {0: ["m", "0"], 1: ["m", "1"]}
    shown = package.KvjaxConnector.build_prom_metrics(None, types, ["model_name", "engine"], engines)
    one, two = ({"model_name": "m", "engine": str(engine)} for engine in engines)
    assert registry.get_sample_value("kvjax_hit_tokens_total", one) == 0
    shown.observe({"kvjax_hit_tokens_total": {"": 5}, "kvjax_held_bytes": {"full0": 9}})
    shown.observe({"kvjax_hit_tokens_total": {"": 2}, "kvjax_held_bytes": {"full0": 4}}, 1)
    shown.observe({"kvjax_hit_tokens_total": {"": 1}, "kvjax_held_bytes": {"full0": 3}}, 1)
    assert registry.get_sample_value("kvjax_hit_tokens_total", one) == 5
    assert registry.get_sample_value("kvjax_hit_tokens_total", two) == 3
    assert registry.get_sample_value("kvjax_held_bytes", one | {"group": "full0"}) == 9
    assert registry.get_sample_value("kvjax_held_bytes", two | {"group": "full0"}) == 3
    assert {metric.name.removesuffix("_total") for metric in SHOWN} == {one.name for one in registry.collect()}
