"""A replay hits what was hit when the trace was recorded, and what a slow model hits."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvjax import CacheLayout, FullAttention, GroupSpec, Recurrent, Scratch, SlidingWindow, resolve_chunking
from kvjax.keys import prefix_hashes
from kvjax.observe.calls import (
    Call,
    ExtendCall,
    FinishCall,
    InvalidateCall,
    LoadCall,
    LookupCall,
    StoreCall,
    Trace,
)
from kvjax.observe.replay import Replay, replay
from kvjax.observe.trace import TraceWriter, read_trace
from kvjax.packing import cut_into_units
from kvjax.pool import LRU
from tests.oracles.layouts import cut, group, random_chunking
from tests.oracles.replay_model import ModelPool
from tests.support.ledgers import CHUNK, HYBRID, MIXED, UNIFORM, picks
from tests.support.recorder import RecordingEngine

NAMESPACE = bytes(16)
FULL4 = cut(group("full", FullAttention(), 4))
FULL8 = cut(group("full", FullAttention(), 8))


def hashes(tokens, unit=4, namespace=NAMESPACE):
    return b"".join(prefix_hashes(namespace, tokens, unit))


def request(name, tokens, reply=(), *, unit=4, namespace=NAMESPACE, device_tokens=0, load=True) -> list[Call]:
    """A whole request: its prompt is stored, then it goes on and is stored as a checkpoint."""
    prompt, whole = hashes(tokens, unit, namespace), hashes([*tokens, *reply], unit, namespace)
    total = len(tokens) + len(reply)
    calls: list[Call] = [LookupCall(name, namespace, len(tokens), prompt, device_tokens)]
    calls += [LoadCall(name)] if load else []
    calls += [StoreCall(name, len(tokens)), ExtendCall(name, total, whole[len(prompt) :])]
    return [*calls, StoreCall(name, total, checkpoint=True), FinishCall(name)]


def trace_of(*requests, unit=4):
    return Trace(unit, [call for calls in requests for call in calls])


def run(trace, chunking=UNIFORM, chunks=1000, **options):
    options.setdefault("checkpoint_tokens", None)
    return Replay(trace, chunking, cut_into_units(chunking, CHUNK), host_bytes=chunks * CHUNK, **options)


def hits(replayed, trace):
    return [found.hit_tokens for found in map(replayed.take, trace.calls) if found is not None]


def prompt(length, start=0):
    return list(range(start, start + length))


# --- against a slow model, and against what was recorded ------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30), st.integers(1, 30), st.integers(0, 12)), max_size=20),
    st.integers(1, 12),
    st.integers(1, 3),
)
def test_hits_are_those_of_a_slow_model(prompts, num_chunks, blocks):
    """Each request shares a part of an earlier one, or none."""
    layout = CacheLayout([GroupSpec("full", FullAttention(), 4, block_bytes=16)])
    chunking = resolve_chunking(layout, blocks_per_chunk=blocks)
    unit = 16 * blocks
    model = ModelPool(num_chunks, 4 * blocks)
    known: list[list[int]] = []
    calls: list[Call] = []
    expected = []
    for number, (back, shared, own, reply) in enumerate(prompts):
        before = known[-1 - back] if back < len(known) else []
        tokens = [*before[:shared], *prompt(own, 1000 * (number + 1))]
        whole = [*tokens, *prompt(reply, 1000 * (number + 1) + 500)]
        known.append(whole)
        calls += request(str(number), tokens, whole[len(tokens) :])
        expected.append(model.lookup(tokens))
        model.store(tokens)
        model.store(whole)
    units = cut_into_units(chunking, unit)
    replayed = Replay(Trace(4, calls), chunking, units, host_bytes=num_chunks * unit, checkpoint_tokens=None)
    found = []
    for call in calls:
        answer = replayed.take(call)
        replayed.ledger.check_integrity()
        found += [] if answer is None else [answer.hit_tokens]
    figures = replayed.figures()
    assert found == expected
    assert figures.hit_tokens == sum(expected)
    assert figures.groups[0].chunks_stored == model.stored
    assert figures.groups[0].chunks_evicted == model.evicted == replayed.ledger.pool.counts.evicted


@settings(max_examples=80, deadline=None)
@given(
    picks(),
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, 20), st.integers(0, 12), st.integers(0, 20)),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from(["never", "retained"]),
    st.integers(1, 3),
)
def test_a_replay_hits_what_the_recorded_engine_hit(tmp_path_factory, pick, prompts, frees, multiple):
    """Any layout, an engine with real block tables that frees blocks, and some of the prefix on the device."""
    path: Path = tmp_path_factory.mktemp("traces") / "trace.jsonl"
    chunking = random_chunking(pick)
    every = pick(4, 40)
    options = {"checkpoint_tokens": every if pick(0, 1) else None, "resume_multiple": multiple}
    with TraceWriter(path, tokens_per_hash=chunking.tokens_per_hash, chunking=chunking) as writer:
        served = RecordingEngine(writer, chunking, frees=frees, **options)
        tokens: list[int] = []
        for number, (shared, own, reply, on_device) in enumerate(prompts):
            tokens = [*tokens[:shared], *prompt(own, 100 * number)]
            found = served.start(number, tokens, on_device=min(on_device, len(tokens) - 1))
            served.end_load(served.load(number))
            whole = [*tokens, *prompt(reply, 100 * number + 50)]
            ahead = [
                len(whole),
                *found.checkpoints,
                *(range(every, 200, every) if options["checkpoint_tokens"] else ()),
            ]
            served.prefill(number, len(tokens), 8, to_come=ahead)
            served.accept(number, whole[len(tokens) :])
            served.prefill(number, len(whole), 8, checkpoint=True, to_come=ahead)
            served.finish(number)
            tokens = whole
    trace = read_trace(path)
    replayed = Replay(trace, chunking, cut_into_units(chunking, 1), host_bytes=10**6, **options)
    assert hits(replayed, trace) == served.found
    counts, figures = served.ledger.counts, replayed.figures()
    assert figures.hit_tokens == counts.hit_tokens
    assert figures.lookup_tokens == counts.lookup_tokens
    assert (figures.bytes_stored, figures.bytes_loaded) == (counts.bytes_stored, counts.bytes_loaded)


@settings(max_examples=50, deadline=None)
@given(
    picks(),
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=8),
    st.integers(2, 12),
)
def test_a_replay_evicts_as_the_recorded_pool_did(tmp_path_factory, pick, prompts, chunks):
    """Without recurrent groups: where a pool is too small for a whole checkpoint, the engine may have no state at the
    lower position that is stored instead."""
    path: Path = tmp_path_factory.mktemp("traces") / "trace.jsonl"
    chunking = random_chunking(pick)
    assume(not any(isinstance(one.kind, Recurrent) for one in chunking.layout.groups))
    budget = chunks * max(size for size in chunking.chunk_bytes if size)
    with TraceWriter(path, tokens_per_hash=chunking.tokens_per_hash) as writer:
        served = RecordingEngine(writer, chunking, num_units=budget)
        tokens: list[int] = []
        for number, (shared, own) in enumerate(prompts):
            tokens = [*tokens[:shared], *prompt(own, 100 * number)]
            served.served(number, tokens, 8)
    trace = read_trace(path)
    replayed = Replay(trace, chunking, cut_into_units(chunking, 1), host_bytes=budget, checkpoint_tokens=None)
    assert hits(replayed, trace) == served.found
    figures = replayed.figures()
    assert sum(one.chunks_evicted for one in figures.groups) == served.ledger.pool.counts.evicted
    assert figures.bytes_stored == served.ledger.counts.bytes_stored


def test_groups_are_counted_apart_and_scratch_groups_not_at_all():
    """The second request needs ten chunks of the full group, and the two of the window before its hit."""
    trace = trace_of(request("a", prompt(40)), request("b", prompt(41)))
    replayed = run(trace, MIXED)
    assert hits(replayed, trace) == [0, 40]
    full, window = replayed.figures().groups
    assert (full.name, full.chunks_stored, full.chunks_loaded, full.chunks_evicted) == ("full", 10, 10, 0)
    assert (full.bytes_stored, full.peak_bytes_held) == (10 * CHUNK, 10 * CHUNK)
    assert (window.name, window.chunks_loaded, window.bytes_loaded) == ("window", 2, 2 * CHUNK)
    assert replayed.figures().bytes_stored == full.bytes_stored + window.bytes_stored
    assert replayed.figures().bytes_loaded == 12 * CHUNK


# --- what is counted ------------------------------------------------------------------------------------


def test_the_hit_rate_has_one_definition_whether_the_host_tier_is_used_or_not():
    """cases.md K4: a tier that is never used adds no term to the denominator."""
    trace = trace_of(request("a", prompt(20), device_tokens=7), request("b", prompt(12, 50)))
    figures = [run_all(trace, chunks=chunks) for chunks in (1, 1000)]
    for one in figures:
        assert (one.lookup_tokens, one.hit_tokens, one.device_tokens, one.hit_rate) == (32, 7, 7, 7 / 32)


def run_all(trace, *args, **options):
    replayed = run(trace, *args, **options)
    hits(replayed, trace)
    return replayed.figures()


def test_a_request_that_is_looked_up_again_counts_once():
    """It was preempted, and hits what it stored itself."""
    again: list[Call] = [LookupCall("a", NAMESPACE, 20, hashes(prompt(20))), StoreCall("a", 20)]
    trace = trace_of([*again, *again, FinishCall("a"), *again])
    replayed = run(trace)
    assert hits(replayed, trace) == [0, 19, 19]
    figures = replayed.figures()
    assert (figures.requests, figures.lookup_tokens, figures.hit_tokens) == (2, 40, 19)


def test_counters_of_three_stored_and_two_loaded_blocks_and_fifty_steps():
    """cases.md K2: bytes are real ones, without padding; the hit counts once."""
    calls = request("a", prompt(12))
    tokens = [*prompt(8), 77]
    steps: list[Call] = [LookupCall("b", NAMESPACE, 9, hashes(tokens)), LoadCall("b")]
    for position in range(10, 60):
        tokens.append(1000 + position)
        new = hashes(tokens)[(position - 1) // 4 * 16 :]
        steps += [ExtendCall("b", position, new)]
    trace = trace_of(calls, [*steps, FinishCall("b")])
    chunking = UNIFORM
    units = cut_into_units(chunking, 48)  # two units of 48 bytes a chunk of 64
    figures = replay(trace, chunking, units, host_bytes=10_000, checkpoint_tokens=None)
    full = figures.groups[0]
    assert (full.chunks_stored, full.chunks_loaded) == (3, 2)
    assert (figures.bytes_stored, figures.bytes_loaded) == (3 * CHUNK, 2 * CHUNK)
    assert figures.hit_tokens == 8
    assert figures.peak_bytes_held == 3 * 2 * 48


def test_bytes_held_are_the_peak_and_the_mean_over_calls():
    trace = trace_of(request("a", prompt(8)), [InvalidateCall()])
    figures = run_all(trace)
    # Six calls of the request, after the store two chunks are held; none after the invalidation.
    held = [0, 0, 2, 2, 2, 2, 0]
    assert figures.peak_bytes_held == 2 * CHUNK
    assert figures.mean_bytes_held == sum(held) * CHUNK / len(held) == figures.groups[0].mean_bytes_held


def test_a_trace_without_calls_has_no_hits():
    figures = run_all(Trace(4, []))
    assert (figures.requests, figures.hit_rate, figures.mean_bytes_held) == (0, 0.0, 0.0)


def test_other_namespaces_share_nothing_and_are_invalidated_apart():
    other = bytes([1]) * 16
    trace = trace_of(
        request("a", prompt(12)),
        request("b", prompt(12), namespace=other),
        [InvalidateCall(other)],
        request("c", prompt(13)),
        request("d", prompt(13), namespace=other),
    )
    assert hits(run(trace), trace) == [0, 0, 12, 0]


def test_equal_hashes_of_two_namespaces_are_not_the_same_chunks():
    trace = trace_of(
        [LookupCall("a", NAMESPACE, 8, hashes(prompt(8))), StoreCall("a", 8), FinishCall("a")],
        [LookupCall("b", bytes([2]) * 16, 9, hashes(prompt(8)))],
    )
    assert hits(run(trace), trace) == [0, 0]


def test_a_hit_that_the_recorded_engine_did_not_have_is_loaded_before_the_first_store():
    """Its pool was too small: it had nothing to load."""
    trace = trace_of(request("a", prompt(12)), request("b", prompt(13), load=False))
    assert run_all(trace).groups[0].chunks_loaded == 3


def test_a_request_that_ends_without_a_load_or_a_store_loads_nothing_and_pins_nothing():
    trace = trace_of(request("a", prompt(12)), [LookupCall("b", NAMESPACE, 13, hashes(prompt(13))), FinishCall("b")])
    replayed = run(trace)
    assert hits(replayed, trace) == [0, 12]
    assert replayed.figures().groups[0].chunks_loaded == 0
    assert not replayed.ledger.pool.open_pins()


def test_states_are_stored_where_steps_end():
    """As of an engine that ends its steps at `next_cut`."""
    trace = trace_of(request("a", prompt(29)), request("b", prompt(30)))
    assert hits(run(trace, HYBRID), trace) == [0, 24]


class Newest(LRU):
    """Evicts what was touched last first."""

    def victims(self):
        return ((slots[::-1], ranks[::-1]) for slots, ranks in list(super().victims())[::-1])


def test_the_policy_decides_what_is_left():
    """Room for two chunks, three prompts of one: the last comes while the first, or the second, is there."""
    one, two, three = (prompt(5, start) for start in (0, 100, 200))
    trace = trace_of(*(request(str(n), tokens) for n, tokens in enumerate([one, two, three, one])))
    assert hits(run(trace, chunks=2), trace) == [0, 0, 0, 0]
    assert hits(run(trace, chunks=2, policy=Newest()), trace) == [0, 0, 0, 4]


def test_refused_stores_are_told():
    """Two requests hold what they load; a third finds no room."""
    reading: list[Call] = [LookupCall("r", NAMESPACE, 9, hashes(prompt(9)))]
    trace = trace_of(request("a", prompt(8)), reading, request("b", prompt(8, 50)))
    assert run_all(trace, chunks=2).refused_stores > 0


# --- other geometries -----------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", [1, 2, 4, 8])
def test_hits_do_not_depend_on_the_hash_unit_of_a_trace_that_divides_that_of_the_geometry(unit):
    """Two prompts part within a unit of the geometry, of 8 tokens."""
    prompts = [prompt(40), [*prompt(28), *prompt(9, 500)], prompt(41)]
    trace = trace_of(*(request(str(n), tokens, unit=unit) for n, tokens in enumerate(prompts)), unit=unit)
    assert hits(run(trace, FULL8), trace) == [0, 24, 40]


def test_smaller_units_share_what_whole_units_of_the_trace_share():
    """Prompts part at token 24, within the trace's second unit of 16: only the first one is shared."""
    prompts = [prompt(64), [*prompt(24), *prompt(40, 500)], prompt(49)]
    trace = trace_of(*(request(str(n), tokens, unit=16) for n, tokens in enumerate(prompts)), unit=16)
    assert hits(run(trace, FULL4), trace) == [0, 16, 48]


def test_smaller_units_past_the_last_whole_unit_of_a_request_are_its_own():
    prompts = [prompt(24), prompt(24), prompt(31)]
    trace = trace_of(*(request(str(n), tokens, unit=16) for n, tokens in enumerate(prompts)), unit=16)
    assert hits(run(trace, FULL4), trace) == [0, 16, 16]


def test_smaller_units_past_the_last_whole_unit_are_still_its_own_when_a_request_is_looked_up_again():
    again: list[Call] = [LookupCall("a", NAMESPACE, 24, hashes(prompt(24), 16)), StoreCall("a", 24)]
    trace = trace_of([*again, *again], unit=16)
    assert hits(run(trace, FULL4), trace) == [0, 23]


def test_smaller_units_of_a_prompt_that_goes_on_are_those_of_the_whole_unit():
    """The first prompt ends within a unit that its reply completes; the next turn has all of it."""
    turn = request("a", prompt(24), prompt(40, 24), unit=16)
    trace = trace_of(turn, request("b", prompt(65), unit=16), unit=16)
    assert hits(run(trace, FULL4), trace) == [0, 64]


def test_hash_units_that_do_not_fit_each_other_are_refused():
    trace = trace_of(request("a", prompt(40), unit=6), unit=6)
    with pytest.raises(ValueError, match="`tokens_per_hash`, 4, must be a multiple of the trace's or divide it: the "):
        run(trace, FULL4)


def test_device_tokens_of_other_groups_are_taken_as_the_smallest_of_them():
    trace = trace_of(request("a", prompt(40), device_tokens={"full": 30, "other": 20}))
    assert hits(run(trace), trace) == [20]
    known = trace_of(request("a", prompt(40), device_tokens={"full": 30, "window": 30}))
    assert hits(run(known, MIXED), known) == [30]


def test_calls_that_do_not_follow_on_each_other_are_refused_before_any_is_replayed():
    trace = Trace(4, [*request("a", prompt(8)), LoadCall("a")])
    with pytest.raises(ValueError, match="`trace` must hold calls that follow on each other, call 6 does not: `requ"):
        run(trace)


def test_what_the_ledger_refuses_is_refused():
    for options in ({"chunks": 0}, {"resume_multiple": 0}, {"checkpoint_tokens": -1}):
        with pytest.raises(ValueError, match="must be"):
            run(Trace(4, []), **options)


def test_each_call_is_told_to_the_progress():
    trace = trace_of(request("a", prompt(8)), request("b", prompt(8)))
    seen = itertools.count()
    units = cut_into_units(UNIFORM, CHUNK)
    replay(trace, UNIFORM, units, host_bytes=10 * CHUNK, on_call=lambda: next(seen))
    assert next(seen) == len(trace.calls)


def test_a_layout_with_shared_leaves_states_and_windows_is_replayed():
    """Tables of groups share no block, as leaves may be shared."""
    layout = cut(
        group("full", FullAttention(), 8),
        group("ring", Scratch(), 2),
        group("local", SlidingWindow(10), 4),
        group("state", Recurrent(), 8),
    )
    trace = trace_of(request("a", prompt(64), prompt(64, 64)), request("b", prompt(129)))
    replayed = run(trace, layout)
    tables = replayed._tables(64)
    blocks = np.concatenate(list(tables.values()))
    assert len(np.unique(blocks)) == len(blocks)
    assert hits(replayed, trace) == [0, 128]
    replayed.ledger.check_integrity()
