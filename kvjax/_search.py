"""The largest and the smallest position that several sets of positions have in common.

A set is a function of `(low, high)` that returns its positions in `[low, high]` as ascending disjoint
closed intervals. Sets are read in spans that double, so that a long prompt costs what its answer costs.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from kvjax._intervals import Intervals, intersect

PositionSet = Callable[[int, int], Intervals]

# Positions that a search looks at first.
_FIRST_SPAN = 4096
# … and at most at a time, so that what a search holds stays small.
_WIDEST_SPAN = 2**22


def in_common(sets: Iterable[PositionSet], low: int, high: int) -> Intervals:
    """Returns the positions in `[low, high]` that all sets hold, as ascending disjoint closed intervals."""
    firsts, lasts = np.array([low]), np.array([high])
    for one in sets:
        firsts, lasts = intersect(firsts, lasts, *one(int(firsts[0]), int(lasts[-1])))
        if not len(firsts):
            break
    return firsts, lasts


def largest(sets: Sequence[PositionSet], high: int, multiple: int) -> int:
    """Returns the largest multiple of `multiple`, at most `high`, that all sets hold; 0 at least."""
    widths = _widths(multiple)
    while high > 0:
        low = max(0, high - next(widths))
        firsts, lasts = in_common(sets, low, high)
        candidates = lasts // multiple * multiple
        candidates = candidates[candidates >= firsts]
        if len(candidates):
            return int(candidates[-1])
        high = low - 1
    return 0


def smallest(sets: Sequence[PositionSet], low: int, high: int, multiple: int) -> int | None:
    """Returns the smallest multiple of `multiple` in `[low, high]` that all sets hold, `None` if there is none."""
    widths = _widths(multiple)
    while low <= high:
        stop = min(high, low + next(widths))
        firsts, lasts = in_common(sets, low, stop)
        candidates = -(-firsts // multiple) * multiple
        candidates = candidates[candidates <= lasts]
        if len(candidates):
            return int(candidates[0])
        low = stop + 1
    return None


def _widths(multiple: int) -> Iterator[int]:
    width = max(_FIRST_SPAN, multiple)
    while True:
        yield width
        width = max(width, min(2 * width, _WIDEST_SPAN))
