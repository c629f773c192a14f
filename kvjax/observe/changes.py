"""Changes of the pool as events."""

import threading
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

from kvjax.chunking import Chunking
from kvjax.observe.events import KVEvent
from kvjax.pool import Change

HOST_TIER = "host"


def events_of(chunking: Chunking, change: Change) -> Iterator[KVEvent]:
    """Yields one event for each group of a change, in layout order."""
    for g in np.unique(change.group_idxs).tolist():
        places = np.flatnonzero(change.group_idxs == g).tolist()
        tokens = chunking.tokens_per_chunk[g] or 0
        starts = [int(change.chunk_idxs[place]) * tokens for place in places]
        yield KVEvent(
            kind=change.kind,
            group=chunking.layout.groups[g].name,
            tier=HOST_TIER,
            keys=tuple(change.keys[place] for place in places),
            token_spans=tuple((start, start + tokens) for start in starts),
            reason=change.reason,
        )


class EventQueue:
    """Changes that were not told yet. They are put in under the lock of the books, in order, and told without it.

    Args:
        chunking: the layout and its chunks.
        callback: told each event; `None` tells nobody.
    """

    def __init__(self, chunking: Chunking, callback: Callable[[KVEvent], object] | None):
        self._chunking = chunking
        self._callback = callback
        self._changes: deque[Change] = deque()
        self._events: deque[KVEvent] = deque()
        self._telling = threading.Lock()

    def put(self, change: Change) -> None:
        """Adds a change."""
        self._changes.append(change)

    def tell(self) -> None:
        """Tells the events in their order. Where another thread is at it, or this one further up, that one goes on."""
        while self._callback is not None and self._waiting() and self._telling.acquire(blocking=False):
            try:
                while self._waiting():
                    if not self._events:
                        self._events.extend(events_of(self._chunking, self._changes.popleft()))
                    self._callback(self._events.popleft())
            finally:
                self._telling.release()

    def _waiting(self) -> bool:
        return bool(self._events or self._changes)
