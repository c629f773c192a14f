"""Futures whose buffers nobody touches after they have ended, and that end by a deadline whatever hangs."""

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from kvjax.tiers.tier import TierTimeoutError, TierUnavailableError

T = TypeVar("T")
R = TypeVar("R")

_FEW = 1024  # calls whose futures have all ended may be remembered until their deadlines


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
        self._waiting: list[tuple[float, int, Sequence[Handover]]] = []
        self._most_waiting = _FEW
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._closed = False

    def watch(self, futures: Sequence[Handover], deadline: float) -> None:
        """Fails futures with a `TierTimeoutError` at the deadline, by the monotonic clock, at once if that has passed;
        with a `TierUnavailableError`, at once, after `close`."""
        now = time.monotonic()
        with self._changed:
            closed = self._closed
            if not closed and deadline > now:
                self._forget_ended()
                heapq.heappush(self._waiting, (deadline, next(self._numbers), futures))
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="kvjax-tier-deadlines", daemon=True)
                    self._thread.start()
                if self._waiting[0][2] is futures:
                    self._changed.notify()
                return
        _fail(futures, self._end() if closed else self._timeout())

    def close(self, timeout_s: float) -> None:
        """Waits until all futures have ended, fails those that have not after `timeout_s`, and ends the thread."""
        with self._changed:
            self._closed = True
            futures = [future for _, _, some in self._waiting for future in some]
        limit = time.monotonic() + timeout_s
        for future in futures:
            ended = threading.Event()
            future.add_done_callback(lambda _future, ended=ended: ended.set())
            if not ended.wait(max(0.0, limit - time.monotonic())):
                _fail([future], self._end())
        with self._changed:
            self._waiting.clear()
            self._changed.notify()

    def _end(self) -> TierUnavailableError:
        return TierUnavailableError(f"{self._name} is closed")

    def _timeout(self) -> TierTimeoutError:
        return TierTimeoutError(f"{self._name} did not answer by the deadline")

    def _forget_ended(self) -> None:
        if len(self._waiting) >= self._most_waiting:
            self._waiting = [entry for entry in self._waiting if not all(future.ended for future in entry[2])]
            heapq.heapify(self._waiting)
            self._most_waiting = max(_FEW, 2 * len(self._waiting))

    def _run(self) -> None:
        while (futures := self._next_due()) is not None:
            _fail(futures, self._timeout())

    def _next_due(self) -> Sequence[Handover] | None:
        """Waits for a deadline to pass, and returns its futures, or `None` after `close`."""
        with self._changed:
            while self._waiting or not self._closed:
                left = self._waiting[0][0] - time.monotonic() if self._waiting else threading.TIMEOUT_MAX
                if left <= 0:
                    return heapq.heappop(self._waiting)[2]
                self._changed.wait(min(left, threading.TIMEOUT_MAX))
        return None


def _fail(futures: Sequence[Handover], error: Exception) -> None:
    for future in futures:
        future.fail(type(error)(*error.args))  # none of its own: each `result()` adds to an error's traceback
