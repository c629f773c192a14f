"""Ids are handed out once, and come back in runs."""

import gc
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.pool.ids import IdAllocator


def test_ids_come_in_runs_from_the_start():
    ids = IdAllocator(10)
    assert ids.take(3).tolist() == [0, 1, 2]
    assert ids.take(4).tolist() == [3, 4, 5, 6]
    assert (ids.num_free, ids.free_ids().tolist()) == (3, [7, 8, 9])


def test_a_run_given_back_is_the_next_run_taken():
    ids = IdAllocator(10)
    run = ids.take(4)
    ids.take(2)
    ids.give(run)
    assert ids.take(4).tolist() == run.tolist()


def test_the_ids_taken_are_int32_and_the_callers_own():
    ids = IdAllocator(4)
    taken = ids.take(2)
    assert taken.dtype == np.int32
    ids.give(taken)
    taken[:] = 77
    assert sorted(ids.free_ids().tolist()) == [0, 1, 2, 3]


def test_more_than_there_is_is_our_own_bug():
    ids = IdAllocator(4)
    with pytest.raises(AssertionError, match="more ids taken than are free"):
        ids.take(5)
    with pytest.raises(AssertionError, match="more ids given back than were taken"):
        ids.give(np.arange(1, dtype=np.int32))
    assert ids.num_free == 4


@given(st.integers(1, 20), st.lists(st.integers(-8, 8), max_size=40))
def test_an_id_is_never_in_two_hands(num_ids, steps):
    """A positive step takes so many ids, a negative one gives one of the runs held back."""
    ids, held = IdAllocator(num_ids), []
    for step in steps:
        if 0 <= step <= ids.num_free:
            held.append(ids.take(step))
        elif step < 0 and held:
            ids.give(held.pop(step % len(held)))
        everywhere = np.concatenate([ids.free_ids(), *held])
        assert sorted(everywhere.tolist()) == list(range(num_ids))


def test_runs_given_back_one_after_the_other_come_back_the_last_one_first():
    ids = IdAllocator(6)
    first, second = ids.take(2), ids.take(3)
    ids.give(first)
    ids.give(second)
    assert ids.take(6).tolist() == [2, 3, 4, 0, 1, 5]


def test_ids_taken_do_not_keep_the_big_array_alive():
    """1,000 slices of 8 ids were kept from an array of a million, and the array was dropped: its memory was not
    released, for the slices were views."""
    tracemalloc.start()
    try:
        ids = IdAllocator(1_000_000)
        kept = [ids.take(8) for _ in range(1000)]
        del ids
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < 1_000_000
    finally:
        tracemalloc.stop()
    assert all(ids.base is None for ids in kept)
