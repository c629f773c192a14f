"""Waiting for what a tier promised, no longer than it may take."""

import time
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TypeVar

from kvjax.tiers.tier import TierTimeoutError

# A tier that does not end its futures by their deadline is waited for so long, in seconds, and no longer.
GRACE_S = 1.0

T = TypeVar("T")


def result_of(future: Future[T], deadline: float, grace_s: float = GRACE_S) -> T:
    """Returns what a future of a tier gives. One that does not end by its deadline is given up.

    Args:
        future: of a `Tier`.
        deadline: the one that the tier was given.
        grace_s: how much longer it is waited for, in seconds.

    Raises:
        TierTimeoutError: it did not end in time.
        Exception: whatever the future raises.
    """
    try:
        return future.result(max(0.0, deadline - time.monotonic()) + grace_s)
    except (FutureTimeoutError, CancelledError):
        if future.done() and not future.cancelled():
            return future.result()  # it ended this very moment, or with an error of this type
        future.cancel()
        raise TierTimeoutError("no answer by the deadline") from None
