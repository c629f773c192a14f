"""Sorted intervals as pairs of ascending `int64` arrays."""

import numpy as np

EMPTY = np.empty(0, np.int64)

Intervals = tuple[np.ndarray, np.ndarray]


def runs_of(indices: np.ndarray) -> Intervals:
    """Returns the maximal runs `[start, stop)` of ascending distinct integers."""
    if not len(indices):
        return EMPTY, EMPTY
    breaks = np.flatnonzero(indices[1:] - indices[:-1] != 1)
    starts = indices[np.concatenate([[0], breaks + 1])]
    stops = indices[np.concatenate([breaks, [len(indices) - 1]])] + 1
    return starts, stops


def mask_runs(mask: np.ndarray) -> Intervals:
    """Returns the maximal runs `[start, stop)` of the true places of a boolean mask."""
    if not len(mask):
        return EMPTY, EMPTY
    edges = np.flatnonzero(mask[1:] != mask[:-1]) + 1
    bounds = np.concatenate([[0] if mask[0] else EMPTY, edges, [len(mask)] if mask[-1] else EMPTY])
    return bounds[::2], bounds[1::2]


def with_run(starts: np.ndarray, stops: np.ndarray, start: int, stop: int) -> Intervals:
    """Adds `[start, stop)` to ascending runs, merging what overlaps or touches."""
    low = int(stops.searchsorted(start))  # first run that reaches `start`
    high = int(starts.searchsorted(stop, side="right"))  # first run beyond `stop`
    if low < high:
        start, stop = min(start, int(starts[low])), max(stop, int(stops[high - 1]))
    return (
        np.concatenate([starts[:low], [start], starts[high:]]),
        np.concatenate([stops[:low], [stop], stops[high:]]),
    )


def intersect(firsts: np.ndarray, lasts: np.ndarray, other_firsts: np.ndarray, other_lasts: np.ndarray) -> Intervals:
    """Returns the intersection of two lists of disjoint closed intervals `[first, last]`."""
    if len(firsts) > len(other_firsts):  # what is looked up in the other list is the shorter one
        firsts, lasts, other_firsts, other_lasts = other_firsts, other_lasts, firsts, lasts
    low = other_lasts.searchsorted(firsts)  # first of the others that ends at or past ours
    high = other_firsts.searchsorted(lasts, side="right")
    if len(firsts) == 1:
        within = slice(low[0], high[0])
        return np.maximum(firsts, other_firsts[within]), np.minimum(lasts, other_lasts[within])
    count = np.maximum(high - low, 0)
    mine = np.repeat(np.arange(len(firsts)), count)
    theirs = np.arange(len(mine)) + np.repeat(low - (np.cumsum(count) - count), count)
    return np.maximum(firsts[mine], other_firsts[theirs]), np.minimum(lasts[mine], other_lasts[theirs])


def merged(firsts: np.ndarray, lasts: np.ndarray) -> Intervals:
    """Returns ascending disjoint closed intervals with those that touch made one."""
    gaps = firsts[1:] > lasts[:-1] + 1
    if gaps.all():
        return firsts, lasts
    return firsts[np.concatenate([[True], gaps])], lasts[np.concatenate([gaps, [True]])]


def multiples_in(firsts: np.ndarray, lasts: np.ndarray, multiple: int) -> np.ndarray:
    """Returns the multiples of `multiple` that lie in ascending disjoint closed intervals, ascending."""
    low, high = -(-firsts // multiple), lasts // multiple
    count = np.maximum(high - low + 1, 0)
    return (np.arange(count.sum()) + np.repeat(low - (np.cumsum(count) - count), count)) * multiple
