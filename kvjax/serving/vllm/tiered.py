"""Books of a host pool in the scheduler's own process, with lower tiers below it."""

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np

from kvjax.handles import Load, Lookup, Store
from kvjax.jobs import Job
from kvjax.ledger import Ledger
from kvjax.mover import Transfer
from kvjax.offloader import Offloader
from kvjax.plan import LoadPlan, StorePlan
from kvjax.stats import Stats


class Reported(Transfer):
    """Moves that the worker's side issues, and whose end it reports."""

    def __init__(self):
        super().__init__([])
        self._moved: Mapping[int, np.ndarray] | None = None

    def end(self, moved: Mapping[int, np.ndarray]) -> None:
        """Notes what was moved: by `group_idx`, masks of the rows of the plan; nothing if there are none."""
        self._moved = moved

    def done(self) -> bool:
        """True once its end was reported."""
        return self._moved is not None

    def moved(self, plan: StorePlan | LoadPlan) -> dict[int, np.ndarray]:
        """Returns, by `group_idx`, a mask of the rows of a plan that were moved."""
        masks = {moves.group_idx: np.zeros(moves.num_chunks, bool) for moves in plan.moves}
        return masks | dict(self._moved or {})


class TieredBooks:
    """Books that an offloader keeps, whose mover the worker's side uses.

    A request waits once for what lower tiers have of it; what has not come by then is computed.

    Args:
        offloader: of the worker.
    """

    def __init__(self, offloader: Offloader):
        self._offloader = offloader
        self._jobs: dict[Load | Store, tuple[Reported, Job]] = {}
        self._arriving: dict[Hashable, Job] = {}
        self._waited: set[Hashable] = set()

    @property
    def ledger(self) -> Ledger:
        """See `Books`."""
        return self._offloader.ledger

    def lookup(self, request_id: Hashable, **arguments: Any) -> Lookup | None:
        """See `Books`."""
        arriving = self._arriving.get(request_id)
        if arriving is not None:
            self._offloader.poll()
            if arriving.result is None:
                return None
            del self._arriving[request_id]
        found = self._offloader.lookup(request_id, wait_s=0, **arguments)
        promotion = self._offloader.promotion(request_id)
        if promotion is None or promotion.result is not None or request_id in self._waited:
            return found
        self._waited.add(request_id)
        self._arriving[request_id] = promotion
        return None

    def look_again(self, request_id: Hashable) -> Lookup:
        """See `Books`. Lower tiers are not asked again."""
        return self._offloader.look_again(request_id)

    def take_on(self, request_id: Hashable, **arguments: Any) -> None:
        """See `Books`."""
        self._offloader.lookup(request_id, wait_s=0, restore="never", max_load_tokens=0, **arguments)

    def extend(self, request_id: Hashable, **arguments: Any) -> None:
        """See `Books`."""
        self._offloader.extend(request_id, **arguments)

    def prepare_load(self, request_id: Hashable, tables: Mapping[str, np.ndarray]) -> Load:
        """See `Books`."""
        self._waited.discard(request_id)
        load = self._offloader.prepare_load(request_id, tables)
        self._issue("load", load)
        return load

    def prepare_store(
        self, request_id: Hashable, tables: Mapping[str, np.ndarray], num_tokens: int, *, checkpoint: bool
    ) -> Store:
        """See `Books`."""
        store = self._offloader.prepare_store(request_id, tables, num_tokens, checkpoint=checkpoint)
        self._issue("store", store)
        return store

    def complete(self, work: Load | Store, moved: Mapping[int, np.ndarray]) -> bool:
        """See `Books`."""
        reported, job = self._jobs.pop(work)
        reported.end(moved)
        self._offloader.poll()
        return job.result is not None and job.result.ok

    def finish(self, request_id: Hashable) -> None:
        """See `Books`."""
        self._arriving.pop(request_id, None)
        self._waited.discard(request_id)
        self._offloader.finish(request_id)

    def invalidate(self) -> None:
        """See `Books`."""
        self._offloader.invalidate()

    def stats(self) -> Stats:
        """See `Books`."""
        return self._offloader.stats()

    def _issue(self, operation: str, work: Load | Store) -> None:
        reported = Reported()
        if not work.num_chunks:
            reported.end({})
        self._jobs[work] = (reported, self._offloader.issued(work.request_id, operation, work, reported))
