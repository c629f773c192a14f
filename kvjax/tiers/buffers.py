"""Memory for entries on their way, used again: fresh pages cost more than the copies themselves."""

import threading
from collections import defaultdict

import numpy as np


class Buffers:
    """Hands out memory and takes it back. Thread-safe.

    Args:
        most_free_bytes: what is kept for later at most.
    """

    def __init__(self, most_free_bytes: int):
        self._most_free = most_free_bytes
        self._free: dict[int, list[np.ndarray]] = defaultdict(list)
        self._free_bytes = 0
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> np.ndarray:
        """Returns `uint8` `(num_bytes,)`, which holds anything."""
        with self._lock:
            free = self._free.get(num_bytes)
            if free:
                self._free_bytes -= num_bytes
                return free.pop()
        return np.frombuffer(bytearray(num_bytes), np.uint8)

    def give(self, memory: np.ndarray) -> None:
        """Takes back what `take` returned; nobody may use it any more."""
        with self._lock:
            if self._free_bytes + len(memory) <= self._most_free:
                self._free[len(memory)].append(memory)
                self._free_bytes += len(memory)


def view_of(memory: np.ndarray) -> memoryview:
    """Returns the bytes of memory that `Buffers` handed out: all of a `bytearray`, as TensorStore takes it without a
    copy."""
    whole = memory.data.obj if not isinstance(memory.base, memoryview) else memory.base.obj
    assert isinstance(whole, bytearray), "it was handed out here"
    return memoryview(whole)
