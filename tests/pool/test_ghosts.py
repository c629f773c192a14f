"""What left lately is remembered once, with the list that it left."""

import numpy as np

from kvjax.pool.ghosts import Ghosts


def prints(*names: int) -> np.ndarray:
    return np.array(names, np.uint64)


def taken(ghosts: Ghosts, *names: int, capacity: int = 100) -> list[list[int]]:
    """The names found, by the list that they left."""
    return [prints(*names)[mask].tolist() for mask in ghosts.take(prints(*names), capacity)]


def test_what_left_is_found_once_with_its_list():
    ghosts = Ghosts(16)
    ghosts.put(prints(1, 2), 0)
    ghosts.put(prints(3), 1)
    assert taken(ghosts, 1, 3, 4) == [[1], [3]]
    assert taken(ghosts, 1, 2, 3) == [[2], []]


def test_what_never_left_is_not_found_whatever_its_fingerprint():
    assert taken(Ghosts(16), 0, 1) == [[], []]


def test_what_left_long_ago_is_forgotten():
    ghosts = Ghosts(64)
    ghosts.put(prints(*range(1, 11)), 0)
    assert taken(ghosts, *range(1, 11), capacity=3) == [[5, 6, 7, 8, 9, 10], []]


def test_one_that_takes_the_place_of_another_pushes_it_out():
    ghosts = Ghosts(16)
    ghosts.put(prints(1), 0)
    ghosts.put(prints(17), 1)
    assert taken(ghosts, 1, 17) == [[], [17]]


def test_sizes_count_what_is_remembered_of_each_list():
    ghosts = Ghosts(64)
    ghosts.put(prints(1, 2, 3), 0)
    ghosts.put(prints(4), 1)
    taken(ghosts, 2)
    assert [ghosts.size(left, 100) for left in (0, 1)] == [2, 1]
    assert ghosts.size(0, 1) == 1
