"""Least recently used, by requests: the oldest request first, and within it from its tail."""

from collections.abc import Iterator

import numpy as np

from kvjax.pool.policy import Access
from kvjax.pool.recency import RecencyList


class LRU:
    """Orders chunks by the last access of a request to them; see `Policy`."""

    def __init__(self):
        self._list = RecencyList()

    def touch(self, access: Access) -> None:
        """See `Policy.touch`."""
        self._list.add(access.number, access.slots, access.ranks)

    def remove(self, slots: np.ndarray, *, evicted: bool) -> None:  # noqa: ARG002  # all are forgotten alike
        """See `Policy.remove`."""
        self._list.remove(slots)

    def victims(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """See `Policy.victims`."""
        return self._list.oldest_first()

    def slots(self) -> np.ndarray:
        """See `Policy.slots`."""
        return self._list.slots()
