"""Futures whose buffers nobody touches after they have ended, and that end by a deadline whatever hangs."""

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from kvjax.tiers.tier import TierTimeoutError, TierUnavailableError

T = TypeVar("T")
R = TypeVar("R")

_FEW = 1024  # futures that have ended may be remembered until their deadlines


class EndedError(Exception):
    """A future ended before its buffer was needed: nobody waits for the work any more."""


class Handover(Future[T]):
    """A future that ends once, by `finish`, `fail` or `cancel`, and hands its buffer out until then.

    It stays pending, and can be cancelled, until it ends: it is never running.
    """

    def __init__(self):
        super().__init__()
        self._touching = threading.Lock()
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether it has ended, or is ending."""
        return self._ended

    def touch(self, move: Callable[[], R]) -> R:
        """Returns `move()`, which alone may touch the buffer: the future does not end before it returns.

        Args:
            move: copies bytes, and never waits for anything.

        Raises:
            EndedError: the future has ended; `move` is not called.
        """
        with self._touching:
            if self._ended:
                raise EndedError
            return move()

    def finish(self, result: T) -> bool:
        """Ends with a result, and tells whether it had not ended before."""
        first = self._end()
        if first:
            self.set_result(result)
        return first

    def fail(self, error: Exception) -> bool:
        """Ends with an error, and tells whether it had not ended before."""
        first = self._end()
        if first:
            self.set_exception(error)
        return first

    def cancel(self) -> bool:
        """Ends without a result, and tells whether it is cancelled now."""
        if self._end():
            super().cancel()
            self.set_running_or_notify_cancel()  # tells those who wait for several futures
        return self.cancelled()

    def _end(self) -> bool:
        with self._touching:
            first, self._ended = not self._ended, True
        return first


class Deadlines:
    """Fails futures whose deadline has passed. One thread does so, from the first future on.

    Args:
        name: of the tier, for messages.
    """

    def __init__(self, name: str):
        self._name = name
        self._changed = threading.Condition()
        self._waiting: list[tuple[float, int, Handover]] = []
        self._most_waiting = _FEW
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._closed = False

    def watch(self, future: Handover, deadline: float) -> None:
        """Fails `future` with a `TierTimeoutError` at the deadline, by the monotonic clock; at once with a
        `TierUnavailableError` after `close`."""
        with self._changed:
            if not self._closed:
                self._forget_ended()
                heapq.heappush(self._waiting, (deadline, next(self._numbers), future))
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="kvjax-tier-deadlines", daemon=True)
                    self._thread.start()
                if self._waiting[0][2] is future:
                    self._changed.notify()
                return
        future.fail(TierUnavailableError(f"{self._name} is closed"))

    def close(self, timeout_s: float) -> None:
        """Waits until all futures have ended, fails those that have not after `timeout_s`, and ends the thread."""
        with self._changed:
            self._closed = True
            futures = [future for _, _, future in self._waiting]
        limit = time.monotonic() + timeout_s
        for future in futures:
            ended = threading.Event()
            future.add_done_callback(lambda _future, ended=ended: ended.set())
            if not ended.wait(max(0.0, limit - time.monotonic())):
                future.fail(TierUnavailableError(f"{self._name} is closed"))
        with self._changed:
            self._waiting.clear()
            self._changed.notify()

    def _forget_ended(self) -> None:
        if len(self._waiting) >= self._most_waiting:
            self._waiting = [entry for entry in self._waiting if not entry[2].ended]
            heapq.heapify(self._waiting)
            self._most_waiting = max(_FEW, 2 * len(self._waiting))

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closed and not self._waiting:
                    return
                if not self._waiting:
                    self._changed.wait()
                    continue
                deadline, _, future = self._waiting[0]
                left = deadline - time.monotonic()
                if left > 0 and not future.ended:
                    self._changed.wait(min(left, threading.TIMEOUT_MAX))
                    continue
                heapq.heappop(self._waiting)
            future.fail(TierTimeoutError(f"{self._name} did not answer by the deadline"))
