"""Stand-ins of vLLM's interface classes, with the signatures of vLLM 0.33, for machines without vLLM.

`test_vllm_interface.py` compares them with the real ones where vLLM is installed.
"""

import enum
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from types import ModuleType


@dataclass
class KVConnectorTransferResults:
    finished_sending: set = field(default_factory=set)
    finished_recving: set = field(default_factory=set)
    failed_recving: set = field(default_factory=set)


class SupportsHMA(ABC):
    @abstractmethod
    def request_finished_all_groups(self, request, block_ids): ...


class KVConnectorRole(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata(ABC):  # noqa: B024
    pass


class KVConnectorWorkerMetadata(ABC):
    @abstractmethod
    def aggregate(self, other): ...


@dataclass
class KVConnectorStats:
    data: dict = field(default_factory=dict)

    def to_dict(self):
        return self.data

    def reset(self): ...

    def aggregate(self, other): ...

    def reduce(self): ...

    def is_empty(self): ...


class KVConnectorPromMetrics:
    def __init__(self, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        self._gauge_cls = metric_types["gauge"]
        self._counter_cls = metric_types["counter"]
        self.per_engine_labelvalues = per_engine_labelvalues

    def observe(self, transfer_stats_data, engine_idx=0): ...


class KVConnectorBase_V1(ABC):  # noqa: N801
    # ruff: noqa: B027  # as in vLLM, methods that need not be there do nothing
    def __init__(self, vllm_config, role, kv_cache_config):
        self._connector_metadata = None
        self._role = role

    def bind_connector_metadata(self, connector_metadata):
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self):
        self._connector_metadata = None

    def register_kv_caches(self, kv_caches): ...

    @abstractmethod
    def start_load_kv(self, forward_context, **kwargs): ...

    @abstractmethod
    def wait_for_layer_load(self, layer_name): ...

    @abstractmethod
    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs): ...

    @abstractmethod
    def wait_for_save(self): ...

    def get_finished(self, finished_req_ids):
        return None, None

    def get_transfer_results(self, finished_req_ids): ...

    def get_block_ids_with_load_errors(self):
        return set()

    def shutdown(self): ...

    def build_connector_worker_meta(self): ...

    @abstractmethod
    def get_num_new_matched_tokens(self, request, num_computed_tokens): ...

    @abstractmethod
    def update_state_after_alloc(self, request, blocks, num_external_tokens): ...

    @abstractmethod
    def build_connector_meta(self, scheduler_output): ...

    def update_connector_output(self, connector_output): ...

    def request_finished(self, request, block_ids):
        return False, None

    def reset_cache(self): ...

    def get_kv_connector_stats(self): ...

    @classmethod
    def build_kv_connector_stats(cls, data=None): ...

    @classmethod
    def build_prom_metrics(cls, vllm_config, metric_types, labelnames, per_engine_labelvalues): ...


ABOVE = "vllm.distributed.kv_transfer.kv_connector.v1"
BASE, METRICS = f"{ABOVE}.base", f"{ABOVE}.metrics"
CLASSES = (
    KVConnectorTransferResults,
    SupportsHMA,
    KVConnectorRole,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
    KVConnectorBase_V1,
)
METRIC_CLASSES = (KVConnectorStats, KVConnectorPromMetrics)


def install(monkeypatch) -> None:
    """Puts the stand-ins where vLLM has its classes, until the test ends."""
    monkeypatch.setitem(sys.modules, "kvjax.serving.vllm.connector", None)
    monkeypatch.setitem(sys.modules, "kvjax.serving.vllm.telemetry", None)
    for name in ("connector", "telemetry"):  # imported anew now, and again after the test
        del sys.modules[f"kvjax.serving.vllm.{name}"]
    parts = ABOVE.split(".")
    names = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    for name in (*names, BASE, METRICS):
        module = ModuleType(name)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
        above, _, last = name.rpartition(".")
        if above:
            setattr(sys.modules[above], last, module)
    transfer = sys.modules["vllm.distributed.kv_transfer"]
    transfer.worker = None  # pyright: ignore
    transfer.has_kv_transfer_group = lambda: transfer.worker is not None
    transfer.get_kv_transfer_group = lambda: transfer.worker
    for name, classes in ((BASE, CLASSES), (METRICS, METRIC_CLASSES)):
        for one in classes:
            setattr(sys.modules[name], one.__name__, one)
