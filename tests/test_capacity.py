"""Chunks that one request leaves on the host, and the longest request that fits: against every length tried."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax import (
    CacheLayout,
    ChunkedLocal,
    FullAttention,
    GroupSpec,
    Recurrent,
    Scratch,
    SlidingWindow,
    resolve_chunking,
)
from kvjax.capacity import StoredChunks, UncountableError
from kvjax.chunking import Chunking
from kvjax.coverage import store_set, stored_positions
from tests.oracles import accounting_model as model
from tests.oracles.layouts import chunkings, cut, group

FULL = group("full", FullAttention(), 16)
LAYOUTS = {
    "gemma": cut(FULL, group("local", SlidingWindow(1024), 16)),
    "llama4": cut(FULL, group("local", ChunkedLocal(8192), 16)),
    "hybrid": cut(FULL, group("ring", Scratch(), 4), group("state", Recurrent(), 528)),
    "draft": cut(FULL, group("draft", FullAttention(), 16, 5), group("local", SlidingWindow(128), 64, 5), blocks=2),
    "odd": cut(group("full", FullAttention(), 112), group("w", SlidingWindow(2000), 80), group("s", Recurrent(), 1584)),
}


def lengths(stored: StoredChunks, most: int, **options) -> list[list[int]]:
    return stored.counts(np.arange(most + 1), **options).tolist()


@settings(max_examples=60, deadline=None)
@given(chunkings(), st.none() | st.integers(1, 30))
def test_chunks_of_every_length_equal_the_union_of_the_store_sets(chunking: Chunking, every: int | None):
    expected = []
    for tokens in range(61):
        chunks = model.stored_chunks(chunking, model.checkpoints_of(tokens, every))
        expected.append([len(chunks[chunking.layout.names[g]]) for g in chunking.layout.cached])
    stored = StoredChunks(chunking, every)
    assert lengths(stored, 60) == expected
    for tokens in range(0, 61, every or 61):
        regular = stored.counts(np.arange(tokens, min(61, tokens + (every or 61))), with_end=False)
        at_checkpoint = expected[tokens] if tokens else [0] * len(expected[0])
        assert (regular == at_checkpoint).all()


@settings(max_examples=150, deadline=None)
@given(chunkings(), st.none() | st.integers(1, 30), st.lists(st.integers(1, 5), min_size=5, max_size=5), st.data())
def test_the_longest_request_is_the_last_of_all_lengths_that_fits(chunking, every, costs, data):
    """Every length is tried up to where the groups have repeated together twice; `None` is for those that fit there
    whatever is added."""
    stored = StoredChunks(chunking, every)
    costs = costs[: len(chunking.layout.cached)]
    period, per_period = stored.per_period()
    most = min(8 * period + 200, 30_000)
    units = stored.counts(np.arange(most + 1)) @ np.array(costs)
    budget = data.draw(st.integers(0, 40) | st.sampled_from(units[: most // 2].tolist()), label="budget")
    fitting = np.flatnonzero(units <= budget)
    found = stored.longest(costs, budget)
    if found is None:
        assert fitting[-1] > most - period
        assert np.dot(per_period, costs) == 0
    elif found <= most:
        assert found == fitting[-1]
    else:
        assert stored.counts(np.array([found]))[0] @ np.array(costs) <= budget


@pytest.mark.parametrize("name", LAYOUTS)
def test_far_checkpoints_serve_and_store_what_the_law_says(name):
    chunking = LAYOUTS[name]
    stored = StoredChunks(chunking)
    rng = np.random.default_rng(1)
    far = [*rng.integers(1, 300_000, 40).tolist(), *(528 * 16 * n + d for n in (1, 99) for d in (-1, 0, 1))]
    for tokens in far:
        chunks = store_set(chunking, tokens)
        expected = [len(chunks[chunking.layout.names[g]]) for g in chunking.layout.cached]
        assert stored.counts(np.array([tokens]))[0].tolist() == expected, tokens
        assert stored.of_checkpoints([tokens]) == expected
        served = stored._positions.served(np.array([tokens]))[0]
        assert tuple(served.tolist()) == stored_positions(chunking, tokens)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("every", [None, 1000, 1009, 4096])
def test_far_lengths_equal_a_sum_over_all_their_checkpoints(name, every):
    chunking = LAYOUTS[name]
    stored = StoredChunks(chunking, every)
    for tokens in (54_321, 98_304, 150_001):
        listed = [*range(every, tokens + 1, every), tokens] if every else [tokens]
        sets = [store_set(chunking, checkpoint) for checkpoint in listed]
        names = [chunking.layout.names[g] for g in chunking.layout.cached]
        expected = [len(np.unique(np.concatenate([chunks[name] for chunks in sets]))) for name in names]
        assert stored.counts(np.array([tokens]))[0].tolist() == expected
        assert stored.of_checkpoints(listed) == expected


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("every", [None, 1000, 98_304])
def test_a_budget_of_terabytes_is_used_up(name, every):
    """Around the answer: it fits, and nothing longer does, up to where the full groups alone are too large."""
    chunking = LAYOUTS[name]
    stored = StoredChunks(chunking, every)
    costs, budget = [1] * len(chunking.layout.cached), 10**7
    found = stored.longest(costs, budget)
    assert found is not None
    assert found > 10**7
    around = stored.counts(np.arange(found, found + 120_000)).sum(axis=1)
    assert around[0] <= budget
    assert (around[1:] > budget).all()
    full_alone = stored.counts(np.array([found + 120_000]), with_end=False)[0]
    assert every or full_alone.sum() == 0


def test_a_slightly_shorter_request_may_need_more():
    """At a multiple of the attention chunk, the next prompt needs nothing of it."""
    chunking = cut(group("full", FullAttention(), 4), group("local", ChunkedLocal(16), 4))
    units = StoredChunks(chunking).counts(np.arange(40)).sum(axis=1).tolist()
    assert units[16:18] == [8, 4]
    assert StoredChunks(chunking).longest([1, 1], 4) == 19
    assert StoredChunks(chunking).longest([1, 1], 7) == 23


def test_the_longest_may_lie_below_the_last_length_that_was_tried():
    window = cut(group("window", SlidingWindow(5), 1))
    stored = StoredChunks(window, 42)
    longest = stored.longest([1], 1398)
    assert longest == 11_721
    counts = [int(stored.counts(np.array([n]), with_end=True)[0][0]) for n in range(longest, longest + 300)]
    assert counts[0] <= 1398
    assert all(count > 1398 for count in counts[1:])


def test_what_does_not_grow_has_no_longest():
    window = cut(group("w", SlidingWindow(8), 4))
    assert StoredChunks(window).longest([1], 3) is None
    assert StoredChunks(window).longest([1], 1) == 7
    assert StoredChunks(window, 100).longest([1], 3) is not None
    assert StoredChunks(cut(group("w", SlidingWindow(1), 4)), 100).longest([1], 0) is None
    assert StoredChunks(cut(group("s", Recurrent(), 8))).longest([1], 0) == 7


def test_one_byte_a_token_beside_a_large_state_ends_at_once():
    chunking = cut(group("full", FullAttention(), 4096), group("state", Recurrent(), 4096))
    assert StoredChunks(chunking).longest([1, 2**35], 2**36) == 2**35 * 4096 + 4095


@pytest.mark.parametrize(
    ("groups", "every"),
    [
        ([("a", FullAttention(), 2**47)], 1),
        ([("a", FullAttention(), 999_983), ("b", FullAttention(), 999_979)], None),
        ([("a", FullAttention(), 2**40 - 87), ("b", Recurrent(), 2**40 - 167), ("c", Recurrent(), 2**40 - 195)], None),
        ([("a", FullAttention(), 16), ("w", SlidingWindow(2**40), 16)], None),
    ],
)
def test_a_layout_whose_table_would_be_too_large_is_refused_at_once(groups, every):
    layout = CacheLayout([GroupSpec(*fields, block_bytes=1) for fields in groups], tokens_per_hash=1)
    with pytest.raises(UncountableError, match=r"repeats itself only after \d+ tokens"):
        StoredChunks(resolve_chunking(layout), every)


@pytest.mark.parametrize("every", [0, -5, 1.5, True, "16"])
def test_checkpoint_tokens_that_are_no_positive_int_are_refused(every):
    with pytest.raises(ValueError, match=r"`checkpoint_tokens` must be a positive int, got"):
        StoredChunks(LAYOUTS["gemma"], every)
