"""Mistakes that a newcomer makes: one sentence of one line that names the argument and what came, and nothing of the
caller's data in it; afterwards all goes on."""

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax._checks import shown
from kvjax.fused import FusedSteps
from kvjax.law import needed
from kvjax.packing import cut_into_units
from kvjax.ranks import RankedOffloader

MOST = 300  # characters of a message

LAYOUT = kvjax.CacheLayout(
    [
        kvjax.GroupSpec("full", kvjax.FullAttention(), 8, [kvjax.LeafSpec("kv", (8, 16), "float32")]),
        kvjax.GroupSpec("swa", kvjax.SlidingWindow(12), 4, [kvjax.LeafSpec("w", (4, 16), "float32")]),
    ]
)
TABLES = {"full": list(range(6)), "swa": list(range(12))}


def make_caches():
    return {"kv": jnp.ones((20, 8, 16)), "w": jnp.ones((40, 4, 16))}


def made(**options):
    return kvjax.Offloader(LAYOUT, make_caches(), host_bytes=2**20, show_progress=False, **options)


def sentence(call, *named, error=ValueError):
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) <= MOST, text
    for word in named:
        assert word in text
    return text


class TestMakingOne:
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"model": 7}, ("`model` must be a string, got 7",)),
            ({"model": None}, ("`model` must be a string, got None",)),
            ({"shard": 0}, ("`shard` must be a string, got 0",)),
            ({"on_event": 5}, ("`on_event` must be callable with one event, got 5",)),
            ({"show_progress": "yes"}, ("`show_progress` must be True or False, got 'yes'",)),
            ({"record": "/"}, ("`record` must name a file that can be written, got '/'",)),
            ({"host_bytes": {"kv": np.zeros((500, 500))}}, ("`host_bytes` must be a positive int, got",)),
        ],
    )
    def test_what_cannot_be_used_is_refused_at_once(self, options, words):
        arguments = {"host_bytes": 2**20, "show_progress": False, **options}
        sentence(lambda: kvjax.Offloader(LAYOUT, make_caches(), **arguments), *words)

    def test_swapped_arguments_are_told_by_type_and_shape(self):
        text = sentence(lambda: kvjax.Offloader(make_caches(), LAYOUT, host_bytes=2**20), "`layout` must be")
        assert "an array of float32, shape (20, 8, 16)" in text

    def test_parts_are_told_by_their_class(self):
        chunking = kvjax.resolve_chunking(LAYOUT)
        units = cut_into_units(chunking, 512)
        sentence(lambda: kvjax.Ledger(None, units, host_bytes=2**20), "`chunking` must be a Chunking")
        sentence(lambda: kvjax.Ledger(chunking, 5, host_bytes=2**20), "`units` must be a Units, got 5")
        sentence(lambda: kvjax.Mover(None, units, make_caches(), num_units=4), "`chunking` must be a Chunking")
        sentence(lambda: kvjax.Mover(chunking, None, make_caches(), num_units=4), "`units` must be a Units")
        sentence(lambda: FusedSteps(None), "`offloader` must be an Offloader, got None")
        sentence(lambda: RankedOffloader(None), "`offloader` must be an Offloader, got None")
        sentence(lambda: kvjax.plan_store(None, {}, {}, {}), "`chunking` must be a Chunking")
        sentence(lambda: kvjax.plan_store(chunking, None, {}, {}), "`chunks` must be a Mapping, got None")
        sentence(lambda: kvjax.plan_load(chunking, None, {}, {}), "`hit` must be a Hit, got None")
        sentence(lambda: kvjax.retained_from(LAYOUT, 1), "`chunking` must be a Chunking")
        sentence(lambda: kvjax.register_metrics(5), "`stats` must be a function that returns them", "got 5")
        sentence(lambda: needed(kvjax.FullAttention, 5), "`kind` must be FullAttention()")
        sentence(lambda: needed(kvjax.FullAttention(), -1), "`position` must be a non-negative int, got -1")


@pytest.fixture(scope="module")
def offloader():
    offloader = made()
    yield offloader
    offloader.close()


class TestServing:
    @pytest.fixture(autouse=True)
    def goes_on(self, offloader):
        yield
        caches, tokens = make_caches(), list(range(40))
        for hit in (0, 39) if not offloader.stats().chunks_stored else (39,):
            assert offloader.lookup("serves", tokens).hit_tokens == hit
            caches, load = offloader.load(caches, "serves", TABLES)
            caches, store = offloader.store(caches, "serves", TABLES, 40)
            assert offloader.wait(load).ok
            assert offloader.wait(store).ok
            offloader.finish("serves")
        offloader.check_integrity()
        assert offloader.stats().open_requests == 0

    SECRET = "a secret prompt, which is nobody's business " * 1000

    @pytest.mark.parametrize(
        ("tokens", "got"),
        [
            (SECRET, "got str"),
            (None, "exactly one of"),
            ({1: 2}, "got dict"),
            ({1, 2}, "got set"),
            ([[1], [2, 3]], "got sequences of various lengths"),
            ([[1, 2]], "got a 2-d one of int64"),
            ([1.5], "got a 1-d one of float64"),
            (np.array([2**63], np.uint64), "got 9223372036854775808, which is too large"),
        ],
    )
    def test_prompts(self, offloader, tokens, got):
        text = sentence(lambda: offloader.lookup("a", tokens), "`token_ids`", got)
        assert "secret" not in text

    def test_an_id_and_a_prompt_that_are_swapped(self, offloader):
        sentence(lambda: offloader.lookup(list(range(10**5)), "a"), "`request_id` must be hashable")

    def test_hashes_go_with_a_number_of_tokens_and_name_prefixes(self, offloader):
        sentence(lambda: offloader.lookup("a", hashes=[1, 2]), "`num_tokens` must be given with `hashes`")
        sentence(lambda: offloader.lookup("a", hashes=["x"], num_tokens=8), "`hashes` must hold bytes or ints, got 'x'")
        same = [b"one"] * (40 // offloader.chunking.tokens_per_hash)
        sentence(lambda: offloader.lookup("a", hashes=same, num_tokens=40), "`hashes` must each stand for the whole")

    def test_block_tables(self, offloader):
        caches = make_caches()
        offloader.lookup("a", list(range(500, 540)))
        for change, words in (
            ({"ful": [1]}, "`block_tables` must name groups of the layout ['full', 'swa'], got 'ful'"),
            ({"full": None}, "`block_tables` of group 'full' must be a 1-d sequence of block ids, got NoneType"),
            ({"full": "123456"}, "must be a 1-d sequence of block ids, got str"),
            ({"full": {1: 2}}, "must be a 1-d sequence of block ids, got dict"),
        ):
            sentence(lambda c=change: offloader.store(caches, "a", {**TABLES, **c}, 40), words)
        sentence(lambda: offloader.store(caches, "a", None, 40), "`block_tables` must hold a table for group")
        sentence(lambda: offloader.store(caches, "a", TABLES, list(range(10**5))), "`num_tokens` must be")
        offloader.finish("a")

    def test_a_job_that_was_not_taken_out_of_what_load_returns(self, offloader):
        offloader.lookup("a", list(range(600, 640)))
        both = offloader.store(make_caches(), "a", TABLES, 40)
        sentence(lambda: offloader.wait(both), "`job` must be one of this offloader, got (", "shape (20, 8, 16)")
        offloader.wait(both[1])
        offloader.finish("a")

    def test_checkpoints(self, offloader):
        offloader.lookup("a", list(range(700, 740)))
        sentence(lambda: offloader.add_checkpoints("a", 5), "`positions` must be a 1-d sequence of ints", "got int")
        sentence(lambda: offloader.add_checkpoints("a", [8, -4]), "`positions` must be", "got -4")
        sentence(lambda: offloader.add_checkpoints("a", [10**9]), "`positions` must be", "got 1000000000")
        offloader.finish("a")

    @pytest.mark.parametrize("seconds", [0, 0.0, None])
    def test_a_prefill_of_no_time_would_have_everything_computed(self, offloader, seconds):
        sentence(lambda: offloader.note_prefill(5, seconds), "`seconds_taken` must be a positive number of seconds")


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (7, "7"),
        ("a word", "'a word'"),
        ([1, 2], "[1, 2]"),
        (jnp.zeros((3, 4)), "an array of float32, shape (3, 4)"),
        ([np.zeros(10**6, np.int8)], "[an array of int8, shape (1000000,)]"),
        ("two\nlines", r"'two\nlines'"),
    ],
)
def test_values_are_shown_in_few_words(value, told):
    assert shown(value) == told


@pytest.mark.parametrize("value", ["x" * 10**6, list(range(10**5)), dict.fromkeys(range(100), "y" * 1000), 10**4000])
def test_no_value_is_shown_at_length(value):
    assert len(shown(value)) <= 120


def test_what_cannot_be_shown_is_shown_by_its_class():
    class Broken:
        def __repr__(self):
            raise RuntimeError("deleted")

    assert "Broken" in shown(Broken())
