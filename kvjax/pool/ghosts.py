"""What left a pool lately, by fingerprint."""

import numpy as np


class Ghosts:
    """Remembers the fingerprints put in last, in a table of fixed size. One that another one pushed out of its
    place is forgotten early: the memory is a hint, not a record.

    Args:
        num_places: places of the table, a power of two.
    """

    def __init__(self, num_places: int):
        self._mask = np.uint64(num_places - 1)
        self._fingerprints = np.zeros(num_places, np.uint64)
        self._stamps = np.zeros(num_places, np.int64)
        self._num_put = 0
        self._num_taken = 0

    def put(self, fingerprints: np.ndarray) -> None:
        """Adds fingerprints, `uint64`."""
        places = fingerprints & self._mask
        self._fingerprints[places] = fingerprints
        self._stamps[places] = np.arange(self._num_put + 1, self._num_put + 1 + len(fingerprints))
        self._num_put += len(fingerprints)

    def take(self, fingerprints: np.ndarray, capacity: int) -> np.ndarray:
        """Returns a mask of those that are among the last `capacity` put in, and forgets them."""
        places = fingerprints & self._mask
        found = (self._fingerprints[places] == fingerprints) & (self._stamps[places] > self._num_put - capacity)
        found &= self._stamps[places] > 0
        self._stamps[places[found]] = 0
        self._num_taken += int(np.count_nonzero(found))
        return found

    def size(self, capacity: int) -> int:
        """Returns about how many of the last `capacity` are remembered."""
        return max(0, min(self._num_put - self._num_taken, capacity))
