"""A pool that is too small: what is refused, retried, dropped and evicted, and that what is left is of use."""

import contextlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax import ChunkedLocal, FullAttention, SlidingWindow, _resident, _search, longest_hit
from kvjax.pool import LRU, PolicyError
from kvjax.retention import eviction_ranks, of_use
from tests.oracles import law
from tests.oracles.layouts import cut, group, random_chunking
from tests.support.fake_engine import FakeEngine
from tests.support.ledgers import MIXED, UNIFORM, engine, picks, prompt, resident


class TestLostBlocks:
    def tables(self, **changed: Any) -> dict[str, Any]:
        return {"full": list(range(9)), "window": list(range(9))} | changed

    def test_a_null_block_is_dropped_counted_once_and_never_stored_later(self):
        """The block of chunk 3 slid out of the window before its chunk could be stored, and its place is null; later
        another block stands there. What can still be had is stored instead."""
        ledger = engine().ledger
        ledger.lookup("a", prompt(20))
        tables = self.tables(window=[0, 1, 2, -1, 4, 5, 6, 7, 8])
        store = ledger.prepare_store("a", tables, 20)
        assert {moves.group_idx: moves.chunk_idx[: moves.num_chunks].tolist() for moves in store.plan.moves} == {
            0: [0, 1, 2],
            2: [1, 2],
        }
        assert ledger.counts.chunks_dropped == 1
        ledger.complete_store(store, ok=True)
        assert ledger.lookup("b", prompt(30)).hit_tokens == 12
        ledger.extend("a", prompt(3, 20))
        for changed in (tables, self.tables()):
            store = ledger.prepare_store("a", changed, 23, checkpoint=True)
            assert all(3 not in moves.chunk_idx for moves in store.plan.moves if moves.group_idx == 2)
            ledger.complete_store(store, ok=True)
        assert ledger.counts.chunks_dropped == 1
        ledger.check_integrity()

    def test_a_null_block_that_no_checkpoint_wants_is_no_loss(self):
        ledger = engine().ledger
        ledger.lookup("a", prompt(20))
        store = ledger.prepare_store("a", self.tables(window=[-1, -1, -1, 3, 4]), 20)
        assert (store.plan.num_chunks, ledger.counts.chunks_dropped) == (7, 0)

    def test_a_chunk_whose_first_tokens_were_never_computed_is_not_stored(self):
        """Attention chunks of 6 tokens in blocks of 4. A request resumes at 6, where nothing is needed: its block 1
        has tokens 6 and 7, and 4 and 5 are whatever was there. Stored under its key, a request resumed at 5 would
        read them."""
        chunking = cut(group("full", FullAttention(), 2), group("chunked", ChunkedLocal(6), 4))
        served = engine(chunking)
        served.served("a", prompt(6))
        assert served.start("b", prompt(12)).hit_tokens == 6
        served.end_load(served.load("b"))
        served.prefill("b", 12, 2)
        assert 1 not in resident(served, prompt(12))["chunked"]
        assert served.ledger.counts.chunks_dropped == 1
        served.ledger.invalidate()
        served.start("c", prompt(8), on_device=6)
        served.prefill("c", 8, 2)
        assert served.ledger.counts.chunks_dropped == 2
        assert resident(served, prompt(8))["chunked"] == []

    def test_a_load_that_fails_leaves_the_first_tokens_of_a_block_unknown(self):
        """The same attention chunks. The device holds 6 tokens and the host more; the load fails, and the request goes
        on from 6 in a block of which tokens 4 and 5 were not restored."""
        chunking = cut(group("full", FullAttention(), 2), group("chunked", ChunkedLocal(6), 4))
        served = engine(chunking)
        served.served("a", prompt(8))
        assert served.start("b", prompt(8), on_device=6).hit_tokens == 7
        served.end_load(served.load("b"), ok=False)
        served.prefill("b", 8, 2)
        assert 1 not in resident(served, prompt(8))["chunked"]


class TestRefusals:
    def test_a_store_refused_for_lack_of_room_is_retried_by_the_next_call(self):
        served = engine(UNIFORM, chunks=6)
        served.served("a", prompt(20))
        served.start("reader", prompt(21))
        served.start("b", prompt(20, 100))
        served.compute("b", 20)
        for _ in range(2):
            store = served.store("b")
            assert store.plan.num_chunks == 0
            served.end_store(store)
        assert served.ledger.pool.counts.refused == 2
        assert resident(served, prompt(20))["full"] == [0, 1, 2, 3, 4]
        served.finish("reader")
        served.end_store(served.store("b"))
        assert served.start("c", prompt(20, 100)).hit_tokens == 19

    @pytest.mark.parametrize("lies", [1, 2, 3])
    def test_a_policy_that_fails_at_a_later_checkpoint_leaves_nothing_reserved(self, lies):
        """Where there is no room for all checkpoints, they are reserved one by one."""

        class Lying(LRU):
            calls = -(10**6)

            def victims(self):
                self.calls += 1
                if self.calls >= lies:
                    raise RuntimeError("lost")
                return super().victims()

        policy = Lying()
        served = engine(MIXED, chunks=10, policy=policy, checkpoint_tokens=8)
        served.served("a", prompt(24, 100), step=8)
        served.start("b", prompt(40))
        served.compute("b", 40)
        policy.calls = 0
        with contextlib.suppress(PolicyError):  # if nothing was reserved before the policy failed
            served.end_store(served.store("b", checkpoint=True))
        served.ledger.check_integrity()
        assert served.ledger.pool.open_reservations() == set()
        assert served.ledger.pool.num_resident > 0
        policy.calls = -(10**6)
        served.end_store(served.store("b", checkpoint=True))
        served.ledger.check_integrity()

    def test_the_end_of_a_request_that_was_refused_is_retried_as_well(self):
        """A checkpoint that was asked for with a store of its own is not forgotten for lack of room."""
        served = engine(UNIFORM, chunks=6)
        served.served("a", prompt(20))
        served.start("reader", prompt(21))
        served.start("b", prompt(4, 100))
        served.compute("b", 4)
        served.end_store(served.store("b"))
        served.accept("b", prompt(12, 104))
        served.compute("b", 16)
        served.end_store(served.store("b", checkpoint=True))
        served.finish("reader")
        served.end_store(served.store("b"))
        assert served.start("c", [*prompt(16, 100), -1]).hit_tokens == 16

    @pytest.mark.parametrize("looks", [1, 2])
    def test_chunks_that_another_request_wrote_and_lost_are_stored_by_the_one_that_waited(self, looks):
        """Both compute the same prompt; the second finds its chunks being written, and then they fail."""
        served = engine(UNIFORM)
        for name in "ab":
            served.start(name, prompt(16))
            served.compute(name, 16)
        first = served.store("a")
        for _ in range(looks):  # at the second look it knows where they are
            assert served.store("b", checkpoint=True).plan.num_chunks == 0
        served.end_store(first, ok=False)
        served.accept("b", prompt(4, 16))
        served.compute("b", 20)
        assert served.store("b").plan.num_chunks == 4  # the prompt's; the 20 tokens were no checkpoint

    def test_chunks_that_another_request_is_about_to_store_are_awaited_too(self):
        """The same, but the first request reserved them only after the second had looked for them."""
        served = engine(UNIFORM)
        for name in "ab":
            served.start(name, prompt(16))
            served.compute(name, 16)
        first = served.store("a")
        second = served.store("b")
        served.end_store(first)
        served.end_store(second)
        served.accept("b", prompt(4, 16))
        served.compute("b", 20)
        assert served.store("b").plan.num_chunks == 0  # nothing is lost, and nothing is stored twice

    def test_a_refused_chunk_that_loses_its_block_meanwhile_is_dropped(self):
        """A store that could not be prepared, whose block then slid out of the window and was used again."""
        served = engine(cut(group("window", SlidingWindow(8), 4)), chunks=3)
        served.served("a", prompt(8))
        served.start("reader", prompt(9))
        request = "b"
        served.start(request, prompt(8, 100))
        served.compute(request, 8)
        served.end_store(served.store(request))
        served.free_block(served.running[request], 0, 0)
        served.finish("reader")
        store = served.store(request)
        assert store.plan.num_chunks == 0
        assert served.ledger.counts.chunks_dropped == 1
        served.end_store(store)

    def test_a_request_larger_than_the_pool_keeps_the_largest_prefix_that_fits(self):
        served = engine(MIXED, chunks=10)
        served.served("a", prompt(100), step=100)
        assert served.start("b", prompt(100)).hit_tokens == 4 * 8
        assert sum(map(len, resident(served, prompt(100)).values())) == 10
        assert served.ledger.pool.counts.refused == 0

    def test_a_store_in_steps_larger_than_the_pool_keeps_it_too(self):
        served = engine(MIXED, chunks=10)
        served.served("a", prompt(100), step=4)
        assert served.start("b", prompt(100)).hit_tokens == 4 * 8

    def test_a_request_makes_room_for_its_next_checkpoint_with_what_only_the_last_one_wanted(self):
        """A pool for 8 chunks full of one request: full 0 to 3, the window of 8 and that of 16. The next checkpoint
        wants two full chunks and two of the window; those of the lower windows go, instead of a refusal for ever."""
        served = engine(MIXED, chunks=8, checkpoint_tokens=8)
        served.served("a", prompt(24), step=8)
        assert served.ledger.pool.counts.refused == 0
        assert resident(served, prompt(24)) == {"full": [0, 1, 2, 3, 4, 5], "window": [4, 5]}
        assert served.start("b", prompt(30)).hit_tokens == 24

    def test_a_refused_store_evicts_nothing_of_others(self):
        served = engine(UNIFORM, chunks=6)
        served.served("a", prompt(8))
        served.served("b", prompt(16, 100))
        served.start("reader", prompt(17, 100))
        served.served("c", prompt(20, 200))
        assert resident(served, prompt(8))["full"] == [0, 1]
        assert resident(served, prompt(16, 100))["full"] == [0, 1, 2, 3]


class TestEviction:
    def test_a_hit_falls_to_the_checkpoint_below_and_not_to_nothing(self):
        """Full and sliding with checkpoints at 16 and 32: 8 + 2 + 2 chunks. For the first chunk of another request
        the whole upper checkpoint goes, for it is of no use in part, and 16 still hits."""
        served = engine(MIXED, chunks=12, checkpoint_tokens=16)
        served.served("a", prompt(32), step=16)
        assert served.start("b", prompt(40)).hit_tokens == 32
        served.finish("b")
        hits = []
        for number in range(1, 8):
            served.served(f"other {number}", prompt(4, 100 * number))
            hits.append(served.start("b", prompt(40)).hit_tokens)
            served.finish("b")
            served.ledger.check_integrity()
        assert hits[0] == 16
        assert sorted(set(hits), reverse=True) in ([16], [16, 0])

    def test_the_request_that_was_longest_ago_goes_first(self):
        served = engine(UNIFORM, chunks=8)
        served.served("a", prompt(16))
        served.served("b", prompt(16, 100))
        served.start("a again", prompt(17))
        served.finish("a again")
        served.served("c", prompt(8, 200))
        assert resident(served, prompt(16))["full"] == [0, 1, 2, 3]
        assert resident(served, prompt(16, 100))["full"] == [0, 1]

    def test_what_is_left_of_a_request_that_evicted_its_own_chunks_is_ranked_anew(self):
        """The end's window takes the place of the one at 16. Then nothing below the end can be restored, so all of it
        leaves at once, and no full chunk stays behind for a window that is gone."""
        served = engine(MIXED, chunks=12)
        served.start("a", prompt(16))
        served.prefill("a", 16, 16, checkpoint=True)
        served.accept("a", prompt(24, 16))
        served.prefill("a", 40, 24, checkpoint=True)
        served.finish("a")
        assert resident(served, prompt(40)) == {"full": list(range(10)), "window": [8, 9]}
        served.served("b", prompt(4, 100))
        assert resident(served, prompt(40)) == {"full": [], "window": []}

    def test_windows_below_a_hit_are_as_recent_as_the_prefix_that_they_serve(self, monkeypatch):
        """A lookup reads no more than its hit needs; the next store looks for the rest, so that a lower checkpoint does
        not lose its window to a request that came in between."""
        monkeypatch.setattr(_search, "_FIRST_SPAN", 2)
        monkeypatch.setattr(_resident, "_FIRST_CHUNKS", 1)
        served = engine(MIXED, chunks=18)
        served.start("a", prompt(16))
        served.prefill("a", 16, 16, checkpoint=True)
        served.accept("a", prompt(24, 16))
        served.prefill("a", 40, 24, checkpoint=True)
        served.finish("a")
        served.served("between", prompt(4, 100))
        served.start("b", prompt(41))
        assert served.ledger._requests["b"].chains[2].not_looked(0, 10).tolist() == [0, 1, 2, 3, 4, 5, 6]
        served.end_load(served.load("b"))
        served.accept("b", prompt(3, 41))
        served.prefill("b", 44, 3, checkpoint=True)
        served.finish("b")
        served.served("c", prompt(4, 200))
        served.served("d", prompt(4, 300))
        assert resident(served, prompt(4, 100))["full"] == []
        assert resident(served, prompt(16))["window"] == [2, 3]

    def test_a_request_that_decodes_over_a_prefix_is_one_access_to_it(self):
        """E4: 100 steps over a cached prefix, each with a store that finds nothing new."""

        class Counting(LRU):
            def touch(self, access):
                self.counts += np.bincount(access.slots[access.counted], minlength=len(self.counts))
                super().touch(access)

        policy = Counting()
        policy.counts = np.zeros(64, np.int64)
        served = engine(UNIFORM, policy=policy)
        served.served("a", prompt(20))
        assert policy.counts.sum() == 0
        served.start("b", prompt(21))
        served.end_load(served.load("b"))
        for token in range(21, 121):
            served.accept("b", [token])
            served.prefill("b", token + 1, 1)
        served.finish("b")
        assert policy.counts.tolist()[:6] == [1, 1, 1, 1, 1, 0]
        assert policy.counts.sum() == 5

    @settings(max_examples=80, deadline=None)
    @given(picks(), st.integers(8, 50), st.integers(4, 16))
    def test_what_is_left_after_every_eviction_is_a_whole_checkpoint(self, pick, length, every):
        """One request with several checkpoints fills the pool; then chunks of other requests come, one by one. Whatever
        went, all that ranks below it is left, and the best position below it hits. What serves no position any more
        may go before."""
        chunking = random_chunking(pick)
        served = FakeEngine(chunking, checkpoint_tokens=every)
        tokens = prompt(length)
        served.served("a", tokens, step=every)
        used = served.ledger.pool.num_units - served.ledger.pool.num_free_units
        served = FakeEngine(
            chunking, max(used, *(size or 0 for size in (*chunking.chunk_bytes, 0))), checkpoint_tokens=every
        )
        served.served("a", tokens, step=every)
        before = resident(served, tokens)
        positions = law.restorable(chunking, law.held_by_chunks(chunking, before), length + 1)
        names, pool = chunking.layout.names, served.ledger.pool
        by_index = eviction_ranks(chunking, {names.index(name): np.array(c, np.int64) for name, c in before.items()})
        ranks = {name: dict(zip(c, by_index[names.index(name)].tolist(), strict=True)) for name, c in before.items()}
        useful = {}
        for name, chunks in before.items():
            g, indices = names.index(name), np.array(chunks, np.int64)
            useful[name] = set(indices[of_use(chunking, g, indices, by_index[g])].tolist())
        cheapest = min(chunking.layout.cached, key=lambda g: pool.units_per_chunk[g] or 0)
        for number in range(pool.num_units):
            store = pool.prepare_store([number.to_bytes(4, "little")], [cheapest])
            assert store is not None
            pool.complete_store(store, ok=True)
            left = resident(served, tokens)
            gone = [ranks[name][c] for name in before for c in useful[name] - set(left[name])]
            if not gone:
                continue
            assert {name: set(left[name]) & useful[name] for name in before} == {
                name: {c for c in useful[name] if ranks[name][c] < min(gone)} for name in before
            }
            assert all(ranks[name][c] < min(gone) for name in before for c in left[name])
            # Positions that require nothing, as at the start of an attention chunk, are hit all the same.
            assert longest_hit(chunking, length + 1, left).hit_tokens >= max(p for p in positions if p < min(gone))
            if not any(left.values()):
                break
