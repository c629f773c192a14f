"""Units are handed out once, and come back in runs."""

import gc
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.pool.units import UnitAllocator


def test_units_come_in_runs_from_the_start():
    units = UnitAllocator(10)
    assert units.take(3).tolist() == [0, 1, 2]
    assert units.take(4).tolist() == [3, 4, 5, 6]
    assert (units.num_free, units.free_units().tolist()) == (3, [9, 8, 7])


def test_a_run_given_back_is_the_next_run_taken():
    units = UnitAllocator(10)
    run = units.take(4)
    units.take(2)
    units.give(run)
    assert units.take(4).tolist() == run.tolist()


def test_the_ids_taken_are_int32_and_the_callers_own():
    units = UnitAllocator(4)
    taken = units.take(2)
    assert taken.dtype == np.int32
    units.give(taken)
    taken[:] = 77
    assert sorted(units.free_units().tolist()) == [0, 1, 2, 3]


def test_more_than_there_is_is_our_own_bug():
    units = UnitAllocator(4)
    with pytest.raises(AssertionError, match="more units taken than are free"):
        units.take(5)
    with pytest.raises(AssertionError, match="more units given back than were taken"):
        units.give(np.arange(1, dtype=np.int32))
    assert units.num_free == 4


@given(st.integers(1, 20), st.lists(st.integers(-8, 8), max_size=40))
def test_a_unit_is_never_in_two_hands(num_units, steps):
    """A positive step takes so many units, a negative one gives one of the runs held back."""
    units, held = UnitAllocator(num_units), []
    for step in steps:
        if 0 <= step <= units.num_free:
            held.append(units.take(step))
        elif step < 0 and held:
            units.give(held.pop(step % len(held)))
        everywhere = np.concatenate([units.free_units(), *held])
        assert sorted(everywhere.tolist()) == list(range(num_units))


def test_ids_taken_do_not_keep_the_big_array_alive():
    """1,000 slices of 8 ids were kept from an array of a million, and the array was dropped: its memory was not
    released, for the slices were views."""
    tracemalloc.start()
    try:
        units = UnitAllocator(1_000_000)
        kept = [units.take(8) for _ in range(1000)]
        del units
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < 1_000_000
    finally:
        tracemalloc.stop()
    assert all(ids.base is None for ids in kept)
