"""How many chunks one request leaves on the host, and the longest request that a number of units holds.

A request leaves the store sets of its checkpoints (see `kvjax.coverage`): of those every `checkpoint_tokens`,
and of its end. Store sets overlap; a chunk counts once. Nothing here states what a kind of attention needs: a
table of what positions require, over one period of the layout, answers for all positions.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from kvjax._checks import integer
from kvjax.chunking import Chunking
from kvjax.coverage import chunk_tokens_of, required
from kvjax.groups import ChunkedLocal, FullAttention, SlidingWindow
from kvjax.retention import resume_step

# Tables of more rows than these are not waited for.
_MOST_ROWS = 2**19
_MOST_CHECKPOINTS = 2**20

# Tokens stay so far from the end of int64 that sums and products with a chunk count cannot wrap.
_MOST_TOKENS = 2**60


class UncountableError(ValueError):
    """What requests leave repeats itself too late for a table of it: chunks fall together too rarely, or a window or
    lookahead is too long."""


def _uncountable(tokens: int) -> UncountableError:
    return UncountableError(f"what requests leave there repeats itself only after {tokens} tokens")


class _Steps:
    """A function of tokens that never decreases: `values` that hold from `since` on, the largest at each token."""

    def __init__(self, since: np.ndarray, values: np.ndarray):
        order = np.lexsort((values, since))
        since, largest = since[order], np.maximum.accumulate(values[order])
        rises = np.append(True, largest[1:] > largest[:-1])
        self.since, self._values = since[rises], largest[rises]

    def at(self, tokens: np.ndarray) -> np.ndarray:
        return self._values[np.searchsorted(self.since, tokens, side="right") - 1]


class _Positions:
    """What positions require, in chunks, and which positions a checkpoint serves.

    From some start on all of it repeats: what is true of a position or of a checkpoint is true of the one that
    is a `period` later, with all chunks a period later.
    """

    def __init__(self, chunking: Chunking):
        groups = [chunking.layout.groups[g] for g in chunking.layout.cached]
        per_chunk = [chunk_tokens_of(chunking, g) for g in chunking.layout.cached]
        windows = [group.kind.window_tokens for group in groups if isinstance(group.kind, SlidingWindow)]
        spans = [group.kind.chunk_tokens for group in groups if isinstance(group.kind, ChunkedLocal)]
        self.step = resume_step(chunking)
        self.period = math.lcm(self.step, *per_chunk, *spans)
        self._past_windows = -(-max(windows, default=1) // self.step) * self.step
        ends = [
            -(-required(group, self.step)[1] // tokens) * tokens
            for group, tokens in zip(groups, per_chunk, strict=True)
        ]
        self.start = max(self.step + 1, *ends)  # from here on, a checkpoint serves positions other than 0
        # So far past any checkpoint, windows share no chunk with those of that checkpoint.
        self.apart = self.start + 2 * self.period + self._past_windows
        num_rows = (max(self.start, self._past_windows) + self.period) // self.step + 1
        if num_rows > _MOST_ROWS or self.apart > _MOST_TOKENS // 16:
            raise _uncountable(self.apart)
        self.tokens_per_chunk = np.array(per_chunk, np.int64)
        self.full = np.array([isinstance(group.kind, FullAttention) for group in groups])
        rows = range(0, num_rows * self.step, self.step)
        tokens = np.array([[required(group, at) for group in groups] for at in rows], np.int64)
        some = tokens[..., 0] < tokens[..., 1]
        self._low = np.where(some, tokens[..., 0] // self.tokens_per_chunk, 0)
        self._high = np.where(some, -(-tokens[..., 1] // self.tokens_per_chunk), 0)
        positions = np.array(rows, np.int64)
        complete = (self._high * self.tokens_per_chunk).max(axis=1)
        self._same = _Steps(np.maximum(positions + (positions > 0), complete), positions)
        self._longer = _Steps(np.maximum(positions, complete), positions)

    def served(self, checkpoints: np.ndarray) -> np.ndarray:
        """Returns `(len(checkpoints), 2)` positions, those of `kvjax.coverage.stored_positions`."""
        whole = np.maximum(0, (checkpoints - self.start) // self.period) * self.period
        early = checkpoints - whole
        return np.stack([self._same.at(early), self._longer.at(early)], axis=-1) + whole[..., None]

    def chunks(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the chunks `[low, high)` that positions require in each cached group, `[0, 0)` for none: two
        arrays `(*positions.shape, num_groups)`."""
        whole = np.maximum(0, (positions - self._past_windows) // self.period) * self.period
        rows = (positions - whole) // self.step
        low, high = self._low[rows], self._high[rows]
        shift = np.where(high > 0, whole[..., None] // self.tokens_per_chunk, 0)
        return np.where(self.full, 0, low + shift), high + shift

    def last_of_pieces(self, first: int, last: int) -> np.ndarray:
        """Returns `last` and the checkpoints in `[first, last]` whose successor serves another position; ascending."""
        ends = np.union1d(self._same.since, self._longer.since) - 1
        early = ends[ends < self.start]
        cycle = ends[(ends >= self.start) & (ends < self.start + self.period)]
        turns = np.arange(max(0, (first - self.start) // self.period), max(0, (last - self.start) // self.period) + 1)
        found = np.concatenate([early, (cycle + turns[:, None] * self.period).ravel(), [last]])
        return np.unique(found[(found >= first) & (found <= last)])


class StoredChunks:
    """The chunks that one request leaves on the host, by its length.

    Args:
        chunking: the layout and its chunks.
        checkpoint_tokens: a checkpoint every so many tokens, besides the request's end; `None` for none.

    Raises:
        UncountableError: what requests leave repeats itself too late.
        ValueError: `checkpoint_tokens` is not a positive int.
    """

    def __init__(self, chunking: Chunking, checkpoint_tokens: int | None = None):
        every = None if checkpoint_tokens is None else integer(checkpoint_tokens, "checkpoint_tokens", at_least=1)
        self._positions = positions = _Positions(chunking)
        self._every = every
        self._period = positions.period if every is None else math.lcm(positions.period, every)
        self._steady = positions.apart + self._period  # from here on, each period adds the same chunks
        last = self._steady + self._period
        num_checkpoints = 0 if every is None else last // every
        if num_checkpoints > _MOST_CHECKPOINTS or last > _MOST_TOKENS:
            raise _uncountable(last)
        self._counts, self._reach = self._after(np.arange(1, num_checkpoints + 1, dtype=np.int64) * (every or 1))
        self._per_period = np.diff(self._early(np.array([self._steady, last]), True), axis=0)[0]

    def counts(self, num_tokens: np.ndarray, *, with_end: bool = True) -> np.ndarray:
        """Returns `(len(num_tokens), num_cached_groups)`: the distinct chunks that requests of these lengths leave.

        Args:
            num_tokens: `int64` lengths, from 0.
            with_end: False leaves out what only the end of the request wants.
        """
        if not with_end and self._every is None:
            return np.zeros((len(num_tokens), len(self._per_period)), np.int64)
        turns = np.maximum(0, (num_tokens - self._steady) // self._period)
        return self._early(num_tokens - turns * self._period, with_end) + turns[:, None] * self._per_period

    def of_checkpoints(self, checkpoints: Iterable[int]) -> list[int]:
        """Returns the distinct chunks of each cached group in the store sets of some checkpoints, ints from 0."""
        return self._after(np.array(sorted(checkpoints), np.int64))[0][-1].tolist()

    def per_period(self) -> tuple[int, list[int]]:
        """Returns how many tokens add the same chunks to any long request, and how many of each cached group."""
        return self._period, self._per_period.tolist()

    def longest(self, units_per_chunk: Sequence[int], num_units: int) -> int | None:
        """Returns the largest number of tokens of one request whose chunks take at most `num_units` units; `None` if
        there is no largest.

        A slightly shorter request may need more: its end may lie worse in the chunks and attention chunks.

        Args:
            units_per_chunk: of each cached group, positive.
            num_units: units there are.
        """
        high = self._bound(units_per_chunk, num_units)
        if high is None:
            return None
        positions, low = self._positions, high // self._every * self._every if self._every else 0
        if high - low > positions.apart + positions.period:
            # Far past the last checkpoint only the full groups grow, by the same units in each period.
            window = positions.last_of_pieces(high - positions.period + 1, high)
            excess = self._units(window, units_per_chunk) - num_units
            growth = self._growth_past_checkpoints(units_per_chunk)
            turns = np.maximum(0, -(-excess // growth)) if growth else np.where(excess > 0, high // positions.period, 0)
            found = (window - turns * positions.period).max()
            if found >= low + positions.apart:
                return int(found)
            high = low + positions.apart + positions.period
        window = positions.last_of_pieces(low, high)
        return int(window[self._units(window, units_per_chunk) <= num_units].max())

    def _bound(self, units_per_chunk: Sequence[int], num_units: int) -> int | None:
        """A length that no longer one can fit, such that its checkpoints do; `None` if there is none."""

        def least(tokens: int) -> int:
            """Units of a request of at least so many tokens: never decreases, exact at a checkpoint."""
            at = np.array([tokens])
            counts = np.where(self._positions.full, self.counts(at), self.counts(at, with_end=False))[0]
            return sum(count * units for count, units in zip(counts.tolist(), units_per_chunk, strict=True))

        if least(self._steady + self._period) == least(self._steady) <= num_units:
            if self._every:  # all lengths fit that are whole numbers of checkpoints
                return None
            period = self._positions.last_of_pieces(self._steady, self._steady + self._period - 1)
            return None if (self._units(period, units_per_chunk) <= num_units).any() else self._steady
        low, high = 0, 1
        while least(high) <= num_units:
            low, high = high, high * 2
            if high > _MOST_TOKENS:
                return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if least(middle) <= num_units else (low, middle)
        return low

    def _growth_past_checkpoints(self, units_per_chunk: Sequence[int]) -> int:
        per_period = np.where(self._positions.full, self._positions.period // self._positions.tokens_per_chunk, 0)
        return sum(count * units for count, units in zip(per_period.tolist(), units_per_chunk, strict=True))

    def _units(self, num_tokens: np.ndarray, units_per_chunk: Sequence[int]) -> np.ndarray:
        counts = self.counts(num_tokens)
        if int(counts.max()) * sum(units_per_chunk) >= 2**62:
            counts = counts.astype(object)
        return counts @ np.array(units_per_chunk, counts.dtype)

    def _early(self, num_tokens: np.ndarray, with_end: bool) -> np.ndarray:
        """`counts` of lengths that the table reaches."""
        passed = num_tokens // self._every if self._every else np.zeros_like(num_tokens)
        counts, reach = self._counts[passed], self._reach[passed]
        if with_end:
            low, high = self._positions.chunks(self._positions.served(num_tokens))
            for served in range(2):
                counts = counts + np.maximum(0, high[:, served] - np.maximum(low[:, served], reach))
                reach = np.maximum(reach, high[:, served])
        return counts

    def _after(self, checkpoints: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The distinct chunks after none, one, … of ascending checkpoints, and the chunk past the last of them: both
        `(1 + len(checkpoints), num_cached_groups)`."""
        low, high = self._positions.chunks(self._positions.served(checkpoints).ravel())
        nothing = np.zeros((1, high.shape[-1]), np.int64)
        reach = np.concatenate([nothing, np.maximum.accumulate(high, axis=0)])
        # Positions ascend and so do the chunks they require: what is known lies below `reach`.
        new = np.maximum(0, high - np.maximum(low, reach[:-1]))
        return np.concatenate([nothing, np.cumsum(new, axis=0)])[::2], reach[::2]
