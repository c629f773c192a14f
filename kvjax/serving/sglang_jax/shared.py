"""The memory that the host pages of all groups lie in, and the moves between it and the device pools."""

import threading
from collections.abc import Sequence

import numpy as np

from kvjax.chunking import Chunking, resolve_chunking
from kvjax.groups import CacheLayout
from kvjax.memory.host import check_available
from kvjax.memory.registration import register
from kvjax.memory.transports import granule_bytes
from kvjax.mover import Mover, Transfer
from kvjax.packing import Units, cut_into_units, unit_bytes
from kvjax.plan import LoadPlan, StorePlan, plan_store
from kvjax.pool.ids import IdAllocator
from kvjax.serving.sglang_jax.device_groups import DeviceGroup
from kvjax.serving.sglang_jax.pages import Pages


class SharedUnits:
    """Equal units of host memory, and the mover that fills them. A host page is a chunk of one block.

    `store` and `load` are for the thread that owns the device pools, with `lock` held.

    Its attribute `pages` holds the books of each group's pages, in the order of the groups.

    Args:
        groups: what the device holds.
        chunking: their layout, one block per chunk, see `cut`.
        units: how a page of each group is cut into units, see `cut`.
        num_units: units in all.
        transfer: how bytes cross the memory spaces, see `kvjax.memory.transports`.
        staging_bytes: see `kvjax.Mover`.

    Raises:
        ValueError: arrays that cannot be moved, or a transfer that this machine cannot take.
        MemoryError: the machine does not have so much memory.
    """

    def __init__(
        self,
        groups: Sequence[DeviceGroup],
        chunking: Chunking,
        units: Units,
        *,
        num_units: int,
        transfer: str = "auto",
        staging_bytes: int | None = None,
    ):
        self.groups = tuple(groups)
        self.chunking = chunking
        self.units = units
        self.lock = threading.Lock()
        check_available(num_units * units.unit_bytes)
        free_units = IdAllocator(num_units)
        self.pages = tuple(Pages(num_units // (n or 1), n or 1, free_units) for n in units.units_per_chunk)
        self.num_bytes = num_units * units.unit_bytes
        self._failed = False
        self._mover = Mover(
            chunking,
            units,
            _arrays(groups),
            num_units=num_units,
            staging_bytes=staging_bytes,
            transfer=transfer,
        )

    @property
    def transfer(self) -> str:
        """How bytes cross the memory spaces: `"direct"` or `"staged"`."""
        return self._mover.transfer

    def store(self, group_idx: int, block_ids: np.ndarray, unit_ids: np.ndarray) -> Transfer:
        """Starts to copy blocks to units; when it returns, the blocks may be overwritten.

        Args:
            group_idx: the group.
            block_ids: `(num_pages,)`, in range.
            unit_ids: `(num_pages, units_per_page)`, each named once.
        """
        self._revive()
        _, transfer = self._mover.store(_arrays(self.groups), self._plan(group_idx, block_ids, unit_ids))
        return transfer

    def load(self, group_idx: int, block_ids: np.ndarray, unit_ids: np.ndarray) -> None:
        """Starts to copy units to blocks, and puts the arrays that will hold them into the device pools.

        Whatever is computed from those arrays waits for the bytes. Units may be written again by a later `store`.

        Args:
            group_idx: the group.
            block_ids: `(num_pages,)`, in range and distinct.
            unit_ids: `(num_pages, units_per_page)`.

        Raises:
            Exception: what kept a part of the move from being started; then the blocks may hold anything.
        """
        stored = self._plan(group_idx, block_ids, unit_ids)
        plan = LoadPlan(stored.moves, stored.num_bytes)
        caches, transfer = self._mover.load(_arrays(self.groups), plan)
        self.groups[group_idx].put(caches)
        if not transfer.moved(plan)[group_idx].all():
            self.wait(transfer)

    def wait(self, transfer: Transfer) -> None:
        """Waits for what `store` started; for any thread, without `lock`.

        Raises:
            Exception: what failed the copy.
        """
        try:
            transfer.wait()
        except Exception:
            self._failed = True
            raise

    def close(self) -> None:
        """Waits for the moves under way."""
        self._mover.close()

    def _revive(self) -> None:
        """Makes the units anew if a program that failed took them along: then no page holds data any more."""
        if self._failed:
            self._failed = False
            if self._mover.revive():
                for pages in self.pages:
                    pages.lose()

    def _plan(self, group_idx: int, block_ids: np.ndarray, unit_ids: np.ndarray) -> StorePlan:
        name = self.chunking.layout.groups[group_idx].name
        pages = np.arange(len(block_ids))
        return plan_store(self.chunking, {name: pages}, {name: block_ids}, {name: unit_ids})


def cut(groups: Sequence[DeviceGroup]) -> tuple[Chunking, Units]:
    """Returns the chunking in which a page of each group is a chunk, and how pages are cut into units.

    Raises:
        ValueError: arrays that cannot be moved, see `kvjax.memory.registration.register`.
    """
    chunking = resolve_chunking(CacheLayout([group.spec for group in groups]))
    granule = granule_bytes(register(chunking.layout, _arrays(groups)))
    return chunking, cut_into_units(chunking, unit_bytes(chunking, granule))


def _arrays(groups: Sequence[DeviceGroup]) -> dict:
    return {name: array for group in groups for name, array in group.arrays().items()}
