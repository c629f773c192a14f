"""What lookups and stores accept, and every refusal by name."""

import numpy as np
import pytest

from kvjax.chunking import resolve_chunking
from kvjax.coverage import longest_hit, next_cut, store_set
from kvjax.groups import CacheLayout, FullAttention, GroupSpec, Recurrent, Scratch, SlidingWindow
from kvjax.retention import retained_from
from tests.oracles import law
from tests.oracles.layouts import cut, group


@pytest.mark.parametrize(
    "chunks",
    [
        [2, 0, 0],
        [0, 0, 2],
        (0, 2),
        {0, 2},
        range(0, 4, 2),
        np.array([2, 0], np.uint8),
        [True, False, True],
        [0, 2, 10**30],
    ],
)
def test_presence_is_a_mask_or_indices_in_any_order(chunks):
    chunking = cut(group("window", SlidingWindow(4), 4))
    at = [longest_hit(chunking, n, {"window": chunks}).hit_tokens for n in range(1, 20)]
    present = law.held_by_chunks(chunking, {"window": [0, 2]})
    assert at == [max(law.restorable(chunking, present, n)) for n in range(1, 20)]


def test_chunks_named_twice_count_once():
    chunking = cut(group("full", FullAttention(), 4))
    assert longest_hit(chunking, 20, {"full": [0, 0, 1, 2, 2, 3]}).hit_tokens == 16


@pytest.mark.parametrize("chunks", [[], np.zeros(0), np.zeros(0, bool), np.zeros(9, bool), range(0), ()])
def test_presence_may_be_empty(chunks):
    assert longest_hit(cut(group("a", FullAttention(), 4)), 20, {"a": chunks}).hit_tokens == 0


@pytest.mark.parametrize(
    ("present", "words"),
    [
        (
            {"a": [0.0]},
            "`present` of group 'a' must be a list or 1-d array of bools or of chunk .*, got float in it",
        ),
        ({"a": np.array([1.0])}, "got a 1-d array of float64"),
        ({"a": [True, 1]}, "got a mix of bools and"),
        ({"a": [np.True_, 1]}, "got a mix of bools and"),
        ({"a": [0, -1]}, "`present` of group 'a' must hold non-negative chunk indices, got -1"),
        ({"a": [-(10**30)]}, "must hold non-negative chunk indices, got -1000"),
        ({"a": np.zeros((2, 2), int)}, "got a 2-d array of int64"),
        ({"a": 3}, "got 3"),
        ({"a": None}, "got None"),
        ({"a": "01"}, "got '01'"),
        ({"a": ["0"]}, "got str in it"),
        ({"a": [[0]]}, "got list in it"),
        ({"a": {0: True}}, "got {0: True}"),
        ({"b": [0]}, r"`present` must name groups of the layout \['a', 'ring'\], got 'b'"),
        ({"ring": []}, "`present` must name groups that are cached, got the scratch group 'ring'"),
        ([0], "`present` must be a mapping of group names to chunks, got"),
        (None, "`present` must be a mapping of group names to chunks, got None"),
    ],
)
def test_other_presence_is_refused(present, words):
    with pytest.raises(ValueError, match=words):
        longest_hit(cut(group("a", FullAttention(), 4), group("ring", Scratch(), 4)), 20, present)


@pytest.mark.parametrize(
    ("device_tokens", "words"),
    [
        (20, "`device_tokens` must be at most num_tokens - 1 = 19, got 20"),
        (-1, "`device_tokens` must be a non-negative int, got -1"),
        (1.0, "`device_tokens` must be a non-negative int, got 1.0"),
        (True, "`device_tokens` must be a non-negative int, got True"),
        (None, "`device_tokens` must be a non-negative int, got None"),
        ({"a": 20}, "`device_tokens` of group 'a' must be at most num_tokens - 1 = 19, got 20"),
        ({"a": -1}, "`device_tokens` of group 'a' must be a non-negative int, got -1"),
        ({"b": 1}, r"`device_tokens` must name groups of the layout \['a', 'ring'\], got 'b'"),
        ({"ring": 1}, "`device_tokens` must name groups that are cached, got the scratch group 'ring'"),
    ],
)
def test_other_device_prefixes_are_refused(device_tokens, words):
    with pytest.raises(ValueError, match=words):
        longest_hit(
            cut(group("a", FullAttention(), 4), group("ring", Scratch(), 4)), 20, {}, device_tokens=device_tokens
        )


@pytest.mark.parametrize("value", [0, -1, 1.0, True, None, "4"])
def test_counts_must_be_positive_ints(value):
    chunking = cut(group("a", FullAttention(), 4))
    with pytest.raises(ValueError, match="`num_tokens` must be a positive int, got "):
        longest_hit(chunking, value, {})
    for call in (
        lambda: longest_hit(chunking, 9, {}, resume_multiple=value),
        lambda: store_set(chunking, 9, resume_multiple=value),
        lambda: next_cut(chunking, 0, [9], resume_multiple=value),
        lambda: retained_from(chunking, 9, resume_multiple=value),
    ):
        with pytest.raises(ValueError, match="`resume_multiple` must be a positive int, got "):
            call()


@pytest.mark.parametrize("value", [-1, 1.0, True, None, "4"])
def test_positions_must_be_non_negative_ints(value):
    chunking = cut(group("a", Recurrent(), 4))
    with pytest.raises(ValueError, match="`checkpoint` must be a non-negative int, got "):
        store_set(chunking, value)
    with pytest.raises(ValueError, match="`position` must be a non-negative int, got "):
        next_cut(chunking, value, [9])
    with pytest.raises(ValueError, match="`checkpoints` must be a non-negative int, got "):
        next_cut(chunking, 0, [9, value])


@pytest.mark.parametrize("checkpoints", [9, "9", None, {9: 1}])
def test_checkpoints_must_be_a_sequence(checkpoints):
    with pytest.raises(ValueError, match="`checkpoints` must be a sequence of non-negative ints, got "):
        next_cut(cut(group("a", Recurrent(), 4)), 0, checkpoints)


def test_one_checkpoint_at_least_is_needed():
    with pytest.raises(ValueError, match="`checkpoints` must hold at least one position, got none"):
        next_cut(cut(group("a", Recurrent(), 4)), 0, [])


def test_a_layout_is_no_chunking():
    layout = CacheLayout([group("a", FullAttention(), 4)])
    for call in (
        lambda: longest_hit(layout, 9, {}),  # pyright: ignore
        lambda: store_set(layout, 9),  # pyright: ignore
        lambda: next_cut(layout, 0, [9]),  # pyright: ignore
    ):
        with pytest.raises(ValueError, match="`chunking` must be a Chunking, as `resolve_chunking` returns it, got "):
            call()


def test_every_group_has_int64_indices():
    chunking = cut(group("a", FullAttention(), 4), group("ring", Scratch(), 4), group("state", Recurrent(), 8))
    for chunks in (longest_hit(chunking, 20, {"a": [0, 1], "state": [0]}).load, store_set(chunking, 20)):
        assert list(chunks) == ["a", "ring", "state"]
        assert {indices.dtype for indices in chunks.values()} == {np.dtype(np.int64)}


def test_a_request_far_longer_than_what_is_resident_is_answered():
    layout = CacheLayout(
        [GroupSpec("a", FullAttention(), 16, block_bytes=64), GroupSpec("b", Recurrent(), 16, block_bytes=64)]
    )
    hit = longest_hit(resolve_chunking(layout), 2**47, {"a": range(9), "b": [3, 7]})
    assert hit.hit_tokens == 128
