"""Chunks that are being read from lower tiers, for one promotion."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np


class Fetch:
    """Which of some rows came. Every row comes or fails once; when all are accounted for, or when it is abandoned, the
    fetch has ended, and nothing writes to the pool for it any more. Thread-safe.

    Args:
        num_rows: of the promotion.
        deadline: by the monotonic clock, in seconds: rows that come later are not kept.
    """

    def __init__(self, num_rows: int, deadline: float):
        self.deadline = deadline
        self.started_at = time.monotonic()
        self._came = np.zeros(num_rows, bool)
        self._settled = np.zeros(num_rows, bool)
        self._accounted = np.zeros(num_rows, bool)
        self._abandoned = False
        self._under_way: list[Future[int]] = []
        self._why: str = ""
        self._num_landing = 0
        self._changed = threading.Condition()
        self._ended = threading.Event()
        if not num_rows:
            self._ended.set()

    def done(self) -> bool:
        """Whether it has ended."""
        return self._ended.is_set()

    def settle(self, timeout_s: float | None = None) -> bool:
        """Waits until it has ended, or for so long, and tells whether it has."""
        return self._ended.wait(timeout_s)

    @property
    def came(self) -> np.ndarray:
        """A mask of the rows that came; of a fetch that ended."""
        return self._came

    @property
    def why_not(self) -> str:
        """Why a row did not come; empty if all did."""
        return self._why

    def land(self, row: int, write: Callable[[], None]) -> bool:
        """Puts a row where it belongs, unless it is too late. Several rows may be put in at a time.

        Args:
            row: that was read and verified.
            write: copies it into the pool, and is soon done.

        Returns:
            Whether it was written.
        """
        with self._changed:
            if self._abandoned or self._settled[row]:
                return False
            self._settled[row] = True
            self._num_landing += 1
        try:
            write()
            self._came[row] = True
        except BaseException:
            self._why = self._why or "a chunk could not be put into the pool"
            raise
        finally:
            with self._changed:
                self._num_landing -= 1
                self._changed.notify_all()
        return True

    def fail(self, row: int, why: str) -> None:
        """Gives a row up."""
        with self._changed:
            if not self._abandoned and not self._settled[row]:
                self._why = self._why or why
                self._settled[row] = True

    def end(self, rows: Sequence[int]) -> None:
        """Says that rows, which came or failed, are in the books of their tier."""
        with self._changed:
            self._accounted[rows] = True
            if self._accounted.all():
                self._ended.set()

    def watch(self, futures: Sequence[Future[int]]) -> None:
        """Takes in what a tier does for the fetch, to be cancelled when it is abandoned."""
        with self._changed:
            self._under_way = [future for future in self._under_way if not future.done()]
            self._under_way += futures
            abandoned = self._abandoned
        if abandoned:
            _cancel(futures)

    @property
    def abandoned(self) -> bool:
        """Whether it was given up before all rows had come or failed."""
        return self._abandoned

    def abandon(self, why: str) -> None:
        """Ends the fetch: what has not come will not. What is being put into the pool this very moment is awaited."""
        with self._changed:
            if self._ended.is_set() or self._abandoned:
                return
            self._abandoned = True
            self._why = self._why or why
            while self._num_landing:
                self._changed.wait()
            self._ended.set()
            under_way, self._under_way = self._under_way, []
        _cancel(under_way)


def _cancel(futures: Sequence[Future[int]]) -> None:
    for future in futures:
        future.cancel()
