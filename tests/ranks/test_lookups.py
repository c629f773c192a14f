"""What ranks make of what each of them found."""

import numpy as np

from kvjax.handles import Lookup
from kvjax.positions import Restorable
from kvjax.ranks import lookups


def found(*, checkpoints=(), promised=16, arriving=()):
    return Lookup(
        hit_tokens=16,
        device_tokens=0,
        load={"full": np.arange(2)},
        load_bytes=64,
        limited_by=("full",),
        checkpoints=checkpoints,
        arriving={"full": np.array(arriving, np.int64).reshape(-1, 1)} if arriving else {},
        promised_tokens=promised,
    )


def agreed(of_ranks):
    """What each rank holds the lookup to be."""
    said = [lookups.said(one) for one in of_ranks]
    return [lookups.agreed(one, said) for one in of_ranks]


def test_what_is_on_its_way_counts_as_far_as_it_comes_on_all_ranks():
    assert [one.promised_tokens for one in agreed([found(promised=24), found(promised=40)])] == [24, 24]


def test_what_one_rank_stores_all_of_them_store():
    one, two = agreed([found(checkpoints=(8, 16)), found(checkpoints=(16, 32))])
    assert one.checkpoints == two.checkpoints == (8, 16, 32)


def test_blocks_are_shared_where_they_arrive_on_all_ranks():
    one, two = agreed([found(arriving=[3, -1]), found(arriving=[3, -1])])
    assert one.arriving["full"].tolist() == two.arriving["full"].tolist() == [[3], [-1]]


def test_blocks_that_arrive_on_one_rank_alone_are_not_shared():
    for other in ([], [4, -1], [-1, -1]):
        assert [one.arriving for one in agreed([found(arriving=[3, -1]), found(arriving=other)])] == [{}, {}]


def test_the_hit_and_what_is_loaded_stay_the_ranks_own():
    (one, _) = agreed([found(), found(promised=40)])
    assert (one.hit_tokens, one.load["full"].tolist(), one.load_bytes, one.limited_by) == (16, [0, 1], 64, ("full",))


def test_sets_of_others_leave_out_the_ranks_own():
    sets = [Restorable([0, last], [0, last]) for last in (8, 16, 24)]
    digits = [one.to_bytes().hex() for one in sets]
    for rank in range(3):
        others = lookups.sets_of_others(digits, rank)
        assert [one.largest() for one in others] == [one.largest() for of, one in enumerate(sets) if of != rank]
