"""The worker's side of the connector: it owns the host pool and moves what it is told to. It decides nothing."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from kvjax.chunking import resolve_chunking
from kvjax.ledger import pool_units
from kvjax.memory.host import check_available
from kvjax.memory.registration import register
from kvjax.memory.transports import granule_bytes
from kvjax.mover import Mover, Transfer
from kvjax.packing import cut_into_units, unit_bytes
from kvjax.plan import LoadPlan, StorePlan
from kvjax.serving.vllm.arrays import flattened, leaves_of, unflattened
from kvjax.serving.vllm.layout import VllmGroup, layout_of
from kvjax.serving.vllm.messages import Geometry, Order, Outcome, Report
from kvjax.serving.vllm.options import Options
from kvjax.serving.vllm.states import States

_LOG = logging.getLogger(__name__)


class WorkerSide:
    """Moves chunks between a runner's caches and the host pool.

    The caches stay the runner's: they are taken from it for each move, and put back.

    Args:
        options: the connector's settings.
        groups: vLLM's groups.
        hash_unit: see `kvjax.serving.vllm.layout.layout_of`.
        runner: with `kv_caches`, a list, and `layer_name_to_kvcache_index`, as tpu-inference's has them.

    Raises:
        ValueError: groups, arrays or settings that do not go together.
        MemoryError: the machine does not have so much memory for the pool.
    """

    def __init__(self, options: Options, groups: tuple[VllmGroup, ...], hash_unit: int | None, runner: Any):
        if jax.process_count() > 1:
            raise ValueError(
                f"kvjax.serving.vllm must be used with one process that holds all devices, got {jax.process_count()}"
            )
        self._runner = runner
        leaves = leaves_of(groups, runner.kv_caches, runner.layer_name_to_kvcache_index)
        layout = layout_of(groups, leaves, hash_unit)
        caches = flattened(runner.kv_caches)
        chunking = resolve_chunking(layout, **options.chunking)
        units = cut_into_units(chunking, unit_bytes(chunking, granule_bytes(register(layout, caches))))
        check_available(options.host_bytes)
        self.mover = Mover(
            chunking,
            units,
            caches,
            num_units=pool_units(chunking, units, options.host_bytes),
            staging_bytes=options.staging_bytes,
            transfer=options.transfer,
        )
        num_blocks = {layout.groups[g].name: self.mover.caches.num_blocks(g) for g in layout.cached}
        self._report = Report(geometry=Geometry(layout, units.unit_bytes, num_blocks))
        self._states = States(layout, caches, runner)
        self._under_way: dict[Order, Transfer] = {}
        self._loaded: set[str] = set()
        self._failed: set[str] = set()
        self._invalid: set[int] = set()

    # --- what the connector calls, in the order of a step ------------------------------------------------

    def begin(self, stores: Iterable[Order]) -> None:
        """Issues stores, after which what they read may be overwritten, and gives restored states to the requests whose
        first step this is."""
        for order in stores:
            self._issue(order, self._moved_out)
        self._put_back(self._states.placed(flattened(self._runner.kv_caches)))

    def load(self, orders: Iterable[Order]) -> None:
        """Issues loads into the runner's caches."""
        for order in orders:
            self._issue(order, self._moved_in)

    def end(self) -> None:
        """Notes what a step leaves behind that the next one may overwrite."""
        self._states.note_slots()

    def loaded(self, finished: Iterable[str]) -> tuple[set[str], set[str]]:
        """Returns the requests whose loads ended since it was last asked, and those of them whose loads failed.

        Args:
            finished: requests that will not be heard of again.
        """
        self._states.drop(finished)
        for order, transfer in list(self._under_way.items()):
            if transfer.done():
                del self._under_way[order]
                self._settle(order, transfer)
        loaded, failed = self._loaded, self._failed
        self._loaded, self._failed = set(), set()
        return loaded, failed

    def invalid_blocks(self) -> set[int]:
        """Returns the blocks of failed loads that were not asked for before, see `Order`."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def report(self) -> Report:
        """Returns what the scheduler's side has to hear, once."""
        report, self._report = self._report, Report()
        return report

    def close(self) -> None:
        """Waits for what was issued."""
        for transfer in self._under_way.values():
            transfer.settle()
        self._under_way.clear()
        self.mover.close()

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
            self._invalid.update(order.blocks)

    def _revive(self) -> None:
        if self.mover.revive():
            self._report.pool_lost = True
