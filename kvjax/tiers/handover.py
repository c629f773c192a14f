"""Futures whose buffers nobody touches after they have ended."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from kvjax.tiers.deadlines import copy_of

T = TypeVar("T")
R = TypeVar("R")


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

    def expire(self, error: Exception) -> None:
        """Ends with an error of its own, equal to `error`, if it has not ended before."""
        self.fail(copy_of(error))

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
