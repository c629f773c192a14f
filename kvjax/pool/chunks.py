"""What the pool knows of each chunk, as arrays by slot."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvjax.pool.ids import IdAllocator

NO_SLOTS = np.empty(0, np.int64)
_CLEARED_SLOTS = 2**20


class ChunkTable:
    """Places for the books of chunks, each with the units that its chunk holds.

    Arrays have one entry for each slot and are as long as the pool can have chunks, but beyond the first million
    memory is taken only for slots that were used: the lowest ones. No Python object belongs to a chunk but its key,
    so that neither growth nor the garbage collector pauses.

    Args:
        num_units: units of the pool.
        units_per_chunk: by `group_idx`, `None` for scratch groups.
    """

    def __init__(self, num_units: int, units_per_chunk: Sequence[int | None]):
        widths = [width or 0 for width in units_per_chunk]
        num_slots = max(1, num_units // min(width for width in widths if width))
        self.key = _zeros(num_slots, object)
        self.fingerprint = _zeros(num_slots, np.uint64)
        self.group_idx = _zeros(num_slots, np.int16)
        self.chunk_idx = _zeros(num_slots, np.int64)
        self.namespace = _zeros(num_slots, np.int32)
        self.generation = _zeros(num_slots, np.int64)
        self.epoch = _zeros(num_slots, np.int64)  # of the chunk in the slot, 0 if there is none
        self.access = _zeros(num_slots, np.int64)  # the number of the last access to the chunk
        self.indexed = _zeros(num_slots, bool)  # a key leads here
        self.writing = _zeros(num_slots, bool)
        self.pins = _zeros(num_slots, np.int32)
        self.widths = np.array(widths, np.int64)  # units of a chunk, by group
        self._row = _zeros(num_slots, np.int32)  # in its group's table of units
        self._units = [np.zeros((num_units // width if width else 0, width), np.int32) for width in widths]
        self._free_rows = [IdAllocator(len(table)) for table in self._units]
        self._free_slots = IdAllocator(num_slots)
        self._free_units = IdAllocator(num_units)
        self.num_units = num_units
        self.most_slots = 0  # no slot from here on was ever used

    @property
    def num_free_units(self) -> int:
        """Units that no chunk holds."""
        return self._free_units.num_free

    def allocate(self, group_idxs: np.ndarray) -> np.ndarray:
        """Gives each of some new chunks a slot and its units; requires that so many are free.

        Returns:
            The slots, `int64`.
        """
        slots = self._free_slots.take(len(group_idxs)).astype(np.int64)
        self.group_idx[slots] = group_idxs
        for g, of_group in self._by_group(slots):
            rows = self._free_rows[g].take(len(of_group))
            self._row[of_group] = rows
            width = int(self.widths[g])
            self._units[g][rows] = self._free_units.take(len(rows) * width).reshape(len(rows), width)
        if len(slots):
            self.most_slots = max(self.most_slots, int(slots.max()) + 1)
        return slots

    def free(self, slots: np.ndarray) -> None:
        """Takes back slots and their units."""
        for g, of_group in self._by_group(slots):
            rows = self._row[of_group]
            self._free_units.give(self._units[g][rows].ravel())
            self._free_rows[g].give(rows)
        self._free_slots.give(slots)
        self.epoch[slots] = 0
        self.key[slots] = None

    def units(self, slots: np.ndarray) -> np.ndarray:
        """Returns `(len(slots), units_per_chunk)` `int32` unit ids of chunks of one group."""
        if not len(slots):
            return np.empty((0, 0), np.int32)
        g = int(self.group_idx[slots[0]])
        return self._units[g][self._row[slots]]

    def check_integrity(self) -> None:
        """Raises an `AssertionError` if a unit, row or slot is neither free nor held exactly once."""
        live = np.flatnonzero(self.epoch)
        _check_partition(self._free_slots, live, "slot")
        held: list[np.ndarray] = [NO_SLOTS]
        for g, table in enumerate(self._units):
            rows = self._row[live[self.group_idx[live] == g]]
            _check_partition(self._free_rows[g], rows, "row")
            held.append(table[rows].ravel())
        _check_partition(self._free_units, np.concatenate(held), "unit")

    def _by_group(self, slots: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """The groups that occur, each with its slots."""
        if not len(slots):
            return []
        group_idxs = self.group_idx[slots]
        if np.count_nonzero(group_idxs == group_idxs[0]) == len(slots):
            return [(int(group_idxs[0]), slots)]
        return [(g, slots[group_idxs == g]) for g in np.flatnonzero(np.bincount(group_idxs)).tolist()]


def distinct(slots: np.ndarray) -> np.ndarray:
    """Returns the slots, each once, ascending. `np.unique` imports a package when it is first called."""
    ordered = np.sort(slots)
    return ordered[np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]]


def _zeros(num_slots: int, dtype: npt.DTypeLike) -> np.ndarray:
    """An array whose first pages are there: the kernel would clear them, 2 MiB at a time, in calls that must not
    pause."""
    array = np.zeros(num_slots, dtype)
    array[:_CLEARED_SLOTS] = None if dtype is object else 0
    return array


def _check_partition(free: IdAllocator, held: np.ndarray, name: str) -> None:
    everywhere = np.sort(np.concatenate([free.free_ids(), held]))
    assert np.array_equal(everywhere, np.arange(free.num_ids)), f"every {name} is free or held exactly once"
