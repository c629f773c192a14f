"""The chunks of one request in one group, and what is known of each in the pool.

Most of a request's chunks stay where they are from one call to the next. A chunk that was found once is
recognized by its slot and epoch, in arrays; only what was not found is asked for by its key.
"""

import numpy as np

from kvjax._intervals import EMPTY
from kvjax.chunking import Chunking
from kvjax.keys import chunk_keys
from kvjax.pool import ChunkPool


class Chain:
    """The chunks, by `chunk_idx`, with the slots of those that were found in the pool.

    Args:
        pool: where they are looked for.
        chunking: the layout and its chunks.
        group_idx: the group.
        namespace: under which they are keyed.
        hashes: the request's prefix hashes, a list that grows with it. Keys are made where they are asked for.
    """

    def __init__(self, pool: ChunkPool, chunking: Chunking, group_idx: int, namespace: bytes, hashes: list[bytes]):
        self._pool = pool
        self._chunking = chunking
        self._group_idx = group_idx
        self._namespace = namespace
        self._hashes = hashes
        self._per_chunk = chunking.hashes_per_chunk[group_idx] or 1
        self._slots = EMPTY
        self._epochs = EMPTY
        self._looked = np.empty(0, bool)
        self._asked = np.empty(0, bool)
        self._own = np.empty(0, bool)  # chunks that the request itself stores

    def __len__(self) -> int:
        return len(self._slots)

    def extend(self) -> None:
        """Takes in the chunks that the hashes cover by now."""
        more = len(self._hashes) // self._per_chunk - len(self)
        if more:
            absent = np.full(more, -1, np.int64)
            self._slots = np.concatenate([self._slots, absent])
            self._epochs = np.concatenate([self._epochs, absent])
            self._looked = np.concatenate([self._looked, np.zeros(more, bool)])
            self._asked = np.concatenate([self._asked, np.zeros(more, bool)])
            self._own = np.concatenate([self._own, np.zeros(more, bool)])

    def keys(self, chunks: np.ndarray) -> list[bytes]:
        """Returns the keys of ascending distinct `chunk_idx`."""
        if not len(chunks):
            return []
        first, stop = int(chunks[0]), int(chunks[-1]) + 1
        keys = chunk_keys(
            self._chunking, self._group_idx, self._hashes, self._namespace, first_chunk=first, stop_chunk=stop
        )
        return keys if stop - first == len(chunks) else [keys[c] for c in (chunks - first).tolist()]

    def look(self, chunks: np.ndarray) -> None:
        """Looks in the pool for chunks, by `chunk_idx`, that are not known to be there."""
        unknown = chunks[~self.held_among(chunks)]
        if len(unknown):
            self.note(unknown, self._pool.held(self.keys(unknown)))
        self._looked[chunks] = True

    def note(self, chunks: np.ndarray, slots: np.ndarray) -> None:
        """Notes where chunks are, by `chunk_idx`; -1 is nowhere."""
        self._slots[chunks] = slots
        self._epochs[chunks] = np.where(slots >= 0, self._pool.epochs(slots), -1)
        self._looked[chunks] = True
        self._own[chunks] = False

    def look_anew(self) -> None:
        """Forgets which chunks are not in the pool: they may have come since."""
        self._looked &= self.held()
        self._slots[~self._looked] = -1

    def stores(self, chunks: np.ndarray) -> None:
        """Notes that the request itself stores chunks whose places were noted."""
        self._own[chunks] = True

    def awaits(self, chunks: np.ndarray) -> bool:
        """Whether others are writing any of some chunks that are held."""
        return bool((~self._own[chunks] & ~self._pool.ready(self._slots[chunks])).any())

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
    """A mask by `chunk_idx` of the chunks of a chain that can be read, looked for where it is read. The pool must not
    change from the first look to the last."""

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
