"""What comes up: entries that a promotion asked for are read, verified and put into the pool."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from kvjax.tiers import frame
from kvjax.tiers.buffers import Buffers, view_of
from kvjax.tiers.entries import EntryName
from kvjax.tiers.fetch import Fetch
from kvjax.tiers.futures import GRACE_S
from kvjax.tiers.level import Level
from kvjax.tiers.pool_bytes import PoolBytes
from kvjax.tiers.tier import TierError, TierTimeoutError

_log = logging.getLogger(__name__)

_THREADS_PER_TIER = 2
_MOST_AT_A_TIME = 16
_MOST_BYTES_AT_A_TIME = 16 * 2**20

# Says what a tier failed to do; called from the reader's threads.
OnFailure = Callable[[Level, BaseException], None]


@dataclass(slots=True, eq=False)
class Run:
    """All that a fetch wants of one tier.

    Args:
        started_at: by the monotonic clock, in seconds.
        num_left: rows that neither came nor failed.
        num_bytes: of all its entries.
        good: whether none has failed.
    """

    started_at: float
    num_left: int
    num_bytes: int
    good: bool = True


@dataclass(slots=True, eq=False)
class Part:
    """Some rows of a fetch that come from one tier.

    Args:
        fetch: the fetch.
        rows: of it.
        names: parallel to `rows`: of the entries.
        units: parallel to `rows`: where they go, `(units_per_chunk,)` each.
        run: of which it is a part.
        landing: rows that came and are put into the pool by others.
    """

    fetch: Fetch
    rows: list[int]
    names: list[EntryName]
    units: list[np.ndarray] = field(repr=False)
    run: Run | None = None
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
        run = Run(time.monotonic(), len(part.rows), sum(name.num_bytes for name in part.names))
        most_bytes = min(_MOST_BYTES_AT_A_TIME, level.tier.max_pending_bytes // _THREADS_PER_TIER)
        start = num_bytes = 0
        for stop, name in enumerate(part.names, 1):
            num_bytes += name.num_bytes
            if stop - start == _MOST_AT_A_TIME or num_bytes >= most_bytes or stop == len(part.names):
                rows = slice(start, stop)
                pieces.append(Part(part.fetch, part.rows[rows], part.names[rows], part.units[rows], run))
                start, num_bytes = stop, 0
        with self._changed:
            self._waiting[level.index].extend(pieces)
            self._changed.notify_all()

    def land(self) -> None:
        """Puts into the pool what came, where the reader's threads may not; called under the offloader's lock."""
        while self._landed:
            fetch, row, group_idx, units, memory = self._landed.popleft()
            payload = memory[frame.HEADER_BYTES :]
            try:
                fetch.land(row, lambda g=group_idx, u=units, p=payload: self._bytes.copy_in(g, u, p))
            except Exception:  # noqa: BLE001  # a program failed: the chunk is a miss
                _log.exception("a chunk of a lower tier could not be put into the host pool")
            fetch.end([row])
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
            except BaseException as error:  # noqa: BLE001  # whatever a tier raises must not end the thread
                self._failed(level, error)
            ended = [row for row in part.rows if row not in part.landing]
            for row in ended:
                part.fetch.fail(row, f"{level.tier.name} could not be read")  # if nothing else became of it
            part.fetch.end(ended)

    def _read(self, level: Level, part: Part) -> None:
        now = time.monotonic()
        deadline = min(part.fetch.deadline, now + level.tier.timeout_s)
        if part.fetch.done() or deadline <= now or not level.health.is_up:
            return
        memories = [self._buffers.take(name.num_bytes) for name in part.names]
        futures = level.tier.get(part.names, [view_of(memory) for memory in memories], deadline=deadline)
        part.fetch.watch(futures)
        outcomes = Outcomes(len(futures))
        for at, future in enumerate(futures):
            future.add_done_callback(partial(self._received, part, at, memories[at], outcomes))
        if not outcomes.wait(deadline - time.monotonic() + GRACE_S):
            for future in futures:
                future.cancel()
        self._account(level, part, outcomes.all())

    def _received(self, part: Part, at: int, memory: np.ndarray, outcomes: "Outcomes", future: Future[int]) -> None:
        """Verifies an entry and puts it into the pool, in the thread that read it, while its bytes are at hand. Then
        others may have the memory: if the future never ends, nobody does."""
        lands_later = False
        try:
            if future.result() != len(memory):
                raise frame.BadFrameError("length")
            frame.verify(view_of(memory), part.names[at])
            data, row, g = memory[frame.HEADER_BYTES :], part.rows[at], part.names[at].group_idx
            if self._bytes.any_thread:
                part.fetch.land(row, lambda: self._bytes.copy_in(g, part.units[at], data))
            else:
                part.landing.add(row)
                lands_later = True
                self._landed.append((part.fetch, row, g, part.units[at], memory))
        except BaseException as error:  # noqa: BLE001  # whatever a tier raises is a miss
            outcomes.note(at, error)
        else:
            outcomes.note(at, None)
        if not lands_later:
            self._buffers.give(memory)

    def _account(self, level: Level, part: Part, outcomes: list[BaseException | None]) -> None:
        """Counts what became of a part, and gives up the rows that did not come."""
        good = [name.num_bytes for name, outcome in zip(part.names, outcomes, strict=True) if outcome is None]
        tier, bad = level.tier.name, []
        with self._lock:
            if good:
                level.health.answered()
                level.counts.chunks_read += len(good)
                level.counts.bytes_read += sum(good) - len(good) * frame.HEADER_BYTES
            _measure(level, part, len(good) == len(outcomes))
            for name, row, outcome in zip(part.names, part.rows, outcomes, strict=True):
                if isinstance(outcome, KeyError):
                    level.health.answered()
                    level.counts.misses += 1
                    part.fetch.fail(row, f"{tier} lost an entry")
                elif isinstance(outcome, frame.BadFrameError):
                    level.found_bad(name, outcome.reason)
                    part.fetch.fail(row, f"{tier} had a bad entry ({outcome.reason})")
                    bad.append(name)
                elif outcome is not None:
                    if not (part.fetch.abandoned and isinstance(outcome, CancelledError)):  # nobody wanted it any more
                        level.failed("reading", outcome)
                    told = f": {outcome}" if isinstance(outcome, TierError) else ""
                    part.fetch.fail(row, f"{tier} failed{told}")
        self._remove(level, bad)

    def _remove(self, level: Level, names: list[EntryName]) -> None:
        """Deletes bad entries of a tier that is written to. Nobody waits: if it fails, they are found once more."""
        if names and level.writes:
            level.tier.delete(names, deadline=time.monotonic() + level.tier.timeout_s)

    def _failed(self, level: Level, error: BaseException) -> None:
        with self._lock:
            level.failed("reading", error)


def _measure(level: Level, part: Part, good: bool) -> None:
    """Takes in how long all that a fetch wants of a tier took, once the last part of it has ended. One that was given
    up, or failed late, would have taken at least so long."""
    run = part.run
    assert run is not None, "it was begun by `Reader.read`"
    run.num_left -= len(part.rows)
    run.good = run.good and good
    took_s = time.monotonic() - run.started_at
    if not run.num_left and (run.good or part.fetch.abandoned or took_s >= level.tier.timeout_s / 2):
        level.read_speed.add(run.num_bytes, took_s)


class Outcomes:
    """What became of some entries: `None` of those that came, or why they did not.

    Args:
        num_entries: how many.
    """

    def __init__(self, num_entries: int):
        self._outcomes: list[BaseException | None] = [TierTimeoutError("no answer by the deadline")] * num_entries
        self._num_left = num_entries
        self._changed = threading.Condition()

    def note(self, at: int, outcome: BaseException | None) -> None:
        """Notes one."""
        with self._changed:
            self._outcomes[at] = outcome
            self._num_left -= 1
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Waits until all were noted, or for so long, and tells whether they were."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_left, max(0.0, timeout_s))

    def all(self) -> list[BaseException | None]:
        """Returns all outcomes as they are now."""
        with self._changed:
            return list(self._outcomes)
