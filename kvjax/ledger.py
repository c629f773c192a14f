"""The scheduler's side: keys, pool, coverage and plans. No JAX, no device, no bytes moved.

A request goes through `lookup`, then `prepare_load` / `complete_load`, `extend` as tokens are accepted,
`prepare_store` / `complete_store`, and `finish`. Every method either does all it says or raises and
changes nothing. Not thread-safe: one scheduler calls it.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from kvjax._checks import integer
from kvjax.checkpoints import checkpoint_spacing
from kvjax.chunking import Chunking
from kvjax.coverage import Hit, longest_hit, next_cut, restorable, stored_positions
from kvjax.groups import Recurrent
from kvjax.handles import LedgerCounts, Load, Lookup, Store
from kvjax.keys import (
    HASH_BYTES,
    NAMESPACE_BYTES,
    key_group,
    key_namespace,
    namespace_of,
)
from kvjax.packing import Units, unit_rows
from kvjax.plan import NULL_BLOCK, block_table, check_range, plan_load
from kvjax.pool import ChunkPool, Policy, Reservation
from kvjax.positions import Restorable
from kvjax.requests import Request
from kvjax.retention import eviction_ranks, junction
from kvjax.storing import Chosen, StoreChooser, sound_from


def pool_units(chunking: Chunking, units: Units, host_bytes: int) -> int:
    """Returns how many units a budget holds. Where chunks are padded, that may be too few for one of the
    largest group, whose chunks are then never stored.

    Raises:
        ValueError: `host_bytes` is not a positive int, or is below one chunk of the largest group.
    """
    budget = integer(host_bytes, "host_bytes", at_least=1)
    largest = max(chunking.layout.cached, key=lambda g: chunking.chunk_bytes[g] or 0)
    least = max(chunking.chunk_bytes[largest] or 0, units.unit_bytes)
    if budget < least:
        raise ValueError(
            f"`host_bytes` must hold at least one chunk of the largest group, "
            f"{chunking.layout.groups[largest].name!r}: {least} bytes, got {budget}"
        )
    return budget // units.unit_bytes


def _last_places(table: np.ndarray) -> np.ndarray:
    """Returns the table with a block named twice left in its last place only: it was re-used, and holds that."""
    _, from_end = np.unique(table[::-1], return_index=True)
    only_last = np.full_like(table, NULL_BLOCK)
    last = len(table) - 1 - from_end
    only_last[last] = table[last]
    return only_last


class Ledger:
    """Decides what is stored and loaded, and keeps the books of the host pool.

    Args:
        chunking: the layout and its chunks.
        units: how chunks are cut into units of the pool.
        host_bytes: budget of the host pool, a hard limit.
        model: which weights write the cache; part of every key.
        shard: which part of the model; part of every key.
        resume_multiple: hits on the host are multiples of this many tokens.
        checkpoint_tokens: a checkpoint every so many tokens, besides the ends of prompts and requests;
            `None` for none; by default what `default_checkpoint_tokens` makes of the layout.
        policy: the pool's order of eviction.

    Raises:
        ValueError: a value of the wrong type or range, or a budget below one chunk of the largest group.
    """

    def __init__(
        self,
        chunking: Chunking,
        units: Units,
        *,
        host_bytes: int,
        model: str = "",
        shard: str = "",
        resume_multiple: int = 1,
        checkpoint_tokens: int | Literal["auto"] | None = "auto",
        policy: Policy | None = None,
    ):
        self.chunking = chunking
        self.units = units
        self.model, self.shard = model, shard
        self.resume_multiple = integer(resume_multiple, "resume_multiple", at_least=1)
        self.checkpoint_tokens = checkpoint_spacing(chunking, checkpoint_tokens)
        self.counts = LedgerCounts()
        self.pool = ChunkPool(pool_units(chunking, units, host_bytes), units.units_per_chunk, policy)
        self._chooser = StoreChooser(chunking, units, self.pool, self.resume_multiple)
        self._requests: dict[Hashable, Request] = {}
        self._open: set[Load | Store] = set()

    # --- a request ------------------------------------------------------------------------------------

    def namespace(self, salt: str | bytes = b"") -> bytes:
        """Returns the namespace under which requests with this salt share chunks."""
        return namespace_of(self.chunking, model=self.model, shard=self.shard, salt=salt)

    def lookup(
        self,
        request_id: Hashable,
        token_ids: Any = None,
        *,
        hashes: Sequence[Any] | None = None,
        num_tokens: int | None = None,
        device_tokens: int | Mapping[str, int] = 0,
        salt: str | bytes = b"",
        ranks: Sequence[Restorable] = (),
    ) -> Lookup:
        """Registers a request and finds the longest prefix that can be restored.

        What a load of it would read stays in the pool until the load completes, the request finishes or
        is looked up again. The end of the prompt becomes a checkpoint, and so does a position where the
        full groups went further than the hit. A request that is looked up again starts afresh.

        Args:
            request_id: names the request in all other calls.
            token_ids: the whole prompt, 1-d ints. Or:
            hashes: the engine's own prefix hashes, one for each whole hash unit, with `num_tokens`.
            num_tokens: tokens of the prompt; only with `hashes`.
            device_tokens: the prefix the device holds, see `longest_hit`.
            salt: tells equal tokens apart (a tenant, an adapter, image keys).
            ranks: what the other ranks of the model can restore, see `restorable`: the hit is one that all can.

        Raises:
            ValueError: neither or both of `token_ids` and `hashes`, an empty prompt, hashes that are not
                one per whole unit, or an argument of the wrong type or range.
        """
        request = Request(self.namespace(salt))
        request.extend(self.chunking, token_ids, hashes, num_tokens)
        if not request.num_tokens:
            raise ValueError("`token_ids` must hold at least one token, got none")
        present = self._present(request)
        hit = longest_hit(
            self.chunking,
            request.num_tokens,
            {self.chunking.layout.groups[g].name: chunks for g, (chunks, _) in present.items()},
            device_tokens=device_tokens,
            resume_multiple=self.resume_multiple,
            ranks=ranks,
        )
        request.hit = hit
        request.device_tokens = dict(device_tokens) if isinstance(device_tokens, Mapping) else int(device_tokens)
        held = self._device_prefixes(request)
        request.sound_from = sound_from(self.chunking, [hit.hit_tokens, min(held)])
        resident = {g: chunks for g, (chunks, _) in present.items()}
        request.checkpoints = {request.num_tokens}
        shared = junction(self.chunking, request.num_tokens, resident)
        if shared > hit.hit_tokens:
            request.checkpoints.add(shared)
        request.add_checkpoints(self.checkpoint_tokens, hit.hit_tokens)

        before = self._requests.get(request_id)
        if before is not None:
            self._unpin(before)
        self._requests[request_id] = request
        request.pins = self.pool.pin(self._slots_to_load(hit, present))
        order = eviction_ranks(self.chunking, resident)
        keys = [request.keys[g][c] for g, chunks in resident.items() for c in chunks.tolist()]
        self.pool.touch(keys, np.concatenate([order[g] for g in resident]))
        self.counts.lookups += 1
        self.counts.lookup_tokens += request.num_tokens
        self.counts.hit_tokens += hit.hit_tokens
        return Lookup(
            hit_tokens=hit.hit_tokens,
            device_tokens=max(held),
            load=hit.load,
            load_bytes=self._load_bytes(hit),
            limited_by=hit.limited_by,
            checkpoints=tuple(sorted(request.checkpoints)),
        )

    def restorable(
        self,
        token_ids: Any = None,
        *,
        hashes: Sequence[Any] | None = None,
        num_tokens: int | None = None,
        device_tokens: int | Mapping[str, int] = 0,
        salt: str | bytes = b"",
    ) -> Restorable:
        """Returns the positions at which this rank could resume a prompt, to send to the others before `lookup`.

        Arguments and errors are those of `lookup`; nothing is registered or touched.
        """
        request = Request(self.namespace(salt))
        request.extend(self.chunking, token_ids, hashes, num_tokens)
        present = {self.chunking.layout.groups[g].name: chunks for g, (chunks, _) in self._present(request).items()}
        return restorable(
            self.chunking,
            request.num_tokens,
            present,
            device_tokens=device_tokens,
            resume_multiple=self.resume_multiple,
        )

    def extend(
        self,
        request_id: Hashable,
        token_ids: Any = None,
        *,
        hashes: Sequence[Any] | None = None,
        num_tokens: int | None = None,
    ) -> None:
        """Adds accepted tokens to a request. Tokens that may still be rejected are not to be given.

        Args:
            request_id: a request that was looked up.
            token_ids: the new tokens. Or:
            hashes: the engine's hashes of the units that these tokens complete, with `num_tokens`.
            num_tokens: tokens of the request from now on; only with `hashes`.

        Raises:
            ValueError: an unknown request, or arguments as in `lookup`.
        """
        request = self._request(request_id)
        before = request.num_tokens
        request.extend(self.chunking, token_ids, hashes, num_tokens)
        request.add_checkpoints(self.checkpoint_tokens, before)

    def next_cut(self, request_id: Hashable, position: int) -> int | None:
        """Returns where a request that is at `position` must end a step so that its states can be stored.

        See `kvjax.next_cut`; the checkpoints are those known by now. One that is only declared when it is
        reached (`prepare_store(..., checkpoint=True)`) has a state if a step ended at its own next cut.

        Args:
            request_id: a request that was looked up.
            position: tokens computed so far.

        Returns:
            A position past `position`, or `None` if no checkpoint lies ahead.

        Raises:
            ValueError: an unknown request, or a position that is no non-negative int.
        """
        here = integer(position, "position", at_least=0)
        ahead = [checkpoint for checkpoint in self._request(request_id).checkpoints if checkpoint > here]
        return next_cut(self.chunking, here, ahead, resume_multiple=self.resume_multiple) if ahead else None

    def finish(self, request_id: Hashable) -> None:
        """Forgets a request and releases what it kept in the pool. Jobs under way go on.

        Raises:
            ValueError: the request is unknown or was finished before.
        """
        request = self._request(request_id)
        self._unpin(request)
        del self._requests[request_id]

    # --- loads ----------------------------------------------------------------------------------------

    def prepare_load(
        self, request_id: Hashable, block_tables: Mapping[str, Any], *, num_blocks: Mapping[str, int] | None = None
    ) -> Load:
        """Plans the load of the request's hit. The plan is empty where the device holds all of it.

        Args:
            request_id: a request that was looked up and not loaded since.
            block_tables: where to, see `plan_load`.
            num_blocks: see `plan_load`.

        Raises:
            ValueError: an unknown request, one without a hit to load, or tables that do not fit the hit.
        """
        request = self._request(request_id)
        if request.hit is None or request.pins is None:
            raise ValueError(f"request {request_id!r} must be looked up before it is loaded, and once for each load")
        units: dict[str, np.ndarray] = {}
        pinned = iter(request.pins.units)
        for g in self.chunking.layout.cached:
            name = self.chunking.layout.groups[g].name
            units[name] = unit_rows(self.units, g, [next(pinned) for _ in request.hit.load[name]])
        plan = plan_load(
            self.chunking,
            request.hit,
            block_tables,
            units,
            device_tokens=request.device_tokens,
            num_blocks=num_blocks,
        )
        load = Load(request_id, plan, request.pins, request.hit.hit_tokens, min(self._device_prefixes(request)))
        request.pins = request.hit = None
        self._open.add(load)
        return load

    def complete_load(self, load: Load, *, ok: bool) -> None:
        """Ends a load. The chunks of one that failed are dropped from the pool: any doubt is a miss.

        Raises:
            ValueError: the load was not prepared here, or was completed before.
        """
        self._close(load, Load)
        if ok:
            self.counts.chunks_loaded += load.plan.num_chunks
            self.counts.bytes_loaded += load.plan.num_bytes
        else:
            self.counts.loads_failed += 1
            self.pool.invalidate(load.pins.keys)
            self._forget_states(load)
        self.pool.unpin(load.pins)

    def cancel_load(self, load: Load) -> None:
        """Takes a load back before anything of it was done: the request can be looked up and loaded again.

        Raises:
            ValueError: the load was not prepared here, or was completed before.
        """
        self._close(load, Load)
        self._forget_states(load)
        self.pool.unpin(load.pins)

    def _forget_states(self, load: Load) -> None:
        """Notes that the places of states that were to be loaded hold none: no step ends there again, perhaps, and
        the request's table may still name them."""
        request = self._requests.get(load.request_id)
        if request is None:
            return
        for moves in load.plan.moves:
            if isinstance(self.chunking.layout.groups[moves.group_idx].kind, Recurrent):
                spoilt = request.dropped.setdefault(moves.group_idx, set())
                spoilt.update(moves.chunk_idx[: moves.num_chunks].tolist())

    # --- stores ---------------------------------------------------------------------------------------

    def prepare_store(
        self,
        request_id: Hashable,
        block_tables: Mapping[str, Any],
        num_tokens: int,
        *,
        checkpoint: bool = False,
        num_blocks: Mapping[str, int] | None = None,
    ) -> Store:
        """Plans the store of what the request's checkpoints want and is complete by now.

        A chunk with a null block is dropped: it can never be stored whole. What finds no room in the pool
        is asked for again by the next call. The plan may be empty.

        Args:
            request_id: a request that was looked up.
            block_tables: block ids by place in the sequence, by group name; -1 is the null block.
            num_tokens: tokens whose cache is written, at most those the request has.
            checkpoint: make `num_tokens` a checkpoint, as at the end of a request or before a preemption.
            num_blocks: see `plan_store`.

        Raises:
            ValueError: an unknown request, `num_tokens` beyond the request's tokens, tables missing, too
                short or with ids out of range.
        """
        request = self._request(request_id)
        written = integer(num_tokens, "num_tokens", at_least=0)
        if written > request.num_tokens:
            raise ValueError(
                f"`num_tokens` must be at most the {request.num_tokens} tokens that request {request_id!r} has, "
                f"got {written}"
            )
        tables = self._checked_tables(block_tables, written, num_blocks)
        chosen: list[Chosen] = []
        asked: tuple[int, ...] = ()
        if checkpoint and written:
            request.checkpoints.add(written)
        if checkpoint or self._completes_a_chunk(request.stored_at, written):
            tables = {g: _last_places(table) for g, table in tables.items()}
            asked = tuple(sorted(request.checkpoints))
            due = self._due(asked, written)
            chosen, served = self._reserve(request, due, tables, written)
            request.checkpoints -= {position for position in served if position <= written}
            if len(served) == len(due):
                request.stored_at = written
        self.counts.chunks_dropped = self._chooser.num_dropped
        reservations = tuple(part.reservation for part in chosen)
        try:
            names = self.chunking.layout.names
            plan = self._chooser.plan(chosen, {names[g]: table for g, table in tables.items()}, num_blocks)
        except BaseException:
            self._roll_back(request, reservations, asked)
            raise
        store = Store(request_id, plan, reservations, request, asked)
        self._open.add(store)
        return store

    def _reserve(
        self, request: Request, due: list[int], tables: Mapping[int, np.ndarray], written: int
    ) -> tuple[list[Chosen], list[int]]:
        """Reserves for all checkpoints at once; where there is no room for all, for the first ones that have some."""
        together = self._chooser.reserve(request, due, tables, written) if due else None
        if together is not None or len(due) < 2:
            return ([together], due) if together is not None else ([], [])
        chosen: list[Chosen] = []
        for position in due:
            reserved = self._chooser.reserve(request, [position], tables, written)
            if reserved is None:
                break  # no room: what a later checkpoint wants has none either
            chosen.append(reserved)
        return chosen, due[: len(chosen)]

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

    def complete_store(self, store: Store, *, ok: bool) -> None:
        """Ends a store: its chunks are found from now on, or, if it failed, never were.

        Raises:
            ValueError: the store was not prepared here, or was completed before.
        """
        self._close(store, Store)
        if not ok:
            self.counts.stores_failed += 1
            self._roll_back(store.request, store.reservations, store.checkpoints)
            return
        for reservation in store.reservations:
            published = self.pool.complete_store(reservation, ok=ok)
            self.counts.chunks_stored += len(published)
            self.counts.bytes_stored += sum(self.chunking.chunk_bytes[key_group(key)] or 0 for key in published)

    # --- all of it ------------------------------------------------------------------------------------

    def invalidate(self, namespace: bytes | None = None) -> int:
        """Makes every chunk a miss, or those of one namespace, whatever is in flight.

        Returns:
            How many chunks were held.

        Raises:
            ValueError: `namespace` is not one.
        """
        if namespace is None:
            return self.pool.invalidate()
        if not isinstance(namespace, bytes) or len(namespace) != HASH_BYTES:
            raise ValueError(f"`namespace` must be one that `namespace` returned, or None for all, got {namespace!r}")
        return self.pool.invalidate(
            key for key in self.pool.held_keys() if key_namespace(key) == namespace[:NAMESPACE_BYTES]
        )

    @property
    def num_requests(self) -> int:
        """Requests that were looked up and not finished."""
        return len(self._requests)

    def check_integrity(self) -> None:
        """Recounts everything.

        Raises:
            AssertionError: the books contradict each other.
        """
        self.pool.check_integrity()
        pins = [request.pins for request in self._requests.values() if request.pins is not None]
        pins += [open_.pins for open_ in self._open if isinstance(open_, Load)]
        assert self.pool.open_pins() == set(pins), "every pin belongs to a request or to a load under way"
        stores = [r for open_ in self._open if isinstance(open_, Store) for r in open_.reservations]
        assert self.pool.open_reservations() == set(stores), "every reservation belongs to a store under way"

    # --- parts ----------------------------------------------------------------------------------------

    def _request(self, request_id: Hashable) -> Request:
        request = self._requests.get(request_id)
        if request is None:
            raise ValueError(f"`request_id` must be one that was looked up and not finished, got {request_id!r}")
        return request

    def _close(self, job: Any, kind: type) -> None:
        if not isinstance(job, kind) or job not in self._open:
            raise ValueError(f"a {kind.__name__.lower()} must be one that was prepared here and not completed yet")
        self._open.remove(job)

    def _roll_back(self, request: Request, reservations: Sequence[Reservation], checkpoints: Sequence[int]) -> None:
        """Nothing of it was stored, and what the checkpoints want is asked for again by the next store."""
        for reservation in reservations:
            self.pool.complete_store(reservation, ok=False)
        request.checkpoints.update(checkpoints)
        request.stored_at = 0

    def _unpin(self, request: Request) -> None:
        if request.pins is not None:
            self.pool.unpin(request.pins)
        request.pins = request.hit = None

    def _device_prefixes(self, request: Request) -> list[int]:
        """What the device held of each cached group at the last lookup. The request resumes at the hit, or, if
        nothing is loaded, at the smallest of them."""
        held = request.device_tokens
        names = [self.chunking.layout.groups[g].name for g in self.chunking.layout.cached]
        return [held.get(name, 0) if isinstance(held, dict) else held for name in names]

    def _present(self, request: Request) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """The request's resident chunks: by group, their ascending `chunk_idx` and their slots."""
        present = {}
        for g, keys in request.keys.items():
            slots = self.pool.find(keys)
            chunks = np.flatnonzero(slots >= 0)
            present[g] = (chunks, slots[chunks])
        return present

    def _slots_to_load(self, hit: Hit, present: Mapping[int, tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
        slots = []
        for g, (chunks, group_slots) in present.items():
            slots.append(group_slots[np.searchsorted(chunks, hit.load[self.chunking.layout.groups[g].name])])
        return np.concatenate(slots)

    def _load_bytes(self, hit: Hit) -> int:
        return sum(
            len(hit.load[self.chunking.layout.groups[g].name]) * (self.chunking.chunk_bytes[g] or 0)
            for g in self.chunking.layout.cached
        )

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
