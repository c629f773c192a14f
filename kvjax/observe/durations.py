"""How long jobs took, as counts in buckets."""

import bisect
import math
from dataclasses import dataclass, field

from kvjax._checks import shown

# Upper bounds of the buckets in seconds, each inclusive; the last bucket has none. From one small chunk to a job
# that waits for a slow tier.
BOUNDS_SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0),
)


@dataclass(frozen=True, slots=True)
class DurationCounts:
    """Durations seen so far.

    Args:
        counts: durations in each bucket of `BOUNDS_SECONDS`, and past the last bound: one more than there are bounds.
        total_seconds: their sum.
    """

    counts: tuple[int, ...] = (0,) * (len(BOUNDS_SECONDS) + 1)
    total_seconds: float = 0.0

    @property
    def num_durations(self) -> int:
        """Durations over all buckets."""
        return sum(self.counts)


@dataclass(slots=True, eq=False)
class Durations:
    """Counts durations. Not thread-safe: one thread adds, and hands out snapshots."""

    _counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_SECONDS) + 1))
    _total_seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """Counts one duration.

        Raises:
            ValueError: `seconds` is negative or not finite. Then nothing is counted.
        """
        if not (seconds >= 0 and math.isfinite(seconds)):
            raise ValueError(f"`seconds` must be finite and not negative, got {shown(seconds)}")
        self._counts[bisect.bisect_left(BOUNDS_SECONDS, seconds)] += 1
        self._total_seconds += seconds

    def snapshot(self) -> DurationCounts:
        """Returns the counts as they are now; later durations do not change them."""
        return DurationCounts(tuple(self._counts), self._total_seconds)
