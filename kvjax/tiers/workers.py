"""Threads that may hang without holding up anything else, not even the end of the process."""

import queue
import threading
from collections.abc import Callable
from typing import Any


class Workers:
    """A fixed number of daemon threads that do jobs in the order given. They start with the first job.

    Args:
        num_threads: jobs done at a time, at most.
        name: of the threads.
    """

    def __init__(self, num_threads: int, name: str):
        self._num_threads = num_threads
        self._name = name
        self._jobs: queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._started = False

    def submit(self, job: Callable[..., None], *args: Any) -> None:
        """Has a thread call `job(*args)`, which must not raise."""
        self._jobs.put((job, args))
        with self._starting:
            if not self._started:
                self._started = True
                for i in range(self._num_threads):
                    threading.Thread(target=self._run, name=f"{self._name}-{i}", daemon=True).start()

    def close(self) -> None:
        """Ends each thread after the jobs given so far, as soon as it hangs no more."""
        for _ in range(self._num_threads):
            self._jobs.put(None)

    def _run(self) -> None:
        while (todo := self._jobs.get()) is not None:
            job, args = todo
            job(*args)
            del todo, job, args  # a thread that waits keeps nobody's buffer
