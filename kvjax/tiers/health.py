"""Whether a tier is worth asking: one that fails again and again is left alone for a while."""

import time
from collections.abc import Callable

_MOST_FAILURES = 3
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0


class Health:
    """After three failures in a row a tier is down, for half a second at first, then twice as long each time that it
    fails again, half a minute at most. One answer of any kind makes it well. Not thread-safe.

    Args:
        clock: monotonic, in seconds.
        on_change: called with false when it goes down, and with true when it answers again.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, on_change: Callable[[bool], object] = lambda _well: None
    ):
        self._clock = clock
        self._on_change = on_change
        self._failures = 0
        self._pause_s = _FIRST_PAUSE_S
        self._until = 0.0
        self.times_down = 0

    @property
    def is_up(self) -> bool:
        """Whether it may be asked."""
        return self._failures < _MOST_FAILURES or self._clock() >= self._until

    @property
    def pause_s(self) -> float:
        """For how long it is still left alone, in seconds."""
        return 0.0 if self.is_up else self._until - self._clock()

    def answered(self) -> None:
        """It did something, if only to say that it has not what was asked for."""
        was_down = self._failures >= _MOST_FAILURES
        self._failures = 0
        self._pause_s = _FIRST_PAUSE_S
        if was_down:
            self._on_change(True)

    def failed(self) -> None:
        """It did not answer in time, or could not be reached."""
        self._failures += 1
        if self._failures >= _MOST_FAILURES and self._clock() >= self._until:
            self.times_down += 1
            self._until = self._clock() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        if self._failures == _MOST_FAILURES:
            self._on_change(False)
