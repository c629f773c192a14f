"""Looking through a store: which entries it has, in the order of their use."""

import threading
from collections.abc import Callable

from kvjax.observe.progress import progress_bar
from kvjax.tiers.entries import EntryName
from kvjax.tiers.store import Store
from kvjax.tiers.tier import TierError

_MOST_RETRY_S = 30.0


def scan(store: Store, show_progress: bool | None, alive: Callable[[], None], *, tidy: bool) -> list[EntryName]:
    """Returns the names of the entries that have as many bytes as their names say, the one used longest ago first.

    Args:
        store: to look through.
        show_progress: `None` shows a bar where standard error is a terminal.
        alive: called after each part.
        tidy: whether entries of other sizes, and what interrupted writers left behind, are deleted.

    Raises:
        TierError: the store cannot be looked through to the end.
    """
    folders = list(store.folders())
    used: list[tuple[float, EntryName]] = []
    with progress_bar(f"looking through {store.name}", len(folders), show=show_progress) as advance:
        for folder in folders:
            found = store.look(folder)
            used += [(time, name) for name, num_bytes, time in found.entries if num_bytes == name.num_bytes]
            if tidy:
                for stray in found.strays:
                    store.remove_stray(stray)
                for name in [name for name, num_bytes, _ in found.entries if num_bytes != name.num_bytes]:
                    store.delete(name)
            alive()
            advance(1)
    return [name for _, name in sorted(used)]


class FirstScan:
    """Looks through a store on a thread of its own, again and again until it has succeeded once.

    Args:
        run: looks through it; is given whether to show progress, and what to call when it gets on.
        retry_s: how long to wait after a failure; twice as long after each further one, to 30 s.
    """

    def __init__(self, run: Callable[[bool | None, Callable[[], None]], None], retry_s: float):
        self._run = run
        self._retry_s = retry_s
        self._changed = threading.Condition()
        self._steps = 0
        self._closed = False
        self.succeeded = False
        self.failure: TierError | None = None

    def start(self, patience_s: float, show_progress: bool | None) -> None:
        """Begins, and waits for the first attempt to end, unless it does not get on for `patience_s`."""
        threading.Thread(target=self._attempts, args=(show_progress,), name="kvjax-tier-scan", daemon=True).start()
        with self._changed:
            while not self.succeeded and not self.failure:
                before = self._steps
                self._changed.wait(patience_s)
                if self._steps == before:
                    return

    def close(self) -> None:
        """Makes no further attempt."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _attempts(self, show_progress: bool | None) -> None:
        wait_s = self._retry_s
        while not self._attempt(show_progress):
            show_progress = False
            with self._changed:
                if self._closed or self._changed.wait_for(lambda: self._closed, wait_s):
                    return
            wait_s = min(2 * wait_s, _MOST_RETRY_S)

    def _attempt(self, show_progress: bool | None) -> bool:
        failure = None
        try:
            self._run(show_progress, self._step)
        except TierError as error:
            failure = error
        with self._changed:
            self.succeeded, self.failure = failure is None, failure
            self._steps += 1
            self._changed.notify_all()
        return failure is None

    def _step(self) -> None:
        with self._changed:
            self._steps += 1
            self._changed.notify_all()
