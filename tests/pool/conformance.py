"""What every policy of eviction must do, whatever its order. A test class inherits it and makes the policy."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvjax.chunking import Chunking
from kvjax.groups import FullAttention, Recurrent, SlidingWindow
from kvjax.pool import Access, Policy
from tests.oracles.layouts import cut, group
from tests.pool.requests import Requests

# One call: an access to some slots with ranks, or the removal of some.
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("touch"), st.dictionaries(st.integers(0, 30), st.integers(0, 4), max_size=8)),
        st.tuples(st.just("remove"), st.sets(st.integers(0, 30), max_size=8)),
    ),
    max_size=25,
)

FULL = cut(group("a", FullAttention(), 1), group("b", FullAttention(), 2), blocks={"a": 2, "b": 2})
WINDOWED = cut(group("global", FullAttention(), 2), group("local", SlidingWindow(4), 1))
STATES = cut(group("global", FullAttention(), 1), group("state", Recurrent(), 1), blocks={"global": 1, "state": 3})

_STEP = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, 20), st.integers(0, 14), st.integers(0, 8), st.booleans()),
    st.tuples(st.just("store"), st.integers(0, 4), st.booleans()),
    st.tuples(st.just("complete"), st.integers(0, 3), st.booleans()),
    st.tuples(st.just("finish"), st.integers(0, 4)),
)
STEPS = st.lists(_STEP, min_size=5, max_size=40)


def inherited(examples: int) -> settings:
    """Settings of a test that several classes run, which hypothesis would take for a mistake."""
    return settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.differing_executors])


_numbers = itertools.count(1)


def touch(policy: Policy, ranks: dict[int, int], *, number: int | None = None, counted: bool = True) -> None:
    """One access, later than all before if it has no number. A slot's content is known by the slot."""
    slots = np.array(list(ranks), np.int64)
    policy.touch(
        Access(
            next(_numbers) if number is None else number,
            slots,
            np.array(list(ranks.values()), np.int64),
            np.full(len(slots), counted),
            slots.astype(np.uint64) + np.uint64(1000),
        )
    )


def remove(policy: Policy, *slots: int, evicted: bool = False) -> None:
    policy.remove(np.array(slots, np.int64), evicted=evicted)


def order(policy: Policy) -> list[list[int]]:
    """The sets that leave at once, in order, each sorted."""
    sets = []
    for slots, ranks in policy.victims():
        pairs = zip(slots.tolist(), ranks.tolist(), strict=True)
        for _, together in itertools.groupby(pairs, key=lambda pair: pair[1]):
            sets.append(sorted(slot for slot, _ in together))
    return sets


def play(chunking: Chunking, policy: Policy, num_units: int, steps: list[tuple]) -> None:
    """Requests with shared prefixes run through a small pool; whenever some chunks make room, what survives is
    judged."""
    requests = Requests(chunking, policy, num_units)
    for name, *arguments in steps:
        getattr(requests, name)(*arguments)
        requests.pool.check_integrity()
    assert requests.pool.policy_error is None


class PolicyConformance:
    """Inherit it, and say how the policy is made."""

    def make_policy(self) -> Policy:
        raise NotImplementedError

    @pytest.fixture
    def policy(self) -> Policy:
        return self.make_policy()

    def test_a_new_policy_knows_nothing(self, policy):
        assert order(policy) == []
        assert policy.slots().tolist() == []

    def test_within_an_access_the_highest_rank_leaves_first(self, policy):
        touch(policy, {4: 10, 1: 30, 9: 20})
        assert order(policy) == [[1], [9], [4]]

    def test_slots_of_equal_rank_leave_at_once(self, policy):
        touch(policy, {4: 7, 1: 9, 9: 7, 2: 9})
        assert order(policy) == [[1, 2], [4, 9]]

    def test_equal_ranks_of_different_requests_do_not_leave_at_once(self, policy):
        touch(policy, {0: 1})
        touch(policy, {1: 1})
        assert sorted(order(policy)) == [[0], [1]]

    def test_parts_of_an_access_are_one_access(self, policy):
        touch(policy, {4: 0, 1: 1}, number=10**6)
        touch(policy, {7: 2}, number=10**6, counted=False)
        touch(policy, {8: 3, 9: 2}, number=10**6, counted=False)
        assert order(policy) == [[8], [7, 9], [1], [4]]

    def test_an_access_to_nothing_changes_nothing(self, policy):
        touch(policy, {3: 0})
        touch(policy, {})
        assert order(policy) == [[3]]

    def test_a_slot_touched_again_is_known_once(self, policy):
        touch(policy, {3: 0, 5: 1})
        touch(policy, {3: 4, 5: 4})
        assert order(policy) == [[3, 5]]

    def test_a_removed_slot_is_no_victim_and_may_come_back(self, policy):
        touch(policy, {3: 0, 5: 1})
        remove(policy, 5)
        assert order(policy) == [[3]]
        touch(policy, {5: 0})
        assert sorted(slot for together in order(policy) for slot in together) == [3, 5]

    def test_removing_what_is_not_known_changes_nothing(self, policy):
        touch(policy, {3: 0})
        remove(policy, 2, 4, 100_000)
        assert order(policy) == [[3]]
        assert policy.slots().tolist() == [3]

    def test_looking_at_victims_and_stopping_half_way_changes_nothing(self, policy):
        touch(policy, {3: 0, 5: 1})
        next(iter(policy.victims()))
        assert order(policy) == order(policy) == [[5], [3]]

    @inherited(100)
    @given(CALLS, st.booleans())
    def test_every_known_slot_is_a_victim_exactly_once(self, calls, evicted):
        policy, known = self.make_policy(), set()
        for name, slots in calls:
            if name == "touch":
                touch(policy, slots)
                known |= set(slots)
            else:
                remove(policy, *slots, evicted=evicted)
                known -= set(slots)
            assert sorted(policy.slots().tolist()) == sorted(known)
            assert sorted(slot for together in order(policy) for slot in together) == sorted(known)

    @inherited(150)
    @given(st.integers(6, 24), STEPS)
    def test_evictions_leave_usable_prefixes_of_full_attention(self, num_units, steps):
        play(FULL, self.make_policy(), num_units, steps)

    @inherited(150)
    @given(st.integers(6, 24), STEPS)
    def test_evictions_leave_usable_prefixes_with_windows(self, num_units, steps):
        play(WINDOWED, self.make_policy(), num_units, steps)

    @inherited(150)
    @given(st.integers(6, 24), STEPS)
    def test_evictions_leave_usable_prefixes_with_states(self, num_units, steps):
        play(STATES, self.make_policy(), num_units, steps)
