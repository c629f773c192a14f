"""The scheduler's side: keys, pool, coverage and plans. No JAX, no device, no bytes moved.

A request goes through `lookup`, then `prepare_load` / `complete_load`, `extend` as tokens are accepted,
`prepare_store` / `complete_store`, and `finish`. Every method either does all it says or raises and
changes nothing. Not thread-safe: one scheduler calls it.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from kvjax._arguments import check_chunking
from kvjax._checks import flag, instance, integer, integers, shown
from kvjax.checkpoints import checkpoint_spacing
from kvjax.chunking import Chunking
from kvjax.coverage import Hit, next_cut, restorable_of
from kvjax.handles import LedgerCounts, Load, Lookup, Store
from kvjax.keys import HASH_BYTES, namespace_of
from kvjax.loading import Loads
from kvjax.lookups import Lookups
from kvjax.packing import Units
from kvjax.pool import ChunkPool, Policy
from kvjax.positions import Restorable, check_all
from kvjax.promotions import Promotion, Promotions
from kvjax.requests import Limits, Request
from kvjax.stores import Stores, rows_ok
from kvjax.storing import StoreChooser

_MOST_NAMESPACES = 1024  # that are remembered, so that each lookup does not fingerprint the layout
# Chunks below a hit, not needed for it, that a later call looks for at most.
_LOOKED_AT_A_TIME = 2048


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


def _check_hashable(request_id: Any) -> None:
    try:
        hash(request_id)
    except TypeError:
        raise ValueError(f"`request_id` must be hashable, got {shown(request_id)}") from None


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
        store_after: a chunk is stored only if prompts asked for it so many times, the one that stores it
            among them; 1 stores what is asked for once.
        policy: the pool's order of eviction, see `kvjax.pool.Policy`.

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
        store_after: int = 1,
        policy: Policy | None = None,
    ):
        check_chunking(chunking)
        self.chunking = chunking
        self.units = instance(units, Units, "units")
        self.model, self.shard = model, shard
        self.resume_multiple = integer(resume_multiple, "resume_multiple", at_least=1)
        self.checkpoint_tokens = checkpoint_spacing(chunking, checkpoint_tokens)
        self.store_after = integer(store_after, "store_after", at_least=1)
        self.pool = ChunkPool(pool_units(chunking, units, host_bytes), units.units_per_chunk, policy)
        chooser = self._chooser = StoreChooser(
            chunking, units, self.pool, self.resume_multiple, admits=self.store_after > 1
        )
        self.counts = LedgerCounts(np.zeros(len(chunking.layout.groups), np.int64), chooser.dropped)
        self._namespaces: dict[str | bytes, bytes] = {}
        self.namespace()  # refuses what cannot name a model or a shard
        self._requests: dict[Hashable, Request] = {}
        self._lookups = Lookups(
            chunking,
            self.pool,
            chooser,
            resume_multiple=self.resume_multiple,
            checkpoint_tokens=self.checkpoint_tokens,
            store_after=self.store_after,
        )
        self._loads = Loads(chunking, units, self.pool, self._requests)
        self._promotions = Promotions(chunking, units, self.pool, self._requests)
        self._stores = Stores(
            chunking, self.pool, chooser, self._lookups, self._loads, self.counts, self.resume_multiple
        )

    @property
    def too_small(self) -> str:
        """A sentence on the first request that was larger than the host pool; empty if there was none."""
        if self._chooser.too_large is None:
            return ""
        tokens, held = self._chooser.too_large
        return (
            f"the host pool is too small for a request of {tokens} tokens: of such requests it holds the first {held} "
            "at most"
        )

    # --- a request ------------------------------------------------------------------------------------

    def namespace(self, salt: str | bytes = b"") -> bytes:
        """Returns the namespace under which requests with this salt share chunks."""
        known = self._namespaces.get(salt) if isinstance(salt, (str, bytes)) else None
        if known is None:
            known = namespace_of(self.chunking, model=self.model, shard=self.shard, salt=salt)
            if len(self._namespaces) >= _MOST_NAMESPACES:
                self._namespaces.clear()
            self._namespaces[salt] = known
        return known

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
        max_store_tokens: int | None = None,
        max_load_tokens: int | None = None,
        skip: bool = False,
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
            max_store_tokens: only chunks of the first so many tokens are stored.
            max_load_tokens: at most so many tokens beyond those that the device holds are restored.
            skip: neither restore nor store anything for this request.

        Raises:
            ValueError: neither or both of `token_ids` and `hashes`, an empty prompt, hashes that are not
                one per whole unit, an id that cannot be hashed, or an argument of the wrong type or range.
        """
        _check_hashable(request_id)
        limits = Limits.of(max_store_tokens, max_load_tokens, skip)
        others = check_all(ranks, "ranks")
        request = self._lookups.new_request(self.namespace(salt), token_ids, hashes, num_tokens, limits)
        try:
            self._lookups.find(request, device_tokens, others)
        except BaseException:
            self.pool.namespaces.close(request.space)
            raise
        before = self._requests.get(request_id)
        again = before is not None and self._lookups.take_over(request, before)
        if before is not None:
            self._lookups.forget(before)
            self._promotions.release(before)
        self._requests[request_id] = request
        self.counts.lookups += not again
        return self._found(request)

    def look_again(
        self, request_id: Hashable, *, ranks: Sequence[Restorable] = (), max_load_tokens: int | None = None
    ) -> Lookup:
        """Finds the hit of a request anew, as `lookup` with the same arguments would, now that chunks may have come
        to the pool or left it. What was promoted for it is kept by its hit from now on, or no more.

        Args:
            request_id: a request that was looked up; nothing was loaded, computed or stored for it since.
            ranks: as for `lookup`.
            max_load_tokens: as for `lookup`; the smaller of this and what was said there is the limit.

        Raises:
            ValueError: an unknown request, or an argument of the wrong type or range.
        """
        request = self._request(request_id)
        others = check_all(ranks, "ranks")
        request.limits = request.limits.at_most(Limits.of(None, max_load_tokens, False))
        before = request.pins
        for chain in request.chains.values():
            chain.look_anew()
        self._lookups.find(request, request.device_tokens, others)
        found = self._found(request)
        if before is not None:
            self.pool.unpin(before)
        self._promotions.release(request)
        return found

    def _found(self, request: Request) -> Lookup:
        """Keeps what the hit of a request needs, counts it, and tells it."""
        self._lookups.register(request)
        hit = request.hit
        assert hit is not None, "the request was looked up"
        self.counts.lookup_tokens += max(0, request.num_tokens - request.counted_tokens)
        self.counts.hit_tokens += max(0, hit.hit_tokens - request.counted_hit)
        request.counted_tokens = max(request.counted_tokens, request.num_tokens)
        request.counted_hit = max(request.counted_hit, hit.hit_tokens)
        return Lookup(
            hit_tokens=hit.hit_tokens,
            device_tokens=request.most_on_device,
            load=hit.load,
            load_bytes=self._load_bytes(hit),
            limited_by=hit.limited_by,
            checkpoints=tuple(sorted(request.checkpoints)),
            arriving=self._loads.arriving(request, hit),
            promised_tokens=hit.hit_tokens,
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
        request = self.new_request(token_ids, hashes=hashes, num_tokens=num_tokens, salt=salt)
        try:
            return restorable_of(self._lookups.asked_for(request, device_tokens))
        finally:
            self.pool.namespaces.close(request.space)

    def resumable(self, request_id: Hashable) -> Restorable:
        """Returns the positions at which this rank could resume a request that was looked up, from the pool and as far
        as the request may load.

        Raises:
            ValueError: an unknown request.
        """
        request = self._request(request_id)
        positions = restorable_of(self._lookups.asked_for(request, request.device_tokens))
        most = request.limits.load_tokens
        return positions if most is None else positions & Restorable([0], [request.fallback + most])

    def add_checkpoints(self, request_id: Hashable, positions: Sequence[int]) -> None:
        """Adds positions to store a request for, as those that other ranks of the model have.

        Args:
            request_id: a request that was looked up; nothing was stored for it since.
            positions: no farther beyond its tokens than its own checkpoints may be.

        Raises:
            ValueError: an unknown request, or a position that is no positive int, or farther.
        """
        request = self._request(request_id)
        below = request.num_tokens + request.lag + (self.checkpoint_tokens or 0) + 1
        rule = f"`positions` must be a 1-d sequence of ints from 1 to {below - 1}"
        wanted = integers(positions, rule)
        wrong = wanted[(wanted < 1) | (wanted >= below)]
        if len(wrong):
            raise ValueError(f"{rule}, got {wrong[0]}")
        request.checkpoints.update(wanted.tolist())

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

    def num_tokens(self, request_id: Hashable) -> int:
        """Returns how many tokens a request has.

        Raises:
            ValueError: an unknown request.
        """
        return self._request(request_id).num_tokens

    def prefix_hashes(self, request_id: Hashable, start: int = 0) -> list[bytes]:
        """Returns the request's hashes of whole hash units, from `start` on; they name tokens and do not tell them.

        Raises:
            ValueError: an unknown request.
        """
        return self._request(request_id).hashes[start:]

    def finish(self, request_id: Hashable) -> None:
        """Forgets a request and releases what it kept in the pool. Jobs under way go on.

        Raises:
            ValueError: the request is unknown or was finished before.
        """
        request = self._request(request_id)
        self._lookups.forget(request)
        del self._requests[request_id]
        self._promotions.release(request)

    # --- loads ----------------------------------------------------------------------------------------

    def prepare_load(
        self,
        request_id: Hashable,
        block_tables: Mapping[str, Any],
        *,
        num_blocks: Mapping[str, int] | None = None,
        share: bool = False,
    ) -> Load:
        """Plans the load of the request's hit. The plan is empty where the device holds all of it.

        Args:
            request_id: a request that was looked up and not loaded since.
            block_tables: where to, see `plan_load`.
            num_blocks: see `plan_load`.
            share: blocks into which a load under way restores the same chunk (`Lookup.arriving`) are shared
                with its request: they are not loaded again, and this load ends well only if that one does.
                Without it every block that the table names is the request's own.

        Raises:
            ValueError: an unknown request, one without a hit to load, or tables that do not fit the hit.
        """
        request = self._request(request_id)
        flag(share, "share")
        if request.hit is None or request.pins is None:
            raise ValueError(f"request {request_id!r} must be looked up before it is loaded, and once for each load")
        load = self._loads.prepare(request_id, request, block_tables, num_blocks=num_blocks, share=share)
        request.pins = request.hit = None
        self.counts.loads_shared += bool(load.after)
        return load

    def complete_load(
        self, load: Load, *, ok: bool | Mapping[int, np.ndarray], told: bool = True, void: bool = False
    ) -> int:
        """Ends a load. Those of its chunks that were not restored are dropped from the pool: any doubt is a miss.

        Args:
            load: as `prepare_load` returned it.
            ok: whether its own moves went well: one for all, or, by `group_idx`, a mask of the rows of the plan.
            told: whether the engine knows at once what is returned. If not, and the load failed, it may go on
                computing from blocks that were not restored: until `acknowledge` all that it stores fails.
            void: nothing of it counts as restored, well as its moves went: other ranks failed to restore their parts.
                What went well stays in the pool.

        Returns:
            How many tokens the caches hold from the first one on: the hit; or, if anything failed, here or in a load
            that this one shares, the largest position for which all that it needs is there.

        Raises:
            ValueError: the load was not prepared here, or was completed before; or it did not fail, and one that it
                shares is still open.
        """
        self._loads.check_open(load)
        masks = {moves.group_idx: rows_ok(ok, moves) for moves in load.plan.moves}
        valid = self._loads.complete(load, masks, failed=ok is False, told=told, void=void)
        for g, good in masks.items():
            self.counts.loaded_by_group[g] += int(np.count_nonzero(good))
            self.counts.bytes_loaded += int(np.count_nonzero(good)) * (self.chunking.chunk_bytes[g] or 0)
        self.counts.loads_failed += valid < load.hit_tokens
        return valid

    def acknowledge(self, load: Load) -> None:
        """Says that the engine knows how a load ended that was completed with `told=False`: what it stores from now on
        was computed with that in mind."""
        self._loads.acknowledge(load)

    def give_up(self, load: Load) -> None:
        """Says that a load counts as failed from now on, although what was issued of it goes on: the request resumes at
        `load.device_tokens`, and its blocks may become others'. `complete_load` still ends it."""
        self._loads.give_up(load)

    def cancel_load(self, load: Load) -> None:
        """Takes a load back before anything of it was done: the request can be looked up and loaded again.

        Raises:
            ValueError: the load was not prepared here, or was completed before; or another one shares it.
        """
        self._loads.cancel(load)

    # --- promotions -----------------------------------------------------------------------------------

    def request(self, request_id: Hashable) -> Request:
        """Returns what is known of a request, to look for its chunks in lower tiers.

        Raises:
            ValueError: an unknown request.
        """
        return self._request(request_id)

    def is_current(self, request_id: Hashable, request: Request) -> bool:
        """Whether a request was neither finished nor looked up again since it was this one."""
        return self._requests.get(request_id) is request

    def new_request(
        self, token_ids: Any, *, hashes: Sequence[Any] | None, num_tokens: int | None, salt: str | bytes
    ) -> Request:
        """Returns a request that nobody looked up, to promote its chunks ahead of time; `forget` it.

        Arguments and errors are those of `lookup`.
        """
        return self._lookups.new_request(self.namespace(salt), token_ids, hashes, num_tokens, Limits())

    def forget(self, request: Request) -> None:
        """Ends what `new_request` began."""
        self.pool.namespaces.close(request.space)

    def prepare_promotion(
        self, request_id: Hashable, request: Request, hit: Hit, tiers: Mapping[int, np.ndarray]
    ) -> Promotion | None:
        """Reserves room for what a hit needs and the pool lacks, and keeps what is there.

        Promotions hold at most half of the pool at a time, so that there is room for stores.

        Args:
            request_id: the request it is for; `None` for one that was not looked up.
            request: the same, as `request` or `new_request` returned it.
            hit: for it, if the chunks of lower tiers were resident, too.
            tiers: by `group_idx`, for each `chunk_idx` the number of the tier that has it; below 0 where none has.

        Returns:
            The promotion, possibly of no chunk; or `None` if there is no room for it, or the request's namespace was
            invalidated. Then nothing changed.
        """
        return self._promotions.prepare(request_id, request, hit, tiers)

    def may_promote(self, request: Request, hit: Hit, tiers: Mapping[int, np.ndarray]) -> bool:
        """Whether promotions may hold so much now; `prepare_promotion` may find no room all the same."""
        return self._promotions.may_fit(request, hit, tiers)

    def complete_promotion(self, promotion: Promotion, *, ok: bool | np.ndarray) -> int:
        """Ends a promotion: the chunks that came are found from now on. If the request was not finished or looked up
        again, what its hit needs stays in the pool until it is.

        Args:
            promotion: as `prepare_promotion` returned it.
            ok: whether the chunks came: one for all, or a mask by row.

        Returns:
            How many became resident.

        Raises:
            ValueError: the promotion was not prepared here, or was completed before.
        """
        return self._promotions.complete(promotion, ok)

    @property
    def promoted_by_group(self) -> np.ndarray:
        """Chunks that came to the pool from lower tiers so far, by `group_idx`."""
        return self._promotions.promoted_by_group

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
        is asked for again by the next call. The plan may be empty; it is for a request whose namespace was
        invalidated since it was looked up, as nobody can tell with which weights its blocks were written.

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
        flag(checkpoint, "checkpoint")
        return self._stores.prepare(
            request_id, request, block_tables, num_tokens, checkpoint=checkpoint, num_blocks=num_blocks
        )

    def complete_store(self, store: Store, *, ok: bool | Mapping[int, np.ndarray]) -> bool:
        """Ends a store: its chunks are found from now on, or, if it failed, never were.

        If the request had a load under way when the store was prepared, and that load failed, the store counts as
        failed: what was computed after it may be anything.

        Args:
            store: as `prepare_store` returned it.
            ok: whether its moves went well: one for all, or, by `group_idx`, a mask of the rows of the plan.

        Returns:
            Whether all of it counts as stored.

        Raises:
            ValueError: the store was not prepared here, or was completed before; or it did not fail, and a load of
                its request that was under way when it was prepared still is.
        """
        return self._stores.complete(store, ok=ok)

    def depends(self, store: Store, load: Load) -> None:
        """Says that a store that was prepared before a load is computed from what it restores, as in one step: it is
        completed after the load, and fails with it."""
        self._stores.check_open(store)
        self._loads.check_open(load)
        store.after.append(load)

    def may_complete(self, work: Load | Store | Promotion) -> bool:
        """Whether nothing that must be completed before this load, store or promotion is still open."""
        if isinstance(work, Promotion):
            return self._promotions.all_ended(work.after)
        if not isinstance(work, (Load, Store)):
            raise ValueError(f"`work` must be a load, a store or a promotion, got {shown(work)}")
        return self._loads.all_ended(work.after)

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
            raise ValueError(
                f"`namespace` must be one that `namespace` returned, or None for all, got {shown(namespace)}"
            )
        space = self.pool.namespaces.find(namespace)
        return 0 if space is None else self.pool.invalidate_namespace(space)

    def update_model(self, model: str) -> None:
        """Says that the weights are others from now on: all that is in the pool becomes a miss at once, under the
        old name, too; what is in flight ends without being published. Requests that were looked up before store
        nothing any more. Takes no longer for a full pool than for an empty one.

        Raises:
            ValueError: `model` is not a string.
        """
        if not isinstance(model, str):
            raise ValueError(f"`model` must be a string, got {shown(model)}")
        self.model = model
        self._namespaces.clear()
        self.pool.invalidate()

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
        pins += self._loads.open_pins() + self._promotions.pins()
        assert self.pool.open_pins() == set(pins), "every pin belongs to a request, or to what is under way for it"
        reservations = self._stores.open_reservations() + self._promotions.open_reservations()
        assert self.pool.open_reservations() == set(reservations), "every reservation belongs to what is under way"
        self._promotions.check_integrity()

    # --- parts ----------------------------------------------------------------------------------------

    def _request(self, request_id: Hashable) -> Request:
        _check_hashable(request_id)
        request = self._requests.get(request_id)
        if request is None:
            raise ValueError(f"`request_id` must be one that was looked up and not finished, got {shown(request_id)}")
        return request

    def _load_bytes(self, hit: Hit) -> int:
        return sum(
            len(hit.load[self.chunking.layout.groups[g].name]) * (self.chunking.chunk_bytes[g] or 0)
            for g in self.chunking.layout.cached
        )
