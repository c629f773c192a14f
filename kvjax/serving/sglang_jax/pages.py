"""Which pages of one group are taken, by which units, how often locked, and whether they hold data."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from kvjax._checks import integer, integers
from kvjax.pool.ids import IdAllocator


class Pages:
    """The books of one group's host pages. They are for one thread at a time.

    Errors are of the types that sglang-jax's own pool raises: `ValueError` for an id that no page has, `RuntimeError`
    for a page in the wrong state. A call that raises changed nothing.

    Args:
        num_pages: pages, with ids from 0 on.
        units_per_page: units of the host pool that one page takes.
        units: hands out units; groups may share it.
    """

    def __init__(self, num_pages: int, units_per_page: int, units: IdAllocator):
        self.num_pages = num_pages
        self._units_per_page = units_per_page
        self._units = units
        self._ids = IdAllocator(num_pages)
        self._unit_ids = np.full((num_pages, units_per_page), -1, np.int32)
        self._is_taken = np.zeros(num_pages, bool)
        self._is_filled = np.zeros(num_pages, bool)
        self._num_locks = np.zeros(num_pages, np.int64)
        self._epochs = np.zeros(num_pages, np.int64)

    @property
    def num_free(self) -> int:
        """Pages that can be taken now. There are as many ids as fit all units, so those never run out first."""
        return self._units.num_free // self._units_per_page

    def take(self, num_pages: int) -> np.ndarray | None:
        """Returns the ids of `num_pages` free pages, `int64`; `None`, and nothing is taken, if there are fewer."""
        if num_pages > self.num_free:
            return None
        ids = self._ids.take(num_pages)
        self._unit_ids[ids] = self._units.take(num_pages * self._units_per_page).reshape(num_pages, -1)
        self._is_taken[ids] = True
        self._epochs[ids] += 1
        return ids.astype(np.int64)

    def give(self, page_ids: np.ndarray) -> None:
        """Takes pages back.

        Raises:
            ValueError: an id out of range.
            RuntimeError: a page that is free or locked.
        """
        self.check_taken(page_ids)
        locked = page_ids[self._num_locks[page_ids] > 0]
        if len(locked):
            raise RuntimeError(
                f"host page {locked[0]} must not be freed while it has locks: {self.num_locks(locked[0])}"
            )
        self._units.give(self._unit_ids[page_ids].ravel())
        self._ids.give(page_ids.astype(np.int32))
        self._is_taken[page_ids] = self._is_filled[page_ids] = False

    def lock(self, page_id: int) -> None:
        """Keeps a page from being freed, once for each call."""
        self._check_one(page_id)
        self._num_locks[page_id] += 1

    def unlock(self, page_id: int) -> None:
        """Ends one `lock`.

        Raises:
            RuntimeError: the page has none.
        """
        self._check_one(page_id)
        if not self._num_locks[page_id]:
            raise RuntimeError(f"host page {page_id} must have a lock to be unlocked, it has none")
        self._num_locks[page_id] -= 1

    def num_locks(self, page_id: int) -> int:
        """How often a page is locked."""
        return int(self._num_locks[page_id])

    def fill(self, page_ids: np.ndarray, epochs: np.ndarray) -> None:
        """Says that pages hold data; those freed, lost or emptied since `epochs` are passed over."""
        self._is_filled[page_ids[(self._epochs[page_ids] == epochs) & self._is_taken[page_ids]]] = True

    def empty(self, page_ids: np.ndarray) -> None:
        """Says that pages hold no data, nor will from what is under way, as they are about to be written anew."""
        self._is_filled[page_ids] = False
        self._epochs[page_ids] += 1

    def lose(self) -> None:
        """Says that no page holds data any more, nor will from what is under way."""
        self._is_filled[:] = False
        self._epochs += 1

    def epochs(self, page_ids: np.ndarray) -> np.ndarray:
        """A number of each page that changes when it is taken, emptied or lost: what began before does not fill it."""
        return self._epochs[page_ids]

    def units_of(self, page_ids: np.ndarray) -> np.ndarray:
        """Units that taken pages lie in, `(len(page_ids), units_per_page)`."""
        return self._unit_ids[page_ids]

    def check_taken(self, page_ids: np.ndarray) -> None:
        """Raises unless every id is that of a page that is taken."""
        self._check_range(page_ids)
        free = page_ids[~self._is_taken[page_ids]]
        if len(free):
            raise RuntimeError(f"host page {free[0]} must be allocated, it is free")

    def check_filled(self, page_ids: np.ndarray) -> None:
        """Raises unless every id is that of a page that holds data."""
        self.check_taken(page_ids)
        empty = page_ids[~self._is_filled[page_ids]]
        if len(empty):
            raise RuntimeError(f"host page {empty[0]} must hold data to be loaded, nothing was backed up to it")

    def check_integrity(self) -> None:
        """Recounts the pages.

        Raises:
            AssertionError: the books contradict each other.
        """
        free = np.zeros(self.num_pages, bool)
        free[self._ids.free_ids()] = True
        assert (free != self._is_taken).all(), "a page is free or taken"
        assert not self._is_filled[free].any(), "a free page holds no data"
        assert not self._num_locks[free].any(), "a free page has no locks"
        taken = self.units_of(np.flatnonzero(self._is_taken)).ravel()
        assert len(np.unique(taken)) == len(taken), "a unit belongs to one page"
        assert not np.isin(taken, self._units.free_ids()).any(), "a unit of a page is not free"

    def _check_one(self, page_id: Any) -> None:
        self.check_taken(np.array([integer(page_id, "buffer_id", at_least=0)]))

    def _check_range(self, page_ids: np.ndarray) -> None:
        wrong = page_ids[(page_ids < 0) | (page_ids >= self.num_pages)]
        if len(wrong):
            raise ValueError(f"host page ids must be from 0 to {self.num_pages - 1}, got {wrong[0]}")


def distinct_ids(ids: Iterable[int]) -> np.ndarray:
    """Returns ids as `int64`, each once, in the order in which they came first.

    >>> distinct_ids([4, 1, 4]).tolist()
    [4, 1]
    """
    return np.array(list(dict.fromkeys(page_ids(ids).tolist())), np.int64)


def page_ids(ids: Iterable[int], name: str = "host page ids") -> np.ndarray:
    """Returns ids as `int64`.

    Raises:
        ValueError: they are no integers.
    """
    listed = list(ids) if isinstance(ids, Iterable) and not hasattr(ids, "__getitem__") else ids
    return integers(listed, f"{name} must be a 1-d sequence of ints")
