"""Least recently used, by requests: the oldest request first, and within it from its tail."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

_NOT_HELD = -1
# Accesses keep lists in which slots touched later are stale. They are compacted once the stale entries
# outnumber the live ones and this many more.
_STALE_ENTRIES = 4096


@dataclass(slots=True, eq=False)
class _Access:
    slots: np.ndarray  # the highest rank first
    bounds: np.ndarray  # slots[bounds[i] : bounds[i + 1]] share a rank


class LRU:
    """Orders chunks by the last access of a request to them; see `Policy`.

    An access costs a few array operations, whatever its length: it is appended as one list, and each slot
    remembers which access it belongs to. Entries of older lists that were touched again are skipped.
    """

    def __init__(self):
        self._accesses: dict[int, _Access] = {}  # by number, oldest first
        self._number = np.full(64, _NOT_HELD, np.int64)  # slot -> the access it belongs to
        self._next = 0
        self._entries = 0
        self._held = 0

    def touch(self, slots: np.ndarray, ranks: np.ndarray) -> None:
        """See `Policy.touch`."""
        if not len(slots):
            return
        order = np.argsort(-ranks, kind="stable")
        ordered, ordered_ranks = slots[order], ranks[order]
        bounds = np.concatenate([[0], np.flatnonzero(np.diff(ordered_ranks)) + 1, [len(ordered)]])
        self._reserve(int(slots.max()) + 1)
        self._held += int((self._number[slots] == _NOT_HELD).sum())
        self._number[slots] = self._next
        self._accesses[self._next] = _Access(ordered, bounds)
        self._next += 1
        self._entries += len(ordered)
        self._compact()

    def remove(self, slots: np.ndarray) -> None:
        """See `Policy.remove`."""
        slots = slots[slots < len(self._number)]
        self._held -= int((self._number[slots] != _NOT_HELD).sum())
        self._number[slots] = _NOT_HELD
        self._compact()

    def victims(self) -> Iterator[np.ndarray]:
        """See `Policy.victims`."""
        for number, access in list(self._accesses.items()):
            live = self._number[access.slots] == number
            for low, high in zip(access.bounds[:-1], access.bounds[1:], strict=True):
                together = access.slots[low:high][live[low:high]]
                if len(together):
                    yield together

    def slots(self) -> np.ndarray:
        """See `Policy.slots`."""
        return np.flatnonzero(self._number != _NOT_HELD)

    def _reserve(self, num_slots: int) -> None:
        if num_slots > len(self._number):
            larger = np.full(max(num_slots, 2 * len(self._number)), _NOT_HELD, np.int64)
            larger[: len(self._number)] = self._number
            self._number = larger

    def _compact(self) -> None:
        if self._entries <= 2 * self._held + _STALE_ENTRIES:
            return
        kept: dict[int, _Access] = {}
        for number, access in self._accesses.items():
            live = self._number[access.slots] == number
            if live.any():
                before = np.concatenate([[0], np.cumsum(live)])
                kept[number] = _Access(access.slots[live], np.unique(before[access.bounds]))
        self._accesses = kept
        self._entries = sum(len(access.slots) for access in kept.values())
