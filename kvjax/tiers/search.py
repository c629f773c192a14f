"""Looking for a request's chunks in the pool and all tiers below it, in one pass."""

import threading
from collections.abc import Callable, Mapping

import numpy as np

from kvjax.chain import Chain
from kvjax.pool import ChunkPool

NOT_ASKED = -2
ABSENT = -1

# Returns, for keys of a group, the number of the first tier that has each, or `ABSENT`.
Find = Callable[[int, list[bytes]], np.ndarray]


class ChunksBelow:
    """A mask by `chunk_idx` of the chunks of one group that are in the pool or in a tier, asked for where it is read.

    Args:
        chain: the chunks.
        pool: the host pool.
        group_idx: the group.
        find: asks the tiers.
        lock: guards the pool; it is not held while tiers are asked.
    """

    def __init__(self, chain: Chain, pool: ChunkPool, group_idx: int, find: Find, lock: threading.RLock):
        self._chain = chain
        self._pool = pool
        self._group_idx = group_idx
        self._find = find
        self._lock = lock
        self.tiers = np.full(len(chain), NOT_ASKED, np.int64)

    def __len__(self) -> int:
        return len(self.tiers)

    def __getitem__(self, span: slice) -> np.ndarray:
        start, stop, _ = span.indices(len(self))
        with self._lock:
            chunks = np.arange(start, stop)
            self._chain.look(start + self._chain.not_looked(start, stop))
            held = self._chain.held_among(chunks)
            ready = held & self._pool.ready(self._chain.slots(chunks))
            unknown = start + np.flatnonzero(~ready & (self.tiers[start:stop] == NOT_ASKED))
            keys = self._chain.keys(unknown)
        if keys:
            self.tiers[unknown] = self._find(self._group_idx, keys)
        return ready | (self.tiers[start:stop] >= 0)


class ChunksDownTo:
    """The same, of the tiers down to one, as far as it is known.

    Args:
        chunks: of all tiers.
        last_tier: the number of the last tier that counts.
    """

    def __init__(self, chunks: ChunksBelow, last_tier: int):
        self._chunks = chunks
        self._last = last_tier

    def __len__(self) -> int:
        return len(self._chunks)

    def __getitem__(self, span: slice) -> np.ndarray:
        here = self._chunks[span]
        return here & (self._chunks.tiers[span] <= self._last)


def tiers_of(chunks: Mapping[int, ChunksBelow]) -> dict[int, np.ndarray]:
    """Returns, by `group_idx`, for each chunk the number of the tier that is known to have it, or below 0."""
    return {g: mask.tiers for g, mask in chunks.items()}
