"""What is not stored, or not loaded: chunks that were asked for too rarely, and the limits of a request."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.admission import AskedSketch
from tests.support.ledgers import HYBRID, MIXED, UNIFORM, engine, prompt, resident


def fingerprints(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.uint64) * np.uint64(0x9E3779B97F4A7C15)


class TestSketch:
    @settings(max_examples=60)
    @given(st.lists(st.sets(st.integers(1, 40), min_size=1), max_size=30))
    def test_a_count_is_never_too_low(self, questions):
        sketch, asked = AskedSketch(64), dict.fromkeys(range(1, 41), 0)
        sketch._counts = np.zeros((4, 2**12), np.uint8)  # so many columns that nothing is forgotten
        sketch._shift = np.uint64(52)
        for question in questions:
            counts = sketch.ask(fingerprints(*sorted(question)))
            for number, count in zip(sorted(question), counts.tolist(), strict=True):
                asked[number] += 1
                assert count >= asked[number]

    def test_counts_of_few_fingerprints_are_exact(self):
        sketch = AskedSketch()
        for times in range(1, 300):
            assert sketch.ask(fingerprints(7, 8, 9)).tolist() == [min(times, 255)] * 3

    def test_what_was_asked_for_long_ago_is_forgotten(self):
        sketch = AskedSketch(2**10)
        for _ in range(4):
            sketch.ask(fingerprints(1))
        for start in range(2, 6000, 50):
            sketch.ask(fingerprints(*range(start, start + 50)))
        assert sketch.ask(fingerprints(1))[0] < 5

    def test_its_memory_is_bounded(self):
        sketch = AskedSketch(2**10)
        before = sketch._counts.nbytes
        for start in range(0, 100_000, 1000):
            sketch.ask(np.arange(start, start + 1000, dtype=np.uint64))
        assert sketch._counts.nbytes == before


class TestStoreAfter:
    @pytest.mark.parametrize("chunking", [UNIFORM, MIXED, HYBRID])
    def test_a_cold_prompt_is_not_stored_and_one_asked_for_again_is(self, chunking):
        served = engine(chunking, store_after=2)
        served.served("a", prompt(24), step=8)
        assert served.ledger.counts.chunks_stored == 0
        assert served.ledger.counts.chunks_declined > 0
        served.served("b", prompt(24), step=8)
        assert served.start("c", prompt(25)).hit_tokens == 24

    def test_what_is_asked_for_once_is_stored_by_default(self):
        served = engine(MIXED)
        served.served("a", prompt(24), step=8)
        assert served.start("b", prompt(25)).hit_tokens == 24
        assert served.ledger.counts.chunks_declined == 0

    @pytest.mark.parametrize("chunking", [UNIFORM, MIXED, HYBRID])
    def test_a_shared_prefix_is_stored_so_that_it_can_be_resumed(self, chunking):
        """Two prompts share 16 tokens and then part: what the second one stores is the best position of the shared
        part, with its windows and states, and no chunk beyond it."""
        served = engine(chunking, store_after=2)
        served.served("a", [*prompt(16), *prompt(16, 100)], step=4)
        served.served("b", [*prompt(16), *prompt(16, 200)], step=4)
        assert resident(served, [*prompt(16), *prompt(16, 200)])["full"] == [0, 1, 2, 3]
        assert served.start("c", [*prompt(16), *prompt(16, 300)]).hit_tokens == 16

    def test_a_lookup_again_of_a_request_that_goes_on_does_not_ask_again(self):
        """A scheduler asks for the request at the head of its queue in every step."""
        served = engine(UNIFORM, store_after=2)
        for _ in range(5):
            served.start("a", prompt(16))
        served.prefill("a", 16, 16)
        assert served.ledger.counts.chunks_stored == 0

    @pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "2", None])
    def test_wrong_values_are_refused(self, wrong):
        with pytest.raises(ValueError, match="`store_after` must be a positive int"):
            engine(UNIFORM, store_after=wrong)


class TestLimits:
    def test_only_chunks_of_the_first_tokens_are_stored(self):
        served = engine(MIXED)
        served.start("a", prompt(24), max_store_tokens=13)
        served.prefill("a", 24, 8)
        assert resident(served, prompt(24))["full"] == [0, 1, 2]
        served.finish("a")
        assert served.start("b", prompt(24)).hit_tokens == 12

    @pytest.mark.parametrize(("limit", "on_device", "hit"), [(0, 0, 0), (9, 0, 9), (9, 6, 15), (0, 6, 6), (99, 0, 23)])
    def test_only_so_many_tokens_are_loaded(self, limit, on_device, hit):
        served = engine(UNIFORM)
        served.served("a", prompt(24))
        assert served.start("b", prompt(24), on_device=on_device, max_load_tokens=limit).hit_tokens == hit

    def test_a_request_that_is_skipped_neither_restores_nor_stores(self):
        served = engine(MIXED)
        served.served("a", prompt(16))
        stored = served.ledger.counts.chunks_stored
        found = served.start("b", [*prompt(16), *prompt(8, 50)], skip=True)
        assert (found.hit_tokens, found.load_bytes) == (0, 0)
        served.prefill("b", 24, 8, checkpoint=True)
        assert served.ledger.counts.chunks_stored == stored
        served.finish("b")

    @pytest.mark.parametrize(
        ("name", "wrong", "rule"),
        [
            ("max_store_tokens", -1, "must be a non-negative int"),
            ("max_load_tokens", 2.0, "must be a non-negative int"),
            ("max_load_tokens", True, "must be a non-negative int"),
            ("skip", 1, "must be True or False"),
        ],
    )
    def test_wrong_values_are_refused_and_nothing_is_registered(self, name, wrong, rule):
        served = engine(UNIFORM)
        with pytest.raises(ValueError, match=f"`{name}` {rule}"):
            served.start("a", prompt(8), **{name: wrong})
        assert served.ledger.num_requests == 0
        assert served.ledger.pool.namespaces.in_use == 0
