"""Which of a range of ids are free: units of the host pool, places in its books."""

import numpy as np


class IdAllocator:
    """Hands out ids and takes them back. What was given back is handed out again in the order in which it was
    held, so that what was a run stays one; ids that were never handed out come last, in ascending order, and
    take no memory until then.

    Args:
        num_ids: ids from 0 on.
    """

    def __init__(self, num_ids: int):
        self.num_ids = num_ids
        self._returned = np.empty(num_ids, np.int32)  # a stack, the next id on top
        self._num_returned = 0
        self._next_fresh = 0

    @property
    def num_free(self) -> int:
        """Ids that nobody holds."""
        return self._num_returned + self.num_ids - self._next_fresh

    def take(self, num_ids: int) -> np.ndarray:
        """Returns `num_ids` ids, `int32`, owned by the caller. Requires that so many are free."""
        assert num_ids <= self.num_free, "more ids taken than are free"
        again = min(num_ids, self._num_returned)
        taken = self._returned[self._num_returned - again : self._num_returned][::-1].copy()
        self._num_returned -= again
        if again == num_ids:
            return taken
        fresh = np.arange(self._next_fresh, self._next_fresh + num_ids - again, dtype=np.int32)
        self._next_fresh += len(fresh)
        return np.concatenate([taken, fresh])

    def give(self, ids: np.ndarray) -> None:
        """Takes back ids that `take` handed out."""
        high = self._num_returned + len(ids)
        assert high <= self._next_fresh, "more ids given back than were taken"
        self._returned[self._num_returned : high] = ids[::-1]
        self._num_returned = high

    def free_ids(self) -> np.ndarray:
        """Returns the free ids, in no order, for integrity checks."""
        return np.concatenate([self._returned[: self._num_returned], np.arange(self._next_fresh, self.num_ids)])
