"""A store in memory that counts what it holds, and hangs or fails where it is told to."""

import threading
from collections.abc import Iterator

from kvjax.tiers.entries import EntryName, folder_of
from kvjax.tiers.handover import Handover
from kvjax.tiers.store import Found, Store
from kvjax.tiers.tier import TierError
from tests.support.entries import LONG_S


class MemoryStore(Store):
    """Entries being written take room from the first moment, as they do on a disk."""

    def __init__(self):
        super().__init__("memory:")
        self.entries: dict[EntryName, bytes] = {}
        self.room = 0  # bytes taken now
        self.most_room = 0
        self.num_writes = 0  # begun
        self.failures: list[TierError] = []  # one for each of the next writes
        self.delete_failures: list[TierError] = []
        self.going = threading.Event()
        self.going.set()
        self.waiting = threading.Semaphore(0)  # released by whoever comes to hang
        self._lock = threading.Lock()

    def write(self, name: EntryName, frame: memoryview, future: Handover) -> bool:
        self.num_writes += 1
        if self.failures:
            raise self.failures.pop(0)
        data = future.touch(lambda: bytes(frame))
        with self._lock:
            if name in self.entries:
                return False
            self._take(name.num_bytes)
        self._hang()
        with self._lock:
            self.entries[name] = data
        return True

    def read(self, name: EntryName, buffer: memoryview, future: Handover) -> int:
        data = self.entries[name]
        self._hang()
        fitting = data[: len(buffer)]
        future.touch(lambda: buffer[: len(fitting)].__setitem__(slice(None), fitting))
        return len(data)

    def has(self, name: EntryName) -> bool:
        return name in self.entries

    def delete(self, name: EntryName) -> bool:
        if self.delete_failures:
            raise self.delete_failures.pop(0)
        with self._lock:
            there = self.entries.pop(name, None) is not None
            self._take(-name.num_bytes if there else 0)
        return there

    def folders(self, namespace: bytes | None = None) -> Iterator[str]:
        yield folder_of(namespace)

    def look(self, folder: str) -> Found:
        self._hang()
        inside = [(name, data) for name, data in self.entries.items() if name.text.startswith(folder)]
        return Found([(name, len(data), float(i)) for i, (name, data) in enumerate(inside)], [])

    def _hang(self) -> None:
        if not self.going.is_set():
            self.waiting.release()
        assert self.going.wait(LONG_S)

    def _take(self, num_bytes: int) -> None:
        self.room += num_bytes
        self.most_room = max(self.most_room, self.room)
