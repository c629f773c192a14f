"""The tier over a store that counts, hangs and fails: its budget, its deadlines, its books."""

import contextlib
import random
import threading
import time

import pytest

from kvjax.tiers import TierError, TierFullError, TierTimeoutError, TierUnavailableError
from kvjax.tiers.kvstore import KVStoreTier
from tests.support.entries import LONG_S, entry, later, name_of
from tests.support.memory_store import MemoryStore
from tests.tiers.conformance import TierConformance, delete, exists, get, put, result

ENTRIES = [entry(seed, 10_000 - 128) for seed in range(8)]
ROOM = 10_000  # of one of them


def tier_on(store: MemoryStore, **settings) -> KVStoreTier:
    return KVStoreTier(store, **{"max_bytes": 2**30, **settings})


@pytest.fixture
def store():
    made = MemoryStore()
    yield made
    made.going.set()


@pytest.fixture
def small(store):
    tier = tier_on(store, max_bytes=3 * ROOM)
    yield tier
    store.going.set()
    tier.close()
    tier.check_integrity()


class TestTierOnMemory(TierConformance):
    @pytest.fixture
    def make(self):
        return lambda: tier_on(MemoryStore())

    def reopen(self, tier):
        tier.close()
        return tier_on(tier._store)


def test_what_was_used_longest_ago_makes_room(small):
    put(small, ENTRIES[:3])
    get(small, ENTRIES[0].name)
    put(small, [ENTRIES[1]])
    put(small, [ENTRIES[3]])
    assert exists(small, [one.name for one in ENTRIES[:4]]) == [True, True, False, True]


def test_an_entry_larger_than_the_budget_is_refused_and_evicts_nothing(small):
    put(small, ENTRIES[:3])
    big = entry(9, 3 * ROOM)
    with pytest.raises(TierFullError, match="an entry of 30128 bytes is larger than the budget"):
        put(small, [big])
    assert exists(small, [one.name for one in ENTRIES[:3]]) == [True] * 3


def test_the_budget_is_never_exceeded_counting_what_is_being_written(small, store):
    """Eight threads write, read and delete; the store counts an entry from the first moment of its writing."""
    stop = time.monotonic() + LONG_S

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(60):
            one = ENTRIES[rng.randrange(8)]
            with contextlib.suppress(KeyError):
                rng.choice([put, put, lambda tier, ones: get(tier, ones[0].name), drop])(small, [one])
            assert time.monotonic() < stop

    def drop(tier, ones):
        delete(tier, [ones[0].name])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 2 * ROOM <= store.most_room <= 3 * ROOM
    assert small.usage().num_bytes == store.room
    assert {one.name for one in ENTRIES if exists(small, [one.name]) == [True]} == store.entries.keys()


def test_a_call_of_more_entries_than_there_is_room_for_keeps_the_last(small):
    assert put(small, ENTRIES) == [True] * 8
    assert small.usage().num_entries == 3


def test_an_entry_that_is_read_is_not_evicted(small, store):
    put(small, ENTRIES[:3])
    store.going.clear()
    buffer = memoryview(bytearray(ROOM))
    (read,) = small.get([ENTRIES[0].name], [buffer], deadline=later())
    assert store.waiting.acquire(timeout=LONG_S)
    (one, other) = small.put(
        [one.name for one in ENTRIES[3:5]], [memoryview(one.frame) for one in ENTRIES[3:5]], deadline=later()
    )
    for _ in range(2):
        assert store.waiting.acquire(timeout=LONG_S)
    store.going.set()
    assert [result(one), result(other), result(read)] == [True, True, ROOM]
    assert bytes(buffer) == ENTRIES[0].frame
    assert exists(small, [one.name for one in ENTRIES[:5]]) == [True, False, False, True, True]


def test_room_that_is_not_made_by_the_deadline_is_a_timeout(small, store):
    store.going.clear()
    names, frames = [one.name for one in ENTRIES[:3]], [memoryview(one.frame) for one in ENTRIES[:3]]
    hanging = small.put(names, frames, deadline=later())
    for _ in range(3):
        assert store.waiting.acquire(timeout=LONG_S)
    (late,) = small.put([ENTRIES[3].name], [memoryview(ENTRIES[3].frame)], deadline=later(0.02))
    with pytest.raises(TierTimeoutError):
        result(late)
    store.going.set()
    assert [result(one) for one in hanging] == [True] * 3


def test_writing_one_name_twice_at_once_writes_it_once(small, store):
    store.going.clear()
    name, frame = ENTRIES[0].name, memoryview(ENTRIES[0].frame)
    futures = [small.put([name], [frame], deadline=later())[0] for _ in range(4)]
    assert store.waiting.acquire(timeout=LONG_S)
    store.going.set()
    assert sorted(result(one) for one in futures) == [False, False, False, True]


def test_a_write_that_ends_after_its_deadline_is_held_and_counted(store):
    tier = tier_on(store, num_threads=1)
    store.going.clear()
    frame = bytearray(ENTRIES[0].frame)
    (future,) = tier.put([ENTRIES[0].name], [memoryview(frame)], deadline=later(1))
    assert store.waiting.acquire(timeout=LONG_S)
    with pytest.raises(TierTimeoutError):
        result(future)
    frame[:] = bytes(ROOM)
    assert tier.usage().num_bytes == ROOM
    assert exists(tier, [ENTRIES[0].name]) == [False]
    store.going.set()
    put(tier, [ENTRIES[1]])  # by the one thread that hung
    assert get(tier, ENTRIES[0].name) == ENTRIES[0].frame
    assert tier.usage().num_bytes == 2 * ROOM
    tier.close()


def test_a_read_that_ends_after_its_deadline_touches_no_buffer(store):
    tier = tier_on(store, num_threads=1)
    put(tier, ENTRIES[:2])
    store.going.clear()
    buffers = [memoryview(bytearray(ROOM)) for _ in range(3)]
    futures = tier.get([ENTRIES[0].name] * 3, buffers, deadline=later(0.02))
    for future in futures:
        with pytest.raises(TierTimeoutError):
            result(future)
    store.going.set()
    assert get(tier, ENTRIES[1].name) == ENTRIES[1].frame  # by the one thread that hung
    assert not any(map(any, buffers))
    tier.close()


def test_threads_that_hang_take_no_more_memory(store):
    """Of a hundred frames only those that the threads had begun with are copied."""
    tier = tier_on(store, num_threads=2)
    store.going.clear()
    many = [entry(seed, 500) for seed in range(100)]
    futures = tier.put([one.name for one in many], [memoryview(one.frame) for one in many], deadline=later())
    for _ in range(2):
        assert store.waiting.acquire(timeout=LONG_S)
    assert all(future.cancel() for future in futures)
    assert tier.usage().num_bytes == 2 * len(many[0].frame)
    store.going.set()
    tier.close()


def test_closing_ends_what_hangs(store):
    tier = tier_on(store, timeout_s=0.02)
    store.going.clear()
    (future,) = tier.put([ENTRIES[0].name], [memoryview(ENTRIES[0].frame)], deadline=later())
    tier.close()
    assert isinstance(future.exception(timeout=0), TierUnavailableError)


def test_a_full_store_is_emptied_of_as_much_as_is_needed_once(store):
    tier = tier_on(store)
    put(tier, ENTRIES[:4])
    store.failures = [TierFullError("no room")]
    assert put(tier, [entry(9, 15_000)]) == [True]
    assert exists(tier, [one.name for one in ENTRIES[:4]]) == [False, False, True, True]
    store.failures = [TierFullError("no room"), TierFullError("still no room")]
    with pytest.raises(TierFullError, match="still no room"):
        put(tier, [ENTRIES[5]])
    store.failures = [TierFullError("no room")]
    for one in [*store.entries]:
        delete(tier, [one])
    with pytest.raises(TierFullError, match="no room"):
        put(tier, [ENTRIES[5]])
    assert tier.usage().num_bytes == store.room == 0
    tier.check_integrity()
    tier.close()


def test_an_entry_that_cannot_be_evicted_stays_and_the_write_fails(small, store):
    put(small, ENTRIES[:3])
    store.delete_failures = [TierError("a disk that fails")]
    with pytest.raises(TierError, match="a disk that fails"):
        put(small, ENTRIES[3:4])
    assert exists(small, [one.name for one in ENTRIES[:4]]) == [True, True, True, False]
    assert put(small, ENTRIES[3:4]) == [True]


def test_an_entry_that_somebody_else_deleted_is_forgotten_when_it_is_read(small, store):
    put(small, ENTRIES[:2])
    store.delete(ENTRIES[0].name)
    with pytest.raises(KeyError):
        get(small, ENTRIES[0].name)
    assert exists(small, [one.name for one in ENTRIES[:2]]) == [False, True]
    assert small.usage().num_bytes == ROOM


def test_refreshing_learns_what_others_did_and_keeps_within_the_budget(small, store):
    put(small, ENTRIES[:3])
    store.delete(ENTRIES[0].name)
    for one in ENTRIES[3:6]:
        store.entries[one.name] = one.frame
        store._take(ROOM)
    small.refresh()
    assert small.usage().num_entries == 3
    assert exists(small, [one.name for one in ENTRIES[1:3]]) == [True, True]
    assert store.room == small.usage().num_bytes


def test_a_tier_that_is_only_read_changes_nothing(store):
    put(tier_on(store), ENTRIES[:3])
    store.entries[ENTRIES[4].name] = b"cut short"
    before = dict(store.entries)
    tier = tier_on(store, write="never", max_bytes=ROOM)
    assert get(tier, ENTRIES[0].name) == ENTRIES[0].frame
    assert exists(tier, [ENTRIES[0].name, ENTRIES[4].name]) == [True, False]
    with pytest.raises(TierError, match="only read"):
        put(tier, ENTRIES[3:4])
    assert store.entries == before
    tier.close()


def test_entries_whose_bytes_are_not_those_of_their_names_are_deleted(store):
    store.entries = {ENTRIES[0].name: b"cut short", ENTRIES[1].name: ENTRIES[1].frame}
    tier = tier_on(store)
    assert list(store.entries) == [ENTRIES[1].name]
    assert tier.usage().num_bytes == ROOM
    tier.close()


def test_an_error_that_nobody_foresaw_becomes_one_of_the_tier_and_tells_its_type_alone(store, monkeypatch):
    def fail(*_):
        raise RuntimeError("with a secret")

    tier = tier_on(store)
    monkeypatch.setattr(store, "write", fail)
    with pytest.raises(TierError, match=r"^memory:: RuntimeError$"):
        put(tier, ENTRIES[:1])
    tier.check_integrity()
    assert tier.usage().num_bytes == 0
    tier.close()


def test_thousands_of_names_are_answered_at_once(small, store):
    put(small, ENTRIES[:1])
    store.going.clear()
    names = [name_of(seed, 5) for seed in range(100, 4100)]
    future = small.exists([*names, ENTRIES[0].name], deadline=later())
    assert future.done()
    assert result(future).tolist() == [False] * 4000 + [True]
    store.going.set()


def test_a_deletion_waits_for_a_write_of_the_same_entry(store):
    """If it did not, the entry could be deleted between its writing and its entering the books, which would keep it."""
    tier = tier_on(store)
    store.going.clear()
    name, frame = ENTRIES[0].name, memoryview(ENTRIES[0].frame)
    (write,) = tier.put([name], [frame], deadline=later())
    assert store.waiting.acquire(timeout=LONG_S)
    late = tier.delete([name], deadline=later(0.02))
    with pytest.raises(TierTimeoutError):
        result(late)
    deletion = tier.delete([name], deadline=later())
    store.going.set()
    assert [result(write), result(deletion)] == [True, 1]
    assert exists(tier, [name]) == [False]
    assert tier.usage().num_bytes == store.room == 0
    tier.close()


def test_an_entry_of_another_size_does_not_enter_the_books(store):
    tier = tier_on(store)
    store.entries[ENTRIES[0].name] = b"cut short"
    (future,) = tier.get([ENTRIES[0].name], [memoryview(bytearray(ROOM))], deadline=later())
    assert result(future) == 9
    assert exists(tier, [ENTRIES[0].name]) == [False]
    tier.close()


def test_what_ended_before_its_turn_is_not_begun(store):
    tier = tier_on(store, num_threads=1)
    store.going.clear()
    names, frames = [one.name for one in ENTRIES[:3]], [memoryview(one.frame) for one in ENTRIES[:3]]
    futures = tier.put(names, frames, deadline=later())
    assert store.waiting.acquire(timeout=LONG_S)
    assert futures[1].cancel()
    store.going.set()
    assert [result(futures[0]), result(futures[2])] == [True, True]
    assert list(store.entries) == [names[0], names[2]]
    assert store.num_writes == 2
    tier.close()


def test_a_scan_that_fails_leaves_the_books_as_they_are(store, monkeypatch):
    """Also where the store holds more than the budget, because an eviction failed."""
    tier = tier_on(store, max_bytes=2 * ROOM)
    put(tier_on(store), ENTRIES[:4])
    store.delete_failures = [TierError("a disk that fails")]
    with pytest.raises(TierError, match="that fails"):
        tier.refresh()
    assert tier.usage().num_bytes == 4 * ROOM

    def fail(*_):
        raise TierError("a disk that still fails")

    monkeypatch.setattr(store, "look", fail)
    with pytest.raises(TierError, match="still fails"):
        tier.refresh()
    monkeypatch.undo()
    assert exists(tier, [one.name for one in ENTRIES[:4]]) == [True] * 4
    assert put(tier, [ENTRIES[4]]) == [True]
    assert tier.usage().num_bytes == store.room == 2 * ROOM
    tier.check_integrity()
    tier.close()
