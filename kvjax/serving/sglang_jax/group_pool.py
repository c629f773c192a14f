"""The host pages of one group, with the methods that sglang-jax's HiCache calls."""

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import numpy as np

from kvjax._checks import integer
from kvjax.mover import Transfer
from kvjax.serving.sglang_jax.pages import distinct_ids, page_ids
from kvjax.serving.sglang_jax.shared import SharedUnits


class GroupPool:
    """Host pages that keep what was backed up to them until they are freed.

    Names and errors of its methods are sglang-jax's (`ValueError` for an id out of range, `RuntimeError` for a page
    in the wrong state); a call that is refused changed nothing. Every id is that of a page: a *device page* is a place
    in the whole array of the group, so with data parallelism rank `r` adds `r` times the pages of a rank.

    `stage_backup`, `flush_load`, `copy_into`, `copy_to_device` and `precompile_transfers` issue JAX work and are for
    the thread that owns the device pool; all others are for any thread.

    Args:
        shared: the memory, which other groups may use, too.
        group_idx: the group.
    """

    def __init__(self, shared: SharedUnits, group_idx: int):
        self._shared = shared
        self._group_idx = group_idx
        self._group = shared.groups[group_idx]
        self._pages = shared.pages[group_idx]
        self._backups: dict[int, tuple[int, Transfer]] = {}
        self._to_load: set[int] = set()

    @property
    def transfer(self) -> str:
        """How bytes cross the memory spaces: `"direct"` or `"staged"`."""
        return self._shared.transfer

    def device_arrays(self) -> dict[str, Any]:
        """The group's device arrays as they are now, by leaf name."""
        return self._group.arrays()

    # --- pages ----------------------------------------------------------------------------------------

    def reserve(self) -> int | None:
        """Returns a free page, now the caller's, or `None`."""
        ids = self.alloc(1)
        return None if ids is None else int(ids[0])

    def alloc(self, need_pages: int) -> np.ndarray | None:
        """Returns `need_pages` free pages, `int64`, now the caller's; or `None` if there are fewer.

        Raises:
            ValueError: `need_pages` is not a positive int.
        """
        number = integer(need_pages, "need_pages", at_least=1)
        with self._shared.lock:
            return self._pages.take(number)

    def release(self, buffer_id: int) -> None:
        """Frees one page."""
        self.free([buffer_id])

    def free(self, host_page_ids: Iterable[int]) -> None:
        """Frees pages, and forgets their data and what was staged for them. One named twice is freed once.

        Raises:
            ValueError: an id out of range.
            RuntimeError: a page that is free or locked.
        """
        ids = distinct_ids(host_page_ids)
        with self._shared.lock:
            self._pages.give(ids)
            for page in ids.tolist():
                self._backups.pop(page, None)
                self._to_load.discard(page)

    def available_size(self) -> int:
        """Pages that can be allocated now."""
        with self._shared.lock:
            return self._pages.num_free

    def total_size(self) -> int:
        """Pages of the pool, free or not."""
        return self._pages.num_pages

    def inc_lock_ref(self, buffer_id: int) -> None:
        """Keeps a page from being freed, once for each call."""
        with self._shared.lock:
            self._pages.lock(buffer_id)

    def dec_lock_ref(self, buffer_id: int) -> None:
        """Ends one `inc_lock_ref`.

        Raises:
            RuntimeError: there is none to end.
        """
        with self._shared.lock:
            self._pages.unlock(buffer_id)

    # --- device to host -------------------------------------------------------------------------------

    def stage_backup(self, device_indices: Sequence[int], host_buffer_ids: Sequence[int]) -> None:
        """Starts to copy device pages to host pages. When it returns, the device pages may be overwritten.

        Args:
            device_indices: device pages.
            host_buffer_ids: as many allocated host pages, each named once; what they held is lost.

        Raises:
            ValueError: ids out of range, named twice or not as many as the others.
            RuntimeError: a host page that is free.
        """
        device, host = self._pairs(device_indices, host_buffer_ids)
        if not len(host):
            return
        with self._shared.lock:
            self._pages.check_taken(host)
            self._check_device(device)
            transfer = self._shared.store(self._group_idx, device, self._pages.units_of(host))
            self._pages.empty(host)
            self._to_load.difference_update(host.tolist())
            for page, epoch in zip(host.tolist(), self._pages.epochs(host).tolist(), strict=True):
                self._backups[page] = epoch, transfer

    def flush_backup(self, host_buffer_ids: Sequence[int]) -> None:
        """Waits until staged host pages hold their data. One that was freed or staged again meanwhile is passed over.

        Raises:
            RuntimeError: a page without `stage_backup`.
            Exception: what failed the copy; then none of the pages holds data.
        """
        ids = distinct_ids(host_buffer_ids)
        with self._shared.lock:
            _check_staged(ids, self._backups, "stage_backup")
            begun = [self._backups.pop(page) for page in ids.tolist()]
        for transfer in dict.fromkeys(transfer for _, transfer in begun):
            self._shared.wait(transfer)
        with self._shared.lock:
            self._pages.fill(ids, np.array([epoch for epoch, _ in begun], np.int64))

    # --- host to device -------------------------------------------------------------------------------

    def stage_load(self, host_buffer_ids: Sequence[int]) -> None:
        """Says that host pages will be loaded. No byte moves before `flush_load`.

        Raises:
            ValueError: an id out of range.
            RuntimeError: a page that is free or holds no data.
        """
        ids = distinct_ids(host_buffer_ids)
        with self._shared.lock:
            self._pages.check_filled(ids)
            self._to_load.update(ids.tolist())

    def flush_load(self, host_buffer_ids: Sequence[int], device_indices: Sequence[int]) -> None:
        """Starts to copy staged host pages to device pages, and puts the new arrays into the device pool.

        A step that reads those arrays waits for the bytes; the host pages may be freed at once.

        Args:
            host_buffer_ids: host pages after `stage_load`.
            device_indices: as many device pages.

        Raises:
            ValueError: ids out of range, named twice or not as many as the others.
            RuntimeError: a host page without `stage_load`.
            Exception: what kept pages from being copied; then the device pages may hold anything.
        """
        device, host = self._pairs(device_indices, host_buffer_ids)
        if not len(host):
            return
        with self._shared.lock:
            self._check_device(device)
            if len(distinct_ids(device)) < len(device):
                raise ValueError(f"`device_indices` must name each device page once, got {device.tolist()}")
            _check_staged(host, self._to_load, "stage_load")
            self._pages.check_filled(host)
            self._to_load.difference_update(host.tolist())
            self._shared.load(self._group_idx, device, self._pages.units_of(host))

    # --- both -----------------------------------------------------------------------------------------

    def copy_into(self, device_indices: Sequence[int], host_buffer_ids: Sequence[int]) -> None:
        """`stage_backup` and `flush_backup`."""
        self.stage_backup(device_indices, host_buffer_ids)
        self.flush_backup(host_buffer_ids)

    def copy_to_device(self, host_buffer_ids: Sequence[int], device_indices: Sequence[int]) -> None:
        """`stage_load` and `flush_load`."""
        self.stage_load(host_buffer_ids)
        self.flush_load(host_buffer_ids, device_indices)

    def copy_from_device(self, layers: Any, buffer_id: int) -> NoReturn:  # sglang-jax's signature
        """Refuses: pages are named by id here, and no array is handed over.

        Raises:
            NotImplementedError: always, as sglang-jax's own HiCache pool does.
        """
        raise NotImplementedError("this pool takes device pages by id; use `copy_into`")

    def precompile_transfers(self, max_pages: int | None = None) -> None:  # noqa: ARG002  # sglang-jax's signature
        """Moves one device page, 0, to the host and back to where it was, if a host page is free.

        All programs, for any number of pages, were compiled when the pool was made; this shows that they run before a
        request depends on it.
        """
        page = self.reserve()
        if page is not None:
            self.copy_into([0], [page])
            self.copy_to_device([page], [0])
            self.release(page)

    def check_integrity(self) -> None:
        """Recounts the pages.

        Raises:
            AssertionError: the books contradict each other.
        """
        with self._shared.lock:
            self._pages.check_integrity()
            staged = np.array([*self._backups, *self._to_load], np.int64)
            self._pages.check_taken(staged)

    def _pairs(self, device_indices: Sequence[int], host_buffer_ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        device = page_ids(device_indices, "`device_indices`")
        host = page_ids(host_buffer_ids, "`host_buffer_ids`")
        if len(device) != len(host):
            raise ValueError(
                f"`device_indices` and `host_buffer_ids` must be as many, got {len(device)} and {len(host)}"
            )
        if len(distinct_ids(host)) < len(host):
            raise ValueError(f"`host_buffer_ids` must name each host page once, got {host.tolist()}")
        return device, host

    def _check_device(self, device: np.ndarray) -> None:
        limit = self._group.num_blocks
        if device.min() < 0 or device.max() >= limit:
            wrong = device[(device < 0) | (device >= limit)][0]
            raise ValueError(f"`device_indices` must be from 0 to {limit - 1}, got {wrong}")


def _check_staged(ids: np.ndarray, staged: Any, first: str) -> None:
    missing = [page for page in ids.tolist() if page not in staged]
    if missing:
        raise RuntimeError(f"`{first}` must be called for host page {missing[0]} before it is flushed")
