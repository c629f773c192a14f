"""Which chunks of a request are stored for a checkpoint."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvjax.chunking import Chunking
from kvjax.coverage import first_tokens, needed, store_set
from kvjax.groups import Recurrent
from kvjax.packing import Units, unit_rows
from kvjax.plan import NULL_BLOCK, StorePlan, chunk_blocks, plan_store
from kvjax.pool import ChunkPool, Reservation
from kvjax.requests import Request
from kvjax.retention import eviction_ranks


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """The new chunks of one checkpoint, parallel to the keys of their reservation."""

    reservation: Reservation
    group_idxs: list[int]
    chunk_idxs: list[int]


def sound_from(chunking: Chunking, positions: Iterable[int]) -> dict[int, int]:
    """Returns, by `group_idx`, the first token that a request surely has in its blocks, at whichever of
    `positions` it is resumed.

    It has the blocks that hold a token it reads, whole, and what it computes from there on. Other blocks
    before them may be in its table and hold anything: they were neither loaded nor computed.
    """
    sound = dict.fromkeys(chunking.layout.cached, 0)
    for g in sound:
        group = chunking.layout.groups[g]
        for position in positions:
            start, stop = needed(group.kind, position)
            whole_block = start // group.tokens_per_block * group.tokens_per_block
            first = position if start == stop else start if isinstance(group.kind, Recurrent) else whole_block
            sound[g] = max(sound[g], first)
    return sound


class StoreChooser:
    """Chooses and reserves the chunks that checkpoints want.

    Args:
        chunking: the layout and its chunks.
        units: how chunks are cut into units of the pool.
        pool: where they are reserved.
        resume_multiple: see `store_set`.
    """

    def __init__(self, chunking: Chunking, units: Units, pool: ChunkPool, resume_multiple: int):
        self._chunking = chunking
        self._units = units
        self._pool = pool
        self._resume_multiple = resume_multiple
        self.num_dropped = 0

    def reserve(
        self, request: Request, checkpoints: Sequence[int], tables: Mapping[int, np.ndarray], written: int
    ) -> Chosen | None:
        """Reserves what `checkpoints` want, is complete, and is not held yet; `None` if there is no room for all.

        The request's chunks that a single checkpoint does not want may be evicted for those that it wants. Where
        there are several, none of the request's is: what is left would have to be ranked anew for each.
        """
        held = {g: self._pool.held(request.keys[g]) >= 0 for g in self._chunking.layout.cached}
        parts = [self._wanted(request, self._fitting(one), tables, written, held) for one in checkpoints]
        wanted = {name: np.unique(np.concatenate([part[name] for part in parts])) for name in parts[0]}
        keys: list[bytes] = []
        group_idxs: list[int] = []
        chunk_idxs: list[int] = []
        kept: list[bytes] = []
        chain: dict[int, np.ndarray] = {}
        for g in self._chunking.layout.cached:
            chunks = wanted[self._chunking.layout.groups[g].name]
            complete = chunks[(chunks + 1) * (self._chunking.tokens_per_chunk[g] or 0) <= written]
            held[g][complete] = True
            chain[g] = np.flatnonzero(held[g])
            keys += [request.keys[g][c] for c in chain[g].tolist()]
            kept += [request.keys[g][c] for c in complete.tolist()]
            group_idxs += [g] * len(chain[g])
            chunk_idxs += chain[g].tolist()
        by_group = eviction_ranks(self._chunking, chain)
        ranks = np.concatenate([by_group[g] for g in chain])
        evicted = self._pool.counts.evicted
        several = len(checkpoints) > 1
        reservation = self._pool.prepare_store(keys, group_idxs, ranks, kept=None if several else kept, trial=several)
        if reservation is None:
            return None
        if self._pool.counts.evicted > evicted:
            self._rank_anew(request)
        new = set(reservation.keys)
        places = [(g, c) for key, g, c in zip(keys, group_idxs, chunk_idxs, strict=True) if key in new]
        return Chosen(reservation, [g for g, _ in places], [c for _, c in places])

    def _rank_anew(self, request: Request) -> None:
        """Orders what is left of a request's chunks: its own may have been among those that made room."""
        chain = {g: np.flatnonzero(self._pool.held(request.keys[g]) >= 0) for g in self._chunking.layout.cached}
        ranks = eviction_ranks(self._chunking, chain)
        keys = [request.keys[g][c] for g in chain for c in chain[g].tolist()]
        self._pool.touch(keys, np.concatenate([ranks[g] for g in chain]))

    def plan(
        self, chosen: Sequence[Chosen], block_tables: Mapping[str, Any], num_blocks: Mapping[str, int] | None
    ) -> StorePlan:
        """Returns the moves that store what was reserved.

        Raises:
            ValueError: see `plan_store`.
        """
        rows: dict[int, dict[int, np.ndarray]] = {}
        for part in chosen:
            for g, c, units in zip(part.group_idxs, part.chunk_idxs, part.reservation.units, strict=True):
                rows.setdefault(g, {})[c] = units
        names = self._chunking.layout.names
        chunks = {names[g]: np.array(sorted(rows[g]), np.int64) for g in sorted(rows)}
        units = {names[g]: unit_rows(self._units, g, [rows[g][c] for c in sorted(rows[g])]) for g in rows}
        return plan_store(self._chunking, chunks, block_tables, units, num_blocks=num_blocks)

    def _fitting(self, checkpoint: int) -> int:
        """The checkpoint itself, or the largest lower position of which the empty pool could hold all."""
        if self._units_for(checkpoint) <= self._pool.num_units:
            return checkpoint
        low, high = 0, checkpoint
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._units_for(middle) <= self._pool.num_units else (low, middle)
        return low

    def _units_for(self, position: int) -> int:
        chosen = store_set(self._chunking, position, resume_multiple=self._resume_multiple)
        return sum(
            len(chosen[self._chunking.layout.groups[g].name]) * (self._units.units_per_chunk[g] or 0)
            for g in self._chunking.layout.cached
        )

    def _wanted(
        self,
        request: Request,
        checkpoint: int,
        tables: Mapping[int, np.ndarray],
        written: int,
        held: Mapping[int, np.ndarray],
    ) -> dict[str, np.ndarray]:
        """The store set of `checkpoint`; the best that can still be had where chunks of it are lost.

        A chunk is lost that is complete, not held and not whole: it begins before what the request surely
        has, it has a null block, or it had one when it was wanted before, and what is in its place now may be
        anything. Those that were wanted are counted, once each.
        """
        names = self._chunking.layout.names
        wanted = store_set(self._chunking, checkpoint, resume_multiple=self._resume_multiple)
        lost = {}
        spoilt = False
        for g in self._chunking.layout.cached:
            chunks = np.arange(written // (self._chunking.tokens_per_chunk[g] or 1))
            null = (chunk_blocks(self._chunking, g, chunks, tables[g]) == NULL_BLOCK).any(axis=1)
            known = request.dropped.setdefault(g, set())
            spoilt_before = np.isin(chunks, list(known))
            unsound = first_tokens(self._chunking, g, chunks) < request.sound_from[g]
            gone = (null | spoilt_before | unsound) & ~held[g][: len(chunks)]
            lost[names[g]] = chunks[gone]
            dropped = set(np.intersect1d(wanted[names[g]], lost[names[g]]).tolist())
            self.num_dropped += len(dropped - known)
            known |= dropped
            spoilt = spoilt or bool(dropped)
        if not spoilt:
            return wanted
        return store_set(self._chunking, checkpoint, resume_multiple=self._resume_multiple, missing=lost)
