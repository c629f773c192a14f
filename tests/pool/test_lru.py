"""Least recently used by requests: the conformance suite, and its own order against a sorted list."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.pool import LRU, lru
from tests.pool.conformance import CALLS, PolicyConformance, order, remove, touch


class TestLRU(PolicyConformance):
    def make_policy(self) -> LRU:
        return LRU()

    def test_the_request_that_was_longest_ago_leaves_first(self, policy):
        touch(policy, {0: 0, 1: 1})
        touch(policy, {2: 0, 3: 1})
        assert order(policy) == [[1], [0], [3], [2]]

    def test_an_access_to_a_part_leaves_the_rest_where_it_was(self, policy):
        touch(policy, {0: 0, 1: 1, 2: 2})
        touch(policy, {5: 0})
        touch(policy, {0: 0, 1: 1})
        assert order(policy) == [[2], [5], [1], [0]]

    def test_equal_ranks_of_different_requests_do_not_leave_at_once(self, policy):
        touch(policy, {0: 1})
        touch(policy, {1: 1})
        assert order(policy) == [[0], [1]]

    def test_a_slot_used_again_for_another_chunk_is_as_recent_as_its_new_access(self, policy):
        """A chunk leaves, its slot is given to a new one: entries of the old access say nothing of it."""
        touch(policy, {0: 0, 1: 1})
        touch(policy, {2: 0})
        remove(policy, 1)
        touch(policy, {1: 0})
        assert order(policy) == [[0], [2], [1]]


def sorted_order(last: dict[int, tuple[int, int]]) -> list[list[int]]:
    """The order by a plain sort: `last` has each slot's number of its last access and its rank in it."""
    sets: dict[tuple[int, int], list[int]] = {}
    for slot, (number, rank) in last.items():
        sets.setdefault((number, -rank), []).append(slot)
    return [sorted(sets[place]) for place in sorted(sets)]


@settings(max_examples=300)
@given(CALLS, st.integers(-30, 8))
def test_the_order_equals_a_sort_however_often_lists_are_compacted(calls, stale_entries):
    policy, last = LRU(), {}
    before, lru._STALE_ENTRIES = lru._STALE_ENTRIES, stale_entries
    try:
        for number, (name, slots) in enumerate(calls):
            if name == "touch":
                touch(policy, slots)
                last |= {slot: (number, rank) for slot, rank in slots.items()}
            else:
                remove(policy, *slots)
                last = {slot: place for slot, place in last.items() if slot not in slots}
            assert order(policy) == sorted_order(last)
    finally:
        lru._STALE_ENTRIES = before


def test_accesses_to_the_same_slots_do_not_pile_up():
    """One prefix is looked up again and again: the lists stay bounded by what is held."""
    policy = LRU()
    for _ in range(2000):
        policy.touch(np.arange(16), np.arange(16))
    assert policy._entries <= 2 * 16 + lru._STALE_ENTRIES
    assert sum(len(access.slots) for access in policy._accesses.values()) == policy._entries
    assert order(policy) == [[slot] for slot in range(15, -1, -1)]
