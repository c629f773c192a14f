"""The law: what resuming at a position needs, for each kind of attention.

`needed` states it; `restorable_spans` and `reach` say it the other way round: which positions what is
resident can restore. No other module restates them. All intervals of *tokens* are half-open
`[start, stop)`, all intervals of *positions* are closed `[first, last]`.
"""

import numpy as np

from kvjax._checks import shown
from kvjax._intervals import Intervals
from kvjax._resident import Resident
from kvjax.groups import ChunkedLocal, FullAttention, GroupSpec, Kind, Recurrent, Scratch, SlidingWindow

_ZERO = np.zeros(1, np.int64)


def needed(kind: Kind, position: int) -> tuple[int, int]:
    """Returns the tokens `[start, stop)` that must be in the cache to compute the token at `position`.

    A recurrent group needs its state *at* `position`, which is the last token a state covers: the
    interval holds that token alone.

    >>> needed(SlidingWindow(4), 10)
    (7, 10)

    Args:
        kind: of a group.
        position: from 0 on.

    Raises:
        ValueError: a `kind` that is none, or a negative position.
    """
    if position <= 0:
        if position < 0:
            raise ValueError(f"`position` must be a non-negative int, got {position}")
        return (0, 0)
    match kind:
        case FullAttention():
            return (0, position)
        case SlidingWindow(window_tokens):
            return (max(0, position - window_tokens + 1), position)
        case ChunkedLocal(chunk_tokens):
            return (position // chunk_tokens * chunk_tokens, position)
        case Recurrent():
            return (position - 1, position)
        case Scratch():
            return (0, 0)
    raise ValueError(f"`kind` must be FullAttention(), SlidingWindow(…) or another kind of group, got {shown(kind)}")


def needed_from(kind: Kind, positions: np.ndarray) -> np.ndarray:
    """Returns the first token of `needed` for each of some positions above 0; of scratch, the positions themselves."""
    match kind:
        case FullAttention():
            return np.zeros_like(positions)
        case SlidingWindow(window_tokens):
            return np.maximum(0, positions - (window_tokens - 1))
        case ChunkedLocal(chunk_tokens):
            return positions // chunk_tokens * chunk_tokens
        case Recurrent():
            return positions - 1
        case Scratch():
            return positions


def required(group: GroupSpec, position: int) -> tuple[int, int]:
    """Returns `needed` extended by the group's lookahead: the tokens that must be resident."""
    start, stop = needed(group.kind, position)
    if position == 0 or not group.lookahead_tokens:
        return (start, stop)
    return (start, position + group.lookahead_tokens)


def restorable_spans(kind: Kind, lookahead: int, resident: Resident, low: int, high: int) -> Intervals:
    """Returns the positions in `[low, high]` that `resident` can restore, as ascending closed intervals."""
    match kind:
        case FullAttention():
            firsts, lasts = _ZERO, np.array([resident.prefix() - lookahead])
        case SlidingWindow(1) if lookahead == 0:
            firsts, lasts = np.array([low]), np.array([high])
        case SlidingWindow(window_tokens):
            starts, stops = resident.runs_in(low - (window_tokens - 1), high + lookahead)
            firsts, lasts = np.where(starts == 0, 0, starts + (window_tokens - 1)), stops - lookahead
        case ChunkedLocal(chunk_tokens):
            begins = low // chunk_tokens * chunk_tokens
            starts, stops = resident.runs_in(begins, high)
            firsts = np.arange(begins, high + 1, chunk_tokens, dtype=np.int64)
            run = starts.searchsorted(firsts, side="right") - 1
            reach = np.concatenate([stops, _ZERO])[run]  # run -1, before every run, reaches 0
            lasts = np.where(reach > firsts, np.minimum(firsts + (chunk_tokens - 1), reach), firsts)
        case Recurrent():
            firsts = lasts = resident.states_in(low, high)
        case Scratch():
            firsts, lasts = np.array([low]), np.array([high])
    firsts, lasts = np.maximum(firsts, low), np.minimum(lasts, high)
    some = firsts <= lasts
    firsts, lasts = firsts[some], lasts[some]
    if low == 0 and not (len(firsts) and firsts[0] == 0):
        firsts, lasts = np.concatenate([_ZERO, firsts]), np.concatenate([_ZERO, lasts])
    return firsts, lasts


def reach(kind: Kind, lookahead: int, resident: Resident, bound: int) -> int:
    """Returns a position beyond which `resident` restores nothing up to `bound`; `bound` itself where it may."""
    match kind:
        case FullAttention():
            return min(bound, resident.prefix() - lookahead)
        case SlidingWindow(window_tokens) if window_tokens > 1 or lookahead:
            return min(bound, resident.end(bound + lookahead) - lookahead)
        case Recurrent():
            return min(bound, resident.end(bound))
    return bound
