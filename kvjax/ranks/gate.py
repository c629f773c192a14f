"""A load that is done when all ranks say so."""

import time
from collections.abc import Sequence

import numpy as np

from kvjax.handles import Load
from kvjax.jobs import Job
from kvjax.mover import Transfer
from kvjax.plan import LoadPlan, StorePlan


class Gate(Transfer):
    """Moves under way that do not count as done until the gate is opened.

    Args:
        inner: the moves.
    """

    def __init__(self, inner: Transfer):
        super().__init__(())
        self.inner = inner
        self.is_open = False

    def open(self, *, good: bool) -> None:
        """Opens the gate; the moves count for nothing unless all is `good`."""
        self.is_open, self.is_void = True, not good

    def done(self) -> bool:
        """True once the gate is open and all moves ended, well or not."""
        return self.is_open and self.inner.done()

    def settle(self) -> Exception | None:
        """Waits for all moves, and returns the first failure."""
        return self.inner.settle()

    def moved(self, plan: StorePlan | LoadPlan) -> dict[int, np.ndarray]:
        """Returns, by `group_idx`, a mask of the rows of a plan that were moved; for moves that ended."""
        return self.inner.moved(plan)


class GatedLoad:
    """A load on this rank on which the ranks have not agreed yet.

    Args:
        job: the offloader's job.
        load: what the ledger prepared.
        gate: its moves.
        after: the loads whose blocks it shares and on which the ranks have not agreed yet.
        limit_s: how long it may take, in seconds; `None` for ever.
    """

    def __init__(self, job: Job, load: Load, gate: Gate, after: "tuple[GatedLoad, ...]", limit_s: float | None):
        self.job, self.load, self.gate = job, load, gate
        self.after, self.limit_s = after, limit_s
        self.failed = False
        self._late_at = None if limit_s is None else time.monotonic() + limit_s

    def says(self) -> str | None:
        """What this rank has to say of its own moves: `""` that all went well, or what went wrong, or `None` while
        they go on."""
        if self.load.stale:
            return "its chunks were invalidated after the lookup"
        if not self.gate.inner.done():
            return "not done by its deadline" if self.is_late() else None
        error = self.gate.settle()
        return "" if error is None else f"{type(error).__name__}: {error}"

    def verdict(self, of_ranks: Sequence[str | None]) -> str | None:
        """What the ranks agree on: `""` that all went well, or what went wrong, or `None` while it goes on somewhere.

        Args:
            of_ranks: what each of them says. The loads that this one shares have their verdicts, as far as they can.
        """
        if any(load.failed for load in self.after):
            return "a load whose blocks it shares failed"
        wrong = next((f"rank {rank}: {words}" for rank, words in enumerate(of_ranks) if words), None)
        if wrong is not None:
            return wrong
        return None if None in of_ranks or any(not load.gate.is_open for load in self.after) else ""

    def is_late(self) -> bool:
        """Whether it is past its deadline."""
        return self._late_at is not None and time.monotonic() >= self._late_at

    def wait(self, until: float | None, longest_sleep_s: float) -> None:
        """Waits until the moves ended or the load is late, or until a time by the monotonic clock."""
        limits = [limit for limit in (until, self._late_at) if limit is not None]
        if not limits:
            self.gate.settle()
        while not self.gate.inner.done() and all(time.monotonic() < limit for limit in limits):
            time.sleep(max(0.0, min([longest_sleep_s, *(limit - time.monotonic() for limit in limits)])))
