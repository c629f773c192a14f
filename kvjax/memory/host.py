"""The host pool's bytes."""

import numpy as np

from kvjax.memory.limits import available_memory
from kvjax.memory.spans import address_of
from kvjax.observe.progress import progress_bar

WORD = np.dtype("<u4")
_TOUCH_BYTES = 64 * 2**20
_PAGE_BYTES = 4096


class HostMemory:
    """Units of the host pool, as rows of 32-bit words. All pages are there from the start.

    Readers and writers of different units may run in different threads.

    Args:
        num_units: units of the pool.
        unit_bytes: bytes of a unit, a multiple of 4.
        show_progress: see `progress_bar`.

    Raises:
        MemoryError: see `check_available`.
    """

    def __init__(self, num_units: int, unit_bytes: int, *, show_progress: bool | None = None):
        check_available(num_units * unit_bytes)
        self._unit_bytes = unit_bytes
        total = num_units * unit_bytes
        self._rows = _on_pages(total).view(WORD).reshape(num_units, unit_bytes // WORD.itemsize)
        step = max(1, _TOUCH_BYTES // unit_bytes)
        with progress_bar("host pool", total, show=show_progress) as advance:
            for low in range(0, num_units, step):
                piece = self._rows[low : low + step]
                piece.fill(0)  # a first touch later would cost a transfer more than the copy itself
                advance(piece.nbytes)

    @property
    def bytes(self) -> np.ndarray:
        """All units, one after the other, as `uint8`."""
        return self._rows.reshape(-1).view(np.uint8)

    def write(self, unit_ids: np.ndarray, rows: np.ndarray) -> None:
        """Copies `rows`, `(len(unit_ids), words)`, into the units."""
        for low, high, first in _runs(unit_ids):
            np.copyto(self._rows[first : first + high - low], rows[low:high])

    def clear_tails(self, unit_ids: np.ndarray, num_bytes: int) -> None:
        """Makes the last `num_bytes` bytes of units zero."""
        if num_bytes:
            self._rows.view(np.uint8)[unit_ids, -num_bytes:] = 0

    def read(self, unit_ids: np.ndarray, rows: np.ndarray) -> None:
        """Copies the units into the first rows of `rows`."""
        for low, high, first in _runs(unit_ids):
            np.copyto(rows[low:high], self._rows[first : first + high - low])

    def copy_out(self, unit_ids: np.ndarray, data: np.ndarray) -> None:
        """Copies the first bytes of some units, one after the other, into `data`, `uint8` and no longer than they."""
        for at, first, stop in self._stretches(unit_ids, len(data)):
            np.copyto(data[at : at + stop - first], self.bytes[first:stop])

    def copy_in(self, unit_ids: np.ndarray, data: np.ndarray) -> None:
        """Copies `data`, `uint8`, into units, one after the other; what is left of them becomes zero."""
        total = len(unit_ids) * self._unit_bytes
        for at, first, stop in self._stretches(unit_ids, total):
            given = data[at : at + stop - first]
            np.copyto(self.bytes[first : first + len(given)], given)
            self.bytes[first + len(given) : stop] = 0

    def _stretches(self, unit_ids: np.ndarray, num_bytes: int) -> list[tuple[int, int, int]]:
        """Cuts `num_bytes` bytes that lie in units into `(at, first, stop)`, `first` and `stop` of the pool's bytes."""
        size = self._unit_bytes
        runs = [(low * size, first * size, (high - low) * size) for low, high, first in _runs(unit_ids)]
        return [(at, first, first + min(length, num_bytes - at)) for at, first, length in runs if at < num_bytes]

    def read_chunks(self, unit_ids: np.ndarray) -> np.ndarray:
        """Returns a copy of chunks whose units are the rows of `unit_ids`, `uint8` `(num_chunks, bytes)`."""
        return self._rows[unit_ids].reshape(len(unit_ids), -1).view(np.uint8)


def check_available(num_bytes: int) -> None:
    """Checks that this process can still take so much memory for a pool, as far as the kernel tells.

    Raises:
        MemoryError: the machine, or a control group of the process, does not have that much.
    """
    memory = available_memory()
    if memory.num_bytes is not None and num_bytes > memory.num_bytes:
        raise MemoryError(
            f"a host pool of {num_bytes} bytes needs more memory than the {memory.num_bytes} bytes available "
            f"{memory.bound}"
        )


def _on_pages(num_bytes: int) -> np.ndarray:
    """New memory that starts at a page. Copies from and to addresses that are no multiples of 64 are slower."""
    memory = np.empty(num_bytes + _PAGE_BYTES, np.uint8)
    start = -address_of(memory) % _PAGE_BYTES
    return memory[start : start + num_bytes]


def _runs(unit_ids: np.ndarray) -> list[tuple[int, int, int]]:
    """Cuts ids into runs of neighbours: `(low, high, first id)` for `unit_ids[low:high]`."""
    if not len(unit_ids):
        return []
    cuts = np.flatnonzero(np.diff(unit_ids) != 1) + 1
    lows = np.concatenate([[0], cuts])
    highs = np.append(cuts, len(unit_ids))
    return list(zip(lows.tolist(), highs.tolist(), unit_ids[lows].tolist(), strict=True))
