"""Ledger and mover in one process: the imperative shell."""

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import Any, Literal, overload

import jax

from kvjax._checks import flag, integer, seconds, shown
from kvjax.chunking import resolve_chunking
from kvjax.coverage import restorable_of
from kvjax.decision import Restore, check_restore
from kvjax.groups import CacheLayout
from kvjax.handles import Load, Lookup, Store
from kvjax.jobs import Job, Jobs
from kvjax.jobs import JobResult as JobResult
from kvjax.jobs.jobs import CANCELLED
from kvjax.jobs.promoter import Promoter
from kvjax.jobs.waiter import LONGEST_SLEEP_S, Waiter, after
from kvjax.ledger import Ledger
from kvjax.memory.host import check_available
from kvjax.memory.local import local_view
from kvjax.memory.registration import register
from kvjax.memory.transports import granule_bytes
from kvjax.mover import Mover, Transfer
from kvjax.observe.changes import EventQueue
from kvjax.observe.events import GuardedCallback, KVEvent
from kvjax.observe.trace import TraceWriter
from kvjax.packing import cut_into_units, unit_bytes
from kvjax.pool import Change, Policy
from kvjax.positions import Restorable
from kvjax.promotions import Promotion
from kvjax.stats import Stats, stats_of
from kvjax.tiers.fetch import Fetch
from kvjax.tiers.flow import TierFlow, check_budgets, opened
from kvjax.tiers.tier import Tier

_LOG = logging.getLogger(__name__)
# How long lower tiers are given to end, in seconds, if nobody says how long.
_TIER_CLOSE_S = 10.0


class Offloader:
    """Keeps chunks of a paged KV cache in host memory and brings them back.

    A request goes `lookup`, `load`, then `extend` and `store` as it is computed, then `finish`. Device
    caches are passed in and come back; none is kept. `load` and `store` are called from the thread that
    runs the model, in the same order in every process; all other methods from any thread.

    Args:
        layout: the groups, with their leaves.
        caches: the device caches by leaf name, `(num_blocks, *block_shape)` each, or
            `(layers, num_blocks, *block_shape)` for stacked leaves. Only their shapes and places are kept. If they
            lie on devices of several processes, each of those has an offloader, which keeps what is on its devices;
            `kvjax.ranks` keeps them in step.
            `load` returns arrays committed to their device; make yours so from the start (by
            `jnp.zeros(..., device=device)`, say), or a step jitted for uncommitted ones compiles again.
        host_bytes: budget of the host pool of this process, a hard limit.
        blocks_per_chunk: see `resolve_chunking`.
        block_size: see `resolve_chunking`.
        min_chunk_bytes: see `resolve_chunking`.
        model: which weights write the cache; other weights never hit.
        shard: which part of the model this process holds; of caches of several processes, the pieces it holds are
            added.
        resume_multiple: hits on the host are multiples of this many tokens.
        checkpoint_tokens: a checkpoint every so many tokens, besides the ends of prompts and requests;
            `None` for none; by default what `default_checkpoint_tokens` makes of the layout.
        staging_bytes: what is staged at most at a time, on each device as on the host; 64 MiB by default, or one
            chunk if that is larger.
        transfer: `"direct"`, `"staged"` or `"auto"`, see `kvjax.memory.transports`.
        policy: the pool's order of eviction, LRU by default; see `kvjax.pool.Policy`.
        store_after: a chunk is stored only if prompts asked for it so many times, the one that stores it among
            them; 1 stores what is asked for once.
        tiers: levels of storage below the host pool, from the fastest one down: `kvjax.tiers.Tier`s, or URLs as
            `kvjax.tiers.open_tier` takes them. They are closed with the offloader.
        tier_wait_s: how long a lookup waits at most, in seconds, for chunks that it wants from lower tiers.
        tier_ask_s: how long a lookup asks lower tiers at most, in seconds, what they have; a quarter of a second by
            default.
        deadline_s: how long a job may take, in seconds, if `load` or `store` say nothing; `None` for ever.
        on_event: called with a `KVEvent` for chunks that became resident or ceased to be, in order, from whichever
            thread saw it. It may call the offloader. What it raises is logged and goes no further.
        record: a file to which the calls are recorded for `kvjax replay`. It has keys, never tokens.
        show_progress: progress bars for start-up on standard error; `None`: where that is a terminal.

    Raises:
        ValueError: an argument of the wrong type or range, caches that do not fit the layout, or budgets
            below one chunk of the largest group.
        MemoryError: the machine does not have so much memory for the pool.
    """

    def __init__(
        self,
        layout: CacheLayout,
        caches: Mapping[str, jax.Array],
        *,
        host_bytes: int,
        blocks_per_chunk: int | Mapping[str, int] | str | None = None,
        block_size: int | None = None,
        min_chunk_bytes: int = 65536,
        model: str = "",
        shard: str = "",
        resume_multiple: int = 1,
        checkpoint_tokens: int | Literal["auto"] | None = "auto",
        staging_bytes: int | None = None,
        transfer: str = "auto",
        policy: Policy | None = None,
        store_after: int = 1,
        tiers: Sequence[Tier | str] = (),
        tier_wait_s: float = 5.0,
        tier_ask_s: float | None = None,
        deadline_s: float | None = None,
        on_event: Callable[[KVEvent], object] | None = None,
        record: str | PathLike[str] | None = None,
        show_progress: bool | None = None,
    ):
        self.deadline_s = seconds(deadline_s, "deadline_s")
        wait_s = seconds(tier_wait_s, "tier_wait_s") or 0.0
        ask_s = seconds(tier_ask_s, "tier_ask_s")
        callback = None if on_event is None else GuardedCallback(on_event, "on_event")
        if show_progress is not None:
            flag(show_progress, "show_progress")
        self.chunking = resolve_chunking(
            layout, blocks_per_chunk=blocks_per_chunk, block_size=block_size, min_chunk_bytes=min_chunk_bytes
        )
        view = local_view(layout, caches)
        local = caches
        if view is not None:
            self.chunking, local, shard = view.chunking(self.chunking), view.local(caches), view.shard_of(shard)
        granule = granule_bytes(register(self.chunking.layout, local))
        units = cut_into_units(self.chunking, unit_bytes(self.chunking, granule))
        check_available(integer(host_bytes, "host_bytes", at_least=1))
        levels = opened(tiers, show_progress)
        try:
            check_budgets(levels, self.chunking)
            self.ledger = Ledger(
                self.chunking,
                units,
                host_bytes=host_bytes,
                model=model,
                shard=shard,
                resume_multiple=resume_multiple,
                checkpoint_tokens=checkpoint_tokens,
                store_after=store_after,
                policy=policy,
            )
            self._host_bytes = int(host_bytes)
            self.mover = Mover(
                self.chunking,
                units,
                caches,
                num_units=self.ledger.pool.num_units,
                staging_bytes=staging_bytes,
                transfer=transfer,
                show_progress=show_progress,
                view=view,
            )
            self._num_blocks = {layout.groups[g].name: self.mover.caches.num_blocks(g) for g in layout.cached}
            self._lock = threading.RLock()
            self._jobs = Jobs(self.ledger, self._revive, self._moved)
            self._depth = 0  # calls of this offloader, one within the other, that hold the lock
            self._events = EventQueue(self.chunking, callback)
            self._policy_error: Exception | None = None
            self._trace = None
            if record is not None:
                if not isinstance(record, (str, PathLike)):
                    raise ValueError(f"`record` must be a path, got {shown(record)}")
                unit = self.chunking.tokens_per_hash
                self._trace = TraceWriter(record, tokens_per_hash=unit, chunking=self.chunking, name="record")
            self._closed = False
            self._warned = self._told_too_small = False
            self._flow = TierFlow(self.ledger, self.mover, levels, self._lock, ask_s)
            self._waiter = Waiter(self._jobs, opened=self._open, locked=self._locked, see_ended=self._see_ended)
            self._promoter = Promoter(
                self.ledger,
                self._flow,
                self._jobs,
                opened=self._open,
                see_ended=self._see_ended,
                deadline_s=self.deadline_s,
                wait_s=wait_s,
            )
            self.tier_wait_s = wait_s if levels else 0.0
            self._watchers = [self._events.put] if callback is not None else []
            if self._flow.levels:
                self._watchers.append(self._flow.note)
            if self._watchers:
                self.ledger.pool.on_change = self._changed
        except BaseException:
            for given, tier in zip(tiers, levels, strict=True):
                if isinstance(given, str):
                    tier.close()
            raise

    # --- a request ------------------------------------------------------------------------------------

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
        restore: Restore = "auto",
        wait_s: float | None = None,
    ) -> Lookup:
        """Registers a request and finds the longest prefix that can be restored; see `Ledger.lookup`.

        Where lower tiers have more than the host pool, and restoring it pays, what the hit needs is brought to the
        pool, and awaited for a while. What has not come by then goes on coming: `promotion` tells when it has, and a
        lookup thereafter finds it.

        Args:
            request_id: as for `Ledger.lookup`, and so are those that are not named here.
            token_ids: the whole prompt.
            hashes: or the engine's own prefix hashes. With lower tiers they name chunks for other processes and times:
                they must be the same everywhere, of 128 bits or more, and cover all that the cache depends on.
            num_tokens: tokens of the prompt; only with `hashes`.
            device_tokens: the prefix the device holds.
            salt: tells equal tokens apart.
            ranks: what the other ranks of the model can restore.
            max_store_tokens: only chunks of the first so many tokens are stored.
            max_load_tokens: at most so many tokens are restored.
            skip: neither restore nor store anything for this request.
            restore: `"auto"`: what takes least time, as far as that is known (see `note_prefill`); `"always"` the
                longest hit; `"never"` any.
            wait_s: how long to wait for lower tiers, in seconds; as the offloader says by default.

        Raises:
            ValueError: see `Ledger.lookup`.
        """
        check_restore(restore)
        wait = seconds(wait_s, "wait_s")
        with self._open():
            self._see_ended()
            found = self.ledger.lookup(
                request_id,
                token_ids,
                hashes=hashes,
                num_tokens=num_tokens,
                device_tokens=device_tokens,
                salt=salt,
                ranks=ranks,
                max_store_tokens=max_store_tokens,
                max_load_tokens=max_load_tokens,
                skip=skip,
            )
            self._promoter.forget(request_id)
            if self._trace is not None:
                self._trace.lookup(
                    request_id,
                    namespace=self.ledger.namespace(salt),
                    num_tokens=self.ledger.num_tokens(request_id),
                    hashes=self.ledger.prefix_hashes(request_id),
                    device_tokens=device_tokens,
                    max_store_tokens=max_store_tokens,
                    max_load_tokens=max_load_tokens,
                    skip=skip,
                )
            request = self.ledger.request(request_id)
            self._flow.use(request)
            if self._flow.levels and hashes is not None:
                self._warn_of_ints(hashes)
            if not self._flow.has_choice(request, found, restore):
                return found
        return self._promoter.chosen(request_id, request, found, ranks=ranks, restore=restore, wait_s=wait)

    def restorable(
        self,
        token_ids: Any = None,
        *,
        hashes: Sequence[Any] | None = None,
        num_tokens: int | None = None,
        device_tokens: int | Mapping[str, int] = 0,
        salt: str | bytes = b"",
    ) -> Restorable:
        """Returns the positions at which this rank could resume a prompt, lower tiers included, to send to the others
        before `lookup`. What is in a tier must still come: see `Ledger.restorable` for what is in the pool alone.

        Arguments and errors are those of `lookup`; nothing is registered or touched.
        """
        with self._open():
            request = self.ledger.new_request(token_ids, hashes=hashes, num_tokens=num_tokens, salt=salt)
        request.device_tokens = dict(device_tokens) if isinstance(device_tokens, Mapping) else device_tokens
        try:
            return restorable_of(self._flow.find(request).asked)
        finally:
            with self._locked():
                self.ledger.forget(request)

    def resumable(self, request_id: Hashable) -> Restorable:
        """Returns where this rank could resume a request from its host pool; see `Ledger.resumable`."""
        with self._open():
            self._see_ended()
            return self.ledger.resumable(request_id)

    def look_again(
        self, request_id: Hashable, *, ranks: Sequence[Restorable] = (), max_load_tokens: int | None = None
    ) -> Lookup:
        """Finds the hit of a request in the host pool anew; see `Ledger.look_again`."""
        with self._open():
            self._see_ended()
            return self.ledger.look_again(request_id, ranks=ranks, max_load_tokens=max_load_tokens)

    def add_checkpoints(self, request_id: Hashable, positions: Sequence[int]) -> None:
        """Adds positions to store a request for; see `Ledger.add_checkpoints`."""
        with self._open():
            self.ledger.add_checkpoints(request_id, positions)

    def prefetch(
        self,
        token_ids: Any = None,
        *,
        hashes: Sequence[Any] | None = None,
        num_tokens: int | None = None,
        salt: str | bytes = b"",
        deadline_s: float | None = None,
    ) -> Job | None:
        """Starts to bring from lower tiers to the host pool what a prompt needs, before it is looked up.

        Args:
            token_ids: the whole prompt, 1-d ints. Or:
            hashes: the engine's own prefix hashes, with `num_tokens`.
            num_tokens: tokens of the prompt; only with `hashes`.
            salt: as for `lookup`.
            deadline_s: how long it may take, in seconds; as the offloader says by default.

        Returns:
            The job, or `None` if there is nothing to bring, or no room.

        Raises:
            ValueError: as for `lookup`.
        """
        limit = seconds(deadline_s, "deadline_s")
        with self._open():
            request = self.ledger.new_request(token_ids, hashes=hashes, num_tokens=num_tokens, salt=salt)
        try:
            return self._promoter.prefetch(request, limit)
        finally:
            with self._locked():
                self.ledger.forget(request)

    def promotion(self, request_id: Hashable) -> Job | None:
        """Returns the job that brings chunks from lower tiers for a request since it was last looked up, if any."""
        with self._locked():
            return self._promoter.promotion(request_id)

    def note_prefill(self, num_tokens: int, seconds_taken: float) -> None:
        """Tells how long the engine took to compute tokens of prompts. From this `lookup` knows whether it pays to
        restore; as long as nobody tells, it restores all it can.

        Args:
            num_tokens: tokens that were computed.
            seconds_taken: how long that took, in seconds.

        Raises:
            ValueError: an argument of the wrong type or range.
        """
        amount = integer(num_tokens, "num_tokens", at_least=1)
        took = seconds(seconds_taken, "seconds_taken")
        if not took:
            raise ValueError(f"`seconds_taken` must be a positive number of seconds, got {shown(seconds_taken)}")
        with self._locked():
            self._flow.prefill_speed.add(amount, took)

    def load(
        self,
        caches: Mapping[str, jax.Array],
        request_id: Hashable,
        block_tables: Mapping[str, Any],
        *,
        share: bool = False,
        deadline_s: float | None = None,
    ) -> tuple[dict[str, jax.Array], Job]:
        """Starts to restore the hit of the last `lookup` into the request's blocks.

        All JAX work is issued when it returns: a step that takes the returned caches reads the restored
        blocks. Blocks that the device holds, and those that nothing needs, are left as they are. The blocks stay
        the request's until the job has its result: to give them back before, cancel the job, finish the request
        or look it up again.

        Args:
            caches: the device caches; those that change are donated.
            request_id: a request that was looked up and not loaded since.
            block_tables: block ids by place in the sequence, by group name; -1 is the null block, allowed
                where nothing is restored. They must reach the hit.
            share: the table may name blocks into which a load under way restores the same chunks, as
                `Lookup.arriving` told them: they are not loaded again. Without it all blocks are the request's own.
            deadline_s: how long the job may take, in seconds; as the offloader says by default.

        Returns:
            The caches to go on with, and the job.

        Raises:
            ValueError: an unknown request or one without a hit to load, tables that do not fit, or caches
                unlike the registered ones. Then nothing changed.
        """
        limit = seconds(deadline_s, "deadline_s")
        return self.start_load(caches, request_id, block_tables, share=share, deadline_s=limit)

    def start_load(
        self,
        caches: Mapping[str, jax.Array],
        request_id: Hashable,
        block_tables: Mapping[str, Any],
        *,
        share: bool,
        deadline_s: float | None,
        around: Callable[[Transfer], Transfer] = lambda transfer: transfer,
    ) -> tuple[dict[str, jax.Array], Job]:
        """`load`, for those who say themselves when it is done.

        Args:
            caches: as for `load`, and so are those that are not named here.
            request_id: the request.
            block_tables: block ids by group name.
            share: whether blocks of other loads may be named.
            deadline_s: how long the job may take, in seconds; as the offloader says for `None`.
            around: makes the transfer of the job of the one that was started.

        Raises:
            ValueError: see `load`.
        """
        with self._open():
            self.mover.check(caches)
            load = self.prepare_load(request_id, block_tables, share=share)
            try:
                caches, transfer = self.mover.load(caches, load.plan)
            except BaseException:
                self.ledger.complete_load(load, ok=False)
                self._revive()
                raise
            return caches, self.issued(request_id, "load", load, around(transfer), deadline_s=deadline_s)

    def extend(
        self,
        request_id: Hashable,
        token_ids: Any = None,
        *,
        hashes: Sequence[Any] | None = None,
        num_tokens: int | None = None,
    ) -> None:
        """Adds accepted tokens to a request; see `Ledger.extend`."""
        with self._open():
            known = len(self.ledger.prefix_hashes(request_id)) if self._trace is not None else 0
            self.ledger.extend(request_id, token_ids, hashes=hashes, num_tokens=num_tokens)
            if self._trace is not None:
                self._trace.extend(
                    request_id,
                    num_tokens=self.ledger.num_tokens(request_id),
                    hashes=self.ledger.prefix_hashes(request_id, known),
                )

    def next_cut(self, request_id: Hashable, position: int) -> int | None:
        """Returns where a request must end a step so that its states can be stored; see `Ledger.next_cut`."""
        with self._open():
            return self.ledger.next_cut(request_id, position)

    def store(
        self,
        caches: Mapping[str, jax.Array],
        request_id: Hashable,
        block_tables: Mapping[str, Any],
        num_tokens: int,
        *,
        checkpoint: bool = False,
        deadline_s: float | None = None,
    ) -> tuple[dict[str, jax.Array], Job]:
        """Starts to store what the request's checkpoints want and is complete by now.

        Call it after each step, before blocks that left a window are freed, and with `checkpoint=True` at
        the end of a request and before a preemption. When it returns, the blocks may be overwritten.

        Args:
            caches: the device caches as the steps that wrote the blocks returned them.
            request_id: a request that was looked up.
            block_tables: block ids by place in the sequence, by group name; -1 is the null block.
            num_tokens: tokens whose cache is written, at most those the request has.
            checkpoint: make `num_tokens` a place to resume from.
            deadline_s: how long the job may take, in seconds; as the offloader says by default.

        Returns:
            The caches to go on with, and the job.

        Raises:
            ValueError: an unknown request, `num_tokens` beyond its tokens, tables that do not fit, or
                caches unlike the registered ones. Then nothing changed.
        """
        limit = seconds(deadline_s, "deadline_s")
        with self._open():
            self.mover.check(caches)
            self._see_ended()
            store = self.prepare_store(request_id, block_tables, num_tokens, checkpoint=checkpoint)
            try:
                caches, transfer = self.mover.store(caches, store.plan)
            except BaseException:
                self.ledger.complete_store(store, ok=False)
                self._revive()
                raise
            return caches, self.issued(request_id, "store", store, transfer, deadline_s=limit)

    def finish(self, request_id: Hashable) -> None:
        """Forgets a request and releases what it kept. Its jobs go on.

        Raises:
            ValueError: the request is unknown or was finished before.
        """
        with self._open():
            self.ledger.finish(request_id)
            self._promoter.forget(request_id)
            if self._trace is not None:
                self._trace.finish(request_id)

    # --- jobs -----------------------------------------------------------------------------------------

    def poll(self) -> list[JobResult]:
        """Returns the results of jobs that ended, each once, without waiting; those of promotions that lookups started
        and did not wait for are among them."""
        with self._open():
            self._see_ended()
            return self._jobs.take_ended()

    @overload
    def wait(self, job: Job, *, timeout_s: float | None = None) -> JobResult: ...

    @overload
    def wait(self, job: None = None, *, timeout_s: float | None = None) -> list[JobResult]: ...

    def wait(self, job: Job | None = None, *, timeout_s: float | None = None) -> JobResult | list[JobResult]:
        """Waits for a job, or for all of them.

        Args:
            job: a job of this offloader; its result can be had again and again. `None` waits for all.
            timeout_s: how long to wait, in seconds; `None` until they end, or reach their deadlines.

        Returns:
            The job's result; or, for all, the results not told by `poll` or `wait` before.

        Raises:
            ValueError: the job is not one of this offloader.
            TimeoutError: they did not end in time; they go on.
        """
        return self._waiter.wait(job, seconds(timeout_s, "timeout_s"))

    @overload
    async def wait_async(self, job: Job, *, timeout_s: float | None = None) -> JobResult: ...

    @overload
    async def wait_async(self, job: None = None, *, timeout_s: float | None = None) -> list[JobResult]: ...

    async def wait_async(
        self, job: Job | None = None, *, timeout_s: float | None = None
    ) -> JobResult | list[JobResult]:
        """`wait` for an event loop: other tasks run meanwhile. A task that is cancelled leaves the jobs as they are."""
        return await self._waiter.wait_async(job, seconds(timeout_s, "timeout_s"))

    def cancel(self, job: Job, *, why: str = CANCELLED) -> bool:
        """Gives a job up: it has a bad result at once, and what it was to move counts as not moved.

        What was issued runs to its end all the same; until then its chunks stay where they are. A load's blocks may
        still be written, but no later than by the next step that takes the caches which `load` returned.

        Args:
            job: a job of this offloader.
            why: what its result gives as the error.

        Returns:
            Whether it was given up; false if it has a result already.

        Raises:
            ValueError: the job is not one of this offloader.
        """
        with self._open():
            self._see_ended()
            self._waiter.check(job)
            if job.ended is not None:
                return False
            self._jobs.cancel(job, why)
            return True

    def prepare_load(self, request_id: Hashable, block_tables: Mapping[str, Any], *, share: bool = False) -> Load:
        """Prepares a load in the ledger, for those who issue it themselves and call `issued`."""
        with self._open():
            load = self.ledger.prepare_load(request_id, block_tables, num_blocks=self._num_blocks, share=share)
            if self._trace is not None:
                self._trace.load(request_id)
            return load

    def prepare_store(
        self, request_id: Hashable, block_tables: Mapping[str, Any], num_tokens: int, *, checkpoint: bool = False
    ) -> Store:
        """Prepares a store in the ledger, for those who issue it themselves and call `issued`."""
        with self._open():
            try:
                store = self.ledger.prepare_store(
                    request_id, block_tables, num_tokens, checkpoint=checkpoint, num_blocks=self._num_blocks
                )
                if self.ledger.too_small and not self._told_too_small:
                    self._told_too_small = True
                    _LOG.warning("%s", self.ledger.too_small)
            finally:
                self._flow.capture()  # before anything is written where evicted chunks are
            if self._trace is not None:
                self._trace.store(request_id, num_tokens=num_tokens, checkpoint=checkpoint)
            return store

    def issued(
        self,
        request_id: Hashable,
        operation: str,
        work: Load | Store,
        transfer: Transfer,
        *,
        deadline_s: float | None = None,
    ) -> Job:
        """Takes on a move that was prepared in the ledger and issued, and returns its job."""
        with self._open():
            limit = self.deadline_s if deadline_s is None else deadline_s
            return self._jobs.add(request_id, operation, work, transfer, limit)

    # --- all of it ------------------------------------------------------------------------------------

    def namespace(self, salt: str | bytes = b"") -> bytes:
        """Returns the namespace of requests with this salt, for `invalidate`."""
        with self._locked():
            return self.ledger.namespace(salt)

    def invalidate(self, namespace: bytes | None = None) -> int:
        """Makes every chunk a miss, or those of one namespace, whatever is in flight; see `Ledger.invalidate`.

        Returns:
            How many chunks were held.
        """
        with self._open():
            held = self.ledger.invalidate(namespace)
            self._flow.invalidate(namespace)
            if self._trace is not None:
                self._trace.invalidate(namespace)
            return held

    def update_model(self, model: str) -> None:
        """Says that the weights are others from now on; see `Ledger.update_model`."""
        with self._open():
            if model == self.ledger.model:
                self._flow.invalidate(None)
            self.ledger.update_model(model)
            if self._trace is not None:
                self._trace.invalidate(None)

    def stats(self) -> Stats:
        """Returns what was done so far and what is held. It may be called after `close`, too."""
        with self._locked():
            if not self._closed:
                self._see_ended()
            return stats_of(self.ledger, self._jobs, self._flow, self._host_bytes, self.mover.most_staged_bytes)

    def check_integrity(self) -> None:
        """Recounts the books.

        Raises:
            AssertionError: they contradict each other.
        """
        with self._locked():
            self.ledger.check_integrity()

    def flush(self, *, timeout_s: float | None = None) -> bool:
        """Writes to the lower tiers what they lack of the host pool, and waits for it.

        Args:
            timeout_s: how long to wait, in seconds; `None` until all tiers have all or are down.

        Returns:
            Whether they have all; of what found no room there or failed the stats tell.
        """
        until = after(seconds(timeout_s, "timeout_s"))
        with self._open():
            self._see_ended()
        return self._flow.flush(until)

    def close(self, *, timeout_s: float | None = None, flush: bool = True) -> None:
        """Waits for all that was issued, writes to the lower tiers what they lack, and ends. A second call does
        nothing.

        Args:
            timeout_s: how long to wait, in seconds; `None` until all has ended.
            flush: whether lower tiers get what they lack; without it, what is on its way to them is lost.

        Raises:
            TimeoutError: something hangs. The memory that it may still write to is kept, and `close` can be called
                again; nothing else can.
        """
        until = after(seconds(timeout_s, "timeout_s"))
        with self._locked():
            if self._closed and not self._jobs.unsettled():
                return
            self._closed = True
            for job in self._jobs.unsettled():
                if isinstance(job.transfer, Fetch):
                    job.transfer.abandon("the offloader was closed")
        for job in self._jobs.unsettled():
            while until is not None and not job.transfer.done():
                left = until - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"{len(self._jobs.unsettled())} jobs did not end in {timeout_s} s")
                time.sleep(min(left, LONGEST_SLEEP_S))
            job.transfer.settle()
        with self._locked():
            self._see_ended()
        if flush:
            self._flow.flush(until)
        self._flow.close(_TIER_CLOSE_S if until is None else max(0.0, until - time.monotonic()))
        with self._locked():
            self.mover.close()
            if self._trace is not None:
                self._trace.close()

    def __enter__(self) -> "Offloader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- parts ----------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether it was not closed."""
        return not self._closed

    def check_open(self) -> None:
        """Raises a `ValueError` if the offloader was closed."""
        if self._closed:
            raise ValueError("an offloader must not be used after `close`")

    def see_ended(self) -> None:
        """Completes the jobs that ended, without waiting; `poll` tells of them."""
        with self._locked():
            self._see_ended()

    def _warn_of_ints(self, hashes: Sequence[Any]) -> None:
        if not self._warned and any(not isinstance(one, (bytes, bytearray)) for one in hashes[:1]):
            self._warned = True
            _LOG.warning(
                "`hashes` are ints, and with `tiers` must be the same in every process: Python's `hash` is not"
            )

    def _see_ended(self) -> None:
        self._flow.tick()
        self._jobs.see_ended()

    def _changed(self, change: Change) -> None:
        for tell in self._watchers:
            tell(change)

    def _moved(self, job: Job, took_s: float) -> None:
        """A job's moves are in the books."""
        if isinstance(job.work, Promotion) and isinstance(job.transfer, Fetch):
            self._flow.came(job.work, job.transfer)
        elif isinstance(job.work, Load):
            self._flow.load_speed.add(job.work.num_bytes, took_s)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One thread at a time; what happened is told when the lock is free again."""
        outermost = False
        try:
            with self._lock:
                outermost = self._depth == 0
                self._depth += 1
                try:
                    yield
                finally:
                    self._depth -= 1
                    self._note_policy_error()
        finally:
            if outermost:
                self._events.tell()

    @contextmanager
    def _open(self) -> Iterator[None]:
        with self._locked():
            self.check_open()
            yield

    def _note_policy_error(self) -> None:
        error = self.ledger.pool.policy_error
        if error is not self._policy_error:
            self._policy_error = error
            _LOG.error("the policy of eviction failed; the pool goes on with LRU", exc_info=error)

    def _revive(self) -> None:
        """A pool that died with a program is made anew, and holds nothing."""
        if self.mover.revive():
            self.ledger.invalidate()
