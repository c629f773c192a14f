"""The books of the host pool: two phases, protection, refusals that change nothing."""

import copy
import gc
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest

from kvjax.pool import ChunkPool, Reservation


def key(name: object, group_idx: int = 0) -> bytes:
    return f"{name}/{group_idx}".encode()


def keys(*names: object) -> list[bytes]:
    return [key(name) for name in names]


def prepare(pool: ChunkPool, *names: object, **more) -> Reservation | None:
    return pool.prepare_store(keys(*names), [0] * len(names), **more)


def put(pool: ChunkPool, *names: object) -> None:
    reservation = prepare(pool, *names)
    assert reservation is not None
    pool.complete_store(reservation, ok=True)


def resident(pool: ChunkPool, *names: object) -> list[bool]:
    return (pool.find(keys(*names)) >= 0).tolist()


def snapshot(pool: ChunkPool) -> dict:
    """All that the pool knows, deeply copied and comparable; refusals are counted, and that may change."""

    def plain(value):
        if isinstance(value, np.ndarray):
            return value.tolist()
        if isinstance(value, dict):
            return {name: plain(item) for name, item in value.items() if name != "refused"}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        if isinstance(value, set):
            return sorted(map(id, value))
        if hasattr(value, "__dict__"):
            return plain(vars(value))
        if hasattr(value, "__slots__"):
            return plain({name: getattr(value, name) for name in value.__slots__})
        return copy.deepcopy(value)

    return plain(pool)


@pytest.fixture
def pool() -> Iterator[ChunkPool]:
    made = ChunkPool(4, [1])
    yield made
    made.check_integrity()


class TestEviction:
    def test_a_chunk_asked_for_again_is_protected_and_another_one_goes(self, pool):
        """E1a: capacity 4, chunks 2 (oldest) and 1 stored, two units free; storing [2, 3, 4, 5] evicts 1, and 2
        still hits."""
        put(pool, 2)
        put(pool, 1)
        reservation = prepare(pool, 2, 3, 4, 5)
        assert reservation.keys == tuple(keys(3, 4, 5))
        assert resident(pool, 2, 1) == [True, False]
        assert pool.counts.evicted == 1
        pool.complete_store(reservation, ok=True)
        assert resident(pool, 2, 3, 4, 5) == [True] * 4

    def test_a_store_whose_only_victim_is_its_own_chunk_is_refused_as_a_whole(self):
        """E1b: capacity 3, chunk 2 stored, the same call needs 3 units of which 2 are free."""
        pool = ChunkPool(3, [1])
        put(pool, 2)
        before = snapshot(pool)
        assert prepare(pool, 2, 3, 4, 5) is None
        assert snapshot(pool) == before
        assert pool.counts.refused == 1
        pool.check_integrity()

    def test_the_tail_goes_first_in_whatever_order_the_copies_end(self, pool):
        """E1c: chunks 0 to 3 of a prefix finish their copies in the order 3, 2, 1, 0; the one evicted is 3."""
        reservations = [prepare(pool, *range(n + 1)) for n in range(4)]
        for reservation in reversed(reservations):
            pool.complete_store(reservation, ok=True)
        put(pool, "other")
        assert resident(pool, 0, 1, 2, 3) == [True, True, True, False]

    @pytest.mark.parametrize("order", ["3210", "0123", "2031"])
    def test_the_order_of_a_touch_does_not_matter_but_its_ranks_do(self, pool, order):
        put(pool, *order)
        pool.touch(keys(*order), np.array([int(name) for name in order]))
        put(pool, "x", "y")
        assert resident(pool, *"0123") == [True, True, False, False]

    def test_chunks_of_one_rank_leave_at_once(self, pool):
        reservation = prepare(pool, "a", "b", "c", ranks=np.array([1, 5, 5]))
        pool.complete_store(reservation, ok=True)
        put(pool, "x", "y")
        assert resident(pool, *"abcxy") == [True, False, False, True, True]

    def test_what_is_read_or_written_is_no_victim(self, pool):
        put(pool, "read", "idle")
        pins = pool.pin(pool.find(keys("read")))
        written = prepare(pool, "written")
        assert prepare(pool, "x", "y", "z") is None
        put(pool, "x", "y")
        assert resident(pool, "read", "idle", "x", "y") == [True, False, True, True]
        pool.complete_store(written, ok=True)
        assert resident(pool, "written") == [True]
        pool.unpin(pins)

    def test_only_what_is_kept_is_protected_if_that_is_said(self, pool):
        """A request's own chunks of a lower checkpoint make room for its next one."""
        put(pool, "old", "a", "b", "c")
        reservation = prepare(pool, "old", "a", "b", "c", "new", kept=keys("a", "b", "c", "new"))
        assert reservation.keys == (key("new"),)
        pool.complete_store(reservation, ok=True)
        assert resident(pool, "old", "a", "b", "c", "new") == [False, True, True, True, True]

    def test_a_refusal_changes_nothing_while_others_read_and_write(self, pool):
        put(pool, "a", "b")
        pins = pool.pin(pool.find(keys("a")))
        written = prepare(pool, "w")
        before = snapshot(pool)
        assert prepare(pool, "x", "y", "z", "u") is None
        assert snapshot(pool) == before
        pool.unpin(pins)
        pool.complete_store(written, ok=False)


class TestStores:
    def test_a_chunk_being_written_is_held_but_not_found(self, pool):
        reservation = prepare(pool, "a")
        assert pool.find(keys("a")).tolist() == [-1]
        assert pool.held(keys("a")).tolist() == [0]
        assert (pool.num_resident, pool.num_free_units) == (0, 3)
        again = prepare(pool, "a", "b")
        assert again.keys == (key("b"),)
        pool.complete_store(reservation, ok=True)
        assert resident(pool, "a", "b") == [True, False]
        pool.complete_store(again, ok=True)
        assert (pool.num_resident, pool.counts.stored) == (2, 2)

    def test_a_failed_store_is_rolled_back(self, pool):
        put(pool, "a")
        reservation = prepare(pool, "b", "c")
        assert pool.complete_store(reservation, ok=False) == []
        assert resident(pool, "a", "b", "c") == [True, False, False]
        assert (pool.num_free_units, pool.counts.failed, pool.counts.stored) == (3, 2, 1)

    def test_a_key_given_twice_takes_units_once(self, pool):
        assert prepare(pool, "a", "a", "b").keys == tuple(keys("a", "b"))
        assert pool.num_free_units == 2

    def test_a_store_of_nothing_new_is_an_empty_reservation(self, pool):
        put(pool, "a")
        reservation = prepare(pool, "a")
        assert reservation.keys == ()
        assert pool.complete_store(reservation, ok=True) == []

    def test_a_reservation_completed_twice_or_elsewhere_is_refused(self, pool):
        reservation = prepare(pool, "a")
        foreign = prepare(ChunkPool(4, [1]), "a")
        pool.complete_store(reservation, ok=True)
        for wrong in (reservation, foreign):
            before = snapshot(pool)
            with pytest.raises(ValueError, match="`reservation` must be one that was prepared here and not completed"):
                pool.complete_store(wrong, ok=True)
            assert snapshot(pool) == before

    @pytest.mark.parametrize("group_idx", [1, 3, -1])
    def test_a_group_without_chunks_is_refused(self, group_idx):
        pool = ChunkPool(4, [1, None, 2])
        with pytest.raises(ValueError, match=f"`group_idxs` must be of groups that are cached, got {group_idx}"):
            pool.prepare_store(keys("a", "b"), [0, group_idx])
        assert pool.num_free_units == 4

    def test_a_chunk_is_accounted_with_the_units_of_its_own_group(self):
        """F1: group bytes per chunk 100, 20 and 20 in 1,400 bytes hold 10 chunks of all three groups: a key of one
        group does not reserve a row for all."""
        pool = ChunkPool(1400, [100, 20, 20])
        listed = [(name, g) for name in range(10) for g in range(3)]
        reservation = pool.prepare_store([key(*place) for place in listed], [g for _, g in listed])
        assert len(reservation.keys) == 30
        assert [len(units) for units in reservation.units[:3]] == [100, 20, 20]
        assert pool.num_free_units == 0
        pool.complete_store(reservation, ok=True)
        assert pool.counts.by_group_units == {0: 1000, 1: 200, 2: 200}
        assert pool.prepare_store([key(10, 1)], [1]) is not None
        assert pool.counts.evicted == 1
        pool.check_integrity()


class TestPins:
    def test_pins_name_what_is_read(self, pool):
        put(pool, "a", "b")
        pins = pool.pin(pool.find(keys("b", "a")))
        assert pins.keys == tuple(keys("b", "a"))
        assert [units.tolist() for units in pins.units] == [[1], [0]]
        pool.unpin(pins)

    def test_pins_are_counted_and_each_is_released_once(self, pool):
        """E8: a second release is an error, never -1 and never a silent reset to 0."""
        put(pool, "a")
        slots = pool.find(keys("a"))
        first, second = pool.pin(slots), pool.pin(slots)
        pool.unpin(first)
        before = snapshot(pool)
        with pytest.raises(ValueError, match="`pins` must be ones that were taken here and not released yet"):
            pool.unpin(first)
        assert snapshot(pool) == before
        assert prepare(pool, "w", "x", "y", "z") is None  # the second reader is still there
        pool.unpin(second)
        assert pool.open_pins() == set()

    def test_pins_of_another_pool_are_refused(self, pool):
        other = ChunkPool(4, [1])
        put(other, "a")
        put(pool, "a")
        with pytest.raises(ValueError, match="`pins` must be ones that were taken here"):
            pool.unpin(other.pin(other.find(keys("a"))))

    @pytest.mark.parametrize("wrong", [-1, 1, 2, 99])
    def test_a_batch_with_one_wrong_slot_pins_nothing(self, pool, wrong):
        """E8: element 2 of a batch of 4 holds nothing or is being written (slot 1); nothing is left pinned."""
        put(pool, "a")
        reservation = prepare(pool, "written")
        before = snapshot(pool)
        with pytest.raises(ValueError, match=f"`slots` must be of resident chunks, got {wrong}"):
            pool.pin(np.array([0, 0, wrong, 0]))
        assert snapshot(pool) == before
        pool.complete_store(reservation, ok=True)

    def test_a_chunk_that_was_invalidated_cannot_be_pinned_any_more(self, pool):
        """Someone remembers a slot; its chunk was invalidated while another request reads it."""
        put(pool, "a")
        slots = pool.find(keys("a"))
        reader = pool.pin(slots)
        pool.invalidate()
        with pytest.raises(ValueError, match="`slots` must be of resident chunks, got 0"):
            pool.pin(slots)
        pool.unpin(reader)
        assert pool.num_free_units == 4

    def test_a_chunk_pinned_twice_by_one_holder_is_released_with_it(self, pool):
        put(pool, "a")
        pool.unpin(pool.pin(np.repeat(pool.find(keys("a")), 2)))
        put(pool, "w", "x", "y", "z")
        assert resident(pool, "a") == [False]


class TestInvalidation:
    def test_chunks_become_misses_and_their_units_are_free(self, pool):
        put(pool, "a", "b", "c")
        assert pool.invalidate(keys("a", "c", "never stored", "a")) == 2
        assert resident(pool, "a", "b", "c") == [False, True, False]
        assert pool.num_free_units == 3

    def test_all_of_it(self, pool):
        put(pool, "a", "b")
        assert pool.invalidate() == 2
        assert pool.held_keys() == []
        assert pool.num_free_units == 4

    def test_a_chunk_invalidated_while_it_is_written_is_never_published(self, pool):
        reservation = prepare(pool, "a", "b")
        assert pool.invalidate(keys("a")) == 1
        assert pool.num_free_units == 2  # its bytes are still arriving
        assert pool.complete_store(reservation, ok=True) == keys("b")
        assert resident(pool, "a", "b") == [False, True]
        assert (pool.counts.stale, pool.num_free_units) == (1, 3)

    def test_a_chunk_stored_anew_is_not_published_by_the_completion_of_the_old_store(self, pool):
        """A store is under way, its chunk is invalidated and stored again: the first completion belongs to bytes that
        nobody wants, and the second one alone publishes."""
        stale = prepare(pool, "a")
        pool.invalidate()
        fresh = prepare(pool, "a")
        assert fresh.keys == (key("a"),)
        assert fresh.units[0].tolist() != stale.units[0].tolist()
        pool.complete_store(stale, ok=True)
        assert resident(pool, "a") == [False]
        pool.complete_store(fresh, ok=True)
        assert resident(pool, "a") == [True]
        assert pool.num_free_units == 3

    def test_a_chunk_invalidated_while_it_is_read_keeps_its_units_until_then(self, pool):
        put(pool, "a", "b", "c", "d")
        pins = pool.pin(pool.find(keys("a")))
        assert pool.invalidate(keys("a")) == 1
        assert resident(pool, "a") == [False]
        assert prepare(pool, "w", "x", "y", "z") is None
        assert pool.invalidate(keys("a")) == 0
        pool.unpin(pins)
        assert pool.num_free_units == 1


def test_what_is_kept_of_a_pool_does_not_keep_its_arrays_alive():
    """E11: a thousand reservations and pins of a pool of a million units outlive it; none holds a view of it."""
    tracemalloc.start()
    try:
        pool = ChunkPool(1_000_000, [8])
        kept: list[object] = []
        for name in range(1000):
            reservation = prepare(pool, name)
            pool.complete_store(reservation, ok=True)
            kept += [reservation, pool.pin(pool.find(keys(name)))]
        del pool
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < 2_500_000
    finally:
        tracemalloc.stop()


def test_books_that_contradict_each_other_are_noticed():
    """E10: free, evictable and held do not add up to the total: the recount must say so."""
    pool = ChunkPool(8, [1])
    put(pool, "a", "b")
    pool.check_integrity()
    for spoil in (
        lambda p: p._units.take(1),
        lambda p: p._policy.remove(np.array([0])),
        lambda p: p._index.pop(key("a")),
        lambda p: p.counts.by_group_units.update({0: 7}),
        lambda p: setattr(p._slots[1], "pins", 1),
        lambda p: setattr(p._slots[1], "writing", True),
        lambda p: p._free_slots.append(1),
    ):
        spoilt = copy.deepcopy(pool)
        spoil(spoilt)
        with pytest.raises(AssertionError):
            spoilt.check_integrity()
