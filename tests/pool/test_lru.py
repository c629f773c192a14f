"""Least recently used by requests: the conformance suite, and its own order against a sorted list."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.pool import LRU, Access, recency
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

    def test_a_slot_used_again_for_another_chunk_is_as_recent_as_its_new_access(self, policy):
        """A chunk leaves, its slot is given to a new one: entries of the old access say nothing of it."""
        touch(policy, {0: 0, 1: 1})
        touch(policy, {2: 0})
        remove(policy, 1)
        touch(policy, {1: 0})
        assert order(policy) == [[0], [2], [1]]

    def test_a_part_of_an_older_access_that_has_slots_goes_there(self, policy):
        touch(policy, {0: 0}, number=10**6)
        touch(policy, {1: 0}, number=10**6 + 1)
        touch(policy, {2: 1}, number=10**6)
        assert order(policy) == [[2], [0], [1]]

    def test_a_part_of_an_older_access_without_slots_goes_where_that_would_be(self, policy):
        touch(policy, {0: 0}, number=10**6)
        touch(policy, {1: 0}, number=10**6 + 1)
        touch(policy, {0: 0}, number=10**6 + 3)
        touch(policy, {2: 1}, number=10**6 + 2)
        assert order(policy) == [[1], [2], [0]]


def sorted_order(last: dict[int, tuple[int, int]]) -> list[list[int]]:
    """The order by a plain sort: `last` has each slot's number of its last access and its rank in it."""
    sets: dict[tuple[int, int], list[int]] = {}
    for slot, (number, rank) in last.items():
        sets.setdefault((number, -rank), []).append(slot)
    return [sorted(sets[place]) for place in sorted(sets)]


@settings(max_examples=300, deadline=None)
@given(CALLS, st.lists(st.integers(0, 6), min_size=25, max_size=25), st.sampled_from([1, 4, 1024]))
def test_the_order_equals_a_sort(calls, ages, block_entries):
    """Calls are accesses of their own, or parts of earlier ones; blocks hold one access or many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recency, "_BLOCK_ENTRIES", block_entries)
        patch.setattr(recency, "_MOST_ENTRIES", 4 * block_entries)
        patch.setattr(recency, "_SPARSE", max(1, block_entries // 2))
        policy, last = LRU(), {}
        for number, ((name, slots), age) in enumerate(zip(calls, ages, strict=False), start=10):
            if name == "touch":
                touch(policy, slots, number=number - age)
                last |= {slot: (number - age, rank) for slot, rank in slots.items()}
            else:
                remove(policy, *slots)
                last = {slot: place for slot, place in last.items() if slot not in slots}
            assert order(policy) == sorted_order(last)
            assert policy._list.num_slots == len(last)
            for asked in range(number - 6, number + 1):
                assert policy._list.has_access(asked) == any(of == asked for of, _ in last.values())


@pytest.mark.parametrize("same_access", [True, False])
def test_accesses_to_the_same_slots_do_not_pile_up(same_access):
    """One prefix is looked up again and again: the lists stay bounded by what is held."""
    policy = LRU()
    slots = np.arange(16)
    for number in range(2000):
        of = 7 if same_access else number
        policy.touch(Access(of, slots, slots, np.ones(16, bool), slots.astype(np.uint64)))
    entries = sum(len(block.slots) for block in policy._list._blocks.values())
    assert entries <= 4 * recency._BLOCK_ENTRIES
    assert order(policy) == [[slot] for slot in range(15, -1, -1)]


def test_blocks_of_which_little_is_left_are_joined():
    """Of every hundred accesses one chunk stays."""
    policy = LRU()
    for number in range(20_000):
        touch(policy, {number: 0}, number=number)
        if number % 100:
            remove(policy, number)
    assert len(policy._list._blocks) <= 3
    assert order(policy) == [[slot] for slot in range(0, 20_000, 100)]


def test_slots_beyond_those_that_there_was_room_for_are_known(monkeypatch):
    monkeypatch.setattr(recency, "FIRST_SLOTS", 4)
    policy = LRU()
    touch(policy, {3: 0})
    assert policy._list.holds(np.array([3, 4, 100])).tolist() == [True, False, False]
    touch(policy, {7: 0, 40: 1})
    remove(policy, 3, 99)
    assert order(policy) == [[40], [7]]


def test_a_block_of_which_little_is_left_is_joined_with_the_next():
    policy = LRU()
    for number in range(5 * recency._BLOCK_ENTRIES):
        touch(policy, {number: 0}, number=number)
    gone = [number for number in range(3 * recency._BLOCK_ENTRIES) if number % 16]
    remove(policy, *gone)
    kept = sorted(set(range(5 * recency._BLOCK_ENTRIES)) - set(gone))
    assert len(policy._list._blocks) == 3  # of five
    assert order(policy) == [[slot] for slot in kept]


@pytest.mark.parametrize("num_requests", [1, 7, 300])
def test_blocks_stay_small_while_old_requests_go_on(num_requests):
    """Requests decode in turns, each under the number of its first access, and others come after them."""
    policy = LRU()
    for number in range(num_requests + 2000):
        touch(policy, {number: 0}, number=number)
    slot = num_requests + 2000
    expected = {number: [number] for number in range(num_requests)}
    for position in range(1, 6000 // num_requests):
        for number in range(num_requests):
            touch(policy, {slot: position}, number=number)
            expected[number].append(slot)
            slot += 1
    largest = max(len(slots) for slots in expected.values())
    assert max(block.num_entries for block in policy._list._blocks.values()) <= max(recency._MOST_ENTRIES, 2 * largest)
    flat = [slot for together in order(policy) for slot in together]
    assert flat[: slot - 2000] == [slot for number in range(num_requests) for slot in reversed(expected[number])]
