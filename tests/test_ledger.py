"""What a scheduler may expect of the ledger: hits, shared prefixes, jobs that fail, and refusals."""

import numpy as np
import pytest

from kvjax import ChunkedLocal, FullAttention, Ledger, SlidingWindow
from kvjax.packing import cut_into_units
from tests.oracles.layouts import cut, group, lists
from tests.support.fake_engine import FakeEngine
from tests.support.ledgers import CHUNK, HYBRID, MIXED, UNIFORM, engine, prompt, resident


class TestHits:
    def test_an_empty_pool_hits_nothing(self):
        found = engine().start("a", prompt(20))
        assert (found.hit_tokens, found.load_bytes, lists(found.load)) == (0, 0, {"full": [], "ring": [], "window": []})
        assert found.limited_by == ("full", "window")

    def test_a_prompt_sent_again_recomputes_its_last_token_and_a_longer_one_does_not(self):
        served = engine()
        served.served("a", prompt(20), step=8)
        assert served.start("same", prompt(20)).hit_tokens == 19
        found = served.start("longer", prompt(21))
        assert found.hit_tokens == 20
        assert lists(found.load) == {"full": [0, 1, 2, 3, 4], "ring": [], "window": [3, 4]}
        assert found.load_bytes == 7 * CHUNK

    def test_a_prompt_that_ends_at_a_state_falls_back_one_state(self):
        """D1 in kind: states at 8, 16 and 24; the state at 24 already contains the last of 24 tokens."""
        served = engine(HYBRID)
        served.served("a", prompt(24), step=8)
        assert [served.start(n, prompt(n)).hit_tokens for n in (24, 25, 16, 8)] == [16, 24, 0, 0]

    def test_steps_that_end_inside_chunks_leave_no_hole(self):
        served = engine()
        served.served("a", prompt(30), step=3)
        assert resident(served, prompt(30))["full"] == list(range(7))
        assert served.start("b", prompt(40)).hit_tokens == 28

    def test_forks_share_what_they_have_in_common(self):
        """Two requests store the trunk once; each restores its own branch."""
        served = engine()
        served.served("a", [*prompt(16), *prompt(8, 100)])
        stored = served.ledger.counts.chunks_stored
        found = served.served("b", [*prompt(16), *prompt(8, 200)])
        assert found.hit_tokens == 0  # no window was kept at the junction
        assert served.ledger.counts.chunks_stored - stored == 2 + 2 + 2  # full 4 and 5, the windows of 16 and of 24
        assert served.start("c", [*prompt(16), *prompt(8, 300)]).hit_tokens == 16
        assert served.start("d", [*prompt(16), *prompt(9, 200)]).hit_tokens == 24

    def test_a_checkpoint_every_so_many_tokens_serves_prompts_that_part_there(self):
        served = engine(checkpoint_tokens=12)
        served.served("a", prompt(40), step=7)
        assert [served.start(n, [*prompt(n), -1, -2]).hit_tokens for n in (36, 30, 25, 24, 13, 11)] == [
            36, 24, 24, 24, 12, 0,
        ]  # fmt: skip

    def test_decoded_tokens_are_stored_at_the_checkpoints_that_follow(self):
        served = engine(checkpoint_tokens=12)
        served.start("a", prompt(10))
        served.prefill("a", 10, 64)
        for token in range(10, 26):
            served.accept("a", [token])
            served.prefill("a", token + 1, 1)
        assert served.start("b", prompt(40)).hit_tokens == 24
        served.end_store(served.store("a", checkpoint=True))
        assert served.start("b", [*prompt(26), -1]).hit_tokens == 24
        served.ledger.check_integrity()

    def test_the_end_of_a_request_is_a_checkpoint_if_that_is_said(self):
        served = engine()
        served.start("a", prompt(10))
        served.prefill("a", 10, 64)
        served.accept("a", prompt(14, 10))
        served.prefill("a", 24, 5)
        assert served.start("b", prompt(30)).hit_tokens == 8
        served.end_store(served.store("a", checkpoint=True))
        assert served.start("b", prompt(30)).hit_tokens == 24

    def test_what_the_device_holds_is_not_loaded(self):
        """B4: the host has 8 tokens and the device 12: nothing is loaded, and never a negative number of tokens."""
        served = engine()
        served.served("a", prompt(8))
        found = served.start("b", prompt(20), on_device=12)
        assert (found.hit_tokens, found.device_tokens, found.load_bytes) == (12, 12, 0)
        assert served.load("b").plan.moves == ()

    def test_hits_are_multiples_of_what_the_engine_can_resume_at(self):
        served = engine(UNIFORM, resume_multiple=8)
        served.served("a", prompt(28))
        assert served.start("b", prompt(28)).hit_tokens == 24


class TestNamespaces:
    def test_salts_do_not_share(self):
        served = engine()
        served.served("a", prompt(20), salt=b"tenant")
        assert served.start("b", prompt(20), salt=b"other").hit_tokens == 0
        assert served.start("b", prompt(20), salt=b"tenant").hit_tokens == 19

    def test_one_namespace_is_invalidated_alone(self):
        served = engine()
        served.served("a", prompt(20), salt=b"tenant")
        served.served("b", prompt(20), salt=b"other")
        assert served.ledger.invalidate(served.ledger.namespace(b"tenant")) == 5 + 2
        assert served.start("c", prompt(20), salt=b"tenant").hit_tokens == 0
        assert served.start("c", prompt(20), salt=b"other").hit_tokens == 19
        assert served.ledger.invalidate() == 5 + 2
        assert served.start("c", prompt(20), salt=b"other").hit_tokens == 0

    def test_the_engines_own_hashes_serve_as_well(self):
        """An engine that has prefix hashes hands those in, one for each whole unit, and all along."""
        ledger = Ledger(UNIFORM, cut_into_units(UNIFORM, 1), host_bytes=1000)
        hashes = [11, 12, b"thirteen", -14]
        ledger.lookup("a", hashes=hashes[:2], num_tokens=10)
        ledger.extend("a", hashes=hashes[2:], num_tokens=17)
        ledger.complete_store(ledger.prepare_store("a", {"full": range(5)}, 17, checkpoint=True), ok=True)
        assert ledger.lookup("b", hashes=[*hashes, 15], num_tokens=20).hit_tokens == 16
        assert ledger.lookup("c", hashes=[11, 12, 99], num_tokens=12).hit_tokens == 8
        for wrong, text in (
            ({"hashes": [1], "num_tokens": 8}, "`hashes` must hold one hash for each whole unit of 4 tokens, 2 for 8"),
            ({"hashes": [1.5], "num_tokens": 4}, "`hashes` must hold bytes or ints, got 1.5"),
            ({"hashes": [1]}, "`num_tokens` must be given with `hashes`, got None"),
            ({"token_ids": [1], "hashes": [1]}, "exactly one of `token_ids` and `hashes` must be given"),
            ({"token_ids": [1], "num_tokens": 1}, "`num_tokens` must not be given with `token_ids`, got 1"),
            ({}, "exactly one of `token_ids` and `hashes` must be given"),
            ({"token_ids": []}, "`token_ids` must hold at least one token, got none"),
        ):
            with pytest.raises(ValueError, match=text):
                ledger.lookup("d", **wrong)
        assert ledger.num_requests == 3
        with pytest.raises(ValueError, match="must be given either `token_ids` or `hashes` all along"):
            ledger.extend("a", [1, 2, 3])
        ledger.check_integrity()


class TestJobs:
    def test_a_failed_store_is_rolled_back_and_later_steps_store_it(self):
        served = engine()
        served.start("a", prompt(24))
        served.compute("a", 12)
        served.end_store(served.store("a"), ok=False)
        assert served.ledger.pool.num_free_units == served.ledger.pool.num_units
        assert served.ledger.counts.stores_failed == 1
        served.prefill("a", 24, 12)
        assert served.start("b", prompt(24)).hit_tokens == 23

    def test_the_chunks_of_a_failed_load_are_misses(self):
        """B6, G7: nobody is told that tokens are there, other chunks stay, and the next lookup does not try again."""
        served = engine()
        served.served("a", prompt(20))
        served.served("other", prompt(20, 100))
        served.start("b", prompt(20))
        served.end_load(served.load("b"), ok=False)
        assert served.running["b"].position == 0
        assert served.start("b", prompt(20)).hit_tokens == 0
        assert served.start("c", prompt(20, 100)).hit_tokens == 19
        assert (served.ledger.counts.loads_failed, served.ledger.counts.chunks_loaded) == (1, 0)

    def test_a_load_taken_back_can_be_prepared_again_after_a_lookup(self):
        served = engine()
        served.served("a", prompt(20))
        served.start("b", prompt(20))
        load = served.load("b")
        served.loads.remove(load)
        served.ledger.cancel_load(load)
        assert served.ledger.pool.open_pins() == set()
        assert served.start("b", prompt(20)).hit_tokens == 19
        served.end_load(served.load("b"))

    def test_pending_chunks_are_no_hits_and_nothing_waits_for_them(self):
        """[hit, hit, miss, pending] with a window of 2 chunks: the first two serve."""
        chunking = cut(group("window", SlidingWindow(8), 4))
        served = engine(chunking)
        served.served("a", prompt(8))
        served.start("b", prompt(16))
        served.compute("b", 16)
        store = served.store("b")
        pool = served.ledger.pool
        pool.invalidate(served.ledger._requests["b"].chains[0].keys(np.array([2])))
        assert lists(served.start("c", prompt(30)).load) == {"window": [0, 1]}
        assert served.start("c", prompt(30)).hit_tokens == 8
        served.end_store(store)
        assert served.start("d", prompt(16)).hit_tokens == 8  # the chunk in the middle was invalidated
        served.ledger.check_integrity()

    def test_a_store_under_way_is_not_stored_twice(self):
        served = engine()
        for name in ("a", "b"):
            served.start(name, prompt(20))
            served.compute(name, 20)
        first, second = served.store("a"), served.store("b")
        assert (first.plan.num_chunks, second.plan.num_chunks) == (5 + 2, 0)
        served.end_store(second)
        assert served.start("c", prompt(20)).hit_tokens == 0
        served.end_store(first)
        assert served.start("c", prompt(20)).hit_tokens == 19

    def test_an_invalidation_reaches_the_store_under_way(self):
        """The weights were swapped while a store ran: what it wrote is never found, and is not counted as stored."""
        served = engine()
        served.start("a", prompt(20))
        served.compute("a", 20)
        store = served.store("a")
        assert served.ledger.invalidate() == 7
        served.end_store(store)
        assert served.start("b", prompt(20)).hit_tokens == 0
        assert (served.ledger.counts.chunks_stored, served.ledger.counts.bytes_stored) == (0, 0)
        assert served.ledger.pool.num_free_units == served.ledger.pool.num_units

    def test_an_invalidation_does_not_disturb_the_load_under_way(self):
        served = engine(chunks=8)
        served.served("a", prompt(20))
        served.start("b", prompt(20))
        load = served.load("b")
        served.ledger.invalidate()
        served.served("c", prompt(20, 100))  # has no room beside what is being read, and evicts none of it
        served.end_load(load)
        assert served.ledger.pool.num_free_units > 0
        served.ledger.check_integrity()

    def test_a_request_may_finish_with_jobs_in_flight(self):
        """G4: preempted or aborted, and admitted again with the same name: old jobs end without a trace."""
        served = engine()
        served.served("a", prompt(20))
        served.start("b", prompt(30))
        load = served.load("b")
        served.finish("b")
        served.start("b", prompt(8, 100))
        served.compute("b", 8)
        store = served.store("b")
        served.finish("b")
        served.ledger.check_integrity()
        served.end_load(load)
        served.end_store(store)
        assert served.ledger.pool.open_pins() == set()
        assert served.ledger.pool.open_reservations() == set()
        assert served.start("c", prompt(9, 100)).hit_tokens == 8

    def test_a_job_completed_twice_or_elsewhere_is_refused(self):
        served, other = engine(), engine()
        served.served("a", prompt(20))
        served.start("b", prompt(20))
        load = served.load("b")
        served.end_load(load)
        served.compute("b", 20)
        store = served.store("b")
        served.end_store(store)
        for ledger in (served.ledger, other.ledger):
            for complete in (ledger.complete_load, ledger.complete_store):
                with pytest.raises(ValueError, match="must be one that was prepared here and not completed yet"):
                    complete(load if complete == ledger.complete_load else store, ok=True)
            with pytest.raises(ValueError, match="must be one that was prepared here and not completed yet"):
                ledger.cancel_load(load)
            ledger.check_integrity()

    def test_a_load_is_not_completed_as_a_store(self):
        served = engine()
        served.served("a", prompt(20))
        served.start("b", prompt(20))
        load = served.load("b")
        with pytest.raises(ValueError, match="a store must be one that was prepared here and not completed yet"):
            served.ledger.complete_store(load, ok=True)
        served.ledger.check_integrity()
        served.end_load(load)


class TestPins:
    def test_a_hit_that_is_never_loaded_is_released_when_the_request_ends(self):
        """E7: chunks hit and pinned, the device covers them, the request ends: no pins, all evictable."""
        served = engine(UNIFORM, chunks=5)
        served.served("a", prompt(20))
        served.start("b", prompt(21))
        served.start("c", prompt(20, 100))
        served.compute("c", 20)
        served.end_store(served.store("c"))
        assert resident(served, prompt(20))["full"] == [0, 1, 2, 3, 4]
        served.finish("b")
        assert all(not len(pins.slots) for pins in served.ledger.pool.open_pins())
        served.end_store(served.store("c", checkpoint=True))
        assert resident(served, prompt(20, 100))["full"] == [0, 1, 2, 3, 4]

    def test_a_second_lookup_starts_afresh(self):
        served = engine(UNIFORM)
        served.served("a", prompt(20))
        served.start("b", prompt(21))
        first = served.ledger.pool.open_pins()
        assert served.start("b", prompt(13)).hit_tokens == 12
        assert len(served.ledger.pool.open_pins()) == 1
        assert served.ledger.pool.open_pins() != first
        served.end_load(served.load("b"))
        with pytest.raises(ValueError, match="request 'b' must be looked up before it is loaded, and once for each"):
            served.ledger.prepare_load("b", {})
        served.ledger.check_integrity()

    def test_a_lookup_that_is_refused_leaves_the_request_as_it_was(self):
        served = engine()
        served.served("a", prompt(20))
        served.start("b", prompt(20))
        with pytest.raises(ValueError, match="`device_tokens` must be at most num_tokens - 1 = 19, got 20"):
            served.ledger.lookup("b", prompt(20), device_tokens=20)
        served.end_load(served.load("b"))
        assert served.running["b"].position == 19


class TestRefused:
    def test_requests_that_are_unknown_or_finished(self):
        ledger = engine().ledger
        ledger.lookup("a", prompt(4))
        ledger.finish("a")
        for call in (
            lambda: ledger.finish("a"),
            lambda: ledger.extend("a", [1]),
            lambda: ledger.prepare_load("a", {}),
            lambda: ledger.prepare_store("a", {}, 0),
        ):
            with pytest.raises(
                ValueError, match="`request_id` must be one that was looked up and not finished, got 'a'"
            ):
                call()

    @pytest.mark.parametrize(
        ("tables", "num_tokens", "text"),
        [
            ({"full": range(5), "window": range(5)}, 9, "`num_tokens` must be at most the 8 tokens that request 'a'"),
            ({"full": range(5), "window": range(5)}, -1, "`num_tokens` must be a non-negative int, got -1"),
            ({"full": range(5), "window": range(5)}, 4.0, "`num_tokens` must be a non-negative int, got 4.0"),
            ({"full": range(5)}, 8, "`block_tables` must hold a table for group 'window'"),
            ({"full": range(5), "window": [0]}, 8, "group 'window' must cover 8 tokens with 2 blocks, got 1"),
            ({"full": [0, 99], "window": range(5)}, 8, "group 'full' must hold ids below 50, .* got 99"),
            ({"full": [0, -2], "window": range(5)}, 8, "group 'full' must hold ids of at least -1, got -2"),
        ],
    )
    def test_a_store_beyond_what_the_request_has(self, tables, num_tokens, text):
        """Tokens that are not accepted are never keyed: a store of them is refused, and nothing changes."""
        ledger = engine().ledger
        ledger.lookup("a", prompt(8))
        with pytest.raises(ValueError, match=text):
            ledger.prepare_store("a", tables, num_tokens, num_blocks={"full": 50, "window": 50})
        ledger.check_integrity()
        assert ledger.pool.num_free_units == ledger.pool.num_units
        store = ledger.prepare_store("a", {"full": range(5), "window": range(5)}, 8)
        assert store.plan.num_chunks == 4

    def test_a_load_into_tables_that_do_not_fit_can_be_tried_again(self):
        served = engine()
        served.served("a", prompt(20))
        served.start("b", prompt(20))
        with pytest.raises(ValueError, match="`block_tables` of group 'full' must cover 5 blocks, got 1"):
            served.ledger.prepare_load("b", {"full": [0], "window": [0]})
        served.end_load(served.load("b"))
        served.ledger.check_integrity()

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"host_bytes": 63}, "`host_bytes` must hold at least one chunk of the largest group, 'full': 64 bytes"),
            ({"host_bytes": 0}, "`host_bytes` must be a positive int, got 0"),
            ({"host_bytes": 64, "resume_multiple": 0}, "`resume_multiple` must be a positive int, got 0"),
            ({"host_bytes": 64, "checkpoint_tokens": 0}, "`checkpoint_tokens` must be a positive int, got 0"),
        ],
    )
    def test_a_ledger_of_wrong_options(self, options, text):
        with pytest.raises(ValueError, match=text):
            Ledger(MIXED, cut_into_units(MIXED, 1), **options)


def test_hits_are_counted_once_whatever_follows():
    """K2: a prompt is stored, hit once and decoded for 50 steps: stores, loads and hits stand as they were; bytes are
    those of chunks, unpadded."""
    chunking = cut(group("full", FullAttention(), 4), group("chunked", ChunkedLocal(8), 4))
    served = FakeEngine(chunking, num_units=10**6)
    served.served("a", prompt(20))
    served.start("b", prompt(21))
    served.end_load(served.load("b"))
    counts = served.ledger.counts
    for token in range(21, 71):
        served.accept("b", [token])
        served.prefill("b", token + 1, 1)
    served.finish("b")
    assert (counts.lookups, counts.lookup_tokens, counts.hit_tokens) == (2, 41, 20)
    assert (counts.chunks_loaded, counts.bytes_loaded) == (5 + 1, 6 * CHUNK)
    assert (counts.chunks_stored, counts.bytes_stored) == (5 + 1, 6 * CHUNK)
