"""The books of a tier with a budget, beside slow and obvious ones."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvjax.tiers.budget import Budget, Room
from tests.support.entries import name_of
from tests.support.machines import machine_settings

NAMES = [name_of(seed, 1 + 50 * (seed % 4)) for seed in range(8)]
MOST = 600
names = st.sampled_from(NAMES)


class BudgetMachine(RuleBasedStateMachine):
    """`held` is a plain list, the entry used longest ago first."""

    def __init__(self):
        super().__init__()
        self.budget = Budget(MOST)
        self.held: list = []
        self.writing: set = set()
        self.leaving: set = set()
        self.reading: list = []
        self.changed: set = set()  # while they are read
        self.scanning: dict | None = None  # what the store held when a scan looked at it

    def room(self) -> int:
        return MOST - sum(name.num_bytes for name in [*self.held, *self.writing, *self.leaving])

    def use(self, name):
        if name in self.held:
            self.held.remove(name)
            self.held.append(name)

    def hold(self, name):
        self.held.append(name)
        self.changed |= {name} & set(self.reading)

    @rule(name=names)
    def reserve(self, name):
        room = self.budget.reserve(name)
        if name in self.held:
            assert room is Room.THERE
            self.use(name)
        elif name in self.writing | self.leaving:
            assert room is Room.BUSY
        elif name.num_bytes > self.room():
            assert room is Room.SHORT
            assert self.budget.shortage(name) == name.num_bytes - self.room()
        else:
            assert room is Room.RESERVED
            self.writing.add(name)

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), well=st.booleans())
    def end_write(self, data, well):
        name = data.draw(st.sampled_from(sorted(self.writing)))
        self.writing.remove(name)
        if well:
            self.budget.publish(name)
            self.hold(name)
        else:
            self.budget.drop(name)

    @rule(name=names)
    def begin_read(self, name):
        self.budget.begin_read(name)
        self.reading.append(name)
        self.use(name)

    @precondition(lambda self: self.reading)
    @rule()
    def end_read(self):
        self.budget.end_read(self.reading.pop())
        self.changed &= set(self.reading)

    @precondition(lambda self: self.reading)
    @rule()
    def a_read_found_its_entry(self):
        name = self.reading[-1]
        self.budget.found(name)
        if name not in self.changed:
            self.use(name)
        unknown = name not in {*self.held, *self.writing, *self.leaving, *self.changed}
        if unknown and name.num_bytes <= self.room():
            self.hold(name)

    @precondition(lambda self: self.reading)
    @rule()
    def a_read_missed_its_entry(self):
        name = self.reading[-1]
        self.budget.missed(name)
        if name in self.held and name not in self.changed:
            self.held.remove(name)
            self.changed.add(name)

    @rule(num_bytes=st.integers(-10, MOST))
    def evict(self, num_bytes):
        wanted = num_bytes - sum(name.num_bytes for name in self.leaving)
        expected = []
        for name in self.held:
            if wanted <= 0:
                break
            if name not in self.reading:
                expected.append(name)
                wanted -= name.num_bytes
        assert self.budget.evict(num_bytes) == expected
        self.held = [name for name in self.held if name not in expected]
        self.leaving |= set(expected)

    @rule(name=names)
    def leave(self, name):
        assert self.budget.leave(name) == (name in self.held)
        if name in self.held:
            self.held.remove(name)
            self.leaving.add(name)

    @precondition(lambda self: self.leaving)
    @rule(data=st.data(), well=st.booleans())
    def end_leave(self, data, well):
        name = data.draw(st.sampled_from(sorted(self.leaving)))
        self.leaving.remove(name)
        if well:
            self.budget.gone(name)
            self.changed |= {name} & set(self.reading)
        else:
            self.budget.stay(name)
            self.hold(name)

    @precondition(lambda self: self.scanning is None)
    @rule(strangers=st.lists(names, unique=True, max_size=3))
    def begin_scan(self, strangers):
        self.budget.begin_scan()
        self.scanning = dict.fromkeys([*strangers, *(name for name in self.held if name not in strangers)])

    @precondition(lambda self: self.scanning is not None)
    @rule(lost=st.sets(names, max_size=2), well=st.booleans())
    def end_scan(self, lost, well):
        """Whatever the scan saw, what is written and deleted meanwhile is known better."""
        assert self.scanning is not None
        found = [name for name in self.scanning if name not in lost]
        before = list(self.held)
        self.scanning = None
        self.budget.end_scan(found if well else None)
        after = [name for name in NAMES if name in self.budget]
        if not well:
            assert set(after) == set(before)
        assert set(after) <= set(before) | set(found)
        assert not set(after) & (self.writing | self.leaving)
        kept = [name for name in before if name in after]
        self.held = [name for name in found if name in after and name not in before] + kept
        for name in [*self.held]:
            assert name in self.budget
        surplus = -self.room()
        if surplus > 0:
            self.evict(surplus)

    @invariant()
    def nothing_is_miscounted(self):
        self.budget.check_integrity()
        assert self.budget.num_entries == len(self.held)
        assert self.budget.num_bytes == MOST - self.room()
        assert [name in self.budget for name in NAMES] == [name in self.held for name in NAMES]


def test_the_books_are_those_of_plain_lists():
    run_state_machine_as_test(BudgetMachine, settings=machine_settings(150, 40))


def test_an_entry_larger_than_the_budget_never_has_room():
    assert Budget(100).reserve(name_of(1, 1000)) is Room.NEVER


def held(budget: Budget) -> list:
    """What is held, in the order in which it would go."""
    order = budget.evict(budget.max_bytes)
    for name in order:
        budget.stay(name)
    return order


def write(budget: Budget, name) -> None:
    assert budget.reserve(name) is Room.RESERVED
    budget.publish(name)


def budget_with(*held_names) -> Budget:
    budget = Budget(10**6)
    for name in held_names:
        write(budget, name)
    return budget


def test_a_scan_forgets_what_is_gone_and_lets_what_is_new_go_first():
    a, b, c, d = NAMES[:4]
    budget = budget_with(a, b)
    budget.begin_scan()
    budget.end_scan([d, b, c])
    assert held(budget) == [d, c, b]


def test_what_is_written_during_a_scan_stays_and_what_is_deleted_does_not_come_back():
    a, b, c, _ = NAMES[:4]
    budget = budget_with(a, b)
    budget.begin_scan()
    write(budget, c)
    budget.leave(a)
    budget.gone(a)
    budget.end_scan([a, b])
    assert held(budget) == [b, c]


def test_what_is_written_again_after_its_deletion_during_a_scan_stays():
    a = NAMES[0]
    budget = budget_with(a)
    budget.begin_scan()
    budget.leave(a)
    budget.gone(a)
    write(budget, a)
    budget.end_scan([])
    assert held(budget) == [a]
    budget.check_integrity()


def test_a_planted_miscount_is_found():
    budget = budget_with(NAMES[0])
    budget._num_bytes += 1
    with pytest.raises(AssertionError, match="miscounted"):
        budget.check_integrity()
