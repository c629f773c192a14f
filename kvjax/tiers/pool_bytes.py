"""The bytes of chunks in the host pool, as tiers copy them out and in."""

from typing import Protocol

import numpy as np

from kvjax.packing import Units


class HostMemory(Protocol):
    """The pool in the process's own memory, see `kvjax.memory.host`."""

    def copy_out(self, unit_ids: np.ndarray, data: np.ndarray) -> None:
        """Copies the first bytes of some units into `data`."""
        ...

    def copy_in(self, unit_ids: np.ndarray, data: np.ndarray) -> None:
        """Copies `data` into units."""
        ...


class Mover(Protocol):
    """What of `kvjax.mover.Mover` is used here."""

    @property
    def host_memory(self) -> HostMemory | None:
        """The pool, if it is in the process's own memory."""
        ...

    def read_chunks(self, group_idx: int, unit_ids: np.ndarray) -> np.ndarray:
        """Returns a copy of chunks."""
        ...

    def write_chunks(self, group_idx: int, unit_ids: np.ndarray, chunks: np.ndarray) -> None:
        """Puts chunks into the pool."""
        ...


class PoolBytes:
    """Copies one chunk at a time between the host pool and other memory, without its padding.

    Args:
        mover: which owns the pool.
        units: how chunks are cut into units.
    """

    def __init__(self, mover: Mover, units: Units):
        self._mover = mover
        self._unit_bytes = units.unit_bytes

    @property
    def any_thread(self) -> bool:
        """Whether the pool is the process's own memory. A pinned pool is an array that only programs touch, and those
        are issued by whoever calls the offloader."""
        return self._mover.host_memory is not None

    def copy_out(self, group_idx: int, unit_ids: np.ndarray, data: np.ndarray) -> None:
        """Copies a chunk out of its units, `(units_per_chunk,)`, into `data`, `uint8` of its bytes."""
        memory = self._mover.host_memory
        if memory is not None:
            memory.copy_out(unit_ids, data)
        else:
            data[:] = self._mover.read_chunks(group_idx, unit_ids[None])[0, : len(data)]

    def copy_in(self, group_idx: int, unit_ids: np.ndarray, data: np.ndarray) -> None:
        """Copies a chunk's bytes into its units; what is left of them becomes zero."""
        memory = self._mover.host_memory
        if memory is not None:
            memory.copy_in(unit_ids, data)
        else:
            chunk = np.zeros((1, len(unit_ids) * self._unit_bytes), np.uint8)
            chunk[0, : len(data)] = data
            self._mover.write_chunks(group_idx, unit_ids[None], chunk)
