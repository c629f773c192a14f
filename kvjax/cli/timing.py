"""Times of calls that take turns, and the copy in host memory that moves are measured against."""

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

PIECE_BYTES = 2**20


def alternating(calls: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Returns the median seconds of each call over `repeats` rounds.

    In every round each call runs once, in order, so that whatever slows the machine for a while slows all of
    them. A round that is not counted warms up.
    """
    for call in calls:
        call()
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, taken in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in times]


class MemoryCopy:
    """A copy of `num_bytes` bytes between two arrays whose pages are all there.

    Args:
        num_bytes: bytes that one call copies.
    """

    def __init__(self, num_bytes: int):
        self.num_bytes = num_bytes
        self._source = np.ones(num_bytes, np.uint8)
        self._target = np.full(num_bytes, 2, np.uint8)

    def in_pieces(self) -> None:
        """Copies 1 MiB at a time."""
        for low in range(0, self.num_bytes, PIECE_BYTES):
            np.copyto(self._target[low : low + PIECE_BYTES], self._source[low : low + PIECE_BYTES])

    def at_once(self) -> None:
        """Copies all bytes in one call, whose instructions depend on how many they are."""
        np.copyto(self._target, self._source)
