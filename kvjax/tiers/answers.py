"""Futures that one side alone ends, and whose buffers nobody touches after that."""

import threading
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

from kvjax.tiers.deadlines import copy_of

T = TypeVar("T")


class Answer(Future[T]):
    """A future that one side alone ends: who gives the answer, or who watches the deadline.

    Who gives it calls `begin` before it touches what belongs to the caller. From then on the future can neither be
    cancelled nor expire, so that whoever began must end it by the deadline.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._taken = False  # by who answers or by who watches the deadline
        self._begun = False

    def begin(self) -> bool:
        """Returns whether the answer is still wanted; then it is the caller's to give. Further calls say the same,
        until it was given."""
        with self._lock:
            self._begun = self._take() or (self._begun and not self.done())
            return self._begun

    def cancel(self) -> bool:
        """Ends the future unless someone began to answer, and returns whether it is cancelled."""
        cancelled = super().cancel()
        if cancelled:
            with self._lock:
                self._take()  # so that `concurrent.futures.wait` sees it
        return cancelled

    def give(self, value: T) -> None:
        """Ends the future with `value`, if that is still wanted."""
        if self.begin():
            self.set_result(value)

    def fail(self, error: Exception) -> None:
        """Ends the future with an error of its own, equal to `error`, if it is still wanted."""
        if self.begin():
            self.set_exception(copy_of(error))

    def expire(self, error: Exception) -> None:
        """Ends the future with an error of its own, unless someone began to answer."""
        with self._lock:
            taken = self._take()
        if taken:
            self.set_exception(copy_of(error))

    def _take(self) -> bool:
        if self._taken:
            return False
        self._taken = True
        return self.set_running_or_notify_cancel()


def fail_all(answers: Iterable[Answer[Any]], error: Exception) -> None:
    """Ends all answers that are still wanted with errors equal to `error`."""
    for answer in answers:
        answer.fail(error)
