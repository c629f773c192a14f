"""The books behind the pool: chunks come to be, are hidden, are cleared away, and all that counts them agrees."""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from kvjax.pool.checked import CheckedPolicy
from kvjax.pool.chunks import NO_SLOTS, ChunkTable
from kvjax.pool.index import KeyIndex
from kvjax.pool.namespaces import Namespaces
from kvjax.pool.policy import Policy
from kvjax.pool.records import Change, PoolCounts, Reason

# Slots that are looked at, and chunks that are dropped, at most at a time when what was invalidated is cleared away.
_SWEPT_SLOTS = 8192
_SWEPT_CHUNKS = 512


class Books:
    """Chunks by slot, keys, namespaces, the policy and counts. Only here do they change, all of them together.

    A chunk is *indexed* while its key leads to it, and *stale* if it is indexed and belongs to a past generation of
    its namespace: then no lookup finds it, and it is cleared away when its key is wanted or its turn comes.

    Args:
        num_units: units of the pool.
        units_per_chunk: by `group_idx`, `None` for scratch groups.
        policy: new, for these books alone.

    Raises:
        ValueError: see `CheckedPolicy`.
    """

    def __init__(self, num_units: int, units_per_chunk: Sequence[int | None], policy: Policy):
        num_groups = len(units_per_chunk)
        self.chunks = ChunkTable(num_units, units_per_chunk)
        self.policy = CheckedPolicy(policy, self.chunks)
        self.index = KeyIndex(self.chunks.key)
        self.namespaces = Namespaces(num_groups)
        self.counts = PoolCounts(np.zeros(num_groups, np.int64), np.zeros(num_groups, np.int64))
        self.num_stale = 0
        self.on_change: Callable[[Change], None] | None = None
        self._num_groups = num_groups
        self._epoch = 0
        self._sweep_at = 0

    def past(self, slots: np.ndarray) -> np.ndarray:
        """Returns a mask of the chunks that belong to a past generation of their namespace."""
        chunks = self.chunks
        return chunks.generation[slots] != self.namespaces.generation[chunks.namespace[slots]]

    def current(self, slots: np.ndarray) -> np.ndarray:
        """Turns slots of stale chunks into -1, in place, and returns `slots`."""
        if self.num_stale:
            slots[self.past(slots)] = -1
        return slots

    def fill(
        self, keys: Sequence[bytes], prints: np.ndarray, groups: np.ndarray, chunk_idxs: np.ndarray, namespace: int
    ) -> np.ndarray:
        """Makes chunks that are being written, of distinct keys that are not indexed; their units must be free.

        Returns:
            Their slots.
        """
        if not len(keys):
            return NO_SLOTS
        chunks = self.chunks
        slots = chunks.allocate(groups)
        chunks.key[slots] = keys
        chunks.fingerprint[slots] = prints
        chunks.chunk_idx[slots] = chunk_idxs
        chunks.namespace[slots] = namespace
        chunks.generation[slots] = self.namespaces.generation[namespace]
        chunks.access[slots] = 0
        chunks.epoch[slots] = np.arange(self._epoch + 1, self._epoch + 1 + len(slots))
        self._epoch += len(slots)
        chunks.indexed[slots] = chunks.writing[slots] = True
        self.index.insert(keys, prints, slots)
        spaces = self.namespaces
        spaces.count((spaces.held, spaces.existing), chunks.namespace[slots], groups, 1)
        return slots

    def publish(self, slots: np.ndarray) -> None:
        """Counts chunks whose writing ended well, none of them stale, as resident."""
        if not len(slots):
            return
        chunks, spaces = self.chunks, self.namespaces
        self.counts.stored += len(slots)
        self.counts.stored_by_group += self.by_group(slots)
        spaces.count((spaces.resident,), chunks.namespace[slots], chunks.group_idx[slots], 1)
        self._tell("stored", "", slots)

    def hide(self, slots: np.ndarray, reason: Reason) -> None:
        """Keys lead to these chunks no more. Those being written were never found, and nobody is told of them."""
        if not len(slots):
            return
        chunks, spaces = self.chunks, self.namespaces
        is_found = ~chunks.writing[slots]
        is_current = ~self.past(slots) if self.num_stale else np.ones(len(slots), bool)
        self.num_stale -= len(slots) - int(np.count_nonzero(is_current))
        for table, some in ((spaces.held, slots[is_current]), (spaces.resident, slots[is_current & is_found])):
            spaces.count((table,), chunks.namespace[some], chunks.group_idx[some], -1)
        self.index.remove(slots)
        chunks.indexed[slots] = False
        self.policy.remove(slots, evicted=reason == "evicted")
        self._tell("removed", reason, slots[is_found])

    def evict(self, slots: np.ndarray) -> None:
        """Hides and frees chunks to make room for others."""
        self.counts.evicted += len(slots)
        self.counts.evicted_by_group += self.by_group(slots)
        self.hide(slots, "evicted")
        self.free(slots)

    def free(self, slots: np.ndarray) -> None:
        """Gives back the units of those distinct chunks that nobody finds, writes or reads."""
        chunks, spaces = self.chunks, self.namespaces
        slots = slots[~(chunks.indexed[slots] | chunks.writing[slots] | (chunks.pins[slots] > 0))]
        if not len(slots):
            return
        namespaces = chunks.namespace[slots]
        spaces.count((spaces.existing,), namespaces, chunks.group_idx[slots], -1)
        chunks.free(slots)
        spaces.recycle(namespaces)

    def invalidate(self, namespace: int | None) -> int:
        """Makes all chunks of a namespace, or of all, stale; returns how many keys led to."""
        held = int(self.namespaces.invalidate(namespace).sum())
        self.num_stale += held
        self._sweep_at = 0
        return held

    def drop_stale(self, slots: np.ndarray) -> None:
        """Clears away those of some distinct indexed chunks, -1 among them, that are stale."""
        slots = slots[slots >= 0]
        stale = slots[self.past(slots)]
        self.hide(stale, "invalidated")
        self.free(stale)

    def sweep(self, *, missing: int = 0) -> None:
        """Clears away some stale chunks: those of one stretch of slots, or of more until enough units are free.

        Args:
            missing: units that are wanted beyond those that are free.
        """
        wanted = self.chunks.num_free_units + missing
        while self.num_stale and self._sweep_at < self.chunks.most_slots:
            self._sweep_stretch()
            if self.chunks.num_free_units >= wanted:
                return

    def by_group(self, slots: np.ndarray) -> np.ndarray:
        """Returns how many of the chunks are of each group."""
        return np.bincount(self.chunks.group_idx[slots], minlength=self._num_groups)

    def keys(self, slots: np.ndarray) -> tuple[bytes, ...]:
        """Returns the keys of chunks."""
        return tuple(self.chunks.key[slots].tolist())

    def _sweep_stretch(self) -> None:
        chunks = self.chunks
        start, stop = self._sweep_at, min(self._sweep_at + _SWEPT_SLOTS, chunks.most_slots)
        stretch = np.arange(start, stop)
        stale = stretch[chunks.indexed[start:stop] & self.past(stretch)][:_SWEPT_CHUNKS]
        self._sweep_at = int(stale[-1]) + 1 if len(stale) == _SWEPT_CHUNKS else stop
        self.hide(stale, "invalidated")
        self.free(stale)

    def _tell(self, kind: Literal["stored", "removed"], reason: Reason | Literal[""], slots: np.ndarray) -> None:
        if self.on_change is not None and len(slots):
            chunks = self.chunks
            places = chunks.group_idx[slots].copy(), chunks.chunk_idx[slots].copy()
            self.on_change(Change(kind, reason, self.keys(slots), *places, slots.copy()))
