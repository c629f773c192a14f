"""What every policy of eviction must do, whatever its order. A test class inherits it and makes the policy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.pool import Policy

# One call: an access to some slots with ranks, or the removal of some.
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("touch"), st.dictionaries(st.integers(0, 30), st.integers(0, 4), max_size=8)),
        st.tuples(st.just("remove"), st.sets(st.integers(0, 30), max_size=8)),
    ),
    max_size=25,
)


def touch(policy: Policy, ranks: dict[int, int]) -> None:
    policy.touch(np.array(list(ranks), np.int64), np.array(list(ranks.values()), np.int64))


def remove(policy: Policy, *slots: int) -> None:
    policy.remove(np.array(slots, np.int64))


def order(policy: Policy) -> list[list[int]]:
    """The sets that leave at once, in order, each sorted."""
    return [sorted(together.tolist()) for together in policy.victims()]


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

    def test_the_arrays_given_are_not_kept(self, policy):
        slots, ranks = np.array([3, 5]), np.array([1, 0])
        policy.touch(slots, ranks)
        slots[:], ranks[:] = 7, 7
        assert order(policy) == [[3], [5]]

    def test_looking_at_victims_and_stopping_half_way_changes_nothing(self, policy):
        touch(policy, {3: 0, 5: 1})
        next(iter(policy.victims()))
        assert order(policy) == order(policy) == [[5], [3]]

    @given(CALLS)
    def test_every_known_slot_is_a_victim_exactly_once(self, calls):
        policy, known = self.make_policy(), set()
        for name, slots in calls:
            if name == "touch":
                touch(policy, slots)
                known |= set(slots)
            else:
                remove(policy, *slots)
                known -= set(slots)
            assert sorted(policy.slots().tolist()) == sorted(known)
            assert sorted(slot for together in order(policy) for slot in together) == sorted(known)
