"""One tier as an offloader sees it: what waits to be written, how it fares, what became of it."""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvjax.tiers.clearing import Clearing
from kvjax.tiers.entries import EntryName
from kvjax.tiers.health import Health
from kvjax.tiers.log_limit import LogLimit
from kvjax.tiers.speed import Speed
from kvjax.tiers.tier import Tier, TierError, TierFullError

_log = logging.getLogger(__name__)

# Lines in the log in a minute, at most, of what failed or was bad, and as many of a tier's going down and coming back.
_MOST_LOGGED = 20
# Chunks that are used in the host pool, of which a level is to be told; others are told of when they are used again.
_MOST_USES = 2**16


@dataclass(slots=True)
class Counts:
    """What a tier did for an offloader so far; bytes are of chunks, without frames and padding.

    Args:
        chunks_written: entries written.
        bytes_written: their chunks' bytes.
        chunks_known: entries that were there already when they were to be written.
        chunks_read: entries that were read and are right.
        bytes_read: their chunks' bytes.
        misses: entries that were gone when they were to be read.
        dropped: chunks that were evicted from the host pool and not written, as too many others waited or the tier
            was down.
        full: entries for which the tier had no room.
        errors: operations that failed in another way, by deadline or otherwise.
        cleared: entries deleted as their chunks were invalidated.
        bad: entries that were not what they should be, by reason; they were removed.
    """

    chunks_written: int = 0
    bytes_written: int = 0
    chunks_known: int = 0
    chunks_read: int = 0
    bytes_read: int = 0
    misses: int = 0
    dropped: int = 0
    full: int = 0
    errors: int = 0
    cleared: int = 0
    bad: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True, eq=False)
class Frame:
    """The memory of an entry on its way down.

    Args:
        memory: `uint8`, the whole entry; its header is written before it is sent.
        users: levels that have not done with it.
    """

    memory: np.ndarray
    users: int = 1


@dataclass(slots=True, eq=False)
class Outgoing:
    """A chunk that is to be written to a level.

    Args:
        name: of the entry.
        chunk_idx: the chunk's place in its sequence.
        slot: of the pool, where it is or was.
        epoch: of the chunk in the slot.
        units: of the pool, `(units_per_chunk,)`: where its bytes are until they were copied.
        frame: its bytes, once they were copied.
    """

    name: EntryName
    chunk_idx: int
    slot: int
    epoch: int
    units: np.ndarray
    frame: Frame | None = None


class Level:
    """A tier with its queues and counts. What is called from several threads is guarded by the offloader's lock.

    Args:
        tier: the tier.
        index: its number, 0 for the first one below the host pool.
        clock: monotonic, in seconds.
    """

    def __init__(self, tier: Tier, index: int, clock: Callable[[], float] = time.monotonic):
        self.tier = tier
        self.index = index
        self.bit = np.uint8(1 << index)
        self.health = Health(clock, self._log_health)
        self.read_speed = Speed()
        self.write_speed = Speed()
        self.counts = Counts()
        self.refs: deque[tuple[int, int]] = deque()  # slots and epochs of chunks to be written
        self.uses: deque[tuple[int, int]] = deque(maxlen=_MOST_USES)  # slots and epochs of chunks that were used
        self.checks: deque[tuple[int, int]] = deque()  # likewise of those that a flush looks for
        self.frames: deque[Outgoing] = deque()  # copies of chunks that left the pool
        self.pending_bytes = 0  # of frames
        self.num_writing = 0  # 1 while the writer does something
        self.in_hand: list[Outgoing] = []  # what it is writing
        self.clearing = Clearing(timeout_s=tier.timeout_s, clears=self.writes)
        self.num_undone = 0  # chunks that left the pool and could not be written
        self._faults = LogLimit(_MOST_LOGGED, clock)
        self._changes = LogLimit(_MOST_LOGGED, clock)

    @property
    def writes(self) -> bool:
        """Whether chunks are written to it at all."""
        return self.tier.write != "never"

    @property
    def idle(self) -> bool:
        """Whether nothing waits to be written or deleted."""
        return not (self.refs or self.checks or self.frames or self.num_writing or self.clearing.waiting)

    @property
    def progress(self) -> tuple[int, ...]:
        """Numbers of which one changes with whatever is done of what waits."""
        counts = self.counts
        done = counts.chunks_written, counts.chunks_known, counts.full, counts.errors, counts.cleared
        return (*done, len(self.refs), len(self.checks), len(self.frames), len(self.clearing.waiting))

    def failed(self, what: str, error: BaseException) -> None:
        """Counts a failure and says so in the log, a few times a minute."""
        level = logging.WARNING if isinstance(error, TierError) else logging.ERROR
        told = str(error).removeprefix(f"{self.tier.name}: ")
        self._log(self._faults, level, f"{what} failed: {type(error).__name__}: {told}")
        if isinstance(error, TierFullError):
            self.counts.full += 1
            self.health.answered()
        else:
            self.counts.errors += 1
            self.health.failed()

    def found_bad(self, name: EntryName, reason: str) -> None:
        """Counts an entry that is not what it should be."""
        self.counts.bad[reason] += 1
        self.health.answered()
        self._log(self._faults, logging.WARNING, f"a bad entry ({reason}) was removed: {name.text}")

    def _log_health(self, well: bool) -> None:
        text = "answers again" if well else "is down, is left alone for a while, and is then asked again"
        self._log(self._changes, logging.WARNING, text)

    def _log(self, limit: LogLimit, level: int, text: str) -> None:
        left_out = limit.left_out()
        if left_out is not None:
            more = f" ({left_out:,} more lines were left out)" if left_out else ""
            _log.log(level, "%s: %s%s", self.tier.name, text, more)
