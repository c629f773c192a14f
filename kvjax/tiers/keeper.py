"""A store kept within a budget: what one thread does at a time for a `KVStoreTier`."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from kvjax.tiers.budget import Budget, Room
from kvjax.tiers.entries import EntryName
from kvjax.tiers.handover import EndedError, Handover
from kvjax.tiers.scans import scan
from kvjax.tiers.store import Store
from kvjax.tiers.tier import TierError, TierFullError, TierTimeoutError, Usage


class Keeper:
    """Reads, writes, evicts and deletes entries of a store. Methods may wait as long as the store hangs, raise
    `TierError`, and may be called from several threads.

    Args:
        store: of the entries.
        max_bytes: of them, at most.
        tidy: whether looking through the store may delete what has no place in it.
    """

    def __init__(self, store: Store, max_bytes: int, *, tidy: bool):
        self._store = store
        self._tidy = tidy
        self._budget = Budget(max_bytes)
        self._changed = threading.Condition()  # guards the budget
        self._scanning = threading.Lock()

    def held(self, names: Iterable[EntryName]) -> list[bool]:
        """Tells of each entry whether the books have it."""
        with self._changed:
            return [name in self._budget for name in names]

    def use(self, names: Sequence[EntryName]) -> list[bool]:
        """Uses entries; tells of each whether the books have it."""
        with self._changed:
            held = [name in self._budget for name in names]
            for name in names:
                self._budget.use(name)
        for name, is_held in zip(names, held, strict=True):
            if is_held and self._tidy:
                self._store.use(name)
        return held

    def usage(self) -> Usage:
        """Returns what the books have. Entries that are being written or deleted count by their bytes."""
        with self._changed:
            return Usage(self._budget.num_entries, self._budget.num_bytes, self._budget.max_bytes)

    def write(self, name: EntryName, frame: memoryview, deadline: float, future: Handover[bool]) -> bool:
        """Writes an entry unless it is there, and returns whether it did. Room is made first, by the deadline; if the
        store itself is full, once more, of as many bytes as the entry has.

        Raises:
            TierFullError: the entry is larger than the budget, or the store is full in spite of all.
        """
        if not self._reserve(name, deadline):
            return False
        end = self._budget.drop
        try:
            written = self._write(name, frame, future)
            end = self._budget.publish
            return written
        finally:
            with self._changed:
                end(name)
                self._changed.notify_all()

    def read(self, name: EntryName, buffer: memoryview, future: Handover[int], *, learn: bool) -> int:
        """Reads an entry, see `Store.read`. It is not evicted meanwhile.

        Args:
            name: of the entry.
            buffer: to read into.
            future: through which the buffer is touched.
            learn: whether the books take up an entry that is there and that they do not have.
        """
        with self._changed:
            self._budget.begin_read(name)
        try:
            num_bytes = self._store.read(name, buffer, future)
            with self._changed:
                if learn and num_bytes == name.num_bytes:
                    self._budget.found(name)
            return num_bytes
        except KeyError:
            with self._changed:
                self._budget.missed(name)
            raise
        finally:
            with self._changed:
                self._budget.end_read(name)
                self._changed.notify_all()

    def delete(self, names: Sequence[EntryName], deadline: float, future: Handover[int]) -> int:
        """Deletes entries, and returns how many were there; what is being written is awaited, by the deadline."""
        deleted = 0
        for name in names:
            if future.ended:
                raise EndedError
            with self._changed:
                while self._budget.is_busy(name):
                    self._wait(deadline)
                known = self._budget.leave(name)
            if known:
                deleted += self._evict([name])
            elif self._store.has(name):
                deleted += self._store.delete(name)
        return deleted

    def scan(self, show_progress: bool | None, alive: Callable[[], None]) -> None:
        """Looks through the store, makes the books what it holds, and keeps within the budget. See
        `kvjax.tiers.scans.scan` for the arguments. If the looking fails, the books stay as they are."""
        with self._scanning:
            with self._changed:
                self._budget.begin_scan()
            found = None
            try:
                found = scan(self._store, show_progress, alive, tidy=self._tidy)
            finally:
                with self._changed:
                    self._budget.end_scan(found)
                    self._changed.notify_all()
            with self._changed:
                victims = self._budget.evict(self._budget.shortage()) if self._tidy else []
            self._evict(victims)

    def check_integrity(self) -> None:
        """Recounts the books.

        Raises:
            AssertionError: they contradict themselves.
        """
        with self._changed:
            self._budget.check_integrity()

    def _reserve(self, name: EntryName, deadline: float) -> bool:
        """Makes room for an entry, and returns whether it must be written."""
        while True:
            with self._changed:
                room = self._budget.reserve(name)
                if room in (Room.RESERVED, Room.THERE):
                    return room is Room.RESERVED
                if room is Room.NEVER:
                    text = f"an entry of {name.num_bytes} bytes is larger than the budget"
                    raise TierFullError(f"{self._store.name}: {text}")
                victims = self._budget.evict(self._budget.shortage(name)) if room is Room.SHORT else []
                if not victims:
                    self._wait(deadline)
            self._evict(victims)

    def _wait(self, deadline: float) -> None:
        """Lets other threads change the books, which are locked before and after."""
        if not self._changed.wait(max(0.0, deadline - time.monotonic())):
            raise TierTimeoutError(f"{self._store.name} did not get to it by the deadline")

    def _write(self, name: EntryName, frame: memoryview, future: Handover[bool]) -> bool:
        try:
            return self._store.write(name, frame, future)
        except TierFullError:
            with self._changed:
                victims = self._budget.evict(name.num_bytes)
            if not victims:
                raise
        self._evict(victims)
        return self._store.write(name, frame, future)

    def _evict(self, victims: Sequence[EntryName]) -> int:
        """Deletes entries that are leaving, and returns how many of them were there still."""
        deleted = 0
        for i, name in enumerate(victims):
            try:
                deleted += self._store.delete(name)
            except TierError:
                with self._changed:
                    for kept in victims[i:]:
                        self._budget.stay(kept)
                    self._changed.notify_all()
                raise
            with self._changed:
                self._budget.gone(name)
                self._changed.notify_all()
        return deleted
