"""What the connector cannot be used with, and what of vLLM's settings names a model."""

import json
from collections.abc import Sequence
from typing import Any

from kvjax._checks import shown
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
        raise ValueError(f"`kv_role` must be 'kv_both' with kvjax, got {shown(transfer.kv_role)}")
    if transfer.kv_load_failure_policy != "recompute":
        raise ValueError(
            "`kv_load_failure_policy` must be 'recompute' with kvjax, so that blocks that cannot be restored are "
            f"computed, got {shown(transfer.kv_load_failure_policy)}"
        )
    for name in ("data_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size"):
        number = getattr(parallel, name, 1)
        if number != 1:
            raise ValueError(f"`{name}` must be 1 with kvjax, got {number}")
    # tpu-inference: each data-parallel rank has a scheduler and block ids of its own, whatever vLLM's settings say.
    ranks = getattr(getattr(vllm_config, "sharding_config", None), "total_dp_size", 1)
    if ranks != 1:
        raise ValueError(f"tpu-inference must split nothing over data-parallel ranks with kvjax, got {ranks} ranks")
    if not by_request:
        raise ValueError(
            "vLLM must take failed loads by request with kvjax (`KVConnectorTransferResults`, as 0.32 has it), got one "
            "that does not"
        )
    if not any(isinstance(group.kind, Recurrent) for group in groups):
        return
    if vllm_config.speculative_config is not None:
        raise ValueError("models with recurrent layers must be served without speculative decoding, got a draft model")
    if (getattr(vllm_config, "additional_config", None) or {}).get("enable_continue_decode"):
        raise ValueError(
            "models with recurrent layers must be served without `enable_continue_decode`, whose steps leave a state "
            "that is further than vLLM knows, got it in `additional_config`"
        )


def model_of(vllm_config: Any) -> str:
    """Returns what, besides the layout, a cache depends on: the model's name and revision, how it is quantized, its
    type of numbers, what of its configuration is overridden, and all of `additional_config`, where tpu-inference is
    told to quantize."""
    model = vllm_config.model_config
    named = f"{model.model}@{model.revision or 'default'}/{model.quantization or 'none'}/{model.dtype}"
    more = {"hf_overrides": model.hf_overrides, "additional_config": getattr(vllm_config, "additional_config", None)}
    more = {name: value for name, value in more.items() if value}
    return f"{named}/{json.dumps(more, sort_keys=True, default=str)}" if more else named
