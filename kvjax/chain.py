"""The chunks of one request in one group, and what is known of each in the pool.

Most of a request's chunks stay where they are from one call to the next. A chunk that was found once is
recognized by its slot and epoch, in arrays; only what was not found is asked for by its key.
"""

from collections.abc import Sequence

import numpy as np

from kvjax._intervals import EMPTY
from kvjax.pool import ChunkPool


class Chain:
    """Keys by `chunk_idx`, with the slots of those that were found in the pool.

    Args:
        pool: where they are looked for.
    """

    def __init__(self, pool: ChunkPool):
        self.keys: list[bytes] = []
        self._pool = pool
        self._slots = EMPTY
        self._epochs = EMPTY
        self._looked = np.empty(0, bool)
        self._asked = np.empty(0, bool)

    def __len__(self) -> int:
        return len(self.keys)

    def extend(self, keys: Sequence[bytes]) -> None:
        """Adds the keys of the chunks that follow."""
        if not keys:
            return
        self.keys += keys
        absent = np.full(len(keys), -1, np.int64)
        self._slots = np.concatenate([self._slots, absent])
        self._epochs = np.concatenate([self._epochs, absent])
        self._looked = np.concatenate([self._looked, np.zeros(len(keys), bool)])
        self._asked = np.concatenate([self._asked, np.zeros(len(keys), bool)])

    def look(self, chunks: np.ndarray) -> None:
        """Looks in the pool for chunks, by `chunk_idx`, that are not known to be there."""
        unknown = chunks[~self.held_among(chunks)]
        if len(unknown):
            first, last = int(unknown[0]), int(unknown[-1])
            in_a_row = last - first + 1 == len(unknown)
            keys = self.keys[first : last + 1] if in_a_row else [self.keys[c] for c in unknown.tolist()]
            self.note(unknown, self._pool.held(keys))
        self._looked[chunks] = True

    def note(self, chunks: np.ndarray, slots: np.ndarray) -> None:
        """Notes where chunks are, by `chunk_idx`; -1 is nowhere."""
        self._slots[chunks] = slots
        self._epochs[chunks] = np.where(slots >= 0, self._pool.epochs(slots), -1)
        self._looked[chunks] = True

    def held(self) -> np.ndarray:
        """Returns a mask of the chunks that are known and still in the pool, written or being written."""
        return self._pool.still_held(self._slots, self._epochs)

    def held_among(self, chunks: np.ndarray) -> np.ndarray:
        """Returns a mask of those of `chunks`, by `chunk_idx`, that are known and still in the pool."""
        return self._pool.still_held(self._slots[chunks], self._epochs[chunks])

    def slots(self, chunks: np.ndarray) -> np.ndarray:
        """Returns the slots of chunks that are held."""
        return self._slots[chunks]

    def not_looked(self, start: int, stop: int) -> np.ndarray:
        """Returns which of the chunks `[start, stop)` were never looked for, ascending and counted from `start`."""
        return np.flatnonzero(~self._looked[start:stop])

    def first_asked(self, chunks: np.ndarray) -> np.ndarray:
        """Returns a mask of the chunks for which this is the first call, and notes them."""
        first = ~self._asked[chunks]
        self._asked[chunks] = True
        return first

    def asked_like(self, before: "Chain", num_chunks: int) -> None:
        """Takes over which of the first chunks were asked for, from a chain that begins with the same ones."""
        self._asked[:num_chunks] = before._asked[:num_chunks]


class ReadyChunks:
    """A mask by `chunk_idx` of the chunks of a chain that can be read, looked for where it is read."""

    def __init__(self, chain: Chain, pool: ChunkPool):
        self._chain = chain
        self._pool = pool

    def __len__(self) -> int:
        return len(self._chain)

    def __getitem__(self, span: slice) -> np.ndarray:
        start, stop, _ = span.indices(len(self._chain))
        chunks = np.arange(start, stop)
        self._chain.look(start + self._chain.not_looked(start, stop))
        slots = self._chain.slots(chunks)
        return (slots >= 0) & self._pool.ready(slots)
