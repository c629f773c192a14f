"""The worker's side of the connector: it owns the host pool and moves what it is told to. It decides nothing."""

import logging
from collections.abc import Container, Iterable, Mapping
from typing import Any

import jax

from kvjax.mover import Transfer
from kvjax.plan import LoadPlan, StorePlan
from kvjax.serving.vllm.arrays import flattened, unflattened
from kvjax.serving.vllm.host import Host
from kvjax.serving.vllm.messages import Order, Outcome, Report
from kvjax.serving.vllm.states import States

_LOG = logging.getLogger(__name__)


class WorkerSide:
    """Moves chunks between a runner's caches and the host pool.

    The caches stay the runner's: they are taken from it for each move, and put back.

    Args:
        host: the host pool.
        runner: with `kv_caches`, a list, and an `input_batch`, as tpu-inference's has them.
        slots: names of the recurrent groups whose states are in slots of the runner.

    Raises:
        ValueError: the runner does not tell what has to be known of its states.
    """

    def __init__(self, host: Host, runner: Any, slots: Container[str] = ()):
        self._runner = runner
        self.host = host
        self.mover = host.mover
        self._states = States(host.geometry.layout, flattened(runner.kv_caches), runner, slots)
        self._report = Report(geometry=host.geometry)
        self._under_way: dict[Order, Transfer] = {}
        self._loaded: set[str] = set()
        self._failed: set[str] = set()

    # --- what the connector calls, in the order of a step ------------------------------------------------

    def begin(self, stores: Iterable[Order], finished: Iterable[str]) -> None:
        """Issues stores, after which what they read may be overwritten, and gives restored states to the requests whose
        first step this is.

        Args:
            stores: of what earlier steps wrote.
            finished: requests that ended before the step.
        """
        for order in stores:
            self._issue(order, self._moved_out)
        self._states.drop(finished)
        self._put_back(self._states.placed(flattened(self._runner.kv_caches)))

    def load(self, orders: Iterable[Order]) -> None:
        """Issues loads into the runner's caches."""
        for order in orders:
            self._issue(order, self._moved_in)

    def end(self) -> None:
        """Notes what a step leaves behind that the next one may overwrite."""
        self._states.note_slots()

    def loaded(self) -> tuple[set[str], set[str]]:
        """Returns the requests whose loads ended since it was last asked, and those of them whose loads failed."""
        for order, transfer in list(self._under_way.items()):
            if transfer.done():
                del self._under_way[order]
                self._settle(order, transfer)
        loaded, failed = self._loaded, self._failed
        self._loaded, self._failed = set(), set()
        return loaded, failed

    def report(self) -> Report:
        """Returns what the scheduler's side has to hear, once."""
        report, self._report = self._report, Report()
        return report

    def close(self) -> None:
        """Waits for what was issued."""
        for transfer in self._under_way.values():
            transfer.settle()
        self._under_way.clear()
        self.host.close()

    # --- parts ----------------------------------------------------------------------------------------

    def _issue(self, order: Order, move: Any) -> None:
        if order.plan is None:
            self._end(order, {})
            return
        try:
            self._under_way[order] = move(order.request_id, order.plan)
        except Exception:  # noqa: BLE001  # the edge of a job: whatever went wrong fails it
            _LOG.exception("a move for request %s could not be issued", order.request_id)
            self._end(order, {})
            self._revive()

    def _moved_out(self, request_id: str, plan: StorePlan) -> Transfer:
        plan = self._states.from_slots(request_id, plan)
        caches, transfer = self.mover.store(flattened(self._runner.kv_caches), plan)
        self._put_back(caches)
        return transfer

    def _moved_in(self, request_id: str, plan: LoadPlan) -> Transfer:
        caches, transfer = self.mover.load(flattened(self._runner.kv_caches), plan)
        self._put_back(caches)
        self._states.hold(request_id, plan, caches)
        return transfer

    def _put_back(self, caches: Mapping[str, jax.Array]) -> None:
        self._runner.kv_caches = unflattened(self._runner.kv_caches, caches)

    def _settle(self, order: Order, transfer: Transfer) -> None:
        assert order.plan is not None, "what was issued had a plan"
        error = transfer.settle()
        if error is not None:
            _LOG.error("a move for request %s failed", order.request_id, exc_info=error)
            self._revive()
        self._end(order, transfer.moved(order.plan))

    def _end(self, order: Order, moved: dict[int, Any]) -> None:
        self._report.outcomes.append(Outcome(order.number, moved))
        if isinstance(order.plan, StorePlan):
            return
        self._loaded.add(order.request_id)
        if order.plan is None or len(moved) < len(order.plan.moves) or not all(mask.all() for mask in moved.values()):
            self._failed.add(order.request_id)
            self._states.drop([order.request_id])

    def _revive(self) -> None:
        if self.mover.revive():
            self._report.pool_lost = True
