"""The tier for disks and object stores: a store of bytes by name, with a budget, deadlines and threads of its own."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import numpy as np

from kvjax._checks import integer
from kvjax.tiers.deadlines import Deadlines
from kvjax.tiers.entries import EntryName
from kvjax.tiers.handover import Handover
from kvjax.tiers.keeper import Keeper
from kvjax.tiers.scans import FirstScan
from kvjax.tiers.store import Found, Store
from kvjax.tiers.tier import (
    DEFAULT_PENDING_BYTES,
    DEFAULT_TIMEOUT_S,
    Listed,
    Tier,
    TierError,
    TierTimeoutError,
    TierUnavailableError,
    Usage,
    Write,
)
from kvjax.tiers.workers import Workers

_READS_PER_THREAD = 4  # of one call: to wake a thread takes as long as to read 1 MiB that memory holds


class KVStoreTier(Tier):
    """Keeps entries in a store, within a budget, evicting those used longest ago.

    The books of what is held are this process's own. They are made by looking through the store at the start, and
    again by `refresh`; what others write or delete meanwhile shows when it is read or written. `exists` answers from
    the books at once, so that thousands of names cost no request; `get` asks the store whatever the books say. Two
    processes with one store do no harm to each other, but each keeps to its budget by what it knows.

    Until the store has been looked through, which goes on in the background if it cannot be reached, nothing is
    written and `exists` and `usage` raise `TierUnavailableError`: what room there is is not known.

    Operations on one name at one time happen in any order. A write that goes on after its deadline may still succeed;
    the entry is then held, whole. A thread that hangs is not replaced: with all of them, the tier answers with
    `TierTimeoutError`s until they go on, and takes no more memory.

    Args:
        store: where entries are kept.
        max_bytes: of entries, frames and all, at most.
        write: see `Tier`. With `"never"` only `delete` changes the store, and a put fails.
        timeout_s: see `Tier`.
        max_pending_bytes: see `Tier`.
        num_threads: writes done at a time, and as many reads.
        retry_s: how long to wait before an unreachable store is looked through again; grows to 30 s.
        show_progress: of looking through the store; `None` for where standard error is a terminal.

    Raises:
        ValueError: a value of the wrong type or range.
    """

    def __init__(
        self,
        store: Store,
        *,
        max_bytes: int,
        write: Write = "through",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        max_pending_bytes: int = DEFAULT_PENDING_BYTES,
        num_threads: int = 8,
        retry_s: float = 1.0,
        show_progress: bool | None = None,
    ):
        super().__init__(store.name, write=write, timeout_s=timeout_s, max_pending_bytes=max_pending_bytes)
        self._store = store
        self.max_bytes = integer(max_bytes, "max_bytes", at_least=1)
        self._keeper = Keeper(store, self.max_bytes, tidy=write != "never")
        self._deadlines = Deadlines(self.name)
        num_threads = integer(num_threads, "num_threads", at_least=1)
        self._writers = Workers(self.name, num_threads, self._deadlines)
        self._readers = Workers(self.name, num_threads, self._deadlines)
        self._first_scan = FirstScan(self._keeper.scan, retry_s)
        self._closed = False
        self._first_scan.start(timeout_s, show_progress)

    def put(self, names: Sequence[EntryName], frames: Sequence[memoryview], *, deadline: float) -> list[Future[bool]]:
        """See `Tier.put`."""
        tasks = [(name, frame, deadline) for name, frame in zip(names, frames, strict=True)]
        return [*self._writers.call(self._put, tasks, deadline=deadline)]

    def get(self, names: Sequence[EntryName], buffers: Sequence[memoryview], *, deadline: float) -> list[Future[int]]:
        """See `Tier.get`."""
        tasks = list(zip(names, buffers, strict=True))
        return [*self._readers.call(self._get, tasks, deadline=deadline, tasks_per_thread=_READS_PER_THREAD)]

    def exists(self, names: Sequence[EntryName], *, deadline: float) -> Future[np.ndarray]:
        """See `Tier.exists`. The future has ended: the books answer, not the store."""
        future: Future[np.ndarray] = Future()
        try:
            if time.monotonic() >= deadline:
                raise TierTimeoutError(f"{self.name} was asked after the deadline")
            self._refuse_unless_ready()
            future.set_result(np.array(self._keeper.held(names), bool))
        except TierError as error:
            future.set_exception(error)
        return future

    def touch(self, names: Sequence[EntryName], *, deadline: float) -> Future[np.ndarray]:
        """See `Tier.touch`: the entries are the last ones to be evicted."""
        return self._writers.call(self._touch, [(tuple(names),)], deadline=deadline)[0]

    def delete(self, names: Sequence[EntryName], *, deadline: float) -> Future[int]:
        """See `Tier.delete`."""
        return self._writers.call(self._keeper.delete, [(tuple(names), deadline)], deadline=deadline)[0]

    def list(self, namespace: bytes | None = None) -> Iterator[EntryName]:
        """See `Tier.list`. Whatever has the name of an entry is listed, whatever its bytes."""
        return (listed.name for listed in self.survey(namespace))

    def survey(self, namespace: bytes | None = None) -> Iterator[Listed]:
        """See `Tier.survey`. It asks the store, not the books; of objects it tells no more than their names do."""
        for folder in self._folders(namespace):
            found = self._readers.ask(self._look, folder, timeout_s=self.timeout_s)
            yield from (Listed(*entry) for entry in found.entries)

    def usage(self) -> Usage:
        """See `Tier.usage`. Entries that are being written or deleted count by their bytes."""
        self._refuse_unless_ready()
        return self._keeper.usage()

    def close(self) -> None:
        """See `Tier.close`."""
        if self._closed:
            return
        self._closed = True
        self._first_scan.close()
        self._deadlines.close(TierUnavailableError(f"{self.name} is closed"), self.timeout_s)
        self._writers.close()
        self._readers.close()

    def sweep(self) -> int:
        """See `Tier.sweep`. What other writers still hold is not touched. Empty folders are
        removed, but not counted."""
        return sum(self._readers.ask(self._sweep, folder, timeout_s=self.timeout_s) for folder in self._folders())

    def refresh(self, *, show_progress: bool | None = False) -> None:
        """Looks through the store again, and makes the books what it holds. Entries whose bytes are not those of their
        names are deleted, and what is above the budget is evicted. It takes as long as the store does.

        Args:
            show_progress: `None` shows a bar where standard error is a terminal.

        Raises:
            TierError: the store cannot be looked through; the books stay as they are.
        """
        self._keeper.scan(show_progress, lambda: None)

    def check_integrity(self) -> None:
        """Recounts the books.

        Raises:
            AssertionError: they contradict themselves.
        """
        self._keeper.check_integrity()

    def _refuse_unless_ready(self) -> None:
        if self._closed:
            raise TierUnavailableError(f"{self.name} is closed")
        if not self._first_scan.succeeded:
            reason = self._first_scan.failure
            raise TierUnavailableError(str(reason) if reason else f"{self.name} is still being looked through")

    def _touch(self, names: Sequence[EntryName], _: Handover) -> np.ndarray:
        self._refuse_unless_ready()
        return np.array(self._keeper.use(names), bool)

    def _put(self, name: EntryName, frame: memoryview, deadline: float, future: Handover[bool]) -> bool:
        if self.write == "never":
            raise TierError(f"{self.name} is only read")
        self._refuse_unless_ready()
        return self._keeper.write(name, frame, deadline, future)

    def _get(self, name: EntryName, buffer: memoryview, future: Handover[int]) -> int:
        return self._keeper.read(name, buffer, future, learn=self._first_scan.succeeded)

    def _folders(self, namespace: bytes | None = None) -> Iterator[str]:
        """Yields the store's folders; a store that hangs is a `TierTimeoutError`."""
        folders = self._store.folders(namespace)
        while (folder := self._readers.ask(_next, folders, timeout_s=self.timeout_s)) is not None:
            yield folder

    def _look(self, folder: str, _future: Handover) -> Found:
        return self._store.look(folder)

    def _sweep(self, folder: str, _future: Handover) -> int:
        found = self._store.look(folder)
        num_removed = sum(map(self._store.remove_stray, found.strays))
        if not found.entries:
            self._store.remove_empty(folder)
        return num_removed


def _next(folders: Iterator[str], _future: Handover) -> str | None:
    return next(folders, None)
