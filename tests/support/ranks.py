"""Ranks in one process: a thread for each, and a channel between them."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from kvjax.ranks.channel import RankLostError


class Hub:
    """Where the channels of ranks in one process meet.

    Args:
        num_ranks: how many there are.
    """

    def __init__(self, num_ranks: int):
        self.num_ranks = num_ranks
        self._given: defaultdict[int, dict[int, bytes]] = defaultdict(dict)
        self._changed = threading.Condition()

    def channel(self, rank: int) -> "ThreadChannel":
        """The channel of one rank."""
        return ThreadChannel(self, rank)

    def exchange(self, count: int, rank: int, payload: bytes, timeout_s: float) -> list[bytes]:
        """Gives a payload as the `count`th of a rank, and waits for those of the others."""
        until = time.monotonic() + timeout_s
        with self._changed:
            given = self._given[count]
            given[rank] = payload
            self._changed.notify_all()
            while len(given) < self.num_ranks:
                if not self._changed.wait(until - time.monotonic()) and time.monotonic() >= until:
                    lost = tuple(other for other in range(self.num_ranks) if other not in given)
                    raise RankLostError(lost, f"nothing came from {lost} within {timeout_s} s")
            self._given.pop(count - 2, None)
            return [given[other] for other in range(self.num_ranks)]


class ThreadChannel:
    """The channel of one rank in a thread of its own; `count` says how often it exchanged something."""

    def __init__(self, hub: Hub, rank: int):
        self.rank, self.num_ranks = rank, hub.num_ranks
        self._hub = hub
        self.count = 0

    def exchange(self, payload: bytes, timeout_s: float) -> list[bytes]:
        self.count += 1
        return self._hub.exchange(self.count - 1, self.rank, payload, timeout_s)


def run_ranks(num_ranks: int, work: Callable[[int, Hub], Any]) -> list[Any]:
    """Runs `work(rank, hub)` in a thread for each rank, and returns what each returned or raised, by rank."""
    hub = Hub(num_ranks)
    ended: list[Any] = [None] * num_ranks

    def run(rank: int) -> None:
        try:
            ended[rank] = work(rank, hub)
        except BaseException as error:  # noqa: BLE001  # whatever it is, the test is told
            ended[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ended


def raise_first(ended: list[Any]) -> list[Any]:
    """Raises the first error of a rank that is no consequence of another rank's, or returns what they returned."""
    errors = [one for one in ended if isinstance(one, BaseException)]
    if errors:
        raise next((one for one in errors if not isinstance(one, RankLostError)), errors[0])
    return ended
