"""Futures that end by their deadline, whatever hangs, and whose buffers nobody touches after that."""

import heapq
import itertools
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from typing import TypeVar

from kvjax.tiers.tier import TierTimeoutError

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
            self.set_exception(_copy(error))

    def expire(self, error: Exception) -> None:
        """Ends the future with an error of its own, unless someone began to answer."""
        with self._lock:
            taken = self._take()
        if taken:
            self.set_exception(_copy(error))

    def _take(self) -> bool:
        if self._taken:
            return False
        self._taken = True
        return self.set_running_or_notify_cancel()


class Deadlines:
    """Ends answers that nobody began to give by their deadline. Its thread starts with the first one.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str):
        self._name = name
        self._changed = threading.Condition()
        self._order = itertools.count()
        self._waiting: list[tuple[float, int, list[Answer]]] = []
        self._thread: threading.Thread | None = None
        self._end: Exception | None = None

    def watch(self, answers: Iterable[Answer], deadline: float) -> None:
        """Ends with a `TierTimeoutError` each of `answers` that nobody has begun by the deadline; at once, if that is
        past. After `close` it ends them at once as that did."""
        watched = list(answers)
        with self._changed:
            error = self._end
            if error is None and deadline > time.monotonic():
                heapq.heappush(self._waiting, (deadline, next(self._order), watched))
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    self._thread.start()
                self._changed.notify()
                return
        _expire(watched, error or _timeout())

    def close(self, error: Exception) -> None:
        """Ends all that nobody has begun with `error`, and the thread. A second call does nothing."""
        with self._changed:
            if self._end is not None:
                return
            self._end = error
            waiting, self._waiting = self._waiting, []
            self._changed.notify()
        for _, _, answers in waiting:
            _expire(answers, error)

    def _run(self) -> None:
        while (due := self._next_due()) is not None:
            _expire(due, _timeout())

    def _next_due(self) -> list[Answer] | None:
        """Waits for answers whose deadline passes, and returns them, or `None` once there will be none."""
        with self._changed:
            while self._end is None:
                left = self._waiting[0][0] - time.monotonic() if self._waiting else None
                if left is not None and left <= 0:
                    return heapq.heappop(self._waiting)[2]
                self._changed.wait(left)
        return None


def fail_all(answers: Iterable[Answer], error: Exception) -> None:
    """Ends all answers that are still wanted with errors equal to `error`."""
    for answer in answers:
        answer.fail(error)


def _expire(answers: list[Answer], error: Exception) -> None:
    for answer in answers:
        answer.expire(error)


def _timeout() -> TierTimeoutError:
    return TierTimeoutError("the tier did not answer by the deadline")


def _copy(error: Exception) -> Exception:
    """Futures do not share an error: each `result()` adds to its traceback."""
    return type(error)(*error.args)
