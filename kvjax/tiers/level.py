"""One tier as an offloader sees it: what waits to be written, how it fares, what became of it."""

import logging
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from kvjax.tiers.entries import EntryName
from kvjax.tiers.health import Health
from kvjax.tiers.speed import Speed
from kvjax.tiers.tier import Tier, TierError, TierFullError

_log = logging.getLogger(__name__)

# A fault of these kinds is worth a line in the log each time, at most so many times.
_MOST_LOGGED = 20
# Namespaces that are remembered at most, and, for each, entries that may turn up.
_MOST_USED = 2**17
_MOST_UNCERTAIN = 2**12
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
    """

    def __init__(self, tier: Tier, index: int):
        self.tier = tier
        self.index = index
        self.bit = np.uint8(1 << index)
        self.health = Health()
        self.read_speed = Speed()
        self.write_speed = Speed()
        self.counts = Counts()
        self.refs: deque[tuple[int, int]] = deque()  # slots and epochs of chunks to be written
        self.uses: deque[tuple[int, int]] = deque(maxlen=_MOST_USES)  # slots and epochs of chunks that were used
        self.frames: deque[Outgoing] = deque()  # copies of chunks that left the pool
        self.pending_bytes = 0  # of frames
        self.num_writing = 0  # 1 while the writer does something
        self.in_hand: list[Outgoing] = []  # what it is writing
        self.to_clear: deque[bytes] = deque()  # namespaces whose entries are to be deleted
        # By namespace, entries of which it is not known whether they were written, and until when they may turn up.
        self.uncertain: dict[bytes, set[EntryName]] = {}
        self._turn_up_until: dict[bytes, float] = {}
        self._clear_from: dict[bytes, float] = {}  # when namespaces are to be cleared once more
        self._used: dict[bytes, None] = {}  # namespaces that were asked for or written, the last one at the end
        self._hidden: dict[bytes, int] = {}  # namespaces whose entries count as absent, with how often they were hidden
        self._cleared: set[bytes] | None = None  # if all were invalidated: those that were cleared since
        self._num_logged = 0

    @property
    def writes(self) -> bool:
        """Whether chunks are written to it at all."""
        return self.tier.write != "never"

    @property
    def idle(self) -> bool:
        """Whether nothing waits to be written or deleted."""
        return not (self.refs or self.frames or self.num_writing or self.to_clear)

    def is_hidden(self, namespace: bytes) -> bool:
        """Whether entries of a namespace count as absent, as they were invalidated and may still be there."""
        if self._cleared is not None and namespace not in self._cleared and namespace not in self._hidden:
            self.hide(namespace)
        return namespace in self._hidden

    def note_used(self, namespace: bytes) -> None:
        """Notes that entries of a namespace are asked for or written."""
        self._used.pop(namespace, None)
        self._used[namespace] = None
        if len(self._used) > _MOST_USED:
            del self._used[next(iter(self._used))]

    def may_turn_up(self, names: Iterable[EntryName]) -> None:
        """Notes that entries may have been written, or may be yet: within `timeout_s`, or as long as `delete` of them
        does not end."""
        until = time.monotonic() + self.tier.timeout_s
        for name in names:
            if len(self._turn_up_until) > _MOST_UNCERTAIN:
                now = time.monotonic()
                self._turn_up_until = {key: value for key, value in self._turn_up_until.items() if value > now}
            self._turn_up_until[name.namespace] = until
            if name.namespace in self.uncertain or len(self.uncertain) < _MOST_UNCERTAIN:
                some = self.uncertain.setdefault(name.namespace, set())
                if len(some) < _MOST_UNCERTAIN:
                    some.add(name)

    def turned_up(self, names: Iterable[EntryName]) -> None:
        """Notes that entries are there."""
        for name in names if self.uncertain else ():
            some = self.uncertain.get(name.namespace)
            if some is not None:
                some.discard(name)
                if not some:
                    del self.uncertain[name.namespace]

    def next_to_clear(self) -> bytes | None:
        """Returns the first namespace whose time to be cleared has come."""
        now = time.monotonic()
        return next((one for one in self.to_clear if self._clear_from.get(one, 0.0) <= now), None)

    @property
    def clears_in_s(self) -> float | None:
        """How long until a namespace is to be cleared, in seconds; `None` if none is."""
        first = min((self._clear_from.get(one, 0.0) for one in self.to_clear), default=None)
        return None if first is None else max(0.0, first - time.monotonic())

    def times_hidden(self, namespace: bytes | None) -> int:
        """Returns how often a namespace was hidden since it was last cleared."""
        return 0 if namespace is None else self._hidden.get(namespace, 0)

    def hide(self, namespace: bytes) -> None:
        """Entries of a namespace count as absent until those that are there are deleted; of a tier that is only read,
        for ever."""
        self._hidden[namespace] = self.times_hidden(namespace) + 1
        if self.writes and namespace not in self.to_clear:
            self.to_clear.append(namespace)

    def hide_all(self) -> None:
        """Likewise for all namespaces: those that were used here at once, others from when they are first asked for."""
        self._cleared = set()
        for namespace in self._used | dict.fromkeys(self._hidden):
            self.hide(namespace)

    @property
    def progress(self) -> tuple[int, ...]:
        """Numbers of which one changes with whatever is done of what waits."""
        counts = self.counts
        done = counts.chunks_written, counts.chunks_known, counts.full, counts.errors, counts.cleared
        return (*done, len(self.refs), len(self.frames), len(self.to_clear))

    def cleared(self, namespace: bytes, times: int, began_at: float) -> None:
        """Notes that what was there of a namespace is deleted, and what may have been there. If it was hidden once more
        since that began, or entries of it may have turned up since, it stays hidden and is cleared again.

        Args:
            namespace: the first one of those to be cleared.
            times: how often it had been hidden when that began.
            began_at: when that was, by the monotonic clock.
        """
        if self.times_hidden(namespace) != times:
            return
        until = self._turn_up_until.get(namespace, 0.0)
        if until > began_at:
            self._clear_from[namespace] = until
            return
        self.to_clear.remove(namespace)
        self.uncertain.pop(namespace, None)
        self._clear_from.pop(namespace, None)
        del self._hidden[namespace]
        if self._cleared is not None:
            self._cleared.add(namespace)

    def failed(self, what: str, error: BaseException) -> None:
        """Counts a failure and says so in the log, not for ever."""
        if isinstance(error, TierFullError):
            self.counts.full += 1
            self.health.answered()
        else:
            self.counts.errors += 1
            self.health.failed()
        if self._num_logged < _MOST_LOGGED:
            self._num_logged += 1
            level = logging.WARNING if isinstance(error, TierError) else logging.ERROR
            _log.log(level, "%s: %s failed: %s: %s", self.tier.name, what, type(error).__name__, error)

    def found_bad(self, name: EntryName, reason: str) -> None:
        """Counts an entry that is not what it should be."""
        self.counts.bad[reason] += 1
        self.health.answered()
        if self._num_logged < _MOST_LOGGED:
            self._num_logged += 1
            _log.warning("%s: a bad entry (%s) was removed: %s", self.tier.name, reason, name.text)
