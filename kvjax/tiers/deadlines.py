"""One thread that ends futures whose deadline has passed, whatever hangs."""

import heapq
import itertools
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from kvjax.tiers.tier import TierError, TierTimeoutError

_FEW = 1024  # calls whose futures have all ended may be remembered until their deadlines


class Expiring(Protocol):
    """A future that can be ended from outside."""

    def done(self) -> bool:
        """Whether it has ended."""
        ...

    def expire(self, error: Exception) -> None:
        """Ends it with an error of its own, equal to `error`, unless it has ended or is being ended."""
        ...


class Deadlines:
    """Ends futures by their deadlines. Its thread starts with the first one.

    Args:
        name: of the tier, for messages; it holds no credentials.
    """

    def __init__(self, name: str):
        self._name = name
        self._changed = threading.Condition()
        self._waiting: list[tuple[float, int, Sequence[Expiring]]] = []
        self._most_waiting = _FEW
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._closed: TierError | None = None

    def watch(self, futures: Iterable[Expiring], deadline: float) -> None:
        """Ends futures with a `TierTimeoutError` at the deadline, by the monotonic clock; at once if that is past, and
        as `close` did after it."""
        watched = tuple(futures)
        with self._changed:
            error = self._closed
            if error is None and deadline > time.monotonic():
                self._forget_ended()
                heapq.heappush(self._waiting, (deadline, next(self._numbers), watched))
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="kvjax-tier-deadlines", daemon=True)
                    self._thread.start()
                if self._waiting[0][2] is watched:
                    self._changed.notify()
                return
        _expire(watched, error or self._late())

    def close(self, error: TierError, wait_s: float = 0.0) -> None:
        """Ends all futures with `error` that have not ended after some seconds, and the thread. A second call does
        nothing."""
        with self._changed:
            if self._closed is not None:
                return
            self._closed = error
            futures = [future for _, _, some in self._waiting for future in some]
        limit = time.monotonic() + wait_s
        for future in futures:
            _wait(future, limit)
        _expire(futures, error)
        with self._changed:
            self._waiting.clear()
            self._changed.notify()

    def _late(self) -> TierTimeoutError:
        return TierTimeoutError(f"{self._name} did not answer by the deadline")

    def _forget_ended(self) -> None:
        if len(self._waiting) >= self._most_waiting:
            self._waiting = [entry for entry in self._waiting if not all(future.done() for future in entry[2])]
            heapq.heapify(self._waiting)
            self._most_waiting = max(_FEW, 2 * len(self._waiting))

    def _run(self) -> None:
        while (futures := self._next_due()) is not None:
            _expire(futures, self._late())

    def _next_due(self) -> Sequence[Expiring] | None:
        """Waits for a deadline to pass, and returns its futures, or `None` once there will be none."""
        with self._changed:
            while self._waiting or self._closed is None:
                left = self._waiting[0][0] - time.monotonic() if self._waiting else threading.TIMEOUT_MAX
                if left <= 0:
                    return heapq.heappop(self._waiting)[2]
                self._changed.wait(min(left, threading.TIMEOUT_MAX))
        return None


def copy_of(error: Exception) -> Exception:
    """Returns an equal error: futures share none, as each `result()` adds to its traceback."""
    return type(error)(*error.args)


def _wait(future: Expiring, limit: float) -> None:
    """Waits until a future has ended, or until a time by the monotonic clock."""
    pause = 1e-4
    while not future.done() and (left := limit - time.monotonic()) > 0:
        time.sleep(min(pause, left))
        pause = min(2 * pause, 0.01)


def _expire(futures: Iterable[Expiring], error: Exception) -> None:
    for future in futures:
        future.expire(error)
