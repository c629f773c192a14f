"""Which units of the host pool are free."""

import numpy as np


class UnitAllocator:
    """Hands out unit ids and takes them back. Freed units are handed out again in the order in which
    they were held, so that what was a run stays one.

    Args:
        num_units: units of the pool.
    """

    def __init__(self, num_units: int):
        self.num_units = num_units
        self._free = np.arange(num_units - 1, -1, -1, dtype=np.int32)  # a stack, the next unit on top
        self._num_free = num_units

    @property
    def num_free(self) -> int:
        """Units not held by any chunk."""
        return self._num_free

    def take(self, num_units: int) -> np.ndarray:
        """Returns `num_units` unit ids, `int32`, owned by the caller. Requires that so many are free."""
        assert num_units <= self._num_free, "more units taken than are free"
        low = self._num_free - num_units
        taken = self._free[low : self._num_free][::-1].copy()
        self._num_free = low
        return taken

    def give(self, units: np.ndarray) -> None:
        """Takes back units that `take` handed out."""
        high = self._num_free + len(units)
        assert high <= self.num_units, "more units given back than were taken"
        self._free[self._num_free : high] = units[::-1]
        self._num_free = high

    def free_units(self) -> np.ndarray:
        """Returns a copy of the free unit ids, for integrity checks."""
        return self._free[: self._num_free].copy()
