"""Loads under way: what they read, which of them share blocks, and what is left of one that failed."""

from collections.abc import Hashable, Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from kvjax._checks import shown
from kvjax.chunking import Chunking
from kvjax.coverage import Hit, asked, blocks_to_load, hit_of
from kvjax.groups import Recurrent
from kvjax.handles import Load, LoadRows
from kvjax.packing import Units
from kvjax.plan import GroupMoves, LoadPlan, block_table, chunk_blocks, plan_load
from kvjax.pool import ChunkPool, Pins
from kvjax.requests import Request
from kvjax.storing import sound_from


class Loads:
    """The loads of a ledger that were prepared and not completed.

    Args:
        chunking: the layout and its chunks.
        units: how chunks are cut into units of the pool.
        pool: which holds the chunks.
        requests: the requests that were looked up and not finished, by id.
    """

    def __init__(self, chunking: Chunking, units: Units, pool: ChunkPool, requests: Mapping[Hashable, Request]):
        self._chunking = chunking
        self._units = units
        self._pool = pool
        self._requests = requests
        self._open: dict[Load, None] = {}  # in the order in which they were prepared
        self._given_up: set[Load] = set()  # of the open ones
        self._lost: WeakKeyDictionary[Load, dict[int, np.ndarray]] = WeakKeyDictionary()  # epochs not restored

    def check_open(self, load: Any) -> None:
        """Raises a `ValueError` if a load was not prepared here, or was completed."""
        if not isinstance(load, Load) or load not in self._open:
            raise ValueError("a load must be one that was prepared here and not completed yet")

    def all_ended(self, loads: Iterable[Load]) -> bool:
        """Whether none of some loads is open."""
        return not any(load in self._open for load in loads)

    def failed(self, load: Load) -> bool:
        """Whether a load ended without all that it was to restore."""
        return load in self._lost

    def open_pins(self) -> list[Pins]:
        """Returns what the open loads keep in the pool."""
        return [load.pins for load in self._open]

    def arriving(self, request: Request, hit: Hit) -> dict[str, np.ndarray]:
        """Returns the blocks into which open loads of other requests restore chunks of a hit, see `Lookup`."""
        found = {}
        for g, chain in request.chains.items():
            name = self._chunking.layout.groups[g].name
            chunks = hit.load[name]
            if not len(chunks):
                continue
            epochs = self._pool.epochs(chain.slots(chunks))
            blocks: np.ndarray | None = None
            for moves, theirs in self._others(request, g):
                if blocks is None:
                    blocks = np.full((len(chunks), moves.block_ids.shape[1]), -1, np.int64)
                mine, rows = _matches(epochs, theirs)
                new = blocks[mine] < 0
                blocks[mine] = np.where(new, moves.block_ids[rows], blocks[mine])
            if blocks is not None:
                found[name] = blocks
        return found

    def prepare(
        self,
        request_id: Hashable,
        request: Request,
        block_tables: Mapping[str, Any],
        *,
        num_blocks: Mapping[str, int] | None,
        share: bool,
    ) -> Load:
        """Plans the load of a request's hit, see `Ledger.prepare_load`."""
        pins, hit = request.pins, request.hit
        assert pins is not None, "the request has a hit to load"
        assert hit is not None, "the request has a hit to load"
        stale = not self._pool.still_held(pins.slots, pins.epochs).all()
        rows: dict[int, LoadRows] = {}
        units: dict[str, np.ndarray] = {}
        shared: dict[str, np.ndarray] = {}
        after: dict[Load, None] = {}
        start = 0
        for g in self._chunking.layout.cached if not stale else ():
            name = self._chunking.layout.groups[g].name
            chunks = hit.load[name]
            part = slice(start, start + len(chunks))
            start += len(chunks)
            slots, epochs = pins.slots[part], pins.epochs[part]
            units[name] = self._pool.units(slots) if len(slots) else np.empty((0, self._width(g)), np.int32)
            if share and len(chunks):
                shared[name], found = self._shared(request, g, chunks, epochs, block_tables)
                after |= dict.fromkeys(found)
            of_others = np.any(shared[name], axis=1) if name in shared else np.zeros(len(chunks), bool)
            rows[g] = LoadRows(chunks, epochs, np.asarray(of_others))
        if stale:
            plan = LoadPlan((), 0)
        else:
            plan = plan_load(
                self._chunking,
                hit,
                block_tables,
                units,
                device_tokens=request.device_tokens,
                num_blocks=num_blocks,
                shared=shared,
            )
        load = Load(request_id, plan, pins, hit.hit_tokens, request.fallback, request, rows, tuple(after), stale)
        request.loads.append(load)
        self._open[load] = None
        return load

    def complete(self, load: Load, masks: Mapping[int, np.ndarray], *, failed: bool, told: bool, void: bool) -> int:
        """Ends a load, and returns how many tokens the caches hold; see `Ledger.complete_load`.

        Args:
            load: an open load.
            masks: by `group_idx`, the rows of its plan that were moved.
            failed: whether all of it counts as failed, what others bring, too.
            told: whether the engine knows what is returned; otherwise `acknowledge` says when it does.
            void: whether nothing that was moved counts as restored.

        Raises:
            ValueError: the load is not open; or one that it shares is, and it did not fail.
        """
        self.check_open(load)
        if not failed and not self.all_ended(load.after):
            raise ValueError("a load that shares blocks of others must be completed after their loads")
        del self._open[load]
        self._given_up.discard(load)
        own = {g: self._restored(load, g, rows, masks.get(g)) for g, rows in load.rows.items()}
        good = {
            g: mask & ~rows.of_others if failed else mask & (not void)
            for (g, mask), rows in zip(own.items(), load.rows.values(), strict=True)
        }
        complete = not load.stale and all(mask.all() for mask in good.values())
        valid = load.hit_tokens if complete else self._valid_tokens(load, good)
        if not complete:
            self._lost[load] = {g: rows.epochs[~good[g]] for g, rows in load.rows.items()}
            doubtful = [pinned[~mask] for pinned, mask in zip(self._pinned(load), own.values(), strict=True)]
            self._drop(np.concatenate([np.empty(0, np.int64), *doubtful]), load.pins)
            self._forget_states(load)
        if (complete or told) and load in load.request.loads:
            load.request.loads.remove(load)
        for g, first in sound_from(self._chunking, [valid]).items():
            load.request.sound_from[g] = max(load.request.sound_from.get(g, 0), first)
        self._pool.unpin(load.pins)
        return valid

    def acknowledge(self, load: Load) -> None:
        """Notes that the engine knows that a load failed, or was given up: what it stores from now on it has computed
        anew."""
        if not isinstance(load, Load):
            raise ValueError(f"`load` must be one that was prepared here, got {shown(load)}")
        if load in load.request.loads and (load not in self._open or load in self._given_up):
            load.request.loads.remove(load)

    def give_up(self, load: Load) -> None:
        """Notes that an open load counts as failed for its request, which may give its blocks to others: no other
        request is told of them any more."""
        if not isinstance(load, Load):
            raise ValueError(f"`load` must be one that was prepared here, got {shown(load)}")
        if load in self._open:
            self._given_up.add(load)

    def cancel(self, load: Load) -> None:
        """Takes a load back before anything of it was done, see `Ledger.cancel_load`."""
        self.check_open(load)
        if any(load in other.after for other in self._open):
            raise ValueError("a load whose blocks another one shares must be completed, not taken back")
        del self._open[load]
        self._given_up.discard(load)
        self._forget_states(load)
        if load in load.request.loads:
            load.request.loads.remove(load)
        self._pool.unpin(load.pins)

    # --- parts ----------------------------------------------------------------------------------------

    def _width(self, g: int) -> int:
        return self._units.units_per_chunk[g] or 0

    def _others(self, request: Request, g: int) -> list[tuple[GroupMoves, np.ndarray]]:
        """Moves of a group in open loads of other requests that were not finished, the newest load first, each with
        the epochs of its rows."""
        found = []
        for load in self._shareable(request):
            for moves in load.plan.moves:
                if moves.group_idx == g:
                    rows = load.rows[g]
                    chunks = moves.chunk_idx[: moves.num_chunks]
                    found.append((moves, rows.epochs[np.searchsorted(rows.chunk_idx, chunks)]))
        return found

    def _shareable(self, request: Request) -> list[Load]:
        """The open loads of other requests that still hold their blocks, the newest first."""
        return [
            load
            for load in reversed(self._open)
            if load.request is not request
            and load not in self._given_up
            and self._requests.get(load.request_id) is load.request
        ]

    def _shared(
        self, request: Request, g: int, chunks: np.ndarray, epochs: np.ndarray, block_tables: Mapping[str, Any]
    ) -> tuple[np.ndarray, list[Load]]:
        """A mask `(chunks, blocks)` of the blocks of a table into which others restore the same; and their loads."""
        table = block_table(self._chunking, g, block_tables)
        held = request.device_tokens
        name = self._chunking.layout.groups[g].name
        device = held.get(name, 0) if isinstance(held, dict) else held
        position = request.hit_tokens
        wanted = blocks_to_load(self._chunking, g, position, device, chunks)
        blocks = chunk_blocks(self._chunking, g, chunks, table, needed=wanted)
        blocks = np.where(wanted, blocks, -1)
        shared = np.zeros(blocks.shape, bool)
        decided = np.zeros(blocks.shape, bool)  # by the newest load that writes the block
        loads = []
        for load in self._shareable(request):
            for moves in load.plan.moves:
                if moves.group_idx != g:
                    continue
                rows = load.rows[g]
                theirs = rows.epochs[np.searchsorted(rows.chunk_idx, moves.chunk_idx[: moves.num_chunks])]
                mine, other = _matches(epochs, theirs)
                same = np.zeros(blocks.shape, bool)
                same[mine] = (blocks[mine] == moves.block_ids[other]) & (blocks[mine] >= 0)
                same &= ~decided
                if same.any():
                    loads.append(load)
                shared |= same
                decided |= np.isin(blocks, moves.block_ids[: moves.num_chunks])
        return shared, loads

    def _restored(self, load: Load, g: int, rows: LoadRows, mask: np.ndarray | None) -> np.ndarray:
        """A mask of the rows of a group that are in the caches, whoever brought them."""
        good = np.ones(len(rows.chunk_idx), bool)
        for moves in load.plan.moves:
            if moves.group_idx == g and mask is not None:
                good[np.searchsorted(rows.chunk_idx, moves.chunk_idx[: moves.num_chunks])] = mask
        for other in load.after:
            lost = self._lost.get(other, {}).get(g)
            if lost is not None:
                good &= ~(rows.of_others & np.isin(rows.epochs, lost))
        return good

    def _valid_tokens(self, load: Load, good: Mapping[int, np.ndarray]) -> int:
        """The largest position for which the caches hold all that it needs, now that only some rows were restored."""
        request = load.request
        chunks = {}
        for g, rows in load.rows.items():
            name = self._chunking.layout.groups[g].name
            held = request.device_tokens
            device = held.get(name, 0) if isinstance(held, dict) else held
            written = blocks_to_load(self._chunking, g, load.hit_tokens, device, rows.chunk_idx).all(axis=1)
            chunks[g] = rows.chunk_idx[good[g] & written]
        if not any(map(len, chunks.values())):
            return load.device_tokens
        held = request.device_tokens
        most_held = max(held.values(), default=0) if isinstance(held, dict) else held
        total = max(load.hit_tokens, most_held + 1)
        partly = hit_of(asked(self._chunking, total, chunks, held, 1), most=load.hit_tokens - 1)
        return max(partly.hit_tokens, load.device_tokens)

    def _pinned(self, load: Load) -> list[np.ndarray]:
        """The slots of the load's rows, group by group."""
        ends = np.cumsum([len(rows.chunk_idx) for rows in load.rows.values()])
        return np.split(load.pins.slots, ends[:-1]) if len(ends) else []

    def _drop(self, slots: np.ndarray, pins: Pins) -> None:
        """Makes chunks misses that a load did not restore, but for those that were invalidated meanwhile."""
        epochs = pins.epochs[np.isin(pins.slots, slots)]
        slots = pins.slots[np.isin(pins.slots, slots)]
        self._pool.invalidate_slots(slots[self._pool.still_held(slots, epochs)])

    def _forget_states(self, load: Load) -> None:
        """Notes that the places of states that were to be loaded hold none: no step ends there again, perhaps, and
        the request's table may still name them."""
        for g, rows in load.rows.items():
            if isinstance(self._chunking.layout.groups[g].kind, Recurrent):
                load.request.dropped.setdefault(g, set()).update(rows.chunk_idx.tolist())


def _matches(epochs: np.ndarray, theirs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the same chunks stand in two lists of distinct epochs."""
    _, mine, other = np.intersect1d(epochs, theirs, assume_unique=True, return_indices=True)
    return mine, other
