"""Threads that may hang without holding up anything else, not even the end of the process."""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from kvjax.tiers.deadlines import Deadlines
from kvjax.tiers.handover import EndedError, Handover
from kvjax.tiers.tier import TierError

T = TypeVar("T")
_Calls = Iterator[tuple[Callable[..., Any], tuple[Any, ...], Handover[Any]]]


class Workers:
    """A fixed number of daemon threads that do tasks for a tier, about in the order given. They start with the first.

    Args:
        tier: its name, for messages.
        num_threads: tasks done at a time, at most.
        deadlines: of the tasks; the caller closes them.
    """

    def __init__(self, tier: str, num_threads: int, deadlines: Deadlines):
        self._tier = tier
        self._num_threads = num_threads
        self._deadlines = deadlines
        self._calls: queue.SimpleQueue[_Calls | None] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._started = False

    def call(
        self,
        job: Callable[..., T],
        tasks: Sequence[tuple[Any, ...]],
        *,
        deadline: float,
        tasks_per_thread: int = 1,
    ) -> list[Handover[T]]:
        """Returns, for each task, a future of what `job(*task, future)` returns or raises.

        Args:
            job: raises `KeyError`, `TierError`, or, where nobody waits any more, `EndedError`; anything else becomes
                a `TierError` that tells its type alone.
            tasks: arguments of the job.
            deadline: by the monotonic clock, in seconds; a task that has not begun by then never does.
            tasks_per_thread: how many of them are worth waking a thread.
        """
        futures = [Handover[T]() for _ in tasks]
        self._deadlines.watch(futures, deadline)
        calls = iter([(job, task, future) for task, future in zip(tasks, futures, strict=True) if not future.ended])
        for _ in range(0, len(tasks), tasks_per_thread):
            self._calls.put(calls)
        self._start()
        return futures

    def ask(self, job: Callable[..., T], *task: Any, timeout_s: float) -> T:
        """Returns what `job(*task, future)` returns, within `timeout_s`."""
        return self.call(job, [task], deadline=time.monotonic() + timeout_s)[0].result()

    def close(self) -> None:
        """Ends each thread after the tasks given so far, as soon as it hangs no more."""
        for _ in range(self._num_threads):
            self._calls.put(None)

    def _start(self) -> None:
        with self._starting:
            if not self._started:
                self._started = True
                for _ in range(self._num_threads):
                    threading.Thread(target=self._run, name="kvjax-tier", daemon=True).start()

    def _run(self) -> None:
        while (calls := self._calls.get()) is not None:
            for job, task, future in calls:  # the iterator of a list: several threads may take from it
                if not future.ended:
                    self._do(job, task, future)
                del job, task, future  # a thread that waits keeps nobody's buffer

    def _do(self, job: Callable[..., T], task: tuple[Any, ...], future: Handover[T]) -> None:
        try:
            future.finish(job(*task, future))
        except EndedError:
            return
        except (KeyError, TierError) as error:
            future.fail(error)
        except Exception as error:  # noqa: BLE001 the edge of a job
            future.fail(TierError(f"{self._tier}: {type(error).__name__}"))
