"""Runs plans on caches: what a worker process does. It knows no keys and decides nothing."""

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import numpy as np

from kvjax._checks import integer
from kvjax.chunking import Chunking
from kvjax.memory.host import WORD, HostMemory
from kvjax.memory.registration import register
from kvjax.memory.staged import StagedTransport
from kvjax.packing import Units
from kvjax.plan import NULL_BLOCK, GroupMoves, LoadPlan, StorePlan

DEFAULT_STAGING_BYTES = 64 * 2**20

# A large move goes in pieces, so that packing one, transferring the one before and copying the one before that
# overlap, and so that allocators re-use memory: fresh pages cost more than the copy itself.
_PIECES_PER_STAGING = 8


class Transfer:
    """Moves under way. Nothing of them is on the caller's hands any more."""

    def __init__(self, parts: list["Future[None] | jax.Array"]):
        self._parts = parts

    def done(self) -> bool:
        """True once all moves ended, well or not."""
        return all(_ended(part) for part in self._parts)

    def wait(self) -> None:
        """Waits for all moves.

        Raises:
            Exception: the first failure, after all moves ended.
        """
        first: Exception | None = None
        for part in self._parts:
            try:
                part.result() if isinstance(part, Future) else part.block_until_ready()
            except Exception as error:  # noqa: BLE001  # the edge of a job: whatever went wrong fails it
                first = first or error
        if first is not None:
            raise first


class Mover:
    """Owns the host pool's bytes and moves chunks between it and the device caches.

    All JAX work is issued on the caller's thread before `store` and `load` return; one thread of its own
    only waits for arrays and copies bytes.

    Args:
        chunking: the layout and its chunks.
        units: how chunks are cut into units of the pool.
        caches: the device caches, by leaf name; only their shapes and places are kept.
        num_units: units of the host pool.
        staging_bytes: what is staged at most at a time, on the device as on the host; a larger step goes
            in several. By default 64 MiB, or one chunk if that is larger.
        show_progress: progress bars on standard error; `None`: where that is a terminal.

    Raises:
        ValueError: caches that do not fit the layout, or a staging below one chunk.
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
        show_progress: bool | None = None,
    ):
        self.caches = register(chunking.layout, caches)
        self._units = units
        self._num_units = num_units
        largest = max(units.units_per_chunk[g] or 0 for g in chunking.layout.cached)
        self._most_units = _staging_units(chunking, units, staging_bytes, num_units)
        piece_units = max(largest, self._most_units // _PIECES_PER_STAGING)
        self._transport = StagedTransport(self.caches, chunking, units, piece_units, show_progress=show_progress)
        self._memory = HostMemory(num_units, units.unit_bytes, show_progress=show_progress)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="kvjax-mover")
        self._staged: deque[tuple[int, Future[None] | jax.Array]] = deque()
        self.most_staged_bytes = 0

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
        self.caches.check(caches)
        for moves in plan.moves:
            self._check_ids(moves, lowest=0)
        parts: list[Future[None] | jax.Array] = []
        try:
            for group_idx, blocks, units in self._pieces(plan):
                staged = self._make_room(group_idx, len(blocks))
                array = self._transport.to_host(caches, group_idx, blocks)
                part = self._worker.submit(self._keep, array, units.reshape(-1))
                self._staged.append((staged, part))
                parts.append(part)
        except Exception as error:  # noqa: BLE001  # the edge of a job: whatever went wrong fails it
            parts.append(_failed(error))
        return dict(caches), Transfer(parts)

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
        self.caches.check(caches)
        for moves in plan.moves:
            self._check_ids(moves, lowest=NULL_BLOCK)
        updated = dict(caches)
        parts: list[Future[None] | jax.Array] = []
        try:
            for group_idx, blocks, units in self._pieces(plan):
                staged = self._make_room(group_idx, len(blocks))
                rows = np.empty((staged, self._units.unit_bytes // WORD.itemsize), WORD)
                self._memory.read(units.reshape(-1), rows)
                read, written = self._transport.to_device(updated, group_idx, blocks, rows)
                self._staged.append((staged, read))
                parts.append(written)
        except Exception as error:  # noqa: BLE001  # the edge of a job; the caches of earlier pieces are the caller's
            parts.append(_failed(error))
        return updated, Transfer(parts)

    def close(self) -> None:
        """Waits for the moves under way and ends the thread."""
        self._worker.shutdown(wait=True)

    def _keep(self, array: jax.Array, unit_ids: np.ndarray) -> None:
        self._memory.write(unit_ids, np.asarray(array)[: len(unit_ids)])

    def _pieces(self, plan: StorePlan | LoadPlan) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        for moves in plan.moves:
            step = self._transport.max_chunks(moves.group_idx)
            for low in range(0, moves.num_chunks, step):
                high = min(low + step, moves.num_chunks)
                yield moves.group_idx, moves.block_ids[low:high], moves.unit_ids[low:high]

    def _make_room(self, group_idx: int, num_chunks: int) -> int:
        """Waits until a piece can be staged within the bound; returns the units it takes."""
        wanted = self._transport.staged_units(group_idx, num_chunks)
        while self._staged and self._staged_units() + wanted > self._most_units:
            _, part = self._staged.popleft()
            part.exception() if isinstance(part, Future) else part.block_until_ready()
        held = self._staged_units() + wanted
        self.most_staged_bytes = max(self.most_staged_bytes, held * self._units.unit_bytes)
        return wanted

    def _staged_units(self) -> int:
        while self._staged and _ended(self._staged[0][1]):
            self._staged.popleft()
        return sum(staged for staged, _ in self._staged)

    def _check_ids(self, moves: GroupMoves, *, lowest: int) -> None:
        rows = slice(moves.num_chunks)
        for name, ids, low, limit in (
            ("block_ids", moves.block_ids[rows], lowest, self.caches.num_blocks(moves.group_idx)),
            ("unit_ids", moves.unit_ids[rows], 0, self._num_units),
        ):
            if ids.size and (ids.min() < low or ids.max() >= limit):
                raise ValueError(f"`plan` must have {name} from {low} to {limit - 1}, got {ids.min()} to {ids.max()}")


def _failed(error: Exception) -> "Future[None]":
    future: Future[None] = Future()
    future.set_exception(error)
    return future


def _ended(part: "Future[None] | jax.Array") -> bool:
    return part.done() if isinstance(part, Future) else part.is_ready()  # pyright: ignore[reportAttributeAccessIssue]


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
