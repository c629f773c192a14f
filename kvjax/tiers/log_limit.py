"""How many lines a tier may log: few at a time, and never none for long."""

import time
from collections.abc import Callable

_PER_S = 60.0


class LogLimit:
    """Allows so many lines in any minute. Not thread-safe.

    Args:
        most: lines in a minute.
        clock: monotonic, in seconds.

    >>> limit = LogLimit(1, clock=lambda: 0.0)
    >>> limit.left_out(), limit.left_out()
    (0, None)
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic):
        self._most = most
        self._clock = clock
        self._times: list[float] = []  # of the lines of the last minute
        self._left_out = 0

    def left_out(self) -> int | None:
        """Asks for a line. Returns how many were refused since the last one, or `None` if this one is, too."""
        now = self._clock()
        self._times = [at for at in self._times if now - at < _PER_S]
        if len(self._times) >= self._most:
            self._left_out += 1
            return None
        self._times.append(now)
        number, self._left_out = self._left_out, 0
        return number
