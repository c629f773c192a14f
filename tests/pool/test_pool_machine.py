"""The pool against a slow, obvious model, through any sequence of calls, with each policy."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from kvjax.pool import ARC, LRU, Change, ChunkPool, Pins, Policy, Reservation, books
from tests.oracles.pool_model import Chunk, PoolModel
from tests.pool.conformance import order
from tests.support.machines import machine_settings

UNITS_PER_CHUNK = (1, None, 3, 2)
GROUPS = (0, 2, 3)
SPACES = st.sampled_from([None, "base", "adapter"])
NAMES = st.integers(0, 14)
RANKS = st.lists(st.tuples(NAMES, st.integers(0, 3)), max_size=6)

Store = tuple[Reservation, list[Chunk]]


def key(name: int, space: str | None) -> bytes:
    """Many of them end in zero bytes."""
    return name.to_bytes(2, "little") + (space or "").encode() + bytes(name % 3)


def group_of(name: int) -> int:
    return GROUPS[name % 3]


class PoolMachine(RuleBasedStateMachine):
    """Subclasses say which policy; of LRU the order is modelled, too, of others it is taken at its word."""

    stores = Bundle("stores")
    readers = Bundle("readers")

    def make_policy(self) -> Policy:
        raise NotImplementedError

    @initialize(num_units=st.integers(1, 20), swept=st.sampled_from([(1, 1), (2, 5), (100, 100)]))
    def start(self, num_units: int, swept: tuple[int, int]):
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(books, "_SWEPT_SLOTS", swept[0])
        self.patch.setattr(books, "_SWEPT_CHUNKS", swept[1])
        self.policy = self.make_policy()
        self.pool = ChunkPool(num_units, UNITS_PER_CHUNK, self.policy)
        self.pool.on_change = self.replay
        self.model = PoolModel(num_units, UNITS_PER_CHUNK)
        self.told: dict[bytes, tuple[int, int]] = {}  # what those who hear of changes believe to be resident
        self.in_use: dict[int, Chunk] = {}  # the chunk of each unit that was handed out
        self.numbers = [self.pool.new_access() for _ in range(2)]

    def teardown(self):
        if hasattr(self, "patch"):
            self.patch.undo()

    def replay(self, change: Change):
        for name, group_idx, chunk_idx in zip(change.keys, change.group_idxs, change.chunk_idxs, strict=True):
            if change.kind == "stored":
                assert name not in self.told, "a chunk is stored once"
                self.told[name] = (int(group_idx), int(chunk_idx))
            else:
                assert self.told.pop(name) == (int(group_idx), int(chunk_idx)), "a chunk is removed as it was stored"

    def number(self, which: int) -> int:
        """One of the accesses under way, or a new one; there may be later ones than that."""
        if which < len(self.numbers):
            return self.numbers[-1 - which]
        self.numbers = [*self.numbers, self.pool.new_access()][-4:]
        return self.numbers[-1]

    def eviction_order(self) -> Sequence[Sequence[Chunk]]:
        stale = set(self.stale().tolist())
        named = [[slot for slot in together if slot not in stale] for together in order(self.policy)]
        by_key = {chunk.key: chunk for chunk in self.model.chunks if chunk.found}
        told = [[by_key[name] for name in self.pool.keys(np.array(slots, np.int64))] for slots in named if slots]
        if isinstance(self.policy, LRU):
            expected = self.model.lru_order()
            assert list(map(set, told)) == list(map(set, expected))
        return told

    def stale(self) -> np.ndarray:
        """Slots of chunks that were invalidated with their namespace and are not cleared away."""
        indexed = np.flatnonzero(self.pool._chunks.indexed)
        return indexed[self.pool._books.past(indexed)]

    @rule(
        target=stores,
        ranks=RANKS,
        space=SPACES,
        which=st.integers(0, 6),
        kept=st.none() | st.sets(NAMES, max_size=5),
    )
    def prepare_store(self, ranks: list[tuple[int, int]], space: str | None, which: int, kept: set[int] | None):
        wanted = [(key(name, space), group_of(name)) for name, _ in ranks]
        kept_keys = None if kept is None else [key(name, space) for name in sorted(kept)]
        kept_slots = None
        if kept_keys is not None:
            slots = self.pool.held(kept_keys)
            kept_slots = slots[slots >= 0]
        handle = 0 if space is None else self.pool.namespaces.open(space.encode())
        access = self.number(which)
        expected = self.model.prepare_store(wanted, space, kept_keys, self.eviction_order())
        found = self.pool.prepare_store(
            [name for name, _ in wanted],
            [group for _, group in wanted],
            np.array([rank for _, rank in ranks], np.int64),
            access=access,
            kept=kept_slots,
            chunk_idxs=np.array([name for name, _ in ranks], np.int64),
            namespace=handle,
        )
        if space is not None:
            self.pool.namespaces.close(handle)
        assert (found is None) == (expected is None)
        if found is None or expected is None:
            return multiple()
        assert found.keys == tuple(chunk.key for chunk in expected)
        assert [wanted[place][0] for place in found.places] == list(found.keys)
        assert self.pool.keys(found.slots) == found.keys
        if expected:
            self.model.touch(access, [(name, rank) for (name, _), (_, rank) in zip(wanted, ranks, strict=True)])
        self.forget_free_units()
        for chunk, slot in zip(expected, found.slots, strict=True):
            units = self.pool.units(np.array([slot]))[0]
            assert len(units) == chunk.cost
            for unit in units.tolist():
                assert unit not in self.in_use, "a unit of another chunk was handed out"
                self.in_use[unit] = chunk
        return found, expected

    @rule(store=consumes(stores), seed=st.integers(0, 2**6 - 1), whole=st.booleans())
    def complete_store(self, store: Store, seed: int, whole: bool):
        reservation, chunks = store
        ok = [bool(seed >> (0 if whole else place) & 1) for place in range(len(chunks))]
        mask = bool(seed & 1) if whole else np.array(ok, bool)
        assert self.pool.complete_store(reservation, ok=mask).tolist() == self.model.complete_store(chunks, ok)

    @rule(target=readers, names=st.lists(NAMES, max_size=5), space=SPACES)
    def pin(self, names: list[int], space: str | None):
        keys = [key(name, space) for name in names if key(name, space) in self.model.resident()]
        return self.pool.pin(self.pool.find(keys)), self.model.pin(keys)

    @rule(reader=consumes(readers))
    def unpin(self, reader: tuple[Pins, list[Chunk]]):
        pins, chunks = reader
        for slot, chunk in zip(pins.slots, chunks, strict=True):
            units = self.pool.units(np.array([slot]))[0].tolist()
            assert units == [unit for unit, of in self.in_use.items() if of is chunk]
        self.pool.unpin(pins)
        self.model.unpin(chunks)

    @rule(ranks=st.dictionaries(NAMES, st.integers(0, 3), max_size=6), space=SPACES, which=st.integers(0, 6))
    def touch(self, ranks: dict[int, int], space: str | None, which: int):
        named = [(key(name, space), rank) for name, rank in ranks.items() if key(name, space) in self.model.held()]
        slots = self.pool.held([name for name, _ in named])
        access = self.number(which)
        self.pool.touch(slots, np.array([rank for _, rank in named], np.int64), access=access)
        self.model.touch(access, named)

    @rule(names=st.lists(NAMES, max_size=4), space=SPACES, by_slot=st.booleans())
    def invalidate_some(self, names: list[int], space: str | None, by_slot: bool):
        keys = [key(name, space) for name in names]
        expected = self.model.invalidate(lambda chunk: chunk.key in keys)
        if by_slot:
            slots = self.pool.held(keys)
            assert self.pool.invalidate_slots(np.unique(slots[slots >= 0])) == expected
        else:
            assert self.pool.invalidate(keys) == expected

    @rule(space=SPACES)
    def invalidate_namespace(self, space: str | None):
        known = 0 if space is None else self.pool.namespaces.find(space.encode())
        expected = self.model.invalidate(lambda chunk: chunk.space == space)
        assert (self.pool.invalidate_namespace(known) if known is not None else 0) == expected

    @rule()
    def invalidate_all(self):
        assert self.pool.invalidate() == self.model.invalidate(lambda chunk: True)

    @rule()
    def clear_away(self):
        self.pool.clear_away()

    @rule(space=SPACES.filter(bool))
    def open_namespace(self, space: str):
        self.pool.namespaces.open(space.encode())
        self.model.handles[space] += 1

    @rule(space=SPACES.filter(bool))
    def close_namespace(self, space: str):
        if self.model.handles[space]:
            known = self.pool.namespaces.find(space.encode())
            assert known is not None
            self.pool.namespaces.close(known)
            self.model.handles[space] -= 1

    def forget_free_units(self):
        self.in_use = {unit: chunk for unit, chunk in self.in_use.items() if chunk in self.model.chunks}

    @invariant()
    def equal(self):
        if not hasattr(self, "pool"):
            return
        pool, model = self.pool, self.model
        pool.check_integrity()
        assert pool.policy_error is None
        keys = [key(name, space) for name in range(15) for space in (None, "base", "adapter")]
        found, held = pool.find(keys), pool.held(keys)
        assert {k for k, slot in zip(keys, found, strict=True) if slot >= 0} == model.resident()
        assert {k for k, slot in zip(keys, held, strict=True) if slot >= 0} == model.held()
        assert set(pool.held_keys()) == model.held()
        assert pool.num_resident == len(model.resident())
        assert pool.still_held(held, pool.epochs(held)).tolist() == (held >= 0).tolist()
        self.equal_but_for_what_is_not_cleared_away()
        counts = pool.counts
        for name in ("stored", "evicted", "failed", "stale", "invalidated", "refused"):
            assert getattr(counts, name) == model.counts[name], name
        for g in range(len(UNITS_PER_CHUNK)):
            assert counts.stored_by_group[g] == model.counts[f"stored {g}"]
            assert counts.evicted_by_group[g] == model.counts[f"evicted {g}"]
            assert pool.resident_by_group()[g] == model.num_resident(g)

    def equal_but_for_what_is_not_cleared_away(self):
        pool, model = self.pool, self.model
        chunks, stale = pool._chunks, self.stale()
        unused = stale[~chunks.writing[stale] & (chunks.pins[stale] == 0)]
        groups, costs = chunks.group_idx[unused], chunks.widths[chunks.group_idx[unused]]
        assert pool.num_free_units + costs.sum() == model.num_free
        expected = [model.units(g) + costs[groups == g].sum() for g in range(len(UNITS_PER_CHUNK))]
        assert pool.units_by_group().tolist() == expected
        ready = stale[~chunks.writing[stale]]
        assert set(self.told) == model.resident() | set(pool.keys(ready))
        spaces = {space for space in ("base", "adapter") if pool.namespaces.find(space.encode()) is not None}
        assert spaces >= model.spaces()
        assert len(stale) or spaces == model.spaces()


class LRUMachine(PoolMachine):
    def make_policy(self) -> LRU:
        return LRU()


class ARCMachine(PoolMachine):
    def make_policy(self) -> ARC:
        return ARC(ghost_places=16)


TestLRUMachine = LRUMachine.TestCase
TestARCMachine = ARCMachine.TestCase
TestLRUMachine.settings = TestARCMachine.settings = machine_settings(100, 40)
