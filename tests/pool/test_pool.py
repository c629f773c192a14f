"""The books of the host pool: two phases, protection, refusals that change nothing."""

import copy
import gc
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest

from kvjax.pool import ChunkPool, Reservation, books


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


def slots_of(pool: ChunkPool, *names: object) -> np.ndarray:
    return pool.held(keys(*names))


def touch(pool: ChunkPool, *names: object, ranks=None, access: int | None = None, counted=True) -> None:
    number = pool.new_access() if access is None else access
    order = np.arange(len(names)) if ranks is None else np.array(ranks)
    pool.touch(slots_of(pool, *names), order, access=number, counted=counted)


def snapshot(pool: ChunkPool) -> dict:
    """All that the pool knows, deeply copied and comparable, but what may change: refusals are counted, and which
    entries of a list leave at once is remembered."""

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
            return plain({name: getattr(value, name) for name in value.__slots__ if name != "sets"})
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
        touch(pool, *order, ranks=[int(name) for name in order])
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
        reservation = prepare(pool, "old", "a", "b", "c", "new", kept=slots_of(pool, "a", "b", "c"))
        assert (reservation.keys, reservation.places.tolist()) == ((key("new"),), [4])
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
        assert pool.complete_store(reservation, ok=False).tolist() == [False, False]
        assert resident(pool, "a", "b", "c") == [True, False, False]
        assert (pool.num_free_units, pool.counts.failed, pool.counts.stored) == (3, 2, 1)

    def test_a_key_given_twice_takes_units_once(self, pool):
        reservation = prepare(pool, "a", "a", "b", "a", ranks=np.array([0, 9, 1, 9]))
        assert (reservation.keys, reservation.places.tolist()) == (tuple(keys("a", "b")), [0, 2])
        assert pool.num_free_units == 2
        pool.complete_store(reservation, ok=True)
        put(pool, "x", "y", "z")
        assert resident(pool, "a", "b") == [True, False]  # where it stands first says its rank

    def test_a_store_of_nothing_new_is_an_empty_reservation(self, pool):
        put(pool, "a")
        reservation = prepare(pool, "a")
        assert reservation.keys == ()
        assert pool.complete_store(reservation, ok=True).tolist() == []

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
        assert [pool.units(reservation.slots[place : place + 1]).shape for place in range(3)] == [
            (1, 100),
            (1, 20),
            (1, 20),
        ]
        assert pool.num_free_units == 0
        pool.complete_store(reservation, ok=True)
        assert pool.units_by_group().tolist() == [1000, 200, 200]
        assert pool.resident_by_group().tolist() == pool.counts.stored_by_group.tolist() == [10, 10, 10]
        assert pool.prepare_store([key(10, 1)], [1]) is not None
        assert pool.counts.evicted == 1
        assert pool.counts.evicted_by_group.tolist() == [0, 0, 1]
        pool.check_integrity()

    def test_a_mask_publishes_a_part_and_rolls_back_the_rest(self, pool):
        reservation = prepare(pool, "a", "b", "c")
        published = pool.complete_store(reservation, ok=np.array([True, False, True]))
        assert published.tolist() == [True, False, True]
        assert resident(pool, "a", "b", "c") == [True, False, True]
        assert (pool.num_free_units, pool.counts.stored, pool.counts.failed) == (2, 2, 1)

    @pytest.mark.parametrize("ok", [np.array([True]), np.ones((2, 1), bool), np.array([1, 0]), "yes", None, 1])
    def test_what_is_no_mask_is_refused_and_the_reservation_stays_open(self, pool, ok):
        reservation = prepare(pool, "a", "b")
        before = snapshot(pool)
        with pytest.raises(ValueError, match="`ok` must be a bool or one for each of 2 keys, got "):
            pool.complete_store(reservation, ok=ok)
        assert snapshot(pool) == before
        pool.complete_store(reservation, ok=True)

    def test_keys_that_end_in_zero_bytes_stay_whole(self, pool):
        names = [b"k\0", b"k\0\0", b"k"]
        reservation = pool.prepare_store(names, [0, 0, 0])
        pool.complete_store(reservation, ok=True)
        assert reservation.keys == pool.keys(reservation.slots) == tuple(names)
        assert pool.find(names).tolist() == reservation.slots.tolist()

    def test_a_pool_without_room_for_one_chunk_finds_nothing_and_takes_nothing(self):
        pool = ChunkPool(1, [2, 3])
        assert pool.find([b"a"]).tolist() == [-1]
        assert pool.prepare_store([b"a"], [0]) is None
        pool.check_integrity()


class TestPins:
    def test_pins_name_what_is_read(self, pool):
        put(pool, "a", "b")
        pins = pool.pin(pool.find(keys("b", "a")))
        assert pool.keys(pins.slots) == tuple(keys("b", "a"))
        assert pool.units(pins.slots).tolist() == [[1], [0]]
        assert pins.epochs.tolist() == pool.epochs(pins.slots).tolist()
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

    def test_ten_chunks_looked_up_and_never_loaded_are_evictable_when_the_request_ends(self):
        """E7: the device prefix covers all that was hit and pinned."""
        pool = ChunkPool(10, [1])
        put(pool, *range(10))
        pins = pool.pin(pool.find(keys(*range(10))))
        assert prepare(pool, "x") is None
        pool.unpin(pins)
        assert pool.open_pins() == set()
        put(pool, *"abcdefghij")
        assert pool.counts.evicted == 10
        pool.check_integrity()

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
        put(pool, *"wxyz")
        assert pool.num_free_units == 0

    def test_a_chunk_pinned_twice_by_one_holder_is_released_with_it(self, pool):
        put(pool, "a")
        pool.unpin(pool.pin(np.repeat(pool.find(keys("a")), 2)))
        put(pool, "w", "x", "y", "z")
        assert resident(pool, "a") == [False]

    def test_a_chunk_pinned_twice_by_one_holder_and_invalidated_gives_its_units_back_once(self, pool):
        put(pool, "a", "b")
        pins = pool.pin(np.repeat(pool.find(keys("a")), 2))
        pool.invalidate(keys("a"))
        pool.unpin(pins)
        assert pool.num_free_units == 3


class TestInvalidation:
    def test_chunks_become_misses_and_their_units_are_free(self, pool):
        put(pool, "a", "b", "c")
        assert pool.invalidate(keys("a", "c", "never stored", "a")) == 2
        assert resident(pool, "a", "b", "c") == [False, True, False]
        assert pool.num_free_units == 3

    def test_all_of_it(self, pool):
        put(pool, "a", "b")
        assert pool.invalidate() == 2
        assert (pool.held_keys(), pool.num_resident, pool.invalidate()) == ([], 0, 0)
        assert pool.num_free_units == 4
        put(pool, *"wxyz")
        assert resident(pool, *"wxyz") == [True] * 4
        assert (pool.counts.evicted, pool.counts.invalidated) == (0, 2)

    def test_a_chunk_invalidated_while_it_is_written_is_never_published(self, pool):
        reservation = prepare(pool, "a", "b")
        assert pool.invalidate(keys("a")) == 1
        assert pool.num_free_units == 2  # its bytes are still arriving
        assert pool.complete_store(reservation, ok=True).tolist() == [False, True]
        assert resident(pool, "a", "b") == [False, True]
        assert (pool.counts.stale, pool.num_free_units) == (1, 3)

    def test_a_chunk_stored_anew_is_not_published_by_the_completion_of_the_old_store(self, pool):
        """A store is under way, its chunk is invalidated and stored again: the first completion belongs to bytes that
        nobody wants, and the second one alone publishes."""
        stale = prepare(pool, "a")
        pool.invalidate()
        fresh = prepare(pool, "a")
        assert fresh.keys == (key("a"),)
        assert pool.units(fresh.slots).tolist() != pool.units(stale.slots).tolist()
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


class TestAccesses:
    def test_a_chunk_stays_with_the_most_recent_access_to_it(self, pool):
        """A request decodes for long under the access of its lookup. Another one has since asked for the prefix they
        share, and has stored a chunk behind it: the prefix must not leave before that."""
        put(pool, "prefix")
        first, second = pool.new_access(), pool.new_access()
        touch(pool, "prefix", access=first)
        pool.complete_store(prepare(pool, "prefix", "second", access=second), ok=True)
        pool.complete_store(prepare(pool, "prefix", "first", access=first), ok=True)
        assert pool.accesses(slots_of(pool, "prefix", "second", "first")).tolist() == [second, second, first]
        put(pool, "x", "y", "z")
        assert resident(pool, "prefix", "second", "first") == [True, False, False]

    def test_a_slot_used_again_says_nothing_of_the_access_to_the_chunk_before(self, pool):
        old, recent = pool.new_access(), pool.new_access()
        pool.complete_store(prepare(pool, "a", access=recent), ok=True)
        pool.invalidate(keys("a"))
        pool.complete_store(prepare(pool, "b", access=old), ok=True)
        assert pool.accesses(slots_of(pool, "b")).tolist() == [old]

    def test_a_chunk_invalidated_while_it_is_read_is_not_named(self, pool):
        put(pool, "a", "b")
        slots = slots_of(pool, "a", "b")
        pins = pool.pin(slots)
        pool.invalidate(keys("a"))
        pool.touch(slots, np.arange(2), access=pool.new_access())
        pool.check_integrity()
        pool.unpin(pins)
        put(pool, *"wxyz")
        assert resident(pool, *"wxyz") == [True] * 4

    def test_slots_given_to_a_touch_are_not_the_policys(self, pool):
        put(pool, "a", "b")
        slots, ranks = slots_of(pool, "a", "b"), np.array([0, 1])
        pool.touch(slots, ranks, access=pool.new_access())
        slots[:], ranks[:] = 3, 7
        put(pool, "x", "y", "z")
        assert resident(pool, "a", "b") == [True, False]

    def test_an_epoch_tells_a_chunk_from_the_next_one_in_its_slot(self, pool):
        put(pool, "a")
        slots = slots_of(pool, "a", "never stored")
        epochs = pool.epochs(slots)
        assert pool.still_held(slots, epochs).tolist() == [True, False]
        pool.invalidate(keys("a"))
        put(pool, "b")
        assert slots_of(pool, "b").tolist() == slots[:1].tolist()
        assert pool.still_held(slots, epochs).tolist() == [False, False]

    @pytest.mark.parametrize("invalidate", ["all", "its namespace", "its key"])
    def test_what_was_invalidated_is_held_no_more(self, pool, invalidate):
        put(pool, "a")
        slots = slots_of(pool, "a")
        epochs = pool.epochs(slots)
        if invalidate == "its key":
            pool.invalidate(keys("a"))
        else:
            pool.invalidate_namespace(None if invalidate == "all" else 0)
        assert pool.still_held(slots, epochs).tolist() == [False]
        with pytest.raises(ValueError, match="`slots` must be of resident chunks, got 0"):
            pool.pin(slots)


class TestChanges:
    @pytest.fixture
    def changes(self, pool) -> list[tuple]:
        told: list[tuple] = []
        pool.on_change = lambda c: told.append((c.kind, c.reason, c.keys, c.group_idxs.tolist(), c.chunk_idxs.tolist()))
        return told

    def test_a_chunk_is_told_of_when_it_becomes_resident_and_when_it_makes_room(self, pool, changes):
        reservation = pool.prepare_store(keys("a", "b"), [0, 0], chunk_idxs=np.array([7, 8]))
        assert changes == []
        pool.complete_store(reservation, ok=np.array([True, False]))
        assert changes == [("stored", "", (key("a"),), [0], [7])]
        changes.clear()
        prepare(pool, *"wxyz")
        assert changes == [("removed", "evicted", (key("a"),), [0], [7])]

    @pytest.mark.parametrize("ok", [True, False])
    @pytest.mark.parametrize("whole", [True, False])
    def test_nobody_hears_of_a_chunk_that_was_never_found(self, pool, changes, ok, whole):
        """It is invalidated while it is being written; or its store fails."""
        reservation = prepare(pool, "a")
        if ok or not whole:
            pool.invalidate(None if whole else keys("a"))
        pool.complete_store(reservation, ok=ok)
        assert (changes, pool.num_resident, pool.num_free_units) == ([], 0, 4)

    def test_a_chunk_of_a_namespace_that_was_invalidated_is_removed_before_it_is_stored_anew(self, pool, changes):
        put(pool, "a")
        pool.invalidate()
        put(pool, "a")
        assert [change[:3] for change in changes] == [
            ("stored", "", (key("a"),)),
            ("removed", "invalidated", (key("a"),)),
            ("stored", "", (key("a"),)),
        ]


class TestNamespaces:
    def test_one_namespace_is_invalidated_and_the_others_stay(self, pool):
        spaces = [pool.namespaces.open(name) for name in (b"base", b"adapter")]
        for name, space in zip("ab", spaces, strict=True):
            pool.complete_store(prepare(pool, name, namespace=space), ok=True)
        assert pool.invalidate_namespace(spaces[1]) == 1
        assert resident(pool, "a", "b") == [True, False]
        assert (pool.num_resident, pool.counts.invalidated) == (1, 1)

    def test_an_id_is_used_again_when_nobody_refers_to_it_and_its_old_chunks_stay_gone(self, pool):
        space = pool.namespaces.open(b"image 1")
        reservation = prepare(pool, "a", namespace=space)
        pool.namespaces.close(space)
        assert pool.namespaces.find(b"image 1") == space  # a chunk of it is being written
        pool.invalidate_namespace(space)
        pool.complete_store(reservation, ok=True)
        assert pool.namespaces.find(b"image 1") is None
        assert (pool.namespaces.in_use, pool.namespaces.open(b"image 2")) == (0, space)
        assert resident(pool, "a") == [False]

    def test_thousands_of_namespaces_that_come_and_go_take_few_ids(self, pool):
        for n in range(2000):
            space = pool.namespaces.open(b"image %d" % n)
            pool.complete_store(prepare(pool, n, namespace=space), ok=True)
            pool.namespaces.close(space)
        assert pool.namespaces.in_use == 4
        assert len(pool.namespaces.generation) <= 8

    def test_chunks_of_a_past_generation_make_room_before_any_is_evicted(self):
        pool = ChunkPool(20_000, [1])
        space = pool.namespaces.open(b"old weights")
        others = prepare(pool, *range(100))
        pool.complete_store(others, ok=True)
        pool.complete_store(prepare(pool, *range(100, 20_000), namespace=space), ok=True)
        pool.invalidate_namespace(space)
        put(pool, *(f"new {n}" for n in range(19_900)))
        assert pool.counts.evicted == 0
        assert pool.num_free_units == 0
        pool.check_integrity()

    def test_a_key_given_twice_is_cleared_away_once(self, pool, monkeypatch):
        monkeypatch.setattr(books, "_SWEPT_SLOTS", 1)
        put(pool, "x", "y", "a")
        pool.invalidate()
        assert prepare(pool, "a", "a").keys == (key("a"),)
        pool.check_integrity()

    def test_little_is_cleared_away_at_a_time(self):
        """A weight update drops all, and no call pauses to free it."""
        pool = ChunkPool(20_000, [1])
        put(pool, *range(20_000))
        assert pool.invalidate() == 20_000
        assert (pool.num_resident, pool.num_free_units) == (0, books._SWEPT_CHUNKS)
        prepare(pool, "a")
        assert pool.num_free_units == 2 * books._SWEPT_CHUNKS - 1
        pool.clear_away()
        assert pool.num_free_units == 3 * books._SWEPT_CHUNKS - 1
        for _ in range(100):
            pool.clear_away()
        assert pool.num_free_units == 19_999
        pool.check_integrity()


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


@pytest.mark.parametrize(
    "spoil",
    [
        lambda c, b: c._free_units.take(1),
        lambda c, b: c._free_slots.take(1),
        lambda c, b: b.policy.remove(np.array([0]), evicted=True),
        lambda c, b: b.index.remove(np.array([0])),
        lambda c, b: setattr(b, "num_stale", 1),
        lambda c, b: setattr(b.index, "_num_entries", 1),
        lambda c, b: b.namespaces.existing.put(0, 7),
        lambda c, b: b.namespaces.held.put(0, 3),
        lambda c, b: b.namespaces.resident.put(0, 1),
        lambda c, b: setattr(b.namespaces, "_num_closed", 1),
        lambda c, b: c.pins.put(1, 1),
        lambda c, b: c.writing.put(1, True),
        lambda c, b: c.indexed.put(1, False),
        lambda c, b: c.indexed.put(5, True),
        lambda c, b: c.generation.put(1, 1),
        lambda c, b: c.key.put(1, key("a")),
        lambda c, b: c.epoch.put(1, 0),
        lambda c, b: c._units[0].put(1, 0),
    ],
)
def test_books_that_contradict_each_other_are_noticed(spoil):
    """E10: free, evictable and held do not add up to the total: the recount must say so."""
    pool = ChunkPool(8, [1])
    put(pool, "a", "b")
    pool.check_integrity()
    spoil(pool._chunks, pool._books)
    with pytest.raises(AssertionError):
        pool.check_integrity()
