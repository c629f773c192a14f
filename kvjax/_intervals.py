"""Sorted intervals as pairs of ascending `int64` arrays."""

import numpy as np

EMPTY = np.empty(0, np.int64)


def runs_of(indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the maximal runs `[start, stop)` of ascending distinct integers."""
    if not len(indices):
        return EMPTY, EMPTY
    breaks = np.flatnonzero(np.diff(indices) != 1)
    starts = indices[np.concatenate([[0], breaks + 1])]
    stops = indices[np.concatenate([breaks, [len(indices) - 1]])] + 1
    return starts, stops


def with_run(starts: np.ndarray, stops: np.ndarray, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Adds `[start, stop)` to ascending runs, merging what overlaps or touches."""
    low = int(np.searchsorted(stops, start))  # first run that reaches `start`
    high = int(np.searchsorted(starts, stop, side="right"))  # first run beyond `stop`
    if low < high:
        start, stop = min(start, int(starts[low])), max(stop, int(stops[high - 1]))
    return (
        np.concatenate([starts[:low], [start], starts[high:]]),
        np.concatenate([stops[:low], [stop], stops[high:]]),
    )


def intersect(
    firsts: np.ndarray, lasts: np.ndarray, other_firsts: np.ndarray, other_lasts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the intersection of two lists of disjoint closed intervals `[first, last]`."""
    low = np.searchsorted(other_lasts, firsts)  # first of the others that ends at or past ours
    count = np.maximum(np.searchsorted(other_firsts, lasts, side="right") - low, 0)
    mine = np.repeat(np.arange(len(firsts)), count)
    theirs = np.arange(len(mine)) + np.repeat(low - (np.cumsum(count) - count), count)
    return np.maximum(firsts[mine], other_firsts[theirs]), np.minimum(lasts[mine], other_lasts[theirs])
