"""An offloader whose loads and stores ride in the user's own steps."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from kvjax._checks import instance, integer, shown
from kvjax.fused.host import bucket_of, pad_ids, rows_sharding
from kvjax.fused.layer_rows import LayerRows, rows_of
from kvjax.fused.transfers import Arriving
from kvjax.handles import Load, Store
from kvjax.mover import Part, Transfer
from kvjax.observe.progress import progress_bar
from kvjax.offloader import Job, Offloader
from kvjax.plan import GroupMoves

Caches = Mapping[str, jax.Array]
ByGroup = dict[str, Any]


@dataclass(slots=True, eq=False)
class Step:
    """One step that moves blocks, between `FusedSteps.begin` and its end.

    Args:
        caches: what the step must take.
        arriving: by group name: an `Arriving` whose rows are a dictionary by leaf name.
        leaving: by group name: ids for `collect`.
        request_id: the request.
        load: what arrives, if anything does.
        store: what leaves.
        loaded: a load too large for the buckets, which was issued on its own.
        rides: whether what is stored leaves in the step; otherwise it is too large for the buckets.
        owner: the `FusedSteps` that it belongs to.
        is_open: whether it was neither ended nor abandoned.
    """

    caches: dict[str, jax.Array] = field(repr=False)
    arriving: ByGroup = field(repr=False)
    leaving: ByGroup = field(repr=False)
    request_id: Hashable
    load: Load | None = field(repr=False)
    store: Store = field(repr=False)
    loaded: Transfer | None = field(repr=False)
    rides: bool
    owner: "FusedSteps" = field(repr=False)
    is_open: bool = True


class FusedSteps:
    """Plans, for each step of a request, what arrives with it and what leaves with it.

    The step is the user's: it takes `arriving` and `leaving`, and calls `kvjax.fused` for each layer. Programs are
    compiled for one arriving and one leaving bucket at a time, the same for all groups: `warm_up` runs all pairs.
    What a bucket cannot hold moves as by `Offloader.load` and `Offloader.store`, before or after the step.

    Its thread waits for the rows that leave and copies them into the pool. Close it before the offloader.

    Args:
        offloader: keeps the chunks. Its host pool must be in the process's own memory: `transfer="staged"` on
            accelerators, either one on the CPU backend.
        arriving_buckets: blocks of a group that a step can restore; 0 is for steps that restore nothing.
        leaving_buckets: blocks of a group that a step can store; 0 is for steps that store nothing.

    Raises:
        ValueError: a pool in pinned memory, caches that are split over blocks or layers, or buckets that are not
            distinct non-negative ints with 0 among them.
    """

    def __init__(
        self,
        offloader: Offloader,
        *,
        arriving_buckets: Sequence[int] = (0, 8, 64),
        leaving_buckets: Sequence[int] = (0, 8),
    ):
        self._offloader = instance(offloader, Offloader, "offloader")
        mover = offloader.mover
        if mover.view is not None:
            raise ValueError("`offloader` must have been made for caches of this process only, got some of several")
        if mover.host_memory is None:
            raise ValueError("`offloader` must have been made with `transfer='staged'`, got one with a pinned pool")
        self._memory = mover.host_memory
        self._arriving_buckets = _buckets("arriving_buckets", arriving_buckets)
        self._leaving_buckets = _buckets("leaving_buckets", leaving_buckets)
        chunking = offloader.chunking
        self._names = {g: chunking.layout.groups[g].name for g in chunking.layout.cached}
        self._rows = {g: LayerRows(mover.caches, chunking, offloader.ledger.units, g) for g in self._names}
        self._num_blocks = {g: mover.caches.num_blocks(g) for g in self._names}
        self._shardings = {
            name: rows_sharding(leaf.struct(), stacked=leaf.spec.layers is not None)
            for name, leaf in mover.caches.leaves.items()
        }
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="kvjax-fused")
        self._closed = False

    def begin(
        self,
        caches: Caches,
        request_id: Hashable,
        block_tables: Mapping[str, Any],
        num_tokens: int,
        *,
        load: bool = False,
        checkpoint: bool = False,
    ) -> Step:
        """Prepares a step that computes a request's tokens up to `num_tokens`.

        Args:
            caches: the device caches; those that change before the step are donated.
            request_id: a request that was looked up.
            block_tables: block ids by place in the sequence, by group name; they cover `num_tokens` tokens.
            num_tokens: tokens whose cache is written once the step has run, at most those the request has.
            load: the step restores the hit of the request's last lookup before its layers read.
            checkpoint: see `Offloader.store`.

        Returns:
            The step, which must be ended by `end` or `abandon`.

        Raises:
            ValueError: see `Offloader.load` and `Offloader.store`. Then nothing changed.
        """
        offloader = self._offloader
        self._check_not_closed()
        offloader.mover.check(caches)
        offloader.see_ended()
        store = offloader.prepare_store(request_id, block_tables, num_tokens, checkpoint=checkpoint)
        loading = None
        try:
            if load:
                loading = offloader.prepare_load(request_id, block_tables)
                offloader.ledger.depends(store, loading)
            moves = loading.plan.moves if loading else ()
            loaded, current = None, dict(caches)
            bucket = self._bucket(moves, self._arriving_buckets)
            arriving = self._arriving(moves if bucket is not None else (), bucket or 0)
            leaving_bucket = self._bucket(store.plan.moves, self._leaving_buckets)
            leaving = self._leaving(store.plan.moves if leaving_bucket is not None else (), leaving_bucket or 0)
            if loading and bucket is None:
                current, loaded = offloader.mover.load(caches, loading.plan)
        except BaseException:
            self._roll_back(loading, store)
            raise
        rides = leaving_bucket is not None
        return Step(current, arriving, leaving, request_id, loading, store, loaded, rides, self)

    def end(self, step: Step, caches: Caches, rows: ByGroup) -> tuple[dict[str, jax.Array], list[Job]]:
        """Takes what the step returned.

        Args:
            step: as `begin` returned it.
            caches: the device caches as the step returned them.
            rows: by group name and leaf name, what `collect` returned: `(bucket, *block_shape)`, for stacked leaves
                a list of these by layer or one array `(layers, bucket, *block_shape)`. Groups may be missing where
                nothing leaves.

        Returns:
            The caches to go on with, and the jobs of the offloader: of the load, if there was one, and of the store.

        Raises:
            ValueError: a step that was ended before, rows missing or of another shape, or caches unlike the
                registered ones. Then the step is still open.
        """
        offloader = self._offloader
        self._check_not_closed()
        self._check_open(step)
        offloader.mover.check(caches)
        collected = self._collected(step, rows)
        step.is_open = False
        updated, jobs = dict(caches), []
        if step.load is not None:
            arrived = step.loaded or Transfer(self._written(step.load, caches))
            jobs.append(offloader.issued(step.request_id, "load", step.load, arrived))
        if step.rides:
            stored = Transfer([self._kept(step, moves, arrays) for moves, arrays in collected])
        else:
            try:
                updated, stored = offloader.mover.store(caches, step.store.plan)
            except BaseException:
                self._roll_back(None, step.store)
                raise
        jobs.append(offloader.issued(step.request_id, "store", step.store, stored))
        return updated, jobs

    def abandon(self, step: Step) -> None:
        """Ends a step that did not run, or failed. Nothing is stored, which counts as a failed job if anything was to
        be; what it was to restore can be looked up again.

        Raises:
            ValueError: the step was ended before.
        """
        self._check_open(step)
        step.is_open = False
        self._roll_back(step.load, step.store)

    def warm_up(
        self,
        caches: Caches,
        run: Callable[[Caches, ByGroup, ByGroup], Caches],
        *,
        show_progress: bool | None = None,
    ) -> Caches:
        """Runs a step for every pair of buckets, with nothing that moves, so that no later step compiles.

        Args:
            caches: the device caches.
            run: runs the step with caches, `arriving` and `leaving`, and returns the caches.
            show_progress: a progress bar on standard error; `None`: where that is a terminal.

        Returns:
            The caches to go on with.
        """
        pairs = [(a, b) for a in self._arriving_buckets for b in self._leaving_buckets]
        with progress_bar("compiling steps", len(pairs), show=show_progress) as advance:
            for arriving, leaving in pairs:
                caches = run(caches, self._arriving((), arriving), self._leaving((), leaving))
                advance(1)
        return caches

    def close(self) -> None:
        """Waits for what is leaving, and ends the thread. A second call does nothing."""
        self._closed = True
        self._worker.shutdown(wait=True)

    def __enter__(self) -> "FusedSteps":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _arriving(self, moves: Sequence[GroupMoves], bucket: int) -> ByGroup:
        by_group = {move.group_idx: move for move in moves}
        nothing = np.empty(0, np.int32)
        arrays: dict[str, dict[str, np.ndarray]] = {}
        for g, name in self._names.items():
            move = by_group.get(g) or GroupMoves(g, 0, nothing, nothing[:, None], nothing[:, None])
            arrays[name] = self._rows[g].from_pool(self._memory, move, bucket)
        places = {name: {leaf: self._shardings[leaf] for leaf in rows} for name, rows in arrays.items()}
        on_host = jax.device_put(arrays, places)
        made = {}
        for g, name in self._names.items():
            ids = rows_of(by_group[g]) if g in by_group else nothing
            padded = pad_ids(ids, bucket=bucket, num_blocks=self._num_blocks[g])
            made[name] = Arriving(on_host[name], padded, np.int32(len(ids)))
        return made

    def _leaving(self, moves: Sequence[GroupMoves], bucket: int) -> ByGroup:
        by_group = {move.group_idx: rows_of(move) for move in moves}
        nothing = np.empty(0, np.int32)
        return {
            name: pad_ids(by_group.get(g, nothing), bucket=bucket, num_blocks=self._num_blocks[g])
            for g, name in self._names.items()
        }

    def _collected(self, step: Step, rows: ByGroup) -> list[tuple[GroupMoves, dict[str, list[jax.Array]]]]:
        collected = []
        for moves in step.store.plan.moves if step.rides else ():
            name = self._names[moves.group_idx]
            if not isinstance(rows, Mapping) or name not in rows:
                got = sorted(map(str, rows)) if isinstance(rows, Mapping) else repr(rows)
                raise ValueError(f"`rows` must hold group {name!r}, of which blocks leave, got {got}")
            bucket = len(step.leaving[name])
            collected.append((moves, self._rows[moves.group_idx].checked(rows[name], bucket, name)))
        return collected

    def _keep(self, moves: GroupMoves, bucket: int, arrays: dict[str, list[jax.Array]]) -> None:
        whole = {}
        for name, layers in arrays.items():
            parts = [np.ascontiguousarray(np.asarray(array)) for array in layers]
            whole[name] = parts[0] if len(parts) == 1 else np.stack(parts)
        self._rows[moves.group_idx].to_pool(self._memory, moves, bucket, whole)

    def _bucket(self, moves: Sequence[GroupMoves], buckets: tuple[int, ...]) -> int | None:
        most = max((len(rows_of(move)) for move in moves), default=0)
        return bucket_of(most, buckets) if most <= max(buckets) else None

    def _kept(self, step: Step, moves: GroupMoves, arrays: dict[str, list[jax.Array]]) -> Part:
        bucket = len(step.leaving[self._names[moves.group_idx]])
        return Part(moves.group_idx, 0, moves.num_chunks, self._worker.submit(self._keep, moves, bucket, arrays))

    def _written(self, load: Load, caches: Caches) -> list[Part]:
        """What the step wrote for a load, leaf by leaf."""
        leaves = self._offloader.mover.caches.group_leaves
        return [
            Part(moves.group_idx, 0, moves.num_chunks, _Arrived(caches[name]))
            for moves in load.plan.moves
            for name in leaves[moves.group_idx]
        ]

    def _roll_back(self, load: Load | None, store: Store | None) -> None:
        if store is not None:
            self._offloader.ledger.complete_store(store, ok=False)
        if load is not None:
            self._offloader.ledger.cancel_load(load)

    def _check_not_closed(self) -> None:
        self._offloader.check_open()
        if self._closed:
            raise ValueError("fused steps must not be used after `close`; a step that is open can be abandoned")

    def _check_open(self, step: Step) -> None:
        if not isinstance(step, Step) or step.owner is not self:
            raise ValueError(f"`step` must be one that `begin` of these fused steps returned, got {shown(step)}")
        if not step.is_open:
            raise ValueError("`step` must not be ended twice")


class _Arrived:
    """A cache that a step returned. One that was donated since shares the fate of what took it over."""

    def __init__(self, cache: Any):
        self._cache = cache

    def is_ready(self) -> bool:
        return self._cache.is_deleted() or self._cache.is_ready()

    def block_until_ready(self) -> None:
        if not self._cache.is_deleted():
            self._cache.block_until_ready()


def _buckets(name: str, buckets: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(buckets, Sequence) or isinstance(buckets, str):
        raise ValueError(f"`{name}` must be a list or tuple of numbers of blocks, got {shown(buckets)}")
    sizes = tuple(sorted(integer(bucket, name, at_least=0) for bucket in buckets))
    if len(set(sizes)) < len(sizes) or 0 not in sizes:
        raise ValueError(f"`{name}` must be distinct numbers of blocks with 0 among them, got {tuple(buckets)}")
    return sizes
