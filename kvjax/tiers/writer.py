"""What goes down: chunks that became resident or were evicted, and what was invalidated."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import numpy as np

from kvjax.chunking import Chunking
from kvjax.pool import Change, ChunkPool
from kvjax.tiers import frame
from kvjax.tiers.buffers import Buffers, view_of
from kvjax.tiers.entries import EntryName
from kvjax.tiers.futures import GRACE_S, result_of
from kvjax.tiers.level import Frame, Level, Outgoing
from kvjax.tiers.pool_bytes import PoolBytes
from kvjax.tiers.tier import TierError, TierTimeoutError, TierUnavailableError

_MOST_AT_A_TIME = 32
_MOST_BYTES_AT_A_TIME = 32 * 2**20
_DELETED_AT_A_TIME = 512
# How long, in seconds, who flushes sleeps between two looks at most.
_LOOKS_S = 0.05
_SHORTEST_WAIT_S = 0.001
# A chunk that is used in the pool all the time is touched in its tiers this often, in seconds.
_TOUCHED_AGAIN_S = 300.0
_TOUCHED_AT_A_TIME = 512
# Chunks wait for a level by their slots; when there are so many more of them than slots, most are gone.
_MOST_REFS_PER_SLOT = 4
_FEW_SLOTS = 1024


class Writer:
    """Keeps every tier supplied, each by a thread of its own.

    What `note` and `capture` do is done under the offloader's lock, by whoever calls it. The threads hold the lock
    while they look at the books, never while they copy, hash or wait.

    Args:
        chunking: the layout and its chunks.
        pool: the host pool.
        bytes_of_pool: its bytes.
        levels: the tiers.
        lock: the offloader's.
        buffers: memory for frames.
    """

    def __init__(
        self,
        chunking: Chunking,
        pool: ChunkPool,
        bytes_of_pool: PoolBytes,
        levels: Sequence[Level],
        lock: threading.RLock,
        buffers: Buffers,
    ):
        self._chunking = chunking
        self._pool = pool
        self._bytes = bytes_of_pool
        self._levels = levels
        self._buffers = buffers
        self._sizes = [frame.entry_bytes(size or 0) for size in chunking.chunk_bytes]
        self._where = np.zeros(pool.num_slots, np.uint8)  # by slot, the bits of the tiers that have its chunk
        self._counted = np.zeros(pool.num_slots, np.uint8)  # by slot, the bits of the tiers that were seen to have it
        self._touched_at = np.full(pool.num_slots, -np.inf)  # by slot, when its chunk was last used in the tiers
        self._evicted: list[tuple[Outgoing, int]] = []  # not copied yet, with the bits of the tiers that lack them
        self._changed = threading.Condition(lock)
        self._stopped = False
        self._threads = [
            threading.Thread(target=self._run, args=(level,), name=f"kvjax-tier-{level.index}-writer", daemon=True)
            for level in levels
        ]
        for thread in self._threads:
            thread.start()

    # --- called under the offloader's lock ------------------------------------------------------------

    def note(self, change: Change) -> None:
        """Takes in that chunks became resident, or that they leave the pool; it asks the pool of their slots only."""
        if change.kind == "stored":
            self._where[change.slots] = self._counted[change.slots] = 0
            self._touched_at[change.slots] = time.monotonic()
            self._want(change.slots, [level for level in self._levels if level.tier.write == "through"])
        elif change.reason == "evicted":
            self._note_evicted(change.slots)

    def came_from(self, slots: np.ndarray, levels: np.ndarray) -> None:
        """Notes from which tiers resident chunks came."""
        bits = np.left_shift(np.uint8(1), levels.astype(np.uint8))
        self._where[slots] |= bits
        self._counted[slots] |= bits

    def use(self, slots: np.ndarray) -> None:
        """Takes in that chunks are used in the pool: what tiers have of them must not become old there, and may be gone
        behind our back."""
        now = time.monotonic()
        due = slots[(now - self._touched_at[slots] > _TOUCHED_AGAIN_S) & (self._where[slots] > 0)]
        if len(due):
            self._touched_at[due] = now
            pairs = list(zip(due.tolist(), self._pool.epochs(due).tolist(), strict=True))
            for level in self._levels:
                level.uses.extend(pairs)
            self._changed.notify_all()

    def capture(self) -> None:
        """Copies chunks that were evicted and not written yet, before anything is written to their units."""
        evicted, self._evicted = self._evicted, []
        for item, bits in evicted:
            wanting = [level for level in self._levels if bits & int(level.bit)]
            takers = [level for level in wanting if self._has_room(level, item.name.num_bytes)]
            for level in wanting:
                level.counts.dropped += level not in takers
            copied = self._copied(item, len(takers)) if takers else None
            for level in takers:
                self._queue(level, item, copied)

    def want_all(self) -> None:
        """All that is in the pool is to be written to every tier that is written to and lacks it: what a tier had may
        be gone."""
        slots = self._pool.resident_slots()
        self._where[slots] = 0
        self._want(slots, [level for level in self._levels if level.writes])

    def read_ahead(self) -> None:
        """Where threads may not touch the pool, copies some of the chunks that are to be written."""
        if self._bytes.any_thread:
            return
        for level in self._levels:
            if level.health.is_up:
                for item in self._next_refs(level):
                    item.frame = self._copied(item)
                    level.frames.append(item)
                    self._changed.notify_all()

    def invalidate(self, namespace: bytes | None) -> None:
        """Entries of a namespace, or of all, are absent from now on, and are deleted in the background."""
        for level in self._levels:
            if namespace is None:
                level.clearing.hide_all()
            else:
                level.clearing.hide(namespace)
            # What waits was computed before, and would be written after the others were deleted.
            frames = list(level.frames)
            level.frames.clear()
            for item in frames:
                if namespace is None or item.name.namespace == namespace:
                    self._release(level, item)
                else:
                    level.frames.append(item)
        self._changed.notify_all()

    def wake(self) -> None:
        """Tells the threads that there may be something to do."""
        self._changed.notify_all()

    def flush(self, until: float | None, step: Callable[[], None]) -> bool:
        """Waits until nothing waits any more that a tier which is up could take; the lock is free meanwhile. A tier
        that does nothing for long is given up.

        Args:
            until: by the monotonic clock; `None` for as long as it takes.
            step: called now and then.

        Returns:
            Whether nothing was left undone.
        """
        good = True
        for level in self._levels:
            progress, since = level.progress, time.monotonic()
            while not level.idle:
                step()
                now = time.monotonic()
                if level.progress != progress:
                    progress, since = level.progress, now
                hangs = now - since > 2 * level.tier.timeout_s + GRACE_S
                if hangs or (not level.health.is_up and not level.num_writing):
                    good = False
                    self._drop(level)
                    break
                if until is not None and now >= until:
                    return False
                self._changed.wait(_LOOKS_S if until is None else min(_LOOKS_S, until - now))
        return good

    def stop(self) -> list[threading.Thread]:
        """Tells the threads to end, and returns them."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        return self._threads

    # --- parts, under the lock ------------------------------------------------------------------------

    def _want(self, slots: np.ndarray, levels: Sequence[Level]) -> None:
        if len(slots) and levels:
            epochs = self._pool.epochs(slots)
            for level in levels:
                level.refs.extend(zip(slots.tolist(), epochs.tolist(), strict=True))
                if len(level.refs) > _MOST_REFS_PER_SLOT * max(_FEW_SLOTS, self._pool.num_slots):
                    self._forget_refs(level)
            self._changed.notify_all()

    def _forget_refs(self, level: Level) -> None:
        """Of what waits for a level, keeps what is still to be had, once: one that is down for long has many others."""
        slots, epochs = np.array(level.refs, np.int64).T
        held = self._pool.still_held(slots, epochs)
        level.refs.clear()
        level.refs.extend(dict.fromkeys(zip(slots[held].tolist(), epochs[held].tolist(), strict=True)))

    def _note_evicted(self, slots: np.ndarray) -> None:
        writable = np.uint8(sum(int(level.bit) for level in self._levels if level.writes))
        lacking = writable & ~self._where[slots]
        wanted = lacking > 0
        if wanted.any():
            bits = dict(zip(slots[wanted].tolist(), lacking[wanted].tolist(), strict=True))
            self._evicted += [(item, bits[item.slot]) for item in self._outgoing(slots[wanted])]

    def _outgoing(self, slots: np.ndarray) -> list[Outgoing]:
        """What is to be written of chunks; those without a namespace of their own are left out."""
        pool, found = self._pool, []
        groups = pool.groups(slots)
        for g in np.flatnonzero(np.bincount(groups)).tolist() if len(slots) else ():
            some = slots[groups == g]
            columns = (
                some.tolist(),
                pool.keys(some),
                pool.names(some),
                pool.chunk_idxs(some).tolist(),
                pool.epochs(some).tolist(),
                pool.units(some),
            )
            found += [
                Outgoing(EntryName(namespace, key, self._sizes[g]), chunk_idx, slot, epoch, units)
                for slot, key, namespace, chunk_idx, epoch, units in zip(*columns, strict=True)
                if namespace is not None
            ]
        return found

    def _has_room(self, level: Level, num_bytes: int) -> bool:
        return level.health.is_up and level.pending_bytes + num_bytes <= level.tier.max_pending_bytes

    def _copied(self, item: Outgoing, users: int = 1) -> Frame:
        """A new frame with the chunk's bytes."""
        memory = self._buffers.take(item.name.num_bytes)
        self._bytes.copy_out(item.name.group_idx, item.units, memory[frame.HEADER_BYTES :])
        return Frame(memory, users)

    def _queue(self, level: Level, item: Outgoing, copied: Frame | None) -> None:
        level.frames.append(replace(item, frame=copied))
        level.pending_bytes += item.name.num_bytes
        self._changed.notify_all()

    def _next_refs(self, level: Level) -> list[Outgoing]:
        """The next chunks of the pool that are to be written to a level; they count as pending from now on."""
        chosen: list[Outgoing] = []
        room = min(_MOST_BYTES_AT_A_TIME, level.tier.max_pending_bytes - level.pending_bytes)
        while level.refs and not chosen and room > 0:
            some = [level.refs.popleft() for _ in range(min(_MOST_AT_A_TIME, len(level.refs)))]
            slots, epochs = np.array(some, np.int64).T
            good = self._pool.still_held(slots, epochs) & ((self._where[slots] & level.bit) == 0)
            for item in self._outgoing(slots[good]):
                if level.clearing.is_hidden(item.name.namespace):
                    continue
                if room > 0:
                    chosen.append(item)
                    room -= item.name.num_bytes
                    level.pending_bytes += item.name.num_bytes
                else:
                    level.refs.appendleft((item.slot, item.epoch))
        return chosen

    def _drop(self, level: Level) -> None:
        """Forgets what waits to be written to a level that is down; what is in the pool is tried when it leaves."""
        level.counts.dropped += len(level.frames)
        level.refs.clear()
        while level.frames:
            self._release(level, level.frames.popleft())

    def _release(self, level: Level, item: Outgoing) -> None:
        """A level has done with a chunk."""
        level.pending_bytes -= item.name.num_bytes
        if item.frame is not None:
            item.frame.users -= 1
            if not item.frame.users:
                self._buffers.give(item.frame.memory)

    # --- the threads ----------------------------------------------------------------------------------

    def _run(self, level: Level) -> None:
        while True:
            with self._changed:
                while not self._stopped and not self._has_work(level):
                    left = level.health.pause_s or level.clearing.clears_in_s
                    self._changed.wait(None if left is None else max(left, _SHORTEST_WAIT_S))
                if self._stopped:
                    return
                work = self._next_work(level)
                level.num_writing += 1
            try:
                work()
            except BaseException as error:  # noqa: BLE001  # whatever a tier raises must not end the thread
                with self._changed:
                    level.failed("writing", error)
            with self._changed:
                for item in level.in_hand:
                    self._release(level, item)
                level.in_hand = []
                level.num_writing -= 1
                self._changed.notify_all()

    def _next_work(self, level: Level) -> Callable[[], None]:
        namespace = level.clearing.next_to_clear()
        if namespace is not None:
            return partial(self._clear, level, namespace, level.clearing.times_hidden(namespace))
        level.in_hand = self._take(level)
        if level.in_hand or not level.uses:
            return partial(self._write, level, level.in_hand)
        pairs = [level.uses.popleft() for _ in range(min(_TOUCHED_AT_A_TIME, len(level.uses)))]
        return partial(self._touch, level, *np.array(pairs, np.int64).T)

    def _has_work(self, level: Level) -> bool:
        refs = level.refs and self._bytes.any_thread
        return bool(level.health.is_up and (level.clearing.next_to_clear() or level.frames or refs or level.uses))

    def _take(self, level: Level) -> list[Outgoing]:
        """Some distinct chunks to write: first those that left the pool."""
        batch: dict[EntryName, Outgoing] = {}
        num_bytes = 0
        while level.frames and len(batch) < _MOST_AT_A_TIME and num_bytes < _MOST_BYTES_AT_A_TIME:
            item = level.frames.popleft()
            num_bytes += item.name.num_bytes
            hidden = level.clearing.is_hidden(item.name.namespace)
            level.counts.dropped += hidden
            if hidden or item.name in batch:
                self._release(level, item)
            else:
                batch[item.name] = item
        if not batch and self._bytes.any_thread:
            for item in self._next_refs(level):
                if batch.setdefault(item.name, item) is not item:
                    self._release(level, item)
        return list(batch.values())

    def _write(self, level: Level, batch: list[Outgoing]) -> None:
        if not batch:
            return
        deadline = time.monotonic() + level.tier.timeout_s
        there = result_of(level.tier.exists([item.name for item in batch], deadline=deadline), deadline)
        known = [item for item, is_there in zip(batch, there, strict=True) if is_there]
        new = [item for item, is_there in zip(batch, there, strict=True) if not is_there]
        self._written(level, known, new=False)
        new = self._with_bytes(new)
        if new:
            self._put(level, new, deadline)

    def _touch(self, level: Level, slots: np.ndarray, epochs: np.ndarray) -> None:
        """Uses the entries of chunks that a tier has; those that it has lost are written again."""
        with self._changed:
            good = self._pool.still_held(slots, epochs) & ((self._where[slots] & level.bit) > 0)
            items = self._outgoing(slots[good])
        if not items:
            return
        deadline = time.monotonic() + level.tier.timeout_s
        there = result_of(level.tier.touch([item.name for item in items], deadline=deadline), deadline)
        with self._changed:
            level.health.answered()
            lost = [item for item, is_there in zip(items, there, strict=True) if not is_there]
            if lost:
                slots, epochs = np.array([(item.slot, item.epoch) for item in lost], np.int64).T
                slots = slots[self._pool.still_held(slots, epochs)]
                self._where[slots] &= ~level.bit
                if level.tier.write == "through":
                    self._want(slots, [level])

    def _put(self, level: Level, batch: list[Outgoing], deadline: float) -> None:
        started = time.monotonic()
        frames = [self._finished(item) for item in batch]
        with self._changed:
            for namespace in {item.name.namespace for item in batch}:
                level.clearing.note_used(namespace)
        futures = self._begun(level, batch, frames, deadline)
        good: dict[bool, list[Outgoing]] = {True: [], False: []}
        num_bytes = num_failed = 0
        for item, future in zip(batch, futures, strict=True):
            try:
                good[result_of(future, deadline)].append(item)
                num_bytes += item.name.num_bytes
            except BaseException as error:  # noqa: BLE001  # whatever a tier raises is a failure to write
                num_failed += 1
                with self._changed:
                    if isinstance(error, (TierTimeoutError, TierUnavailableError)) or not isinstance(error, TierError):
                        level.clearing.may_turn_up([item.name])
                    level.failed("writing", error)
                    if not future.done():
                        _keep(item)
        self._written(level, good[True], new=True)
        self._written(level, good[False], new=False)
        if not num_failed:
            level.write_speed.add(num_bytes, time.monotonic() - started)

    def _begun(
        self, level: Level, batch: list[Outgoing], frames: list[memoryview], deadline: float
    ) -> list[Future[bool]]:
        """Begins to write; if the tier does not keep to what it is asked for, all may have been written."""
        names = [item.name for item in batch]
        try:
            futures = list(level.tier.put(names, frames, deadline=deadline))
            if len(futures) != len(names):
                raise TierError(f"{len(futures)} futures for {len(names)} entries")
        except BaseException:
            with self._changed:
                level.clearing.may_turn_up(names)
                for item in batch:
                    _keep(item)
            raise
        return futures

    def _with_bytes(self, batch: list[Outgoing]) -> list[Outgoing]:
        """Copies what is still in the pool; a chunk that left it meanwhile may have been copied in part, and was
        captured when it left."""
        fresh = [item for item in batch if item.frame is None]
        for item in fresh:
            item.frame = self._copied(item)
        if not fresh:
            return batch
        slots = np.array([item.slot for item in fresh])
        epochs = np.array([item.epoch for item in fresh])
        with self._changed:
            held = self._pool.still_held(slots, epochs)
        lost = {item for item, is_held in zip(fresh, held.tolist(), strict=True) if not is_held}
        return [item for item in batch if item not in lost]

    def _finished(self, item: Outgoing) -> memoryview:
        assert item.frame is not None, "its bytes were copied"
        entry = view_of(item.frame.memory)
        g = item.name.group_idx
        frame.write_header(
            entry,
            item.name,
            group_name=self._chunking.layout.groups[g].name,
            chunk_idx=item.chunk_idx,
            tokens_per_chunk=self._chunking.tokens_per_chunk[g] or 0,
        )
        return entry

    def _written(self, level: Level, items: list[Outgoing], *, new: bool) -> None:
        """Notes that entries are in a tier."""
        if not items:
            return
        slots, epochs = np.array([(item.slot, item.epoch) for item in items], np.int64).T
        with self._changed:
            level.health.answered()
            level.clearing.turned_up(item.name for item in items)
            if new:
                level.counts.chunks_written += len(items)
                level.counts.bytes_written += sum(item.name.num_bytes - frame.HEADER_BYTES for item in items)
            held = self._pool.still_held(slots, epochs)
            if not new:
                seen = held & ((self._counted[slots] & level.bit) > 0)  # and counted before
                level.counts.chunks_known += len(items) - int(np.count_nonzero(seen))
            self._where[slots[held]] |= level.bit
            self._counted[slots[held]] |= level.bit

    def _clear(self, level: Level, namespace: bytes, times: int) -> None:
        """Deletes what a tier has of a namespace, which was hidden so many times."""
        began_at = time.monotonic()
        with self._changed:
            names = list(level.clearing.uncertain.get(namespace, ()))
        for name in level.tier.list(namespace):
            names.append(name)
            if len(names) >= _DELETED_AT_A_TIME:
                self._delete(level, names)
                names = []
        self._delete(level, names)
        with self._changed:
            level.health.answered()
            level.clearing.cleared(namespace, times, began_at)

    def _delete(self, level: Level, names: list[EntryName]) -> None:
        deadline = time.monotonic() + level.tier.timeout_s
        if names:
            num_deleted = result_of(level.tier.delete(names, deadline=deadline), deadline)
            with self._changed:
                level.counts.cleared += num_deleted


def _keep(item: Outgoing) -> None:
    """The tier may still read a chunk's frame: nobody gets its memory any more."""
    if item.frame is not None:
        item.frame.users += 1
