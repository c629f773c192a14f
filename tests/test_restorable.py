"""Sets of restorable positions: what they hold, how ranks agree through them, and as bytes."""

import contextlib
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvjax
from kvjax import Restorable, longest_hit, restorable
from kvjax.groups import ChunkedLocal, FullAttention, Recurrent, SlidingWindow
from kvjax.positions import MOST_INTERVALS
from tests.oracles import check_law
from tests.oracles.layouts import Instance, cut, group, ranks


def pairs(found: Restorable) -> list[tuple[int, int]]:
    return list(zip(found.firsts.tolist(), found.lasts.tolist(), strict=True))


def of(*intervals: tuple[int, int]) -> Restorable:
    return Restorable(*zip(*intervals, strict=True))


def positions(found: Restorable) -> set[int]:
    return {p for first, last in pairs(found) for p in range(first, last + 1)}


@st.composite
def sets(draw: st.DrawFn, *, largest_step: int = 2**40) -> Restorable:
    """Any set, some with long stretches of equal intervals."""
    bounds = [0, draw(st.integers(0, largest_step))]
    for _ in range(draw(st.integers(0, 6))):
        gap, length = draw(st.integers(2, largest_step)), draw(st.integers(0, largest_step))
        for _ in range(draw(st.sampled_from([1, 1, 2, 5]))):
            bounds += [bounds[-1] + gap, bounds[-1] + gap + length]
    return Restorable(bounds[::2], bounds[1::2])


# --- ranks


@settings(max_examples=600, deadline=None)
@given(ranks())
def test_sets_and_common_hits_of_ranks_equal_brute_force(instances: list[Instance]):
    assert check_law.ranks_difference(instances) is None


def test_1_000_random_lookups_on_several_ranks_equal_brute_force():
    found = (check_law.with_seed(check_law.check_ranks, seed) for seed in range(1_000))
    assert [difference for difference in found if difference] == []


def test_the_smallest_hit_of_all_ranks_is_not_a_common_hit():
    """Full attention and a state every 16 tokens. Rank 0 lost the state at 48 and can resume at 32 or 64; rank 1 ends
    at 48 and lost the state at 32. Their hits are 64 and 48, of which 48 cannot be restored on rank 0: what both can
    restore is 16."""
    chunking = cut(group("full", FullAttention(), 16), group("state", Recurrent(), 16))
    present = [{"full": range(4), "state": [0, 1, 3]}, {"full": range(3), "state": [0, 2]}]
    own = [restorable(chunking, 100, chunks) for chunks in present]
    assert [pairs(one) for one in own] == [[(0, 0), (16, 16), (32, 32), (64, 64)], [(0, 0), (16, 16), (48, 48)]]
    assert [longest_hit(chunking, 100, chunks).hit_tokens for chunks in present] == [64, 48]
    hits = [
        longest_hit(chunking, 100, present[0], ranks=own[1:]),
        longest_hit(chunking, 100, present[1], ranks=own[:1]),
    ]
    assert [hit.hit_tokens for hit in hits] == [16, 16]
    assert [hit.load["full"].tolist() for hit in hits] == [[0], [0]]


def test_limited_by_names_groups_of_this_rank_and_is_empty_where_only_another_rank_limits():
    chunking = cut(group("full", FullAttention(), 16), group("window", SlidingWindow(16), 16))
    everything, less = {"full": range(4), "window": range(4)}, {"full": range(4), "window": [0]}
    sets = [restorable(chunking, 65, chunks) for chunks in (everything, less)]
    here = longest_hit(chunking, 65, everything, ranks=[sets[1]])
    assert (here.hit_tokens, here.limited_by) == (16, ())
    there = longest_hit(chunking, 65, less, ranks=[sets[0]])
    assert (there.hit_tokens, there.limited_by) == (16, ("window",))


def test_a_prefix_on_one_device_is_no_hit_unless_the_others_can_resume_there():
    """Devices hold 7 and 9 tokens, and the host of the first 8 more; hits are multiples of 4. One alone resumes at its
    7 or 9; together they resume at 8, and the load of it takes nothing that the device holds."""
    chunking = cut(group("full", FullAttention(), 4))
    first = restorable(chunking, 20, {"full": [0, 1]}, device_tokens=7, resume_multiple=4)
    second = restorable(chunking, 20, {}, device_tokens=9, resume_multiple=4)
    assert (pairs(first), pairs(second)) == ([(0, 0), (4, 4), (7, 8)], [(0, 0), (4, 4), (8, 9)])
    hit = longest_hit(chunking, 20, {}, device_tokens=9, resume_multiple=4, ranks=[first])
    assert (hit.hit_tokens, hit.load["full"].tolist()) == (8, [])
    hit = longest_hit(chunking, 20, {"full": [0, 1]}, device_tokens=7, resume_multiple=4, ranks=[second])
    assert (hit.hit_tokens, hit.load["full"].tolist()) == (8, [1])
    assert longest_hit(chunking, 20, {}, device_tokens=7, resume_multiple=4, ranks=[first]).hit_tokens == 7


def test_0_is_always_restorable():
    for kind in (FullAttention(), SlidingWindow(8), ChunkedLocal(8), Recurrent()):
        chunking = cut(group("g", kind, 4))
        assert 0 in restorable(chunking, 1, {})
        assert longest_hit(chunking, 20, {"g": range(5)}, ranks=[of((0, 0))]).hit_tokens == 0


def test_a_set_of_another_length_is_still_a_limit():
    chunking = cut(group("full", FullAttention(), 4))
    assert longest_hit(chunking, 100, {"full": range(25)}, ranks=[of((0, 10)), of((0, 200))]).hit_tokens == 10
    assert longest_hit(chunking, 100, {"full": range(25)}, ranks=(of((0, 200)),)).hit_tokens == 99


def test_sets_reach_far_below_the_first_span_of_a_search():
    chunking = cut(group("window", SlidingWindow(8), 4))
    present = {"window": np.ones(250_000, bool)}
    other = of((0, 0), (777, 778), (999_999, 1_000_100))
    assert longest_hit(chunking, 999_000, present, ranks=[other]).hit_tokens == 778
    assert longest_hit(chunking, 1_000_000, present, ranks=[other]).hit_tokens == 999_999


@pytest.mark.parametrize("given_ranks", [3, None, "ab", {0: of((0, 1))}, of((0, 1)), [b"x"], [None]])
def test_other_ranks_are_refused(given_ranks):
    with pytest.raises(ValueError, match="`ranks` must be a sequence of Restorable, got "):
        longest_hit(cut(group("full", FullAttention(), 4)), 20, {}, ranks=given_ranks)


def test_arguments_are_those_of_a_lookup():
    chunking = cut(group("full", FullAttention(), 4))
    with pytest.raises(ValueError, match="`num_tokens` must be a positive int, got 0"):
        restorable(chunking, 0, {})
    with pytest.raises(ValueError, match="`device_tokens` must be at most num_tokens - 1 = 3, got 4"):
        restorable(chunking, 4, {}, device_tokens=4)
    with pytest.raises(ValueError, match="`present` must name groups of the layout"):
        restorable(chunking, 4, {"other": []})
    assert callable(kvjax.restorable)


# --- sets


@given(st.lists(sets(largest_step=6), min_size=1, max_size=4))
def test_intersections_hold_what_all_hold(listed: list[Restorable]):
    common = listed[0].intersect(*listed[1:])
    assert positions(common) == set.intersection(*map(positions, listed))
    assert common.largest() == max(positions(common))
    one = listed[0]
    for other in listed[1:]:
        one = one & other
    assert one == common
    assert Restorable.intersect(*listed) == common


@given(sets(largest_step=6), st.integers(0, 40), st.integers(0, 40))
def test_a_part_of_a_set_and_its_positions(one, low, more):
    firsts, lasts = one.within(low, low + more)
    inside = {p for first, last in zip(firsts, lasts, strict=True) for p in range(first, last + 1)}
    assert inside == positions(one) & set(range(low, low + more + 1))
    assert (low in one) == (low in positions(one))


def test_equal_sets_are_equal_and_hash_alike():
    one, same, other = of((0, 3), (5, 9)), of((0, 3), (5, 9)), of((0, 3), (5, 8))
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert one != of((0, 3))
    assert one != ((0, 3), (5, 9))
    assert pickle.loads(pickle.dumps(one)) == one


def test_a_set_reads_well():
    assert repr(of((0, 31), (48, 48), (64, 95))) == "Restorable(0-31, 48, 64-95)"
    many = Restorable(range(0, 200, 10), range(0, 200, 10))
    assert repr(many) == "Restorable(0, 10, 20, 30, 40, 50, …, 190; 20 intervals)"


def test_a_set_cannot_be_changed():
    firsts = np.array([0, 5])
    one = Restorable(firsts, [0, 9])
    firsts[1] = 3
    assert pairs(one) == [(0, 0), (5, 9)]
    with pytest.raises(ValueError, match="read-only"):
        one.firsts[0] = 1
    with pytest.raises(AttributeError, match="a Restorable cannot be changed, tried to set 'firsts'"):
        one.firsts = firsts  # pyright: ignore
    with pytest.raises(AttributeError, match="a Restorable cannot be changed, tried to delete 'lasts'"):
        del one.lasts
    with pytest.raises(TypeError):
        one & {0}  # pyright: ignore
    with pytest.raises(ValueError, match=r"`others` must be a sequence of Restorable, got \{0\} in it"):
        one.intersect({0})  # pyright: ignore


@pytest.mark.parametrize(
    ("firsts", "lasts", "words"),
    [
        ([], [], "`firsts` must be a non-empty 1-d sequence of ints"),
        ([0], [1.0], "`lasts` must be a non-empty 1-d sequence of ints"),
        ([[0]], [0], "`firsts` must be a non-empty 1-d"),
        ([0, 2**70], [0, 2**70], "`firsts` must be a non-empty 1-d"),
        ([True], [1], "`firsts` must be a non-empty 1-d"),
        ([0, 5], [9], "must be equally many, at most 4194304, got 2 and 1"),
        ([1], [2], "`firsts` must begin with 0, which is always restorable, got 1"),
        ([0, 5], [0, 4], "an interval must not end before it begins, got 5 to 4"),
        ([0, 5], [4, 9], "intervals must ascend and not touch, got one from 5 after one to 4"),
        ([0, 9, 5], [0, 9, 5], "intervals must ascend and not touch, got one from 5 after one to 9"),
        ([0], [2**48], "`lasts` must hold positions from 0 to below 281474976710656, got"),
        ([0, -5], [0, 9], "`firsts` must hold positions from 0 to below 281474976710656, got -5 to 0"),
    ],
)
def test_other_intervals_are_refused(firsts, lasts, words):
    with pytest.raises(ValueError, match=words):
        Restorable(firsts, lasts)


# --- bytes


@given(sets())
def test_bytes_give_the_same_set_back(one):
    data = one.to_bytes()
    assert Restorable.from_bytes(data) == one
    assert Restorable.from_bytes(bytearray(data)) == Restorable.from_bytes(memoryview(data)) == one


@pytest.mark.parametrize(
    ("one", "num_bytes"),
    [
        (of((0, 1_048_575)), 4),
        (Restorable(range(0, 2**20, 16), range(0, 2**20, 16)), 7),
        (Restorable(range(0, 2**20, 1408), range(0, 2**20, 1408)), 7),
        (of((0, 2**48 - 1)), 8),
        (of((0, 0)), 2),
    ],
)
def test_sets_are_small_to_send(one, num_bytes):
    assert len(one.to_bytes()) == num_bytes


def test_bytes_have_not_changed():
    """Ranks of one version must understand each other."""
    assert of((0, 31), (48, 48), (65, 65), (300, 4000)).to_bytes().hex() == "011f010f0000e901f41c"


BAD = {
    "empty": b"",
    "no number": b"\x01",
    "unknown version": b"\x02\x05",
    "cut off": of((0, 9), (300, 4000)).to_bytes()[:-1],
    "ends within a number": b"\x01\x80",
    "a stretch is not whole": b"\x01\x05\x00\x00",
    "more than follows": b"\x01\x05\x00",
    "overlong": b"\x01\x85\x00",
    "two equal stretches in turn": b"\x01\x05\x00\x01\x02\x00\x01\x02",
    "number too large": b"\x01" + b"\xff" * 7 + b"\x7f",
    "position too large": b"\x01" + b"\xff" * 6 + b"\x7f",
    "too many intervals": b"\x01\x00\xff\xff\xff\x7f\x00\x00",
    "far too many intervals": b"\x01\x00" + b"\xff" * 6 + b"\x7f" + b"\x00\x00",
    "many too large": b"\x01\x00\xff\xff\x7f" + b"\xff" * 6 + b"\x7f" + b"\xff" * 6 + b"\x7f",
    "a number of so many intervals that it wraps": b"\x01\x00" + (b"\xff" * 6 + b"\x7f\x00\x00") * 2**15,
    "text": "01",
    "nothing": None,
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD)
def test_bad_bytes_are_refused(data):
    with pytest.raises(ValueError, match="`data` must be the bytes of a Restorable, ") as refused:
        Restorable.from_bytes(data)
    assert "\n" not in str(refused.value)


def test_a_number_too_long_is_named():
    with pytest.raises(ValueError, match="with numbers of at most 7 bytes, got one of 8"):
        Restorable.from_bytes(BAD["number too large"])


@given(st.binary(max_size=24))
def test_any_bytes_are_a_set_of_that_spelling_or_refused(data):
    with contextlib.suppress(ValueError):
        assert Restorable.from_bytes(b"\x01" + data).to_bytes() == b"\x01" + data


def test_as_many_intervals_as_are_allowed_can_be_sent():
    every = np.arange(0, 2 * MOST_INTERVALS, 2)
    assert Restorable.from_bytes(Restorable(every, every).to_bytes()).largest() == every[-1]
    with pytest.raises(ValueError, match="must be equally many, at most 4194304, got 4194305"):
        Restorable(np.arange(0, 2 * MOST_INTERVALS + 2, 2), np.arange(0, 2 * MOST_INTERVALS + 2, 2))
