"""The connector itself: vLLM's interface, handed on to the scheduler's side or the worker's."""

from dataclasses import dataclass, field
from math import lcm
from typing import TYPE_CHECKING, Any

from vllm.distributed import kv_transfer  # pyright: ignore[reportMissingImports]
from vllm.distributed.kv_transfer.kv_connector.v1 import base  # pyright: ignore[reportMissingImports]
from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # pyright: ignore[reportMissingImports]
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (  # pyright: ignore[reportMissingImports]
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvjax.serving.vllm.keys import RequestKeys
from kvjax.serving.vllm.layout import groups_of, layout_of, tokens_per_hash
from kvjax.serving.vllm.messages import Orders, Report
from kvjax.serving.vllm.options import options_of
from kvjax.serving.vllm.scheduler import SchedulerSide
from kvjax.serving.vllm.support import check_supported, model_of
from kvjax.serving.vllm.telemetry import KvjaxPromMetrics, KvjaxStats

if TYPE_CHECKING:
    from kvjax.serving.vllm.books import Books
    from kvjax.serving.vllm.worker import WorkerSide

# How vLLM is told by request that a load failed. By block, as before, it cannot be told of several groups, whose ids
# are ambiguous, nor of a window, of which it would keep what lies before the block that failed.
_RESULTS = getattr(base, "KVConnectorTransferResults", None)


@dataclass
class KvjaxMetadata(KVConnectorMetadata):
    """What the worker is to do in a step."""

    orders: Orders = field(default_factory=Orders)


@dataclass
class KvjaxWorkerMetadata(KVConnectorWorkerMetadata):
    """What the worker tells after it."""

    report: Report = field(default_factory=Report)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:  # noqa: ARG002
        """Refused: there is one worker, which holds all devices.

        Raises:
            ValueError: always.
        """
        raise ValueError("kvjax.serving.vllm must be used with one worker that holds all devices, got several")


class KvjaxConnector(KVConnectorBase_V1, SupportsHMA):
    """Offloads the caches of a model to host memory, whatever its groups.

    Args:
        vllm_config: vLLM's settings.
        role: of this process.
        kv_cache_config: the groups of caches.

    Raises:
        ValueError: settings that are unknown or cannot be had; the text names them.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self._options = options_of(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._groups = groups_of(kv_cache_config)
        check_supported(vllm_config, self._groups, by_request=_RESULTS is not None)
        self._slots = frozenset(group.name for group in self._groups if group.has_slots)
        self._hash_unit = tokens_per_hash(self._groups, kv_cache_config.hash_block_size)
        self._model = self._options.model or model_of(vllm_config)
        self._resume_multiple = lcm(*(group.tokens_per_block for group in self._groups))
        self._worker: WorkerSide | None = None
        self._scheduler: SchedulerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(
                self._options,
                model=self._model,
                keys=RequestKeys(self._hash_unit),
                resume_multiple=self._resume_multiple,
                drafts=vllm_config.speculative_config is not None,
                slots=self._slots,
                books=_tiered_books() if self._options.tiers else None,
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """False: what is not stored is a miss later."""
        return False

    # --- vLLM's front end --------------------------------------------------------------------------------

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Returns what `get_kv_connector_stats` told in another process."""
        return KvjaxStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        """Registers the metrics of `docs/metrics.md`."""
        return KvjaxPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # --- the scheduler's process -------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Returns how many tokens can be loaded, and that they are loaded between steps if there are any."""
        tokens = self._books.matched_tokens(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plans the load of a request that now has blocks for it."""
        self._books.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Returns what the worker is to do in a step."""
        return KvjaxMetadata(self._books.orders(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        """Enters into the books what the worker tells."""
        told = connector_output.kv_connector_worker_meta
        if isinstance(told, KvjaxWorkerMetadata):
            self._books.heard(told.report)

    def request_finished_all_groups(
        self,
        request: Any,
        block_ids: tuple[list[int], ...],  # noqa: ARG002  # the books know them
    ) -> tuple[bool, dict[str, Any] | None]:
        """Stores the end of a request. Its blocks may be freed at once: they are read before the next step."""
        self._books.finished(request)
        return False, None

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished_all_groups`, for models of one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def reset_cache(self) -> bool | None:
        """Makes everything a miss."""
        self._books.reset()
        return True

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Returns what is new of the books, if anything; a worker has no figures."""
        figures = self._scheduler.figures() if self._scheduler is not None else {}
        return KvjaxStats(data=figures) if figures else None

    # --- the worker's process ----------------------------------------------------------------------------

    def register_runner(self, runner: Any) -> None:
        """Takes down the caches of tpu-inference's runner, and makes the host pool.

        Raises:
            ValueError: caches or settings that do not go together.
            MemoryError: the machine does not have so much memory for the pool.
        """
        from kvjax.serving.vllm.arrays import flattened, leaves_of
        from kvjax.serving.vllm.host import host_of
        from kvjax.serving.vllm.worker import WorkerSide

        leaves = leaves_of(self._groups, runner.kv_caches, runner.layer_name_to_kvcache_index)
        host = host_of(
            self._options,
            layout_of(self._groups, leaves, self._hash_unit),
            flattened(runner.kv_caches),
            model=self._model,
            resume_multiple=self._resume_multiple,
        )
        self._worker = WorkerSide(host, runner, self._slots)

    def register_kv_caches(self, kv_caches: Any) -> None:
        """Refused: caches of PyTorch.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "kvjax must be given the runner of tpu-inference (`register_runner`), got caches of "
            f"{sorted({type(cache).__name__ for cache in kv_caches.values()})}"
        )

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Takes the step's orders, and issues its stores, before the step writes to blocks that were freed."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None and isinstance(connector_metadata, KvjaxMetadata):
            self._worker.begin(connector_metadata.orders.stores, connector_metadata.orders.finished)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Issues the step's loads. The requests that they are for are not in the step."""
        orders = self._connector_metadata
        if self._worker is not None and isinstance(orders, KvjaxMetadata):
            self._worker.load(orders.orders.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: no request of a step waits for a load."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to do: chunks are stored whole, all layers at once."""

    def wait_for_save(self) -> None:
        """Notes where the step leaves its states. Stores are issued by `bind_connector_metadata` of the next step."""
        if self._worker is not None:
            self._worker.end()

    def get_finished(
        self,
        finished_req_ids: set[str],  # noqa: ARG002  # `bind_connector_metadata` was told, before the step's loads
    ) -> tuple[set[str] | None, set[str] | None]:
        """Returns the requests whose loads ended, well or not."""
        if self._worker is None:
            return None, None
        loaded, _ = self._worker.loaded()
        return None, loaded

    def get_transfer_results(
        self,
        finished_req_ids: set[str],  # noqa: ARG002  # as above
    ) -> Any:
        """As `get_finished`, with the loads that failed."""
        assert _RESULTS is not None, "vLLM calls it where it has it"
        loaded, failed = self._worker.loaded() if self._worker is not None else (set(), set())
        return _RESULTS(finished_recving=loaded, failed_recving=failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Returns what the scheduler's side has to hear, if anything."""
        report = self._worker.report() if self._worker is not None else None
        return KvjaxWorkerMetadata(report) if report else None

    def shutdown(self) -> None:
        """Waits for what was issued."""
        if self._worker is not None:
            self._worker.close()

    @property
    def _books(self) -> SchedulerSide:
        if self._scheduler is None:
            raise ValueError("this connector was made for a worker, and must not be asked for what a scheduler knows")
        return self._scheduler


def _tiered_books() -> "Books":
    """Returns the books of the worker in this process, which vLLM makes before its scheduler."""
    worker = kv_transfer.get_kv_transfer_group() if kv_transfer.has_kv_transfer_group() else None
    side = worker._worker if isinstance(worker, KvjaxConnector) else None
    if side is None or side.host.offloader is None:
        raise ValueError(
            "`tiers` must be used where vLLM runs its worker in the scheduler's process (the executor 'uni'), got a "
            "scheduler without a worker: what flows between the host pool and lower tiers does not pass between "
            "processes"
        )
    from kvjax.serving.vllm.tiered import TieredBooks

    return TieredBooks(side.host.offloader)
