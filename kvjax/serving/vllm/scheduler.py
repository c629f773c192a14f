"""The scheduler's side of the connector: books and plans. It sees no array and no byte.

All stores are planned one step late, from what the step before wrote, and issued before the next step writes
anything: the last store of a request that ends or is preempted is then like any other. All loads are for requests
that vLLM keeps waiting until they have come, so that nothing is ever computed from blocks that were not restored.
"""

import logging
from collections.abc import Container
from itertools import count
from typing import Any

from kvjax.handles import Load, Store
from kvjax.serving.vllm.books import Books, LedgerBooks
from kvjax.serving.vllm.figures import Figures, Meter
from kvjax.serving.vllm.keys import RequestKeys
from kvjax.serving.vllm.messages import Order, Orders, Outcome, Report
from kvjax.serving.vllm.options import Options
from kvjax.serving.vllm.tracked import Tracked, load_tables

_LOG = logging.getLogger(__name__)


class SchedulerSide:
    """Finds hits, plans loads and stores, and hears what became of them.

    Until the worker has told what its arrays look like, after the first step, nothing is found or stored: there are no
    books.

    Args:
        options: the connector's settings.
        model: see `kvjax.Ledger`.
        keys: what a request's chunks are named by.
        resume_multiple: hits are multiples of this many tokens.
        drafts: whether steps compute tokens that may be rejected.
        slots: names of the recurrent groups whose states are in slots of the runner.
        books: of a host pool in this process; without them, of the worker's, once it has told of its arrays.
    """

    def __init__(
        self,
        options: Options,
        *,
        model: str,
        keys: RequestKeys,
        resume_multiple: int,
        drafts: bool,
        slots: Container[str] = (),
        books: Books | None = None,
    ):
        self._options = options
        self._model = model
        self._keys = keys
        self._resume_multiple = resume_multiple
        self._drafts = drafts
        self._slots = slots
        self._requests: dict[str, Tracked] = {}
        self._open: dict[int, tuple[Load | Store, Tracked]] = {}
        self._numbers = count()
        self._orders = Orders()
        self._meter = Meter()
        self.books = books

    # --- what vLLM's scheduler calls, in the order of a step ---------------------------------------------

    def matched_tokens(self, request: Any, num_computed: int) -> int | None:
        """Returns how many tokens beyond `num_computed` can be loaded, or `None` to be asked again after a step: what
        the request computed before it was preempted is being stored, or what lower tiers have of it is on its way; or
        nothing runs, and no step has told yet what became of the stores of what ran last, such as the turn before. It
        may be asked again and again."""
        tracked = self._requests.setdefault(request.request_id, Tracked(request))
        self._note_preemption(tracked)
        if self.books is None or not tracked.restores:
            return 0
        if tracked.stores_under_way or self._is_idle_and_storing():
            return None
        if tracked.found is not None and tracked.found.device_tokens == num_computed:
            return tracked.found.hit_tokens - num_computed
        question = self._keys.fingerprint(request), num_computed
        try:
            if tracked.answered == question:  # vLLM asks in every step for which a request waits
                found = self.books.look_again(request.request_id)
            else:
                found = self.books.lookup(request.request_id, device_tokens=num_computed, **self._keys.whole(request))
        except ValueError:
            _LOG.exception("request %s goes without restored blocks", request.request_id)
            return 0
        if found is None:
            return None
        tracked.answered = question
        tracked.found = found if found.hit_tokens > num_computed else None  # until it is admitted: it is kept for it
        return max(0, found.hit_tokens - num_computed)

    def allocated(self, request: Any, block_ids: tuple[list[int], ...], num_external: int) -> None:
        """Plans the load of what `matched_tokens` found, now that there are blocks for it."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return
        promised = tracked.found
        tracked.found, tracked.answered, tracked.admitted = None, None, True
        if self.books is None:
            return
        if not num_external:
            if promised is not None:  # vLLM wants logits of the prompt, say: what was kept for it is free to leave
                self.books.take_on(request.request_id, **self._keys.whole(request))
            return
        request_id, number = request.request_id, next(self._numbers)
        try:
            load = self._prepare_load(request_id, block_ids, num_external)
        except ValueError:
            _LOG.exception("the load of request %s cannot be planned, and fails", request_id)
            tracked.restores = False
            self._orders.loads.append(Order(number, request_id, None))
            return
        self._open[number] = load, tracked
        self._orders.loads.append(Order(number, request_id, None if load.stale else load.plan))

    def orders(self, scheduler_output: Any) -> Orders:
        """Plans the stores of what the steps before wrote, and returns what the worker is to do in this one."""
        for tracked in self._requests.values():
            self._note_preemption(tracked)
            self._store(tracked, checkpoint=False)
        scheduled = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            if new.req_id in self._requests:
                self._requests[new.req_id].begin(new.block_ids, new.num_computed_tokens, scheduled[new.req_id])
        again = scheduler_output.scheduled_cached_reqs
        for request_id, ids, num_computed in zip(
            again.req_ids, again.new_block_ids, again.num_computed_tokens, strict=True
        ):
            tracked = self._requests.get(request_id)
            if tracked is None:
                continue
            if request_id in again.resumed_req_ids:
                tracked.begin(ids, num_computed, scheduled[request_id])
            else:
                tracked.step(ids, num_computed, scheduled[request_id])
        orders, self._orders = self._orders, Orders()
        orders.finished = frozenset(scheduler_output.finished_req_ids)
        return orders

    def finished(self, request: Any) -> None:
        """Stores the end of a request, and forgets it. Its blocks may be freed at once."""
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None or self.books is None:
            return
        self._note_preemption(tracked)
        self._store(tracked, checkpoint=True)
        if self._is_known(tracked):
            self.books.finish(request.request_id)

    def heard(self, report: Report) -> None:
        """Enters into the books what a worker tells."""
        if report.geometry is not None and self.books is None:
            self.books = LedgerBooks(
                self._options, report.geometry, model=self._model, resume_multiple=self._resume_multiple
            )
        if self.books is None:
            return
        for outcome in report.outcomes:
            self._complete(outcome)
        if report.pool_lost:
            self._invalidate()

    def reset(self) -> None:
        """Makes everything a miss, as for new weights. Requests that have blocks by now store nothing of them."""
        for tracked in self._requests.values():
            if tracked.lost_its_blocks:
                tracked.forget_blocks()
            else:
                tracked.stores = not tracked.admitted
        self._invalidate()

    def figures(self) -> Figures:
        """Returns what is new of the books since it was last asked."""
        return self._meter.new(self.books.stats()) if self.books is not None else {}

    # --- parts ----------------------------------------------------------------------------------------

    def _is_known(self, tracked: Tracked) -> bool:
        """Whether the ledger has the request; it has none that was admitted before the books were opened."""
        assert self.books is not None, "the books are open"
        try:
            self.books.ledger.request(tracked.request.request_id)
        except ValueError:
            return False
        return True

    def _is_idle_and_storing(self) -> bool:
        """Whether vLLM runs nothing, so that waiting a step costs nothing, while stores are not known to have ended."""
        if not any(isinstance(work, Store) for work, _ in self._open.values()):
            return False
        return not any(tracked.admitted for tracked in self._requests.values())

    def _invalidate(self) -> None:
        for tracked in self._requests.values():
            tracked.found = tracked.answered = None
        if self.books is not None:
            self.books.invalidate()

    def _note_preemption(self, tracked: Tracked) -> None:
        if tracked.lost_its_blocks:
            self._store(tracked, checkpoint=True)
            tracked.forget_blocks()

    def _prepare_load(self, request_id: str, block_ids: tuple[list[int], ...], num_external: int) -> Load:
        assert self.books is not None, "the books are open"
        known = self.books.ledger.request(request_id)
        found = known.hit_tokens - known.most_on_device
        if found != num_external:
            raise ValueError(f"request {request_id!r} must load the {found} tokens that were found, got {num_external}")
        tables = load_tables(self.books.ledger.chunking.layout, block_ids, known.hit_tokens, self._slots)
        return self.books.prepare_load(request_id, tables)

    def _store(self, tracked: Tracked, *, checkpoint: bool) -> None:
        """Plans a store of what was computed since the last one, if that may complete a chunk."""
        if self.books is None or tracked.tables is None or not tracked.stores:
            return
        request, unit = tracked.request, self.books.ledger.chunking.tokens_per_hash
        num_tokens = min(tracked.computed, self._keys.num_tokens(request) - self._drafts)
        if num_tokens <= 0 or not (checkpoint or num_tokens // unit > tracked.stored // unit):
            return
        try:
            self._catch_up(tracked)
            store = self.books.prepare_store(
                request.request_id,
                tracked.store_tables(self.books.ledger.chunking.layout, num_tokens, self._slots),
                num_tokens,
                checkpoint=checkpoint,
            )
        except ValueError:
            _LOG.exception("what request %s computed is not stored", request.request_id)
            return
        tracked.stored = num_tokens
        if not store.num_chunks:
            self.books.complete(store, {})
            return
        number = next(self._numbers)
        self._open[number] = store, tracked
        tracked.stores_under_way += 1
        self._orders.stores.append(Order(number, request.request_id, store.plan))

    def _catch_up(self, tracked: Tracked) -> None:
        """Tells the ledger the tokens that a request has by now."""
        assert self.books is not None, "the books are open"
        request = tracked.request
        if self._is_known(tracked):
            known = self.books.ledger.request(request.request_id)
            if self._keys.continues(request, known):
                self.books.extend(request.request_id, **self._keys.beyond(request, known))
                return
        self.books.take_on(request.request_id, **self._keys.whole(request))

    def _complete(self, outcome: Outcome) -> None:
        assert self.books is not None, "the books are open"
        if outcome.number not in self._open:
            return
        work, tracked = self._open.pop(outcome.number)
        ok = self.books.complete(work, outcome.moved)
        if isinstance(work, Store):
            tracked.stores_under_way -= 1
        elif not ok:
            tracked.restores = False
