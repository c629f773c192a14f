"""What an offloader says of itself: exact, by group, and counted once."""

import dataclasses

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

import kvjax
from kvjax.handles import LedgerCounts
from tests.support import layouts
from tests.support.ledgers import MIXED, UNIFORM, engine, prompt
from tests.support.toy_engine import ToyEngine

NEVER_FALL = {
    field.name
    for field in dataclasses.fields(kvjax.Stats)
    if field.name.endswith(("stored", "loaded", "chunks", "loads", "stores", "jobs", "lookups", "tokens"))
} - {"resident_chunks", "open_jobs", "given_up_jobs"}


def check_sums(offloader: kvjax.Offloader) -> kvjax.Stats:
    """The groups' figures add up to those of the whole, and the books to what the pool holds."""
    stats = offloader.stats()
    for whole, part in (
        ("bytes_held", "bytes_held"),
        ("resident_chunks", "resident_chunks"),
        ("chunks_stored", "chunks_stored"),
        ("bytes_stored", "bytes_stored"),
        ("chunks_loaded", "chunks_loaded"),
        ("bytes_loaded", "bytes_loaded"),
        ("evicted_chunks", "chunks_evicted"),
        ("dropped_chunks", "chunks_dropped"),
    ):
        assert getattr(stats, whole) == sum(getattr(group, part) for group in stats.groups), whole
    assert stats.bytes_held <= stats.budget_bytes
    offloader.check_integrity()
    return stats


@pytest.mark.parametrize("name", ["gemma", "hybrid", "everything"])
@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_figures_of_groups_add_up_and_counters_never_fall(name, policy):
    policies = {"lru": kvjax.pool.LRU, "arc": kvjax.pool.ARC}
    made = ToyEngine(
        layouts.ALL[name],
        96,
        host_bytes={"gemma": 6000, "hybrid": 2000, "everything": 2000}[name],
        policy=policies[policy](),
    )
    rng = np.random.default_rng(5)
    trunks = [rng.integers(0, 9, 64).tolist() for _ in range(3)]
    before = check_sums(made.offloader)
    for n in range(30):
        tokens = [*trunks[n % 3][: int(rng.integers(8, 60))], *rng.integers(10, 20, int(rng.integers(1, 9))).tolist()]
        made.start("a", tokens)
        made.compute("a", len(tokens), step=int(rng.integers(4, 40)))
        made.stop("a")
        if n % 10 == 9:
            made.offloader.invalidate()
        now = check_sums(made.offloader)
        for field in NEVER_FALL:
            assert getattr(now, field) >= getattr(before, field), field
        before = now
    assert before.evicted_chunks > 0
    assert before.lookups == 30
    made.offloader.close()
    assert made.offloader.stats().chunks_stored == before.chunks_stored


def test_three_chunks_stored_two_loaded_and_fifty_steps_are_just_that():
    """K2: the counters elsewhere counted a hit in every step, and padding as bytes."""
    served = engine(UNIFORM)
    served.served("a", prompt(12))
    served.start("b", prompt(11))
    served.end_load(served.load("b"))
    served.compute("b", 11)
    for n in range(50):
        served.accept("b", [n])
        served.prefill("b", 12 + n, 1)
    counts: LedgerCounts = served.ledger.counts
    assert (counts.chunks_loaded, counts.bytes_loaded) == (2, 2 * 64)
    assert (counts.lookups, counts.lookup_tokens, counts.hit_tokens) == (2, 23, 8)
    assert (counts.chunks_stored, counts.bytes_stored) == (3, 3 * 64)  # no step was a checkpoint


def test_a_request_that_waits_is_counted_once_however_often_it_is_looked_up():
    served = engine(MIXED)
    served.served("a", prompt(16))
    before = (served.ledger.counts.lookups, served.ledger.counts.lookup_tokens, served.ledger.counts.hit_tokens)
    for _ in range(20):
        served.start("b", prompt(17))
    after = (served.ledger.counts.lookups, served.ledger.counts.lookup_tokens, served.ledger.counts.hit_tokens)
    assert tuple(np.subtract(after, before)) == (1, 17, 16)


def test_a_preempted_request_counts_once_with_all_its_tokens():
    """It is admitted again with what it decoded: neither its tokens nor its hit count twice, and no rate exceeds 1."""
    served = engine(UNIFORM)
    served.start("a", prompt(8))
    served.prefill("a", 8, 8)
    served.accept("a", prompt(40, 8))
    served.prefill("a", 48, 8, checkpoint=True)
    served.start("a", prompt(49))
    counts = served.ledger.counts
    assert (counts.lookups, counts.lookup_tokens, counts.hit_tokens) == (1, 49, 48)


def test_a_host_tier_that_is_never_used_does_not_change_the_hit_rate():
    """K4: a rate with one more term below the line falls by the mere presence of the tier."""
    rates = []
    for limits in ({}, {"skip": True}, {"max_load_tokens": 0}):
        served = engine(UNIFORM, chunks=2)  # too small for any of the prompts
        for n in range(6):
            served.start(f"{n}", prompt(24, 100 * n), on_device=8, **limits)
            served.finish(f"{n}")
        counts = served.ledger.counts
        rates.append(counts.hit_tokens / counts.lookup_tokens)
    assert rates == [8 / 24] * 3


def test_prometheus_sees_what_stats_say():
    made = ToyEngine(layouts.GEMMA, 64, host_bytes=2**16)
    registry = CollectorRegistry()
    kvjax.register_metrics(made.offloader.stats, labels={"model": "toy"}, registry=registry)
    made.start("a", prompt(40))
    made.compute("a", 40, step=16)
    made.stop("a")
    made.start("b", [*prompt(40), 1])
    made.stop("b")
    stats = made.offloader.stats()
    group = {"model": "toy", "group": "local"}
    assert registry.get_sample_value("kvjax_stored_bytes_total", group) == stats.groups[1].bytes_stored > 0
    assert registry.get_sample_value("kvjax_hit_tokens_total", {"model": "toy"}) == stats.hit_tokens == 40
    made.offloader.close()
