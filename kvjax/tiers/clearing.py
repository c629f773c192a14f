"""Namespaces of a tier whose entries are worth nothing any more, until none of them is left.

A namespace is *visible*; when it is invalidated it is *hidden*: its entries count as absent, whatever the tier says. It
waits to be *cleared*: all entries that are there are deleted. Then it is visible again, unless it was hidden once more
meanwhile, or entries that were being written may still turn up: then it is cleared once more, when they would have.
"""

import time
from collections import deque
from collections.abc import Iterable

from kvjax.tiers.entries import EntryName

# Namespaces that are remembered as used at most; and with entries that may turn up, and such entries in each.
_MOST_USED = 2**17
MOST_UNCERTAIN = 2**12


class Clearing:
    """Which namespaces of one tier are hidden, and which of them is to be cleared next. Not thread-safe.

    Args:
        timeout_s: how long an operation of the tier may take, in seconds.
        clears: whether entries may be deleted at all; of a tier that is only read, what is hidden stays hidden.
    """

    def __init__(self, *, timeout_s: float, clears: bool):
        self.waiting: deque[bytes] = deque()  # to be cleared
        # By namespace, entries of which it is not known whether they were written, and until when they may turn up.
        self.uncertain: dict[bytes, set[EntryName]] = {}
        self._turn_up_until: dict[bytes, float] = {}
        self._clear_from: dict[bytes, float] = {}  # when those that wait are to be cleared once more
        self._used: dict[bytes, None] = {}  # namespaces that were asked for or written, the last one at the end
        self._hidden: dict[bytes, int] = {}  # with how often they were hidden
        self._cleared: set[bytes] | None = None  # if all were invalidated: those that were cleared since
        self._timeout_s = timeout_s
        self._clears = clears

    def is_hidden(self, namespace: bytes) -> bool:
        """Whether entries of a namespace count as absent, as they were invalidated and may still be there."""
        if self._cleared is not None and namespace not in self._cleared and namespace not in self._hidden:
            self.hide(namespace)
        return namespace in self._hidden

    def hide(self, namespace: bytes) -> None:
        """Entries of a namespace count as absent until those that are there are deleted; of a tier that is only read,
        for ever."""
        self._hidden[namespace] = self.times_hidden(namespace) + 1
        if self._clears and namespace not in self.waiting:
            self.waiting.append(namespace)

    def hide_all(self) -> None:
        """Likewise for all namespaces: those that were used here at once, others from when they are first asked for."""
        self._cleared = set()
        for namespace in self._used | dict.fromkeys(self._hidden):
            self.hide(namespace)

    def times_hidden(self, namespace: bytes | None) -> int:
        """Returns how often a namespace was hidden since it was last cleared."""
        return 0 if namespace is None else self._hidden.get(namespace, 0)

    def next_to_clear(self) -> bytes | None:
        """Returns the first namespace whose time to be cleared has come."""
        now = time.monotonic()
        return next((one for one in self.waiting if self._clear_from.get(one, 0.0) <= now), None)

    @property
    def clears_in_s(self) -> float | None:
        """How long until a namespace is to be cleared, in seconds; `None` if none is."""
        first = min((self._clear_from.get(one, 0.0) for one in self.waiting), default=None)
        return None if first is None else max(0.0, first - time.monotonic())

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
        self.waiting.remove(namespace)
        self.uncertain.pop(namespace, None)
        self._clear_from.pop(namespace, None)
        del self._hidden[namespace]
        if self._cleared is not None:
            self._cleared.add(namespace)

    def note_used(self, namespace: bytes) -> None:
        """Notes that entries of a namespace are asked for or written."""
        self._used.pop(namespace, None)
        self._used[namespace] = None
        if len(self._used) > _MOST_USED:
            del self._used[next(iter(self._used))]

    def may_turn_up(self, names: Iterable[EntryName]) -> None:
        """Notes that entries may have been written, or may be yet: within `timeout_s`, or as long as `delete` of them
        does not end."""
        until = time.monotonic() + self._timeout_s
        for name in names:
            if len(self._turn_up_until) > MOST_UNCERTAIN:
                now = time.monotonic()
                self._turn_up_until = {key: value for key, value in self._turn_up_until.items() if value > now}
            self._turn_up_until[name.namespace] = until
            if name.namespace in self.uncertain or len(self.uncertain) < MOST_UNCERTAIN:
                some = self.uncertain.setdefault(name.namespace, set())
                if len(some) < MOST_UNCERTAIN:
                    some.add(name)

    def turned_up(self, names: Iterable[EntryName]) -> None:
        """Notes that entries are there."""
        for name in names if self.uncertain else ():
            some = self.uncertain.get(name.namespace)
            if some is not None:
                some.discard(name)
                if not some:
                    del self.uncertain[name.namespace]
