"""What one group has, read piece by piece, so that a long prompt costs what its answer costs."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvjax._intervals import Intervals, mask_runs, runs_of, with_run

# Chunks that a search for the last one looks at first; each further span is four times as wide.
_FIRST_CHUNKS = 64


class ChunkMask(Protocol):
    """A boolean mask by `chunk_idx` that is worked out where it is read."""

    def __len__(self) -> int: ...

    def __getitem__(self, span: slice, /) -> np.ndarray: ...


@dataclass(frozen=True, slots=True, eq=False)
class Resident:
    """What one group has, on the host or on the device.

    A state of a recurrent group counts as the token before its position, the last one that it covers.

    Args:
        tokens_per_chunk: tokens that one chunk covers.
        chunks: on the host: a boolean mask by `chunk_idx`, an array or what works like one, or ascending distinct
            `int64` `chunk_idx`.
        on_device: the tokens `[start, stop)` that the device holds.
        num_complete: the first so many chunks are resident, too.
    """

    tokens_per_chunk: int
    chunks: np.ndarray | ChunkMask
    on_device: tuple[int, int] = (0, 0)
    num_complete: int = 0

    def runs_in(self, start: int, stop: int) -> Intervals:
        """Returns the runs of resident tokens that meet `[start, stop)`; they are maximal as far as it reaches."""
        low, high = max(0, start) // self.tokens_per_chunk, -(-stop // self.tokens_per_chunk)
        low = max(low, self.num_complete)
        if self._indices() is None:
            starts, stops = (bound + low for bound in mask_runs(self.chunks[low:high]))
        else:
            starts, stops = runs_of(self._chunks_in(low, high))
        starts, stops = starts * self.tokens_per_chunk, stops * self.tokens_per_chunk
        for first, last in ((0, self.num_complete * self.tokens_per_chunk), self.on_device):
            if first < last:
                starts, stops = with_run(starts, stops, first, last)
        return starts, stops

    def states_in(self, low: int, high: int) -> np.ndarray:
        """Returns the positions in `[low, high]` at which a recurrent group has its state, ascending."""
        first, stop = -(-max(low, 1) // self.tokens_per_chunk) - 1, high // self.tokens_per_chunk
        complete = np.arange(first, min(stop, self.num_complete))
        chunks = np.concatenate([complete, self._chunks_in(max(first, self.num_complete), stop)])
        states = (chunks + 1) * self.tokens_per_chunk
        held = self.on_device[1]
        return np.union1d(states, [held]) if max(low, 1) <= held <= high else states

    def prefix(self) -> int:
        """Returns how many tokens from the first one on are resident without a gap, where the device's begin with the
        first one, too, as those of full attention do."""
        held = self.on_device[1]
        chunk_idx = max(held // self.tokens_per_chunk, self.num_complete)
        return max(held, self._first_missing(chunk_idx) * self.tokens_per_chunk)

    def end(self, bound: int | None = None) -> int:
        """Returns the end of the last resident token, 0 if there is none, whatever is resident from `bound` on. The
        chunk that holds the token before `bound` counts to its end."""
        num_chunks = max(self.num_complete, self._last_chunk(bound) + 1)
        return max(num_chunks * self.tokens_per_chunk, self.on_device[1])

    def _chunks_in(self, low: int, high: int) -> np.ndarray:
        """The `chunk_idx` on the host in `[low, high)`, ascending."""
        indices = self._indices()
        if indices is None:
            return np.flatnonzero(self.chunks[low:high]) + low
        first, stop = indices.searchsorted([low, max(low, high)])
        return indices[first:stop]

    def _first_missing(self, chunk_idx: int) -> int:
        """The first chunk from `chunk_idx` on that is not on the host."""
        indices = self._indices()
        if indices is None:
            low, width = chunk_idx, _FIRST_CHUNKS
            while low < len(self.chunks):
                there = self.chunks[low : low + width]
                hole = int(there.argmin())
                if not there[hole]:
                    return low + hole
                low, width = low + len(there), 4 * width
            return low
        there = indices[indices.searchsorted(chunk_idx) :]
        low, high = 0, len(there)  # the first `low` are consecutive, those from `high` on are not
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if there[middle] == chunk_idx + middle else (low, middle)
        return chunk_idx + low

    def _last_chunk(self, bound: int | None) -> int:
        """The last chunk on the host that begins before `bound`, -1 if there is none."""
        limit = None if bound is None else -(-max(0, bound) // self.tokens_per_chunk)
        indices = self._indices()
        if indices is not None:
            last = len(indices) if limit is None else int(indices.searchsorted(limit))
            return int(indices[last - 1]) if last else -1
        high = len(self.chunks) if limit is None else min(len(self.chunks), limit)
        width = _FIRST_CHUNKS
        while high > 0:
            low = max(0, high - width)
            found = np.flatnonzero(self.chunks[low:high])
            if len(found):
                return low + int(found[-1])
            high, width = low, 4 * width
        return -1

    def _indices(self) -> np.ndarray | None:
        """The chunks, if they are given as `chunk_idx`; `None` if as a mask."""
        return self.chunks if isinstance(self.chunks, np.ndarray) and self.chunks.dtype != bool else None
