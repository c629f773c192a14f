"""What left a pool lately, by fingerprint."""

import numpy as np


class Ghosts:
    """Remembers the fingerprints of what left two lists, 0 and 1, in a table of fixed size. One that another one
    pushed out of its place is forgotten early: the memory is a hint, not a record.

    Args:
        num_places: places of the table, a power of two.
    """

    def __init__(self, num_places: int):
        self._mask = np.uint64(num_places - 1)
        # Filled now: the kernel would clear pages when they are first touched, a few hundred in one call.
        self._fingerprints = np.full(num_places, 0, np.uint64)
        self._stamps = np.full(num_places, 0, np.int64)  # when it was put in; negative for list 1; 0: taken
        self._num_put = 0
        self._num_put_of = [0, 0]
        self._num_taken_of = [0, 0]

    def put(self, fingerprints: np.ndarray, left: int) -> None:
        """Adds fingerprints, `uint64`, of what left list 0 or 1."""
        places = fingerprints & self._mask
        stamps = np.arange(self._num_put + 1, self._num_put + 1 + len(fingerprints))
        self._fingerprints[places] = fingerprints
        self._stamps[places] = -stamps if left else stamps
        self._num_put += len(fingerprints)
        self._num_put_of[left] += len(fingerprints)

    def take(self, fingerprints: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns, for list 0 and for list 1, a mask of those that are among the last `2 * capacity` put in and left
        that list, and forgets them."""
        places = fingerprints & self._mask
        found = self._fingerprints[places] == fingerprints
        if not np.count_nonzero(found):
            return found, found
        stamps = self._stamps[places]
        found &= (stamps != 0) & (np.abs(stamps) > self._num_put - 2 * capacity)
        self._stamps[places[found]] = 0
        masks = found & (stamps > 0), found & (stamps < 0)
        for left, mask in enumerate(masks):
            self._num_taken_of[left] += int(np.count_nonzero(mask))
        return masks

    def size(self, left: int, capacity: int) -> int:
        """Returns about how many of the last `capacity` that left a list are remembered."""
        return max(0, min(self._num_put_of[left] - self._num_taken_of[left], capacity))
