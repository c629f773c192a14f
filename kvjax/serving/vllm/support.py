"""What the connector cannot be used with, and what of vLLM's settings names a model."""

from collections.abc import Sequence
from typing import Any

from kvjax.groups import Recurrent
from kvjax.serving.vllm.layout import VllmGroup


def check_supported(vllm_config: Any, groups: Sequence[VllmGroup], *, by_request: bool) -> None:
    """Checks vLLM's settings.

    Args:
        vllm_config: vLLM's settings.
        groups: the groups of caches.
        by_request: whether vLLM can be told by request that a load failed.

    Raises:
        ValueError: a setting under which wrong bytes might be restored, or a failed load could not be told.
    """
    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    if transfer.kv_role != "kv_both":
        raise ValueError(f"`kv_role` must be 'kv_both' with kvjax, got {transfer.kv_role!r}")
    for name in ("data_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size"):
        number = getattr(parallel, name, 1)
        if number != 1:
            raise ValueError(f"`{name}` must be 1 with kvjax, got {number}")
    if len(groups) > 1 and not by_request:
        raise ValueError(
            "models of several cache groups must be served by a vLLM that takes failed loads by request "
            "(`KVConnectorTransferResults`, as 0.33 has it), got one without"
        )
    if any(isinstance(group.kind, Recurrent) for group in groups) and vllm_config.speculative_config is not None:
        raise ValueError("models with recurrent layers must be served without speculative decoding, got a draft model")


def model_of(vllm_config: Any) -> str:
    """Returns what, besides the layout, a cache depends on: the model's name and revision, and how it is quantized."""
    model = vllm_config.model_config
    return f"{model.model}@{model.revision or 'default'}/{model.quantization or 'none'}"
