"""Runs plans on caches: what a worker process does. It knows no keys and decides nothing."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from kvjax._arguments import check_chunking
from kvjax._checks import flag, instance, integer
from kvjax.chunking import Chunking
from kvjax.memory.host import HostMemory
from kvjax.memory.local import LocalView
from kvjax.memory.registration import register
from kvjax.memory.staged import ended
from kvjax.memory.transports import make_transport
from kvjax.packing import Units
from kvjax.plan import NULL_BLOCK, GroupMoves, LoadPlan, StorePlan

DEFAULT_STAGING_BYTES = 64 * 2**20


class Part:
    """A piece of a move: some rows of one group.

    Args:
        group_idx: the group.
        start: the first row of the group's moves.
        stop: the row after the last one.
        under_way: a future, or an array (anything with `is_ready` and `block_until_ready`) that is ready when the
            rows are moved; `None` if they are.
    """

    __slots__ = ("error", "group_idx", "start", "stop", "under_way")

    def __init__(self, group_idx: int, start: int, stop: int, under_way: Any):
        self.group_idx = group_idx
        self.start = start
        self.stop = stop
        self.under_way = under_way
        self.error: Exception | None = None

    def done(self) -> bool:
        """True once the piece ended, well or not."""
        return self.under_way is None or ended(self.under_way)

    def wait(self) -> None:
        """Waits until the piece ended; `error` says what went wrong."""
        under_way = self.under_way
        try:
            if isinstance(under_way, Future):
                under_way.result()
            elif under_way is not None:
                under_way.block_until_ready()
        except Exception as error:  # noqa: BLE001  # the edge of a job: whatever went wrong fails it
            self.error = error
        self.under_way = None


class Transfer:
    """Moves under way. Nothing of them is on the caller's hands any more.

    Args:
        parts: the pieces that were started.
        error: what kept others from being started.
    """

    # Whether what was moved counts for nothing.
    is_void = False

    def __init__(self, parts: Sequence[Part], error: Exception | None = None):
        self._parts = parts
        self._error = error

    def done(self) -> bool:
        """True once all moves ended, well or not."""
        return all(part.done() for part in self._parts)

    def wait(self) -> None:
        """Waits for all moves.

        Raises:
            Exception: the first failure, after all moves ended.
        """
        error = self.settle()
        if error is not None:
            raise error

    def settle(self) -> Exception | None:
        """Waits for all moves, and returns the first failure."""
        for part in self._parts:
            part.wait()
        return next((part.error for part in self._parts if part.error is not None), self._error)

    def moved(self, plan: StorePlan | LoadPlan) -> dict[int, np.ndarray]:
        """Returns, by `group_idx`, a mask of the rows of a plan that were moved; for a transfer that ended."""
        masks = {moves.group_idx: np.zeros(moves.num_chunks, bool) for moves in plan.moves}
        for part in self._parts:
            masks[part.group_idx][part.start : part.stop] = True
        for part in self._parts:  # rows of several leaves are in several parts
            if part.error is not None:
                masks[part.group_idx][part.start : part.stop] = False
        return masks


class Mover:
    """Owns the host pool's bytes and moves chunks between it and the device caches.

    All JAX work is issued on the caller's thread before `store` and `load` return.

    Args:
        chunking: the layout and its chunks.
        units: how chunks are cut into units of the pool.
        caches: the device caches, by leaf name; only their shapes and places are kept.
        num_units: units of the host pool.
        staging_bytes: what is staged at most at a time, on each device as on the host; a larger step goes in
            several. By default 64 MiB, or one chunk if that is larger.
        transfer: how bytes cross the memory spaces, see `kvjax.memory.transports`.
        show_progress: progress bars on standard error; `None`: where that is a terminal.
        view: what this process holds of `caches`, if several processes hold them together (see
            `kvjax.memory.local`); `chunking` and `units` are then of that.

    Raises:
        ValueError: caches that do not fit the layout, a staging below one chunk, an unknown `transfer`, or one
            that this machine, these caches or this budget cannot take.
        MemoryError: the machine does not have so much memory for the pool.
    """

    def __init__(
        self,
        chunking: Chunking,
        units: Units,
        caches: Mapping[str, jax.Array],
        *,
        num_units: int,
        staging_bytes: int | None = None,
        transfer: str = "auto",
        show_progress: bool | None = None,
        view: LocalView | None = None,
    ):
        check_chunking(chunking)
        instance(units, Units, "units")
        if show_progress is not None:
            flag(show_progress, "show_progress")
        self.view = view
        self.caches = register(chunking.layout, caches if view is None else view.local(caches))
        self._units = units
        self._num_units = num_units
        self._transport = make_transport(
            transfer,
            self.caches,
            chunking,
            units,
            num_units=num_units,
            staging_units=_staging_units(chunking, units, staging_bytes, num_units),
            show_progress=show_progress,
        )

    @property
    def transfer(self) -> str:
        """How bytes cross the memory spaces: `"direct"` or `"staged"`."""
        return self._transport.name

    @property
    def host_memory(self) -> HostMemory | None:
        """The host pool, if it is in the process's own memory; `None` if it is a pinned array."""
        return self._transport.memory

    @property
    def most_staged_bytes(self) -> int:
        """The most that was staged at a time, on each device."""
        return self._transport.most_staged_units * self._units.unit_bytes

    def check(self, caches: Any) -> None:
        """Checks that caches are like those the mover was made for.

        Raises:
            ValueError: they are not.
        """
        (self.caches if self.view is None else self.view.whole).check(caches)

    def store(self, caches: Mapping[str, jax.Array], plan: StorePlan) -> tuple[dict[str, jax.Array], Transfer]:
        """Starts moving chunks from the device to the host pool.

        When it returns, the blocks may be overwritten at once.

        Args:
            caches: the device caches as they are after the steps that wrote the blocks.
            plan: what to move.

        Returns:
            The caches to go on with, and the moves under way.

        Raises:
            ValueError: caches unlike the registered ones, or ids out of range. Then nothing was done.
        """
        self.check(caches)
        for moves in plan.moves:
            self._check_ids(moves, lowest=0)
        if not plan.moves:
            return dict(caches), Transfer(())
        local = caches if self.view is None else self.view.local(caches)
        return dict(caches), _started(plan, lambda moves: self._transport.store(local, moves))

    def load(self, caches: Mapping[str, jax.Array], plan: LoadPlan) -> tuple[dict[str, jax.Array], Transfer]:
        """Starts moving chunks from the host pool to the device.

        A step that takes the returned caches reads the restored blocks.

        Args:
            caches: the device caches; those of the groups that move are donated.
            plan: what to move.

        Returns:
            The caches to go on with, and the moves under way. What goes wrong on the way fails the moves,
            and the caches are those that the pieces before it returned.

        Raises:
            ValueError: caches unlike the registered ones, or ids out of range. Then nothing was done.
        """
        self.check(caches)
        for moves in plan.moves:
            self._check_ids(moves, lowest=NULL_BLOCK)
        if not plan.moves:
            return dict(caches), Transfer(())
        local = dict(caches) if self.view is None else self.view.local(caches)
        updated = dict(local)
        transfer = _started(plan, lambda moves: self._transport.load(updated, moves))
        return updated if self.view is None else self.view.joined(caches, local, updated), transfer

    def read_chunks(self, group_idx: int, unit_ids: np.ndarray) -> np.ndarray:
        """Returns a copy of chunks, in the one format of `kvjax.packing`, however the caches are split.

        Args:
            group_idx: the group.
            unit_ids: `(num_chunks, units_per_chunk)`, of chunks that are not being written.

        Returns:
            `uint8` `(num_chunks, units_per_chunk * unit_bytes)`.
        """
        return self._transport.read(group_idx, unit_ids)

    def write_chunks(self, group_idx: int, unit_ids: np.ndarray, chunks: np.ndarray) -> None:
        """Puts chunks into the pool, in the one format of `kvjax.packing`, however the caches are split.

        Args:
            group_idx: the group.
            unit_ids: `(num_chunks, units_per_chunk)`, of chunks that are being written by nobody else.
            chunks: `uint8` `(num_chunks, units_per_chunk * unit_bytes)`.
        """
        self._transport.write(group_idx, unit_ids, chunks)

    def revive(self) -> bool:
        """Makes the host pool anew if a program that failed took it along.

        Returns:
            Whether it did: then no chunk in it exists any more.
        """
        return self._transport.revive()

    def close(self) -> None:
        """Waits for the moves under way."""
        self._transport.close()

    def _check_ids(self, moves: GroupMoves, *, lowest: int) -> None:
        rows = slice(moves.num_chunks)
        for name, ids, low, limit in (
            ("block_ids", moves.block_ids[rows], lowest, self.caches.num_blocks(moves.group_idx)),
            ("unit_ids", moves.unit_ids[rows], 0, self._num_units),
        ):
            if ids.size and (ids.min() < low or ids.max() >= limit):
                raise ValueError(f"`plan` must have {name} from {low} to {limit - 1}, got {ids.min()} to {ids.max()}")


def _started(plan: StorePlan | LoadPlan, start: Callable[[GroupMoves], Iterable[tuple[int, Any]]]) -> Transfer:
    """Issues moves one after the other; of one that cannot be issued and those after it nothing is moved."""
    issued: list[Part] = []
    try:
        for moves in plan.moves:
            row = 0
            for num_rows, under_way in start(moves):
                issued.append(Part(moves.group_idx, row, row + num_rows, under_way))
                row += num_rows
            if row != moves.num_chunks:
                raise RuntimeError(f"only {row} of {moves.num_chunks} chunks of group {moves.group_idx} were moved")
    except Exception as error:  # noqa: BLE001  # the edge of a job: whatever went wrong fails it
        return Transfer(issued, error)
    return Transfer(issued)


def _staging_units(chunking: Chunking, units: Units, staging_bytes: int | None, num_units: int) -> int:
    largest = max(chunking.layout.cached, key=lambda g: units.units_per_chunk[g] or 0)
    least = units.units_per_chunk[largest] or 0
    if staging_bytes is None:
        wanted = max(least, DEFAULT_STAGING_BYTES // units.unit_bytes)
    else:
        wanted = integer(staging_bytes, "staging_bytes", at_least=1) // units.unit_bytes
        if wanted < least:
            raise ValueError(
                f"`staging_bytes` must hold at least one chunk of the largest group, "
                f"{chunking.layout.groups[largest].name!r}: {least * units.unit_bytes} bytes, got {staging_bytes}"
            )
    return max(least, min(wanted, num_units))
