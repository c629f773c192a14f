"""Which chunks of a request are stored for a checkpoint."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from kvjax.chain import Chain
from kvjax.chunking import Chunking
from kvjax.coverage import first_tokens, needed, store_set, stored_positions
from kvjax.groups import Recurrent
from kvjax.packing import Units
from kvjax.plan import NULL_BLOCK, StorePlan, chunk_blocks, plan_store
from kvjax.pool import ChunkPool, Reservation
from kvjax.requests import Request
from kvjax.retention import UNRANKED, of_use, ranks_above

# An access is named whole again, as more recent, when it has grown by this share and so many chunks.
_GROWN_BY = 0.25
_GROWN_AT_LEAST = 64


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """The new chunks of some checkpoints, parallel to the keys of their reservation.

    Args:
        reservation: of the chunks.
        group_idxs: their groups.
        chunk_idxs: their places in the sequence.
        settled: false if others are still writing chunks that the checkpoints want.
    """

    reservation: Reservation
    group_idxs: np.ndarray
    chunk_idxs: np.ndarray
    settled: bool


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
        admits: only chunks that were asked for often enough are stored, see `Request.num_admitted`.
    """

    def __init__(self, chunking: Chunking, units: Units, pool: ChunkPool, resume_multiple: int, *, admits: bool):
        self._chunking = chunking
        self._units = units
        self._pool = pool
        self._store_set = lru_cache(maxsize=64)(partial(store_set, chunking, resume_multiple=resume_multiple))
        self._resume_multiple = resume_multiple
        self._admits = admits
        self.dropped = np.zeros(len(chunking.layout.groups), np.int64)  # chunks that lost a block, by group
        self.num_declined = 0  # chunks that were not to be stored
        self.num_too_large = 0  # stores of which the pool is smaller than all
        self.too_large: tuple[int, int] | None = None  # of the first one, the tokens, and how many of them fit

    def reserve(
        self,
        request: Request,
        checkpoints: Sequence[int],
        tables: Mapping[int, np.ndarray],
        written: int,
        *,
        renew: bool = False,
    ) -> Chosen | None:
        """Reserves what `checkpoints` want, is complete, and is not held yet; `None` if there is no room for all.

        The request's chunks that a single checkpoint does not want may be evicted for those that it wants. Where
        there are several, none of the request's is: what is left would have to be ranked anew for each.

        Args:
            request: whose chunks they are.
            checkpoints: ascending positions.
            tables: block tables, by `group_idx`.
            written: tokens whose cache is written.
            renew: name all chunks of the request as a new access, if there is anything to store.
        """
        parts = [self._wanted(request, self._fitting(one), tables, written) for one in checkpoints]
        held = {g: chain.held() for g, chain in request.chains.items()}
        new: dict[int, np.ndarray] = {}
        kept = []
        settled = True
        for g, chain in request.chains.items():
            wanted = np.zeros(written // (self._chunking.tokens_per_chunk[g] or 1), bool)
            for part in parts:
                chunks = part[self._chunking.layout.groups[g].name]
                wanted[chunks[: np.searchsorted(chunks, len(wanted))]] = True
            complete = np.flatnonzero(wanted)
            new[g] = complete[~held[g][complete]]
            there = complete[held[g][complete]]
            kept.append(chain.slots(there))
            settled = settled and not chain.awaits(there)
        several = len(checkpoints) > 1
        if several:
            kept = [chain.slots(np.flatnonzero(held[g])) for g, chain in request.chains.items()]
        chosen = self._reserve_new(request, new, held, np.concatenate(kept), renew=renew, trial=several)
        return chosen if chosen is None or settled else replace(chosen, settled=False)

    def _reserve_new(
        self,
        request: Request,
        new: Mapping[int, np.ndarray],
        held: dict[int, np.ndarray],
        kept: np.ndarray,
        *,
        renew: bool,
        trial: bool,
    ) -> Chosen | None:
        group_idxs = np.repeat(list(new), [len(chunks) for chunks in new.values()])
        chunk_idxs = np.concatenate(list(new.values()))
        keys = [key for g, chunks in new.items() for key in request.chains[g].keys(chunks)]
        if not keys:
            empty = self._pool.prepare_store([], [], kept=kept)
            assert empty is not None, "nothing always finds room"
            return Chosen(empty, group_idxs, chunk_idxs, True)
        for g, chunks in new.items():
            held[g][chunks] = True
        named, position, number = self._access(request, new, held, renew)
        of_new = {g: np.isin(chunks, new[g], assume_unique=True) for g, (chunks, _) in named.items()}
        ranks_of_new = np.concatenate([named[g][1][of_new[g]] for g in new])
        evicted = self._pool.counts.evicted
        reservation = self._pool.prepare_store(
            keys,
            group_idxs,
            ranks_of_new,
            access=number,
            kept=kept,
            chunk_idxs=chunk_idxs,
            namespace=request.space,
            trial=trial,
        )
        if reservation is None:
            return None
        slots = np.empty(len(keys), np.int64)
        slots[reservation.places] = reservation.slots
        others = np.setdiff1d(np.arange(len(keys)), reservation.places, assume_unique=True)
        if len(others):
            slots[others] = self._pool.held([keys[place] for place in others.tolist()])
        starts = np.cumsum([0, *(len(chunks) for chunks in new.values())])
        for (g, chunks), start in zip(new.items(), starts.tolist(), strict=False):
            request.chains[g].note(chunks, slots[start : start + len(chunks)])
            request.chains[g].first_asked(chunks)  # what a request stores it did not ask for
            reserved = reservation.places[(reservation.places >= start) & (reservation.places < start + len(chunks))]
            request.chains[g].stores(chunks[reserved - start])
        request.ranked_to, request.access = position, number
        self._touch_old(request, {g: (chunks[~of_new[g]], ranks[~of_new[g]]) for g, (chunks, ranks) in named.items()})
        if self._pool.counts.evicted > evicted and any((held[g] & ~c.held()).any() for g, c in request.chains.items()):
            self._rank_anew(request)
        settled = bool(self._pool.ready(slots[others]).all())
        return Chosen(reservation, group_idxs[reservation.places], chunk_idxs[reservation.places], settled)

    def _access(
        self, request: Request, new: Mapping[int, np.ndarray], held: Mapping[int, np.ndarray], renew: bool
    ) -> tuple[dict[int, tuple[np.ndarray, np.ndarray]], int, int]:
        """What to name in the access that stores `new`: chunks and ranks by group, and the largest position that
        they restore; and the number of the access.

        Usually the request goes on: the access is the one it has, and the new chunks, with those that waited for
        them, lie above all that was ranked. Now and then all of its chunks are named as a new access, so that
        the recency of one that runs for long does not stay that of its beginning.
        """
        chunks = {g: np.flatnonzero(mask) for g, mask in held.items()}
        total = sum(map(len, chunks.values()))
        number = request.access
        if (
            renew
            or total > (1 + _GROWN_BY) * request.num_touched + _GROWN_AT_LEAST
            or not self._goes_on(request, new, chunks)
        ):
            number, request.num_touched = self._pool.new_access(), total
            named, position = ranks_above(self._chunking, chunks, 0)
            return named, position, number
        named, position = ranks_above(self._chunking, chunks, request.ranked_to)
        if any(len(some) and not np.isin(some, named[g][0]).all() for g, some in new.items()):
            named, position = ranks_above(self._chunking, chunks, 0)  # a hole below what was ranked is filled
        return named, position, number

    def _goes_on(self, request: Request, new: Mapping[int, np.ndarray], chunks: Mapping[int, np.ndarray]) -> bool:
        """Whether the pool still has chunks for which the request's access is the last one."""
        for g, chain in request.chains.items():
            before = chunks[g][~np.isin(chunks[g], new[g], assume_unique=True)] if len(new[g]) else chunks[g]
            if (self._pool.accesses(chain.slots(before)) == request.access).any():
                return True
        return False

    def _rank_anew(self, request: Request) -> None:
        """Orders what is left of a request's chunks: its own were among those that made room."""
        chunks = {g: np.flatnonzero(chain.held()) for g, chain in request.chains.items()}
        named, request.ranked_to = ranks_above(self._chunking, chunks, 0)
        self._touch_old(request, named)

    def _touch_old(self, request: Request, named: Mapping[int, tuple[np.ndarray, np.ndarray]]) -> None:
        """Names chunks that the request has stored or found before, but for those that went. What serves no position
        any more leaves first if it is in this access, and stays as old as it is if it is in another."""
        left = {}
        for g, (chunks, ranks) in named.items():
            chain = request.chains[g]
            there = chain.held_among(chunks)
            chunks, ranks = chunks[there], ranks[there]
            waiting = (ranks == UNRANKED) | ~of_use(self._chunking, g, chunks, ranks)
            ranks = np.where(waiting, UNRANKED, ranks)
            ours = self._pool.accesses(chain.slots(chunks)) == request.access
            left[g] = chunks[~waiting | ours], ranks[~waiting | ours]
        self.touch(request, left)

    def touch(self, request: Request, named: Mapping[int, tuple[np.ndarray, np.ndarray]]) -> None:
        """Tells the pool of the request's access to chunks that are held, given with their ranks by group, as
        `ranks_above` returns them. Those that the request names for the first time count as asked for."""
        slots, ranks, first = [], [], []
        for g, (chunks, of_chunks) in named.items():
            chain = request.chains[g]
            slots.append(chain.slots(chunks))
            ranks.append(of_chunks)
            first.append(chain.first_asked(chunks))
        counted = np.concatenate(first)
        self._pool.touch(np.concatenate(slots), np.concatenate(ranks), access=request.access, counted=counted)

    def plan(
        self, chosen: Sequence[Chosen], block_tables: Mapping[str, Any], num_blocks: Mapping[str, int] | None
    ) -> tuple[StorePlan, dict[int, np.ndarray]]:
        """Returns the moves that store what was reserved, and by `group_idx` the epochs of their rows.

        Raises:
            ValueError: see `plan_store`.
        """
        group_idxs = np.concatenate([np.empty(0, np.int64), *(part.group_idxs for part in chosen)])
        chunk_idxs = np.concatenate([np.empty(0, np.int64), *(part.chunk_idxs for part in chosen)])
        slots = np.concatenate([np.empty(0, np.int64), *(part.reservation.slots for part in chosen)])
        chunks, units, epochs = {}, {}, {}
        for g in np.unique(group_idxs).tolist():
            name = self._chunking.layout.groups[g].name
            some = np.flatnonzero(group_idxs == g)
            some = some[np.argsort(chunk_idxs[some])]
            chunks[name], units[name] = chunk_idxs[some], self._pool.units(slots[some])
            epochs[g] = self._pool.epochs(slots[some])
        return plan_store(self._chunking, chunks, block_tables, units, num_blocks=num_blocks), epochs

    def note_too_large(self, checkpoint: int) -> None:
        """Counts a store of whose last checkpoint the pool, were it empty, could not hold all; of the first one it is
        noted how much it can."""
        if self._units_for(checkpoint) <= self._pool.num_units:
            return
        self.num_too_large += 1
        if self.too_large is None:
            fitting = self._fitting(checkpoint)
            held = stored_positions(self._chunking, fitting, resume_multiple=self._resume_multiple)[0]
            self.too_large = checkpoint, held

    def _fitting(self, checkpoint: int) -> int:
        """The checkpoint itself, or a lower position of which the empty pool could hold all."""
        if self._units_for(checkpoint) <= self._pool.num_units:
            return checkpoint
        low, high = 0, checkpoint
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._units_for(middle) <= self._pool.num_units else (low, middle)
        return low

    def _units_for(self, position: int) -> int:
        chosen = self._store_set(position)
        return sum(
            len(chosen[self._chunking.layout.groups[g].name]) * (self._units.units_per_chunk[g] or 0)
            for g in self._chunking.layout.cached
        )

    def _wanted(
        self, request: Request, checkpoint: int, tables: Mapping[int, np.ndarray], written: int
    ) -> dict[str, np.ndarray]:
        """The store set of `checkpoint`; the best that can still be had where chunks of it cannot.

        A chunk is lost that is complete, not held and not whole: it begins before what the request surely
        has, it has a null block, or it had one when it was wanted before, and what is in its place now may be
        anything. Those that were wanted are counted, once each. Others are not to be stored.
        """
        wanted = self._store_set(checkpoint)
        amiss = False
        for g, chain in request.chains.items():
            chunks = wanted[self._chunking.layout.groups[g].name]
            chunks = chunks[: np.searchsorted(chunks, written // (self._chunking.tokens_per_chunk[g] or 1))]
            lost = self._not_held(chain, chunks[self._spoilt(request, g, chunks, tables[g])])
            known = request.dropped.setdefault(g, set())
            self.dropped[g] += len(set(lost.tolist()) - known)
            known.update(lost.tolist())
            declined = self._not_held(chain, chunks[chunks >= self._most_chunks(request, g)])
            self.num_declined += int(np.count_nonzero(declined >= request.declined.get(g, 0)))
            if len(declined):
                request.declined[g] = max(request.declined.get(g, 0), int(declined[-1]) + 1)
            amiss = amiss or len(lost) > 0 or len(declined) > 0
        if not amiss:
            return wanted
        missing = {}
        for g, chain in request.chains.items():
            chunks = np.arange(min(len(chain), written // (self._chunking.tokens_per_chunk[g] or 1)))
            not_to_be_had = self._spoilt(request, g, chunks, tables[g]) | (chunks >= self._most_chunks(request, g))
            missing[self._chunking.layout.groups[g].name] = self._not_held(chain, chunks[not_to_be_had])
        return store_set(self._chunking, checkpoint, resume_multiple=self._resume_multiple, missing=missing)

    def _spoilt(self, request: Request, g: int, chunks: np.ndarray, table: np.ndarray) -> np.ndarray:
        """A mask of the chunks that are not, or perhaps not, whole in the request's blocks."""
        null = (chunk_blocks(self._chunking, g, chunks, table) == NULL_BLOCK).any(axis=1)
        before = request.dropped.get(g)
        if before:
            null |= np.isin(chunks, list(before))
        return null | (first_tokens(self._chunking, g, chunks) < request.sound_from[g])

    def _most_chunks(self, request: Request, g: int) -> int:
        """How many chunks from the first one on may be stored."""
        most = len(request.chains[g])
        if self._admits:
            most = min(most, request.num_admitted.get(g, 0))
        if request.limits.store_tokens is not None:
            most = min(most, request.limits.store_tokens // (self._chunking.tokens_per_chunk[g] or 1))
        return most

    def _not_held(self, chain: Chain, chunks: np.ndarray) -> np.ndarray:
        if not len(chunks):
            return chunks
        chain.look(chunks)
        return chunks[~chain.held_among(chunks)]
