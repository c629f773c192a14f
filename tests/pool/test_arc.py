"""ARC: the conformance suite, what makes it ARC, and that a scan does not flush it."""

from collections.abc import Sequence

import numpy as np
import pytest

from kvjax.pool import ARC, LRU, ChunkPool, Policy, Reservation
from tests.pool.conformance import PolicyConformance, order, remove, touch


def keys(*names: object) -> list[bytes]:
    return [repr(name).encode() for name in names]


def prepare(pool: ChunkPool, *names: object, **more) -> Reservation | None:
    return pool.prepare_store(keys(*names), [0] * len(names), **more)


def store(pool: ChunkPool, *names: object, access: int | None = None) -> None:
    reservation = prepare(pool, *names, access=access)
    assert reservation is not None
    pool.complete_store(reservation, ok=True)


def ask(pool: ChunkPool, *names: object) -> int:
    """One request: what the pool has from the first of its chunks on is one access. Returns how many hit."""
    slots = pool.find(keys(*names))
    num_hits = int(np.argmin(np.append(slots, -1)))
    pool.touch(slots[:num_hits], np.arange(num_hits), access=pool.new_access())
    return num_hits


def resident(pool: ChunkPool, *names: object) -> list[bool]:
    return (pool.find(keys(*names)) >= 0).tolist()


def frequent(policy: ARC) -> list[int]:
    return sorted(policy._again.slots().tolist())


class TestARC(PolicyConformance):
    def make_policy(self) -> ARC:
        return ARC(ghost_places=64)

    def test_what_was_asked_for_once_leaves_before_what_was_asked_for_again(self, policy):
        touch(policy, {0: 0, 1: 1}, counted=False)
        touch(policy, {0: 0, 1: 1})
        touch(policy, {2: 0, 3: 1}, counted=False)
        assert order(policy) == [[3], [2], [1], [0]]

    def test_what_is_stored_and_named_again_is_not_asked_for_again(self, policy):
        touch(policy, {0: 0}, counted=False)
        touch(policy, {0: 0, 1: 1}, counted=False)
        assert frequent(policy) == []

    def test_what_follows_a_chunk_asked_for_once_is_not_kept_longer(self, policy):
        """A chunk left, and what follows it did not, as someone read it. Now all of it is there again."""
        touch(policy, {0: 0, 1: 1}, counted=False)
        touch(policy, {0: 0, 1: 1})
        remove(policy, 0)
        touch(policy, {2: 0, 1: 1}, counted=False)
        assert frequent(policy) == []
        assert order(policy) == [[1], [2]]

    def test_a_chunk_that_left_lately_and_comes_back_is_kept_longer(self, policy):
        touch(policy, {0: 0, 1: 0}, counted=False)
        remove(policy, 0, evicted=True)
        touch(policy, {0: 0}, counted=False)
        assert frequent(policy) == [0]

    def test_a_part_of_an_access_is_not_kept_longer_than_what_the_access_named_before(self, policy):
        """A request goes on with a chunk that left lately; what comes before it was asked for once."""
        touch(policy, {5: 0}, number=10**6, counted=False)
        remove(policy, 5, evicted=True)
        touch(policy, {0: 0}, number=10**6 + 1, counted=False)
        touch(policy, {5: 1}, number=10**6 + 1, counted=False)
        assert frequent(policy) == []
        assert order(policy) == [[5], [0]]

    def test_a_chunk_that_was_dropped_is_not_remembered(self, policy):
        touch(policy, {0: 0, 1: 0}, counted=False)
        remove(policy, 0, evicted=False)
        touch(policy, {0: 0}, counted=False)
        assert frequent(policy) == []

    @pytest.mark.parametrize(("was_frequent", "moves"), [(False, 1), (True, -1)])
    def test_the_share_of_what_was_asked_for_once_follows_what_comes_back(self, policy, was_frequent, moves):
        touch(policy, dict.fromkeys(range(8), 0), counted=False)
        if was_frequent:
            touch(policy, {0: 0})
        policy._target = before = 3.0
        remove(policy, 0, evicted=True)
        touch(policy, {0: 0}, counted=False)
        assert (policy._target - before) * moves > 0

    def test_the_oldest_of_what_was_asked_for_again_makes_way_when_its_share_shrinks(self, policy):
        for slots in ({0: 0, 1: 1}, {2: 0, 3: 1}):
            touch(policy, slots, counted=False)
            touch(policy, slots)
        policy._target = 2.0
        touch(policy, {4: 0}, counted=False)
        assert frequent(policy) == [2, 3]
        assert order(policy)[-2:] == [[3], [2]]

    def test_a_share_that_shrinks_at_once_is_given_up_by_and_by(self, policy):
        """No call pauses to move thousands of requests."""
        for slot in range(100):
            touch(policy, {slot: 0}, counted=False)
            touch(policy, {slot: 0})
        policy._target = 100.0
        touch(policy, {200: 0}, counted=False)
        assert frequent(policy) == list(range(4, 100))
        for slot in range(201, 230):
            touch(policy, {slot: 0}, counted=False)
        assert len(frequent(policy)) <= 30
        assert order(policy)[0] == [200]


class TestCases:
    def test_all_of_one_list_makes_room_while_the_other_is_read(self):
        """E2: a and b were asked for once, c again, and c is being read: room for two is a and b, there is none for
        three."""
        policy = ARC()
        pool = ChunkPool(3, [1], policy)
        store(pool, "c")
        ask(pool, "c")
        store(pool, "a")
        store(pool, "b")
        assert frequent(policy) == pool.find(keys("c")).tolist()
        policy._target = 3.0
        pins = pool.pin(pool.find(keys("c")))
        before = order(policy)
        assert prepare(pool, "x", "y", "z") is None
        assert order(policy) == before
        assert resident(pool, "a", "b", "c") == [True] * 3
        store(pool, "x", "y")
        assert resident(pool, "a", "b", "c", "x", "y") == [False, False, True, True, True]
        pool.unpin(pins)
        pool.check_integrity()

    def test_a_chunk_being_written_is_as_recent_as_its_touch_and_counts_only_when_it_is_ready(self):
        """E3: a request asks for a chunk that another one still writes."""
        policy = ARC()
        pool = ChunkPool(4, [1], policy)
        reservation = prepare(pool, "written")
        store(pool, "later")
        slots = pool.held(keys("written"))
        pool.touch(slots, np.zeros(1, int), access=pool.new_access())
        assert frequent(policy) == []
        assert order(policy)[-1] == slots.tolist()
        pool.complete_store(reservation, ok=True)
        assert frequent(policy) == []
        ask(pool, "written")
        assert frequent(policy) == slots.tolist()

    @pytest.mark.parametrize("steps", [1, 100])
    def test_a_request_that_decodes_over_a_cached_prefix_is_one_access(self, steps):
        """E4: 100 steps, each of which stores a chunk and names the prefix: every chunk of it counts once."""
        policy = ARC()
        pool = ChunkPool(200, [1], policy)
        store(pool, "p", "q")
        access = pool.new_access()
        slots = pool.find(keys("p", "q"))
        pool.touch(slots, np.arange(2), access=access)
        for step in range(steps):
            store(pool, "p", "q", *range(step + 1), access=access)
        assert frequent(policy) == sorted(slots.tolist())
        assert (pool.accesses(pool.find(keys("p", *range(steps)))) == access).all()
        other = ARC()
        pool = ChunkPool(200, [1], other)
        access = pool.new_access()
        for step in range(steps):
            store(pool, "p", "q", *range(step + 1), access=access)
        assert frequent(other) == []


def hits_after_a_scan(policy: Policy, scan: Sequence[int]) -> int:
    """Four conversations of 8 chunks take turns in a pool of 64; then a scan of prompts of 8 chunks, never asked for
    again, passes through; then the conversations go on."""
    pool = ChunkPool(64, [1], policy)
    chats = [[f"chat {c} {i}" for i in range(8)] for c in range(4)]
    for _ in range(3):
        for chat in chats:
            ask(pool, *chat)
            store(pool, *chat)
    for prompt in scan:
        names = [f"scan {prompt} {i}" for i in range(8)]
        assert ask(pool, *names) == 0
        store(pool, *names)
    pool.check_integrity()
    return sum(ask(pool, *chat) for chat in chats)


def test_a_scan_of_many_times_the_pool_does_not_flush_what_is_asked_for_again():
    assert hits_after_a_scan(LRU(), range(100)) == 0
    assert hits_after_a_scan(ARC(), range(100)) == 32


def test_without_a_scan_both_keep_everything():
    assert hits_after_a_scan(LRU(), range(4)) == hits_after_a_scan(ARC(), range(4)) == 32


def test_what_was_frequent_long_ago_makes_way():
    """The conversations have ended. New ones fill the pool and come back after a while: ARC learns to keep them."""
    pool = ChunkPool(32, [1], ARC())
    for chat in range(3):
        for _ in range(3):
            names = [f"old {chat} {i}" for i in range(8)]
            ask(pool, *names)
            store(pool, *names)
    hits = 0
    for turn in range(30):
        for chat in range(3):
            names = [f"new {chat} {i}" for i in range(8)]
            found = ask(pool, *names)
            hits += found if turn == 29 else 0
            store(pool, *names)
    assert hits == 24
    pool.check_integrity()
