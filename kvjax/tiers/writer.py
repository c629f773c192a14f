"""What goes down is written, and what was invalidated is deleted."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from kvjax.chunking import Chunking
from kvjax.tiers import frame
from kvjax.tiers.backlog import Backlog, keep
from kvjax.tiers.buffers import view_of
from kvjax.tiers.entries import EntryName
from kvjax.tiers.futures import GRACE_S, result_of
from kvjax.tiers.level import Level, Outgoing
from kvjax.tiers.tier import TierError, TierTimeoutError, TierUnavailableError

_DELETED_AT_A_TIME = 512
# How long, in seconds, who flushes sleeps between two looks at most.
_LOOKS_S = 0.05
_SHORTEST_WAIT_S = 0.001


class Writer:
    """Keeps every tier supplied, each by a thread of its own.

    The threads hold the lock while they look at the books, never while they copy, hash or wait.

    Args:
        chunking: the layout and its chunks.
        backlog: what waits.
        levels: the tiers.
    """

    def __init__(self, chunking: Chunking, backlog: Backlog, levels: Sequence[Level]):
        self._chunking = chunking
        self._backlog = backlog
        self._levels = levels
        self._changed = backlog.changed
        self._stopped = False
        self._threads = [
            threading.Thread(target=self._run, args=(level,), name=f"kvjax-tier-{level.index}-writer", daemon=True)
            for level in levels
        ]
        for thread in self._threads:
            thread.start()

    def flush(self, until: float | None, step: Callable[[], None]) -> bool:
        """Waits until nothing waits any more that a tier which is up could take. A tier that does nothing for long is
        given up. Called under the lock, which is free meanwhile.

        Args:
            until: by the monotonic clock; `None` for as long as it takes.
            step: called now and then.

        Returns:
            Whether nothing was left undone for good: no chunk that has left the pool failed to be written.
        """
        good = True
        undone = [level.num_undone for level in self._levels]
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
                    self._backlog.drop(level)
                    break
                if until is not None and now >= until:
                    return False
                self._changed.wait(_LOOKS_S if until is None else min(_LOOKS_S, until - now))
        return good and undone == [level.num_undone for level in self._levels]

    def stop(self) -> list[threading.Thread]:
        """Tells the threads to end, and returns them."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        return self._threads

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
                    self._backlog.not_written(level, level.in_hand)
            with self._changed:
                for item in level.in_hand:
                    self._backlog.release(level, item)
                level.in_hand = []
                level.num_writing -= 1
                self._changed.notify_all()

    def _next_work(self, level: Level) -> Callable[[], None]:
        namespace = level.clearing.next_to_clear()
        if namespace is not None:
            return partial(self._clear, level, namespace, level.clearing.times_hidden(namespace))
        level.in_hand = self._backlog.take(level)
        if level.in_hand:
            return partial(self._write, level, level.in_hand)
        return partial(self._check, level, *self._backlog.take_known(level))

    def _has_work(self, level: Level) -> bool:
        return level.health.is_up and bool(level.clearing.next_to_clear() or self._backlog.waits_for(level))

    def _write(self, level: Level, batch: list[Outgoing]) -> None:
        deadline = time.monotonic() + level.tier.timeout_s
        there = result_of(level.tier.exists([item.name for item in batch], deadline=deadline), deadline)
        known = [item for item, is_there in zip(batch, there, strict=True) if is_there]
        new = [item for item, is_there in zip(batch, there, strict=True) if not is_there]
        self._note(level, known, new=False)
        new = self._backlog.with_bytes(new)
        if new:
            self._put(level, new, deadline)

    def _check(self, level: Level, items: list[Outgoing], in_use: bool) -> None:
        """Looks whether a tier still has chunks, and uses them there if they are in use. What it has lost is written
        again: if a flush asks, or the tier is written through."""
        if not items:
            return
        deadline = time.monotonic() + level.tier.timeout_s
        ask = level.tier.touch if in_use else level.tier.exists
        try:
            there = result_of(ask([item.name for item in items], deadline=deadline), deadline)
        except BaseException:
            if not in_use:  # nobody knows: a flush looks for them once more, as for what the tier lacks
                with self._changed:
                    self._backlog.lost(level, items, wanted=True)
            raise
        lost = [item for item, is_there in zip(items, there, strict=True) if not is_there]
        with self._changed:
            level.health.answered()
            self._backlog.lost(level, lost, wanted=not in_use or level.tier.write == "through")

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
                    self._backlog.not_written(level, [item])
                    if not future.done():
                        keep(item)
        self._note(level, good[True], new=True)
        self._note(level, good[False], new=False)
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
                    keep(item)
            raise
        return futures

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

    def _note(self, level: Level, items: list[Outgoing], *, new: bool) -> None:
        """Counts entries that are in a tier."""
        if not items:
            return
        with self._changed:
            level.health.answered()
            self._backlog.written(level, items)
            if new:
                level.counts.chunks_written += len(items)
                level.counts.bytes_written += sum(item.name.num_bytes - frame.HEADER_BYTES for item in items)
            else:
                level.counts.chunks_known += len(items)

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
