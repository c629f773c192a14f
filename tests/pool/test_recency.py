"""The list of accesses against a plain dictionary, with blocks so small that they split and join all the time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.pool import recency
from kvjax.pool.recency import RecencyList

SLOTS = st.integers(0, 60)
CALLS = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"), st.integers(0, 30), st.dictionaries(SLOTS, st.integers(0, 3), min_size=1, max_size=7)
        ),
        st.tuples(st.just("append"), st.just(0), st.dictionaries(SLOTS, st.integers(0, 3), min_size=1, max_size=7)),
        st.tuples(
            st.just("remove"), st.just(0), st.sets(SLOTS, max_size=25).map(lambda slots: dict.fromkeys(slots, 0))
        ),
        st.tuples(st.just("take_oldest"), st.just(0), st.just({})),
    ),
    max_size=60,
)


class Model:
    """Slots with their place in the order: the number of the access, how many were appended since, and the rank."""

    def __init__(self):
        self.newest = (0, 0)
        self.held: dict[int, tuple[tuple[int, int], int]] = {}

    def add(self, place: tuple[int, int], ranks: dict[int, int]) -> None:
        self.newest = max(self.newest, place)
        self.held |= {slot: (place, rank) for slot, rank in ranks.items()}

    def order(self) -> list[list[int]]:
        sets: dict[tuple, list[int]] = {}
        for slot, (place, rank) in self.held.items():
            sets.setdefault((place, -rank), []).append(slot)
        return [sorted(sets[key]) for key in sorted(sets)]


def order(accesses: RecencyList) -> list[list[int]]:
    found: list[list[int]] = []
    for slots, ranks in accesses.oldest_first():
        cuts = np.flatnonzero(np.diff(ranks)) + 1
        found += [sorted(part.tolist()) for part in np.split(slots, cuts)]
    return found


class Both:
    """A list and its model, which get the same calls."""

    def __init__(self):
        self.accesses, self.model = RecencyList(), Model()

    def call(self, name: str, number: int, ranks: dict[int, int]) -> None:
        accesses, model = self.accesses, self.model
        slots, values = np.array(list(ranks), np.int64), np.array(list(ranks.values()), np.int64)
        if name == "add":
            accesses.add(number, slots, values)
            model.add((number, 0), ranks)
        elif name == "append":
            falling = np.argsort(-values, kind="stable")
            accesses.append(slots[falling], values[falling])
            model.add((model.newest[0], model.newest[1] + 1), ranks)
        elif name == "remove":
            accesses.remove(slots)
            model.held = {slot: place for slot, place in model.held.items() if slot not in ranks}
        elif model.held:
            oldest = min(place for place, _ in model.held.values())
            taken, of_taken = accesses.take_oldest()
            expected = {slot: rank for slot, (place, rank) in model.held.items() if place == oldest}
            assert dict(zip(taken.tolist(), of_taken.tolist(), strict=True)) == expected
            model.held = {slot: place for slot, place in model.held.items() if slot not in expected}

    def check(self) -> None:
        assert order(self.accesses) == self.model.order()
        assert self.accesses.num_slots == len(self.model.held)
        assert self.accesses.slots().tolist() == sorted(self.model.held)
        assert self.accesses.holds(np.arange(200)).tolist() == [slot in self.model.held for slot in range(200)]
        for one in range(31):
            held = any(place == (one, 0) for place, _ in self.model.held.values())
            assert self.accesses.has_access(one) == held


def small_blocks(patch: pytest.MonkeyPatch, entries: int) -> None:
    patch.setattr(recency, "_BLOCK_ENTRIES", entries)
    patch.setattr(recency, "_MOST_ENTRIES", 2 * entries)
    patch.setattr(recency, "_SPARSE", max(1, entries // 2))


@pytest.mark.parametrize("entries", [3, 6, 12])
@settings(max_examples=150, deadline=None)
@given(calls=CALLS)
def test_the_list_equals_a_dictionary_however_blocks_split_and_join(entries, calls):
    with pytest.MonkeyPatch.context() as patch:
        small_blocks(patch, entries)
        both = Both()
        for call in calls:
            both.call(*call)
            both.check()


@pytest.mark.parametrize("entries", [4, 8, 16])
@pytest.mark.parametrize("seed", range(6))
def test_the_same_for_many_calls_that_name_slots_of_many_blocks(monkeypatch, entries, seed):
    """Blocks that become small in one call are joined with each other, in whatever order they are seen."""
    small_blocks(monkeypatch, entries)
    rng, both = np.random.default_rng(seed), Both()
    for number in range(1, 400):
        name = str(rng.choice(["add"] * 6 + ["append", "take_oldest"] + ["remove"] * 3))
        slots = rng.choice(190, int(rng.integers(1, 60 if name == "remove" else 12)), replace=False)
        recent = max(1, number - int(rng.integers(0, 40)))
        both.call(name, recent, {int(slot): int(rng.integers(4)) for slot in slots})
        both.check()
