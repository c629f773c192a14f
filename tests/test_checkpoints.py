"""Checkpoints in practice: after a store at one, later requests resume where the law says, or as far as they can.

Prefill in steps, decoding with drafts that are rejected, windows whose blocks are freed and used again at once,
preemption, prompts that part. The engine knows every byte that its blocks and the pool truly hold.
"""

import itertools

import pytest
from hypothesis import assume, given, settings

from kvjax import FullAttention, GroupSpec, LeafSpec, Ledger, Recurrent, SlidingWindow, longest_hit, store_set
from kvjax.chunking import resolve_chunking
from kvjax.groups import CacheLayout
from kvjax.packing import Units, cut_into_units
from tests.oracles import law
from tests.oracles.layouts import Pick, cut, group, lists, random_chunking
from tests.support.fake_engine import FakeEngine, Frees, completes_though_freed_at_once
from tests.support.ledgers import MIXED, UNIFORM, engine, picks, prompt, resident
from tests.support.watched_engine import WatchedEngine


def serve(served: WatchedEngine, pick: Pick, name: str, tokens: list[int], fresh: "itertools.count[int]") -> None:
    """A whole request up to its end, which is known: prefill and decode in steps, a store after each one."""
    assume(served.start(name, tokens) == 0)  # positions that need nothing are hit in an empty pool
    end = len(tokens) + pick(0, 20)
    served.to_come[name] = end
    step = pick(1, 12)
    while served.position(name) < len(tokens):
        served.prefill_step(name, step)
        served.store(name)
    served.engine.accept(name, [next(fresh)])
    while served.position(name) < end:
        drafts = [next(fresh) for _ in range(pick(0, 4))]
        served.decode_step(name, drafts, pick(0, len(drafts)), next(fresh))
        served.store(name)


def fork(pick: Pick, tokens: list[int], fresh: "itertools.count[int]") -> list[int]:
    return [*tokens[: pick(0, 24)], *(next(fresh) for _ in range(pick(1, 20)))]


class TestProperties:
    @settings(max_examples=60)
    @given(picks())
    def test_every_checkpoint_of_a_request_serves_what_the_law_says(self, pick):
        """The end of a prompt, every so many tokens, the end of the request, steps of any size, drafts that are
        rejected; blocks are freed when no later store wants them. A request of `P + 1` tokens then hits R(P), and one
        of P tokens S(P)."""
        frees: Frees = ("never", "retained")[pick(0, 1)]
        every = pick(1, 12) if pick(0, 3) else None
        served = WatchedEngine(random_chunking(pick), frees, every=every, lawful=True, resume_multiple=pick(1, 3))
        fresh = itertools.count(100)
        serve(served, pick, "a", [next(fresh) for _ in range(pick(1, 40))], fresh)
        served.finish("a")
        assert served.engine.ledger.counts.chunks_dropped == 0
        assert served.num_checked >= 2

    @settings(max_examples=40)
    @given(picks())
    def test_so_does_an_engine_that_frees_at_once_what_left_the_window(self, pick):
        """No chunk is longer than a window; checkpoints that were known when their chunks completed."""
        chunking = random_chunking(pick)
        assume(completes_though_freed_at_once(chunking))
        served = WatchedEngine(chunking, "at once", every=pick(1, 12), lawful=True, resume_multiple=pick(1, 3))
        fresh = itertools.count(100)
        serve(served, pick, "a", [next(fresh) for _ in range(pick(1, 40))], fresh)
        assert served.engine.ledger.counts.chunks_dropped == 0

    @settings(max_examples=60)
    @given(picks())
    def test_a_store_is_as_good_as_one_of_every_whole_chunk(self, pick):
        """Whatever was lost. Requests share prefixes, are restored in part and preempted; two run in turn, and blocks
        of one are used again by the other; steps may end anywhere, and states be missing; stores may be left out. At
        each checkpoint, later requests hit what they would if every chunk that is whole by then were stored."""
        frees: Frees = ("never", "retained", "at once")[pick(0, 2)]
        every = pick(1, 12) if pick(0, 1) else None
        served = WatchedEngine(
            random_chunking(pick), frees, every=every, cuts=bool(pick(0, 1)), resume_multiple=pick(1, 3)
        )
        fresh = itertools.count(100)
        tokens: list[int] = []
        for number in range(pick(1, 4)):
            name, turn = f"request {number % 2}", number >= 2
            if turn:
                served.finish(name)
            tokens = fork(pick, tokens, fresh)
            served.start(name, tokens)
            step, often = pick(1, 12), pick(0, 2)
            while served.position(name) < len(tokens):
                served.prefill_step(name, step)
                if pick(0, often) == 0:
                    served.store(name)
            served.engine.accept(name, [next(fresh)])
            for _ in range(pick(0, 8)):
                drafts = [next(fresh) for _ in range(pick(0, 4))]
                served.decode_step(name, drafts, pick(0, len(drafts)), next(fresh))
                if pick(0, often) == 0:
                    served.store(name)
            if pick(0, 2) == 0:
                served.store(name, checkpoint=True)  # preempted, and admitted again
                served.start(name, list(served.tokens(name)))
                served.prefill_step(name, 100)
            tokens = list(served.tokens(name))
        for name in list(served.engine.running):
            served.finish(name)

    @settings(max_examples=40)
    @given(picks())
    def test_a_preempted_request_goes_on_where_the_law_says(self, pick):
        """It comes back with the token that was sampled last, and resumes at R of where it stopped."""
        served = WatchedEngine(random_chunking(pick), "retained", lawful=True, resume_multiple=pick(1, 3))
        fresh = itertools.count(100)
        serve(served, pick, "a", [next(fresh) for _ in range(pick(1, 30))], fresh)
        stopped_at = served.position("a")
        assert len(served.tokens("a")) == stopped_at + 1
        served.store("a", checkpoint=True)
        resumed_at, _ = law.stored_positions(served.chunking, stopped_at, served.engine.multiple)
        assert served.start("a", list(served.tokens("a"))) == resumed_at
        served.prefill_step("a", 100)


class TestEnds:
    def test_a_request_that_stores_over_several_prefill_steps_leaves_no_hole(self):
        """Peers: steps end inside chunks, at their ends, and one token before and after."""
        for step in (1, 3, 4, 5, 7, 8, 9):
            served = WatchedEngine(MIXED, "retained", lawful=True)
            served.start("a", prompt(30))
            while served.position("a") < 30:
                served.prefill_step("a", step)
                served.store("a")
            assert resident(served.engine, prompt(30)) == {"full": list(range(7)), "window": [5, 6]}

    def test_the_last_full_chunk_at_the_end_of_a_request_is_stored(self):
        """The token that completes it was decoded; 23 tokens are computed and the 24th is sampled: 5 chunks. One step
        more, and it is 6."""
        served = WatchedEngine(UNIFORM, lawful=True)
        served.start("a", prompt(20))
        served.prefill_step("a", 20)
        served.store("a")
        served.engine.accept("a", [100])
        for token in range(101, 104):
            served.decode_step("a", [], 0, token)
        assert (served.position("a"), len(served.tokens("a"))) == (23, 24)
        assert served.store("a", checkpoint=True) == [(23, 20, 20)]
        served.decode_step("a", [], 0, 104)
        assert served.store("a", checkpoint=True) == [(24, 24, 23)]

    def test_the_last_sampled_token_completes_nothing(self):
        """The 24th token is accepted and was never computed: its chunk is no part of any plan, whatever asks."""
        served = engine(UNIFORM, checkpoint_tokens=4)
        served.start("a", prompt(23))
        served.compute("a", 23)
        served.accept("a", [23])
        store = served.store("a", checkpoint=True)
        (moves,) = store.plan.moves
        assert moves.chunk_idx[: moves.num_chunks].tolist() == [0, 1, 2, 3, 4]
        served.end_store(store)
        assert served.start("b", prompt(30)).hit_tokens == 20

    def test_rejected_drafts_are_never_keyed(self):
        """Three drafts fill a chunk and are rejected. The chunk is stored when accepted tokens have filled it, under
        their key, and nothing is ever found under that of the drafts."""
        served = WatchedEngine(UNIFORM, lawful=True)
        served.start("a", prompt(20))
        served.prefill_step("a", 20)
        served.engine.accept("a", [20])
        served.decode_step("a", [91, 92, 93], 0, 21)
        assert served.store("a", checkpoint=True) == [(20, 20, 19), (21, 20, 20)]
        served.decode_step("a", [22, 99], 1, 23)
        served.decode_step("a", [99], 0, 24)
        assert served.store("a", checkpoint=True) == [(24, 24, 23)]
        assert served.start("b", [*prompt(20), 20, 91, 92, 93, 0]) == 20
        assert served.start("c", prompt(25)) == 24

    def test_drafts_are_refused_as_long_as_they_are_not_accepted(self):
        served = engine(UNIFORM)
        served.start("a", prompt(22))
        served.compute("a", 22)
        with pytest.raises(ValueError, match="`num_tokens` must be at most the 22 tokens that request 'a' has, got 24"):
            served.ledger.prepare_store("a", {"full": range(6)}, 24)

    def test_a_checkpoint_may_want_a_state_from_before_the_last_one(self):
        """Checkpoints every 7 tokens; a draft head that looks 6 ahead, and full chunks of 4, let the one at 35 want the
        state at 26. It is known by then, though the one at 28 comes before it: the state is overwritten by the next
        step."""
        chunking = cut(group("state", Recurrent(), 2), group("full", FullAttention(), 4, 6))
        served = WatchedEngine(chunking, "at once", every=7, lawful=True)
        served.start("a", prompt(20))
        while served.position("a") < 20:
            served.prefill_step("a", 20)
            served.store("a")
        served.engine.accept("a", [20])
        checked = []
        for token in range(21, 36):
            served.decode_step("a", [], 0, token)
            checked += served.store("a")
        assert checked == [(21, 14, 14), (28, 22, 22), (35, 26, 26)]
        assert served.engine.ledger.counts.chunks_dropped == 0

    def test_a_junction_serves_the_third_prompt_that_parts_there(self):
        served = WatchedEngine(MIXED, "retained", lawful=True)
        trunk = prompt(18)
        for name, hit in (("a", 0), ("b", 0), ("c", 16)):
            assert served.start(name, [*trunk, *prompt(22, 100 * ord(name))]) == hit
            while served.position(name) < 40:
                served.prefill_step(name, 7)
                served.store(name)
            served.engine.finish(name)

    def test_an_engine_is_told_of_a_junction_so_that_a_state_is_there(self):
        """States exist only where steps end, and a junction is known to the ledger alone: the engine must be told of it
        to end a step there. Otherwise prompts that share a prefix never hit it, however many come."""
        served = engine(cut(group("full", FullAttention(), 4), group("state", Recurrent(), 4)))
        for name, hit in (("a", 0), ("b", 0), ("c", 16)):
            found = served.start(name, [*prompt(16), *prompt(24, 100 * ord(name))])
            assert found.hit_tokens == hit
            served.end_load(served.load(name))
            served.prefill(name, 40, 64, to_come=found.checkpoints)
            served.finish(name)


class TestWorkedNumbers:
    def test_a_chunk_that_is_pending_keeps_no_window_behind_it_waiting(self):
        """Peers: hit, hit, miss, pending, with a window of 2 chunks: the first two serve."""
        served = engine(cut(group("window", SlidingWindow(9), 4)))
        served.served("a", prompt(8))
        served.start("b", prompt(16))
        served.end_load(served.load("b"))
        served.compute("b", 16)
        served.running["b"].tables[0][2] = -1  # chunk 2 slid out and is lost
        pending = served.store("b")
        found = served.start("c", prompt(17))
        assert (found.hit_tokens, lists(found.load)) == (8, {"window": [0, 1]})
        served.end_load(served.load("c"))
        served.end_store(pending)

    def test_a_draft_head_that_looks_ahead_costs_a_third_block_per_segment(self):
        """C1: a window of 2 blocks, segments of 4, and a draft group that discards its last matched block: a lookahead
        of one block. 3 blocks are kept per segment, or 2 of them a block earlier are asked for; with 2 kept and the
        last one discarded nothing would ever be hit."""
        chunking = cut(group("full", FullAttention(), 4), group("draft", SlidingWindow(9), 4, lookahead_tokens=4))
        served = FakeEngine(chunking, frees="retained", checkpoint_tokens=16, resume_multiple=4)
        served.served("a", prompt(64), step=5)
        assert resident(served, prompt(64))["draft"] == [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15]
        hits = {end: served.start("b", [*prompt(end), -1]).hit_tokens for end in (16, 20, 32, 48, 64)}
        assert hits == {16: 12, 20: 12, 32: 28, 48: 44, 64: 60}
        two = {"full": range(4), "draft": [2, 3]}
        assert longest_hit(chunking, 17, two, resume_multiple=4).hit_tokens == 0

    def test_a_block_taken_over_by_another_request_stays_its_own(self):
        """C4: a block of the window is released by one request and used by another, while a store of the first is
        still under way. Each chunk is under its own request's key, and the end of the first touches nothing of the
        second."""
        served = engine(cut(group("full", FullAttention(), 4), group("window", SlidingWindow(5), 4)), frees="at once")
        served.start("a", prompt(12))
        served.compute("a", 8)
        under_way = served.store("a")
        released = served.running["a"].tables[1][0]
        served.free(served.running["a"])
        served.start("b", prompt(8, 100))
        served.compute("b", 8)
        assert released in {*served.running["b"].tables[0], *served.running["b"].tables[1]}
        served.end_store(served.store("b"))
        served.compute("a", 12)
        served.end_store(under_way)
        served.end_store(served.store("a"))
        assert released not in served.running["a"].tables[1]
        blocks = dict(served.running["b"].tables)
        served.finish("a")
        assert served.running["b"].tables == blocks
        for tokens, hit in ((prompt(13), 12), ([*prompt(8, 100), -1], 8)):
            assert served.start("c", tokens).hit_tokens == hit
            served.end_load(served.load("c"))  # checks every byte
            served.compute("c", len(tokens))
        assert len(served.free_blocks) == len(set(served.free_blocks))

    @pytest.mark.parametrize(("window_tokens", "num_tokens"), [(10, 100), (1, 200), (6, 140), (15, 50)])
    def test_one_pool_of_units_holds_any_ratio_of_groups(self, window_tokens, num_tokens):
        """C7: 4,096,000 bytes, 20,480 a token of the full group and 204,800 of the window: 100 tokens of the one and 10
        of the other, or 200 and none, as the requests have it. Nothing is split beforehand."""
        layout = CacheLayout(
            [
                GroupSpec("full", FullAttention(), 1, block_bytes=20_480),
                GroupSpec("window", SlidingWindow(window_tokens), 1, block_bytes=204_800),
            ]
        )
        chunking = resolve_chunking(layout)
        units = cut_into_units(chunking, 20_480)
        assert units == Units(20_480, (1, 10), (0, 0))
        ledger = Ledger(chunking, units, host_bytes=4_096_000)
        ledger.lookup("a", prompt(num_tokens))
        store = ledger.prepare_store("a", dict.fromkeys(layout.names, range(num_tokens)), num_tokens)
        assert store.plan.num_bytes == 4_096_000
        ledger.complete_store(store, ok=True)
        assert ledger.pool.num_free_units == 0
        assert ledger.lookup("b", prompt(num_tokens + 1)).hit_tokens == num_tokens

    def test_window_blocks_that_end_no_checkpoint_are_not_stored(self):
        """B8: full blocks of 256 tokens, window blocks of 64, a window of 128: 2 of 4 window blocks are kept per 256
        tokens, and a hit at 1024 loads 4 full blocks and the last 2 of the window."""
        chunking = cut(group("full", FullAttention(), 256), group("window", SlidingWindow(128), 64))
        served = FakeEngine(chunking, frees="at once", checkpoint_tokens=256)
        served.served("a", prompt(1024), step=100)
        assert resident(served, prompt(1024)) == {"full": [0, 1, 2, 3], "window": [2, 3, 6, 7, 10, 11, 14, 15]}
        found = served.start("b", prompt(1025))
        assert (found.hit_tokens, lists(found.load)) == (1024, {"full": [0, 1, 2, 3], "window": [14, 15]})

    @pytest.mark.parametrize("full_tokens", [16, 1408])
    def test_a_prompt_that_ends_exactly_at_a_state_is_stored_for_both_lengths(self, full_tokens):
        """D1: states every 1408 tokens; a prompt of 2816 is stored. Sent again it hits 1408, one token longer 2816, and
        a prompt of 1408 tokens nothing."""
        served = FakeEngine(cut(group("full", FullAttention(), full_tokens), group("state", Recurrent(), 1408)))
        served.served("a", prompt(2816), step=1000)
        assert resident(served, prompt(2816))["state"] == [0, 1]
        hits = [served.start("b", prompt(n)).hit_tokens for n in (2816, 2817, 1408, 1409)]
        assert hits == [1408, 2816, 0, 1408]

    def test_a_layer_that_owns_pages_and_a_state_counts_in_both_groups(self):
        """D4: parallel layers, each with a KV page and a state: in two groups, and a checkpoint stores both."""
        layers = range(3)
        layout = CacheLayout(
            [
                GroupSpec("attention", FullAttention(), 4, [LeafSpec(f"{n}.kv", (4, 2), "float16") for n in layers]),
                GroupSpec("mamba", Recurrent(), 8, [LeafSpec(f"{n}.state", (5,), "float32") for n in layers]),
            ]
        )
        chunking = resolve_chunking(layout)
        assert chunking.chunk_bytes == (3 * 16, 3 * 20)
        assert lists(store_set(chunking, 17)) == {"attention": [0, 1, 2, 3], "mamba": [1]}
        served = FakeEngine(chunking)
        served.served("a", prompt(17))
        assert served.ledger.counts.bytes_stored == 4 * 48 + 60
        assert served.start("b", prompt(17)).load_bytes == 4 * 48 + 60
