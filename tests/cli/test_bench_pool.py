"""`kvjax bench pool`: its rows, what its phases do to the pool, and what it refuses."""

import argparse
import gc

import pytest

from kvjax.cli import bench_pool
from kvjax.cli.bench_pool import CHUNKS_PER_REQUEST, PHASES, PoolLoop, Times
from kvjax.pool import POLICIES
from tests.cli.command import document, kvjax, refusal

SMALL = ("bench", "pool", "--requests", 2)
KEYS = ["bench", "policy", "resident_chunks", "phase", "us_per_chunk", "longest_call_ms"]


def test_there_is_a_row_for_every_size_policy_and_phase():
    found = document(*SMALL, "--chunks", "512,1024", "--policy", "arc,lru")
    rows = found.pop("rows")
    assert (found["bench"], found["chunks_per_request"], found["requests"]) == ("pool", 256, 2)
    assert [(row["resident_chunks"], row["policy"], row["phase"]) for row in rows] == [
        (chunks, policy, phase) for chunks in (512, 1024) for policy in ("arc", "lru") for phase in PHASES
    ]
    for row in rows:
        assert list(row) == KEYS
        assert row["bench"] == "pool"
        assert row["us_per_chunk"] > 0
        assert row["longest_call_ms"] > 0


def test_the_defaults():
    args = bench_pool.add_parser(argparse.ArgumentParser().add_subparsers()).parse_args([])
    assert (args.chunks, args.policy, args.requests) == ((131_072, 524_288), tuple(POLICIES), 1000)


def test_people_get_a_row_per_phase_and_columns_per_run():
    ran = kvjax(*SMALL, "--chunks", 512)
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert lines[0].endswith("CPUs, requests of 256 chunks, medians of 2 calls")
    assert lines[2].split() == ["lru", "512", "longest", "arc", "512", "longest"]
    assert lines[3].split() == ["phase", "us", "per", "chunk", "ms", "us", "per", "chunk", "ms"]
    assert [line.split()[0] for line in lines[4:]] == list(PHASES)
    assert {len(line.split()) for line in lines[4:]} == {5}


def test_the_help_says_what_each_phase_is():
    ran = kvjax("bench", "pool", "--help")
    assert ran.code == 0
    for phase, meaning in PHASES.items():
        assert f"{phase} " in ran.out
        assert meaning in ran.out
    assert "processor time of the calling thread" in ran.out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--requests", 0), "kvjax bench: error: `--requests` must be a positive int, got 0"),
        (("--chunks", "512,100"), "kvjax bench: error: `--chunks` must be positive multiples of 256, got 100"),
        (("--chunks", 0), "kvjax bench: error: `--chunks` must be positive multiples of 256, got 0"),
        (("--chunks", "many"), "kvjax bench pool: error: argument --chunks: must be an int, got 'many'"),
        (("--policy", "lru,fifo"), "kvjax bench pool: error: argument --policy: must be among lru, arc, got 'fifo'"),
    ],
)
def test_bad_input_is_refused_in_one_line(argv, words):
    assert refusal("bench", "pool", *argv).startswith(words)


@pytest.mark.parametrize("policy", list(POLICIES))
def test_phases_do_what_they_are_named_for(policy):
    num_chunks, num_requests = 16 * CHUNKS_PER_REQUEST, 5
    loop = PoolLoop(policy, num_chunks, num_requests)
    pool, seen = loop._pool, []
    before = (0, 0, 0, 0)
    for phases, times in loop.phases():
        counts = pool.counts
        after = (counts.stored, counts.evicted, counts.invalidated, counts.failed)
        changed = tuple((a - b) // CHUNKS_PER_REQUEST for a, b in zip(after, before, strict=True))
        seen.append((phases[0], changed, pool.num_free_units // CHUNKS_PER_REQUEST, {len(t.wall) for t in times}))
        before = after
        pool.check_integrity()
    assert seen == [
        ("prepare_store", (16, 0, 0, 0), 0, {16}),
        ("lookup", (0, 0, 0, 0), 0, {5}),
        ("prepare_store_evicting", (5, 5, 0, 0), 0, {5}),
        ("invalidate", (0, 0, 5, 0), 5, {5}),
        ("release", (0, 0, 0, 5), 5, {5}),
    ]
    assert pool.open_pins() == set()
    assert pool.policy_error is None


def test_the_garbage_collector_is_left_as_it_was():
    gc.unfreeze()
    for _ in PoolLoop("lru", CHUNKS_PER_REQUEST, 1).phases():
        assert gc.get_freeze_count() > 0
        assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_call_is_timed_by_both_clocks(monkeypatch):
    wall, thread = iter([1.0, 3.5]), iter([10.0, 10.5])
    monkeypatch.setattr(bench_pool.time, "perf_counter", lambda: next(wall))
    monkeypatch.setattr(bench_pool.time, "thread_time", lambda: next(thread))
    times = Times()
    assert times.of(lambda: 7) == 7
    assert (times.wall, times.thread) == ([2.5], [0.5])
    times.wall, times.thread = [2.56e-4, 1.0, 2.56e-5], [0.25, 0.5, 0.125]
    assert bench_pool._row("lru", 512, "touch", times) == {
        "bench": "pool",
        "policy": "lru",
        "resident_chunks": 512,
        "phase": "touch",
        "us_per_chunk": 1.0,
        "longest_call_ms": 500.0,
    }
