"""Ledger and mover in one process: the imperative shell."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, overload

import jax

from kvjax._checks import integer
from kvjax.chunking import resolve_chunking
from kvjax.groups import CacheLayout
from kvjax.handles import Load, Lookup, Store
from kvjax.ledger import Ledger
from kvjax.memory.host import check_available
from kvjax.memory.registration import register
from kvjax.memory.transports import granule_bytes
from kvjax.mover import Mover, Transfer
from kvjax.packing import cut_into_units, unit_bytes
from kvjax.pool import Policy
from kvjax.positions import Restorable


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a job ended.

    Args:
        job_id: counts the offloader's jobs.
        request_id: the request it was for.
        operation: `"load"` or `"store"`.
        ok: false if the chunks could not be moved. They are misses then, and the tokens of a load beyond
            what the device held must be recomputed.
        num_chunks: chunks asked for.
        num_bytes: their bytes, without padding.
        valid_tokens: of a load: the prefix that is in the caches.
        error: what went wrong, empty if nothing did.
    """

    job_id: int
    request_id: Hashable
    operation: str
    ok: bool
    num_chunks: int
    num_bytes: int
    valid_tokens: int | None
    error: str = ""


@dataclass(slots=True, eq=False)
class Job:
    """A load or store under way; `result` is there once `poll` or `wait` saw it end."""

    job_id: int
    request_id: Hashable
    operation: str
    work: Load | Store = field(repr=False)
    transfer: Transfer = field(repr=False)
    result: JobResult | None = None


@dataclass(frozen=True, slots=True)
class Stats:
    """What an offloader did and holds.

    Args:
        budget_bytes: the host pool's budget.
        bytes_held: units in use times their bytes, those being written included.
        resident_chunks: chunks that a lookup finds.
        chunks_stored: chunks that became resident so far.
        bytes_stored: their bytes, without padding.
        chunks_loaded: chunks restored so far.
        bytes_loaded: their bytes, without padding.
        evicted_chunks: chunks that made room for others.
        dropped_chunks: chunks that could not be stored, as a block was freed before they were complete.
        refused_stores: times that the pool had no room for a store.
        failed_jobs: jobs that ended badly.
        lookups: prompts looked up.
        lookup_tokens: their tokens.
        hit_tokens: of those, tokens that need no computing.
        open_requests: requests not finished.
        open_jobs: jobs not seen to end.
        most_staged_bytes: the most that was staged at a time.
    """

    budget_bytes: int
    bytes_held: int
    resident_chunks: int
    chunks_stored: int
    bytes_stored: int
    chunks_loaded: int
    bytes_loaded: int
    evicted_chunks: int
    dropped_chunks: int
    refused_stores: int
    failed_jobs: int
    lookups: int
    lookup_tokens: int
    hit_tokens: int
    open_requests: int
    open_jobs: int
    most_staged_bytes: int


class Offloader:
    """Keeps chunks of a paged KV cache in host memory and brings them back.

    A request goes `lookup`, `load`, then `extend` and `store` as it is computed, then `finish`. Device
    caches are passed in and come back; none is kept. Not thread-safe: call it from the thread that runs
    the model.

    Args:
        layout: the groups, with their leaves.
        caches: the device caches by leaf name, `(num_blocks, *block_shape)` each, or
            `(layers, num_blocks, *block_shape)` for stacked leaves. Only their shapes and places are kept.
            `load` returns arrays committed to their device; make yours so from the start (by
            `jnp.zeros(..., device=device)`, say), or a step jitted for uncommitted ones compiles again.
        host_bytes: budget of the host pool, a hard limit.
        blocks_per_chunk: see `resolve_chunking`.
        block_size: see `resolve_chunking`.
        min_chunk_bytes: see `resolve_chunking`.
        model: which weights write the cache; other weights never hit.
        shard: which part of the model this process holds.
        resume_multiple: hits on the host are multiples of this many tokens.
        checkpoint_tokens: a checkpoint every so many tokens, besides the ends of prompts and requests;
            `None` for none; by default what `default_checkpoint_tokens` makes of the layout.
        staging_bytes: what is staged at most at a time, on each device as on the host; 64 MiB by default, or one
            chunk if that is larger.
        transfer: `"direct"`, `"staged"` or `"auto"`, see `kvjax.memory.transports`.
        policy: the pool's order of eviction, LRU by default.
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
        show_progress: bool | None = None,
    ):
        self.chunking = resolve_chunking(
            layout, blocks_per_chunk=blocks_per_chunk, block_size=block_size, min_chunk_bytes=min_chunk_bytes
        )
        granule = granule_bytes(register(layout, caches))
        units = cut_into_units(self.chunking, unit_bytes(self.chunking, granule))
        check_available(integer(host_bytes, "host_bytes", at_least=1))
        self.ledger = Ledger(
            self.chunking,
            units,
            host_bytes=host_bytes,
            model=model,
            shard=shard,
            resume_multiple=resume_multiple,
            checkpoint_tokens=checkpoint_tokens,
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
        )
        self._num_blocks = {layout.groups[g].name: self.mover.caches.num_blocks(g) for g in layout.cached}
        self._jobs: dict[int, Job] = {}  # under way, in the order in which they were issued
        self._ended: list[JobResult] = []  # seen to end, not told yet
        self._next_job = 0
        self._closed = False

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
    ) -> Lookup:
        """Registers a request and finds the longest prefix that can be restored; see `Ledger.lookup`."""
        self.check_open()
        self.see_ended()
        return self.ledger.lookup(
            request_id,
            token_ids,
            hashes=hashes,
            num_tokens=num_tokens,
            device_tokens=device_tokens,
            salt=salt,
            ranks=ranks,
        )

    def load(
        self, caches: Mapping[str, jax.Array], request_id: Hashable, block_tables: Mapping[str, Any]
    ) -> tuple[dict[str, jax.Array], Job]:
        """Starts to restore the hit of the last `lookup` into the request's blocks.

        All JAX work is issued when it returns: a step that takes the returned caches reads the restored
        blocks. Blocks that the device holds, and those that nothing needs, are left as they are.

        Args:
            caches: the device caches; those that change are donated.
            request_id: a request that was looked up and not loaded since.
            block_tables: block ids by place in the sequence, by group name; -1 is the null block, allowed
                where nothing is restored. They must reach the hit.

        Returns:
            The caches to go on with, and the job.

        Raises:
            ValueError: an unknown request or one without a hit to load, tables that do not fit, or caches
                unlike the registered ones. Then nothing changed.
        """
        self.check_open()
        self.mover.caches.check(caches)
        load = self.ledger.prepare_load(request_id, block_tables, num_blocks=self._num_blocks)
        try:
            caches, transfer = self.mover.load(caches, load.plan)
        except BaseException:
            self.ledger.complete_load(load, ok=False)
            self._revive()
            raise
        return caches, self.issued(request_id, "load", load, transfer)

    def extend(
        self,
        request_id: Hashable,
        token_ids: Any = None,
        *,
        hashes: Sequence[Any] | None = None,
        num_tokens: int | None = None,
    ) -> None:
        """Adds accepted tokens to a request; see `Ledger.extend`."""
        self.check_open()
        self.ledger.extend(request_id, token_ids, hashes=hashes, num_tokens=num_tokens)

    def next_cut(self, request_id: Hashable, position: int) -> int | None:
        """Returns where a request must end a step so that its states can be stored; see `Ledger.next_cut`."""
        self.check_open()
        return self.ledger.next_cut(request_id, position)

    def store(
        self,
        caches: Mapping[str, jax.Array],
        request_id: Hashable,
        block_tables: Mapping[str, Any],
        num_tokens: int,
        *,
        checkpoint: bool = False,
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

        Returns:
            The caches to go on with, and the job.

        Raises:
            ValueError: an unknown request, `num_tokens` beyond its tokens, tables that do not fit, or
                caches unlike the registered ones. Then nothing changed.
        """
        self.check_open()
        self.mover.caches.check(caches)
        self.see_ended()
        store = self.ledger.prepare_store(
            request_id, block_tables, num_tokens, checkpoint=checkpoint, num_blocks=self._num_blocks
        )
        try:
            caches, transfer = self.mover.store(caches, store.plan)
        except BaseException:
            self.ledger.complete_store(store, ok=False)
            self._revive()
            raise
        return caches, self.issued(request_id, "store", store, transfer)

    def finish(self, request_id: Hashable) -> None:
        """Forgets a request and releases what it kept. Its jobs go on.

        Raises:
            ValueError: the request is unknown or was finished before.
        """
        self.check_open()
        self.ledger.finish(request_id)

    # --- jobs -----------------------------------------------------------------------------------------

    def poll(self) -> list[JobResult]:
        """Returns the results of jobs that ended, each once, without waiting."""
        self.check_open()
        self.see_ended()
        told, self._ended = self._ended, []
        return told

    @overload
    def wait(self, job: Job) -> JobResult: ...

    @overload
    def wait(self, job: None = None) -> list[JobResult]: ...

    def wait(self, job: Job | None = None) -> JobResult | list[JobResult]:
        """Waits for a job, or for all of them.

        Args:
            job: a job of this offloader; its result can be had again and again. `None` waits for all.

        Returns:
            The job's result; or, for all, the results not told by `poll` or `wait` before.

        Raises:
            ValueError: the job is not one of this offloader.
        """
        self.check_open()
        if job is None:
            for open_job in list(self._jobs.values()):
                self._end(open_job)
            return self.poll()
        if job.result is None:
            if self._jobs.get(job.job_id) is not job:
                raise ValueError(f"`job` must be one of this offloader, got {job!r}")
            self._end(job)
        result = job.result
        assert result is not None, "a job that ended has a result"
        self._ended = [ended for ended in self._ended if ended is not result]
        return result

    def issued(self, request_id: Hashable, operation: str, work: Load | Store, transfer: Transfer) -> Job:
        """Takes on a move that was prepared in the ledger and issued, and returns its job."""
        job = Job(self._next_job, request_id, operation, work, transfer)
        self._next_job += 1
        self._jobs[job.job_id] = job
        if not work.plan.moves:
            self._end(job)
        return job

    # --- all of it ------------------------------------------------------------------------------------

    def namespace(self, salt: str | bytes = b"") -> bytes:
        """Returns the namespace of requests with this salt, for `invalidate`."""
        return self.ledger.namespace(salt)

    def invalidate(self, namespace: bytes | None = None) -> int:
        """Makes every chunk a miss, or those of one namespace, whatever is in flight.

        Returns:
            How many chunks were held.
        """
        self.check_open()
        return self.ledger.invalidate(namespace)

    def stats(self) -> Stats:
        """Returns what was done so far and what is held."""
        self.see_ended()
        counts, pool = self.ledger.counts, self.ledger.pool
        return Stats(
            budget_bytes=self._host_bytes,
            bytes_held=(pool.num_units - pool.num_free_units) * self.ledger.units.unit_bytes,
            resident_chunks=pool.num_resident,
            chunks_stored=counts.chunks_stored,
            bytes_stored=counts.bytes_stored,
            chunks_loaded=counts.chunks_loaded,
            bytes_loaded=counts.bytes_loaded,
            evicted_chunks=pool.counts.evicted,
            dropped_chunks=counts.chunks_dropped,
            refused_stores=pool.counts.refused,
            failed_jobs=counts.loads_failed + counts.stores_failed,
            lookups=counts.lookups,
            lookup_tokens=counts.lookup_tokens,
            hit_tokens=counts.hit_tokens,
            open_requests=self.ledger.num_requests,
            open_jobs=len(self._jobs),
            most_staged_bytes=self.mover.most_staged_bytes,
        )

    def check_integrity(self) -> None:
        """Recounts the books.

        Raises:
            AssertionError: they contradict each other.
        """
        self.ledger.check_integrity()

    def close(self) -> None:
        """Waits for the jobs under way and ends. A second call does nothing."""
        if self._closed:
            return
        for job in list(self._jobs.values()):
            self._end(job)
        self.mover.close()
        self._closed = True

    def __enter__(self) -> "Offloader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- parts ----------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raises a `ValueError` if the offloader was closed."""
        if self._closed:
            raise ValueError("an offloader must not be used after `close`")

    def see_ended(self) -> None:
        """Completes the jobs that ended, without waiting; `poll` tells of them."""
        for job in list(self._jobs.values()):
            if job.transfer.done():
                self._end(job)

    def _revive(self) -> None:
        """A pool that died with a program is made anew, and holds nothing."""
        if self.mover.revive():
            self.ledger.invalidate()

    def _end(self, job: Job) -> None:
        error = ""
        del self._jobs[job.job_id]
        try:
            job.transfer.wait()
        except Exception as failure:  # noqa: BLE001  # the edge of a job: whatever went wrong fails it
            error = f"{type(failure).__name__}: {failure}"
        work = job.work
        valid_tokens = None
        if isinstance(work, Load):
            self.ledger.complete_load(work, ok=not error)
            valid_tokens = work.device_tokens if error else work.hit_tokens
        else:
            self.ledger.complete_store(work, ok=not error)
        if error:
            self._revive()
        job.result = JobResult(
            job_id=job.job_id,
            request_id=job.request_id,
            operation=job.operation,
            ok=not error,
            num_chunks=work.plan.num_chunks,
            num_bytes=work.plan.num_bytes,
            valid_tokens=valid_tokens,
            error=error,
        )
        self._ended.append(job.result)
