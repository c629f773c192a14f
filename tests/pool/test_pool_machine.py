"""The pool against a slow, obvious model, through any sequence of calls."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from kvjax.pool import ChunkPool, Pins, Reservation
from tests.oracles.pool_model import Chunk, PoolModel
from tests.support.machines import machine_settings

UNITS_PER_CHUNK = (1, None, 3, 2)
GROUPS = (0, 2, 3)
NAMES = st.integers(0, 14)


def key(name: int) -> bytes:
    return name.to_bytes(2, "little")


def group_of(name: int) -> int:
    return GROUPS[name % 3]


class PoolMachine(RuleBasedStateMachine):
    stores = Bundle("stores")
    readers = Bundle("readers")

    @initialize(num_units=st.integers(1, 20))
    def start(self, num_units: int):
        self.pool = ChunkPool(num_units, UNITS_PER_CHUNK)
        self.model = PoolModel(num_units, UNITS_PER_CHUNK)
        self.in_use: dict[int, Chunk] = {}  # the chunk of each unit that was handed out

    @rule(
        target=stores,
        ranks=st.dictionaries(NAMES, st.integers(0, 3), max_size=6),
        kept=st.none() | st.sets(NAMES, max_size=5),
    )
    def prepare_store(self, ranks: dict[int, int], kept: set[int] | None):
        names = list(ranks)
        kept_keys = None if kept is None else [key(name) for name in sorted(kept)]
        request = ([key(name) for name in names], [group_of(name) for name in names])
        expected = self.model.prepare_store(*request, list(ranks.values()), kept_keys)
        found = self.pool.prepare_store(*request, np.array(list(ranks.values()), np.int64), kept=kept_keys)
        assert (found is None) == (expected is None)
        if found is None or expected is None:
            return multiple()
        assert found.keys == tuple(chunk.key for chunk in expected)
        self.forget_free_units()
        for chunk, units in zip(expected, found.units, strict=True):
            assert len(units) == chunk.cost
            for unit in units.tolist():
                assert unit not in self.in_use, "a unit of another chunk was handed out"
                self.in_use[unit] = chunk
        return found, expected

    @rule(store=consumes(stores), ok=st.booleans())
    def complete_store(self, store: tuple[Reservation, list[Chunk]], ok: bool):
        reservation, chunks = store
        assert self.pool.complete_store(reservation, ok=ok) == self.model.complete_store(chunks, ok)

    @rule(target=readers, names=st.lists(NAMES, max_size=5))
    def pin(self, names: list[int]):
        keys = [key(name) for name in names if key(name) in self.model.resident()]
        return self.pool.pin(self.pool.find(keys)), self.model.pin(keys)

    @rule(reader=consumes(readers))
    def unpin(self, reader: tuple[Pins, list[Chunk]]):
        pins, chunks = reader
        held = [units.tolist() for units in pins.units]
        assert held == [[unit for unit, of in self.in_use.items() if of is chunk] for chunk in chunks]
        self.pool.unpin(pins)
        self.model.unpin(chunks)

    @rule(ranks=st.dictionaries(NAMES, st.integers(0, 3), max_size=6))
    def touch(self, ranks: dict[int, int]):
        keys = [key(name) for name in ranks]
        self.pool.touch(keys, np.array(list(ranks.values()), np.int64))
        self.model.touch(keys, ranks.values())

    @rule(names=st.lists(NAMES, max_size=4))
    def invalidate_some(self, names: list[int]):
        keys = [key(name) for name in names]
        assert self.pool.invalidate(keys) == self.model.invalidate(keys)

    @rule()
    def invalidate_all(self):
        assert self.pool.invalidate() == self.model.invalidate()

    def forget_free_units(self):
        self.in_use = {unit: chunk for unit, chunk in self.in_use.items() if chunk in self.model.chunks}

    @invariant()
    def equal(self):
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        keys = [key(name) for name in range(15)]
        found, held = self.pool.find(keys), self.pool.held(keys)
        assert {k for k, slot in zip(keys, found, strict=True) if slot >= 0} == self.model.resident()
        assert {k for k, slot in zip(keys, held, strict=True) if slot >= 0} == self.model.held()
        assert set(self.pool.held_keys()) == self.model.held()
        assert self.pool.num_free_units == self.model.num_free
        assert self.pool.num_resident == len(self.model.resident())


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = machine_settings(100, 40)
