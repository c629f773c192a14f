"""What comes up: entries that a promotion asked for are read, verified and put into the pool."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from kvjax.tiers import frame
from kvjax.tiers.buffers import Buffers, view_of
from kvjax.tiers.entries import EntryName
from kvjax.tiers.fetch import Fetch
from kvjax.tiers.futures import result_of
from kvjax.tiers.level import Level
from kvjax.tiers.pool_bytes import PoolBytes
from kvjax.tiers.tier import TierError

_THREADS_PER_TIER = 2
_MOST_AT_A_TIME = 16
_MOST_BYTES_AT_A_TIME = 16 * 2**20

# Says what a tier failed to do; called from the reader's threads.
OnFailure = Callable[[Level, BaseException], None]


@dataclass(slots=True, eq=False)
class Part:
    """Some rows of a fetch that come from one tier.

    Args:
        fetch: the fetch.
        rows: of it.
        names: parallel to `rows`: of the entries.
        units: parallel to `rows`: where they go, `(units_per_chunk,)` each.
        landing: rows that came and are put into the pool by others.
    """

    fetch: Fetch
    rows: list[int]
    names: list[EntryName]
    units: list[np.ndarray] = field(repr=False)
    landing: set[int] = field(default_factory=set)


class Reader:
    """Reads from every tier, by threads of its own.

    Args:
        bytes_of_pool: of the host pool.
        levels: the tiers.
        lock: the offloader's; it guards the levels' counts.
        buffers: memory for entries.
    """

    def __init__(self, bytes_of_pool: PoolBytes, levels: Sequence[Level], lock: threading.RLock, buffers: Buffers):
        self._bytes = bytes_of_pool
        self._buffers = buffers
        self._lock = lock
        self._waiting = [deque[Part]() for _ in levels]
        self._landed: deque[tuple[Fetch, int, int, np.ndarray, np.ndarray]] = deque()
        self._changed = threading.Condition()
        self._stopped = False
        self._threads = [
            threading.Thread(
                target=self._run, args=(level,), name=f"kvjax-tier-{level.index}-reader-{number}", daemon=True
            )
            for level in levels
            for number in range(_THREADS_PER_TIER)
        ]
        for thread in self._threads:
            thread.start()

    def read(self, level: Level, part: Part) -> None:
        """Begins to read rows of a fetch from a tier."""
        pieces = []
        most_bytes = min(_MOST_BYTES_AT_A_TIME, level.tier.max_pending_bytes // _THREADS_PER_TIER)
        start = num_bytes = 0
        for stop, name in enumerate(part.names, 1):
            num_bytes += name.num_bytes
            if stop - start == _MOST_AT_A_TIME or num_bytes >= most_bytes or stop == len(part.names):
                rows = slice(start, stop)
                pieces.append(Part(part.fetch, part.rows[rows], part.names[rows], part.units[rows]))
                start, num_bytes = stop, 0
        with self._changed:
            self._waiting[level.index].extend(pieces)
            self._changed.notify_all()

    def land(self) -> None:
        """Puts into the pool what came, where the reader's threads may not; called under the offloader's lock."""
        while self._landed:
            fetch, row, group_idx, units, memory = self._landed.popleft()
            payload = memory[frame.HEADER_BYTES :]
            fetch.land(row, lambda g=group_idx, u=units, p=payload: self._bytes.copy_in(g, u, p))
            self._buffers.give(memory)

    def stop(self) -> list[threading.Thread]:
        """Tells the threads to end, and returns them."""
        with self._changed:
            self._stopped = True
            for parts in self._waiting:
                for part in parts:
                    part.fetch.abandon("the offloader was closed")
            self._changed.notify_all()
        return self._threads

    # --- the threads ----------------------------------------------------------------------------------

    def _run(self, level: Level) -> None:
        waiting = self._waiting[level.index]
        while True:
            with self._changed:
                while not self._stopped and not waiting:
                    self._changed.wait()
                if self._stopped:
                    return
                part = waiting.popleft()
            try:
                self._read(level, part)
            except Exception as error:  # noqa: BLE001  # whatever a tier raises must not end the thread
                self._failed(level, error)
            for row in part.rows:
                if row not in part.landing and part.fetch.waits_for(row):
                    part.fetch.fail(row, f"{level.tier.name} could not be read")

    def _read(self, level: Level, part: Part) -> None:
        now = time.monotonic()
        deadline = min(part.fetch.deadline, now + level.tier.timeout_s)
        if part.fetch.done() or deadline <= now or not level.health.is_up:
            return
        memories = [self._buffers.take(name.num_bytes) for name in part.names]
        futures = level.tier.get(part.names, [view_of(memory) for memory in memories], deadline=deadline)
        part.fetch.watch(futures)
        num_bytes = num_failed = 0
        for at, future in enumerate(futures):
            if self._received(level, part, at, memories[at], future, deadline):
                num_bytes += part.names[at].num_bytes
            else:
                num_failed += 1
        with self._lock:
            took = time.monotonic() - now
            if not num_failed:
                level.read_speed.add(num_bytes, took)
            elif part.fetch.abandoned or took >= level.tier.timeout_s / 2:  # it would take at least so long
                level.read_speed.add(sum(name.num_bytes for name in part.names), took)

    def _received(
        self, level: Level, part: Part, at: int, memory: np.ndarray, future: Future[int], deadline: float
    ) -> bool:
        """Waits for one entry, verifies it and puts it into the pool."""
        name, row, tier = part.names[at], part.rows[at], level.tier.name
        try:
            length = result_of(future, deadline)
            if length != name.num_bytes:
                raise frame.BadFrameError("length")
            payload = frame.verify(view_of(memory), name)
        except KeyError:
            with self._lock:
                level.health.answered()
                level.counts.misses += 1
            part.fetch.fail(row, f"{tier} lost an entry")
        except frame.BadFrameError as error:
            with self._lock:
                level.found_bad(name, error.reason)
            part.fetch.fail(row, f"{tier} had a bad entry ({error.reason})")
            self._remove(level, name)
        except Exception as error:  # noqa: BLE001  # whatever a tier raises is a miss
            if not (part.fetch.abandoned and future.cancelled()):  # nobody wanted it any more
                self._failed(level, error)
            part.fetch.fail(row, f"{tier} failed: {error}" if isinstance(error, TierError) else f"{tier} failed")
            if not future.done():
                return False  # the memory may still be written to: nobody gets it any more
        else:
            with self._lock:
                level.health.answered()
                level.counts.chunks_read += 1
                level.counts.bytes_read += len(payload)
            if not self._bytes.any_thread:
                part.landing.add(row)
                self._landed.append((part.fetch, row, name.group_idx, part.units[at], memory))
                return True
            data = memory[frame.HEADER_BYTES :]
            part.fetch.land(row, lambda: self._bytes.copy_in(name.group_idx, part.units[at], data))
            self._buffers.give(memory)
            return True
        self._buffers.give(memory)
        return False

    def _remove(self, level: Level, name: EntryName) -> None:
        """Deletes a bad entry of a tier that is written to. Nobody waits: if it fails, it is found once more."""
        if level.writes:
            level.tier.delete([name], deadline=time.monotonic() + level.tier.timeout_s)

    def _failed(self, level: Level, error: BaseException) -> None:
        with self._lock:
            level.failed("reading", error)
