"""Stores under way: which checkpoints are due, what is reserved for them, and what becomes of it."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from kvjax._checks import integer, shown
from kvjax.chunking import Chunking
from kvjax.coverage import stored_positions
from kvjax.handles import LedgerCounts, Store
from kvjax.loading import Loads
from kvjax.lookups import Lookups
from kvjax.plan import NULL_BLOCK, GroupMoves, block_table, check_range
from kvjax.pool import ChunkPool, PolicyError, Reservation
from kvjax.requests import Request
from kvjax.storing import Chosen, StoreChooser


class Stores:
    """The stores of a ledger that were prepared and not completed.

    Args:
        chunking: the layout and its chunks.
        pool: where chunks are reserved.
        chooser: chooses and reserves them.
        lookups: looks for chunks of a request that are not known yet.
        loads: the loads under way, on which stores may depend.
        counts: where to count.
        resume_multiple: see `Ledger`.
    """

    def __init__(
        self,
        chunking: Chunking,
        pool: ChunkPool,
        chooser: StoreChooser,
        lookups: Lookups,
        loads: Loads,
        counts: LedgerCounts,
        resume_multiple: int,
    ):
        self.chunking = chunking
        self.pool = pool
        self.counts = counts
        self.resume_multiple = resume_multiple
        self._chooser = chooser
        self._lookups = lookups
        self._loads = loads
        self._stores: dict[Store, None] = {}  # in the order in which they were prepared

    def check_open(self, store: Any) -> None:
        """Raises a `ValueError` if a store was not prepared here, or was completed."""
        if not isinstance(store, Store) or store not in self._stores:
            raise ValueError("a store must be one that was prepared here and not completed yet")

    def open_reservations(self) -> list[Reservation]:
        """Returns what the open stores reserved."""
        return [reservation for store in self._stores for reservation in store.reservations]

    def prepare(
        self,
        request_id: Hashable,
        request: Request,
        block_tables: Mapping[str, Any],
        num_tokens: int,
        *,
        checkpoint: bool,
        num_blocks: Mapping[str, int] | None,
    ) -> Store:
        """Plans a store, see `Ledger.prepare_store`."""
        written = integer(num_tokens, "num_tokens", at_least=0)
        if written > request.num_tokens:
            raise ValueError(
                f"`num_tokens` must be at most the {request.num_tokens} tokens that request {request_id!r} has, "
                f"got {written}"
            )
        tables = self._checked_tables(block_tables, written, num_blocks)
        chosen: list[Chosen] = []
        wants: tuple[int, ...] = ()
        if checkpoint and written:
            request.checkpoints.add(written)
        try:
            if checkpoint or self._completes_a_chunk(request.stored_at, written):
                wants = tuple(sorted(request.checkpoints))
                if self._may_store(request, wants, written):
                    tables = {g: _last_places(table) for g, table in tables.items()}
                    self._choose(request, wants, tables, written, chosen, renew=checkpoint)
            names = self.chunking.layout.names
            plan, epochs = self._chooser.plan(chosen, {names[g]: table for g, table in tables.items()}, num_blocks)
        except BaseException:
            self._roll_back(request, [part.reservation for part in chosen], wants)
            raise
        self.counts.chunks_declined = self._chooser.num_declined
        self.counts.stores_too_large = self._chooser.num_too_large
        reservations = tuple(part.reservation for part in chosen)
        store = Store(request_id, plan, reservations, epochs, request, wants, list(request.loads))
        self._stores[store] = None
        return store

    def complete(self, store: Store, *, ok: bool | Mapping[int, np.ndarray]) -> bool:
        """Ends a store, see `Ledger.complete_store`."""
        self.check_open(store)
        if ok is not False and not self._loads.all_ended(store.after):
            raise ValueError("a store must be completed after the loads of its request that were under way before it")
        masks = {moves.group_idx: rows_ok(ok, moves) for moves in store.plan.moves}
        if any(self._loads.failed(load) for load in store.after):
            masks = {g: np.zeros_like(mask) for g, mask in masks.items()}
        del self._stores[store]
        written = np.concatenate([np.empty(0, np.int64), *(store.epochs[g][mask] for g, mask in masks.items())])
        before = self.pool.counts.stored_by_group.copy()
        for reservation in store.reservations:
            self.pool.complete_store(reservation, ok=np.isin(reservation.epochs, written))
        published = self.pool.counts.stored_by_group - before
        self.counts.chunks_stored += int(published.sum())
        self.counts.bytes_stored += sum(
            number * (size or 0) for number, size in zip(published.tolist(), self.chunking.chunk_bytes, strict=True)
        )
        good = all(mask.all() for mask in masks.values())
        if not good:
            self.counts.stores_failed += 1
            self._ask_again(store.request, store.checkpoints)
        return good

    def _choose(
        self,
        request: Request,
        wants: tuple[int, ...],
        tables: Mapping[int, np.ndarray],
        written: int,
        chosen: list[Chosen],
        *,
        renew: bool,
    ) -> None:
        """Reserves what checkpoints want into `chosen`, and notes which of them are served."""
        self._lookups.look_further(request)
        due = self._due(wants, written)
        if due:
            self._chooser.note_too_large(due[-1])
        served = self._reserve(request, due, tables, written, chosen, renew=renew)
        settled = all(part.settled for part in chosen)
        request.checkpoints -= {position for position in served if position <= written and settled}
        if len(served) == len(due):
            request.stored_at = written

    def _reserve(
        self,
        request: Request,
        due: list[int],
        tables: Mapping[int, np.ndarray],
        written: int,
        chosen: list[Chosen],
        *,
        renew: bool,
    ) -> list[int]:
        """Reserves for all checkpoints at once; where there is no room for all, for the first ones that have some.
        Returns those for which it did."""
        together = self._chooser.reserve(request, due, tables, written, renew=renew) if due else None
        if together is not None:
            chosen.append(together)
            return due
        for position in due if len(due) > 1 else ():
            try:
                reserved = self._chooser.reserve(request, [position], tables, written, renew=renew)
            except PolicyError:
                if not chosen:
                    raise
                break  # what was reserved is stored: others made room for it
            if reserved is None:
                break  # no room: what a later checkpoint wants has none either
            chosen.append(reserved)
        return due[: len(chosen)]

    def _due(self, checkpoints: tuple[int, ...], written: int) -> list[int]:
        """The checkpoints of which something may be lost unless it is stored now, and the last one.

        What a checkpoint serves are positions S <= R. Until the engine is past S, the windows before S and R are
        in its blocks, and their states are to come. Only full groups are stored ahead, and the last checkpoint
        wants all of them.
        """
        due = [position for position in checkpoints if position <= written]
        for position in checkpoints[len(due) :]:  # S grows with the checkpoint
            if stored_positions(self.chunking, position, resume_multiple=self.resume_multiple)[0] > written:
                break
            due.append(position)
        return due if due and due[-1] == checkpoints[-1] else [*due, checkpoints[-1]] if checkpoints else []

    def _may_store(self, request: Request, checkpoints: Sequence[int], written: int) -> bool:
        """Whether anything of the request may be stored at all."""
        if request.generation != self.pool.namespaces.generation[request.space]:
            self.counts.stores_outdated += any(position <= written for position in checkpoints)
            return False
        return request.limits.store_tokens != 0

    def _roll_back(self, request: Request, reservations: Sequence[Reservation], checkpoints: Sequence[int]) -> None:
        """Nothing of it was stored, and what the checkpoints want is asked for again by the next store."""
        for reservation in reservations:
            self.pool.complete_store(reservation, ok=False)
        self._ask_again(request, checkpoints)

    def _ask_again(self, request: Request, checkpoints: Sequence[int]) -> None:
        request.checkpoints.update(checkpoints)
        request.stored_at = 0

    def _completes_a_chunk(self, before: int, written: int) -> bool:
        """Whether any group has more complete chunks at `written` than at `before`."""
        return any(written // tokens > before // tokens for tokens in self.chunking.tokens_per_chunk if tokens)

    def _checked_tables(
        self, block_tables: Mapping[str, Any], written: int, num_blocks: Mapping[str, int] | None
    ) -> dict[int, np.ndarray]:
        tables = {}
        for g in self.chunking.layout.cached:
            group = self.chunking.layout.groups[g]
            table = block_table(self.chunking, g, block_tables)
            blocks = -(-written // group.tokens_per_block)
            if len(table) < blocks:
                raise ValueError(
                    f"`block_tables` of group {group.name!r} must cover {written} tokens with {blocks} blocks, "
                    f"got {len(table)}"
                )
            check_range(group.name, table, (num_blocks or {}).get(group.name))
            tables[g] = table
        return tables


def _last_places(table: np.ndarray) -> np.ndarray:
    """Returns the table with a block named twice left in its last place only: it was re-used, and holds that."""
    _, from_end = np.unique(table[::-1], return_index=True)
    only_last = np.full_like(table, NULL_BLOCK)
    last = len(table) - 1 - from_end
    only_last[last] = table[last]
    return only_last


def rows_ok(ok: bool | Mapping[int, np.ndarray], moves: GroupMoves) -> np.ndarray:
    """Returns a mask of the rows of a plan's moves that went well."""
    if isinstance(ok, (bool, np.bool_)):
        return np.full(moves.num_chunks, bool(ok))
    mask = np.asarray(ok[moves.group_idx]) if isinstance(ok, Mapping) and moves.group_idx in ok else None
    if mask is None or mask.dtype != bool or mask.shape != (moves.num_chunks,):
        raise ValueError(
            f"`ok` must be a bool, or hold a boolean mask of {moves.num_chunks} rows for group {moves.group_idx}, "
            f"got {shown(ok)}"
        )
    return mask
