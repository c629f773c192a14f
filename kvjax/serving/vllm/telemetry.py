"""The connector's figures in vLLM's own log and metrics."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (  # pyright: ignore[reportMissingImports]
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvjax.observe.metrics import label_of
from kvjax.serving.vllm.figures import SHOWN, joined, summary


@dataclass
class KvjaxStats(KVConnectorStats):
    """What is new since the step before; `data` is a `kvjax.serving.vllm.figures.Figures`."""

    def reset(self) -> None:
        """Forgets all."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Returns this and what came later as one."""
        return KvjaxStats(data=joined(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        """Returns a line for the log."""
        return summary(self.data)

    def is_empty(self) -> bool:
        """Whether nothing is new."""
        return not self.data


class KvjaxPromMetrics(KVConnectorPromMetrics):
    """The metrics of `docs/metrics.md`, but for durations, among those of vLLM's server.

    Args:
        vllm_config: vLLM's settings.
        metric_types: vLLM's classes of metrics, by those of `prometheus_client`.
        labelnames: labels that vLLM gives to all its metrics.
        per_engine_labelvalues: their values for each engine.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: Sequence[str],
        per_engine_labelvalues: Mapping[int, Sequence[object]],
    ):
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._kinds = {metric.name: metric.kind for metric in SHOWN}
        self._metrics: dict[str, Any] = {}
        for metric in SHOWN:
            label = label_of(metric)
            labels = [*labelnames, label] if label else list(labelnames)
            text = f"{metric.meaning} ({metric.unit})"
            if metric.kind == "counter":
                made = self._counter_cls(name=metric.name, documentation=text, labelnames=labels)
            else:
                mode = "mostrecent"  # of several processes of vLLM's server
                made = self._gauge_cls(name=metric.name, documentation=text, labelnames=labels, multiprocess_mode=mode)
            self._metrics[metric.name] = made
            if not label:
                for values in per_engine_labelvalues.values():
                    made.labels(*values)  # 0 is shown until there is more

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Enters what is new of one engine."""
        engine = self.per_engine_labelvalues[engine_idx]
        for name, values in transfer_stats_data.items():
            for label, value in values.items():
                shown = self._metrics[name].labels(*engine, *([label] if label else []))
                if self._kinds[name] == "counter":
                    shown.inc(value)
                else:
                    shown.set(value)
