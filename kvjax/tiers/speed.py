"""How long moves take, as measured: a fixed time and a rate."""

import math
import time
from collections.abc import Callable

# What a measurement counts for when the next one comes; about the last 20 of them matter.
_KEPT = 0.9
# Measurements older than this, in seconds, say nothing any more.
_OLDEST_S = 60.0


class Speed:
    """The line through what was measured: seconds = latency + amount / rate. Not thread-safe.

    Args:
        clock: monotonic, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._at = -math.inf
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """Adds a measurement: how long some bytes or tokens took, all in all. Less than one is not taken in."""
        if amount < 1 or not 0 <= seconds < math.inf:
            return
        if self._clock() - self._at > _OLDEST_S:
            self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._weight = self._weight * _KEPT + 1
        self._x = self._x * _KEPT + amount
        self._y = self._y * _KEPT + seconds
        self._xx = self._xx * _KEPT + amount * amount
        self._xy = self._xy * _KEPT + amount * seconds
        self._at = self._clock()

    def seconds(self, amount: float) -> float | None:
        """Returns how long so much will take, or `None` if nothing was measured lately."""
        line = self._line()
        return None if line is None else line[0] + amount * line[1] if amount > 0 else 0.0

    @property
    def latency_s(self) -> float | None:
        """The fixed part, in seconds."""
        line = self._line()
        return None if line is None else line[0]

    @property
    def per_second(self) -> float | None:
        """The rate; `None` also if it is too high to be measured."""
        line = self._line()
        return None if line is None or not line[1] else 1 / line[1]

    def _line(self) -> tuple[float, float] | None:
        """The fixed part and the slope, neither below 0."""
        if not self._weight or self._clock() - self._at > _OLDEST_S:
            return None
        spread = self._weight * self._xx - self._x * self._x
        # Amounts that are all alike tell no latency from a rate.
        if spread > 1e-6 * self._weight * self._xx:
            slope = max(0.0, (self._weight * self._xy - self._x * self._y) / spread)
            latency = (self._y - slope * self._x) / self._weight
            if latency >= 0:
                return latency, slope
        return 0.0, self._y / self._x
