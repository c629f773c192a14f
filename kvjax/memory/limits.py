"""Limits that the system sets on memory: what it has, what a control group allows, what may be pinned or mapped."""

import os
from collections.abc import Mapping

_GPU_LIMIT_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
_DEFAULT_GPU_LIMIT_GB = 64  # of XLA's allocator of pinned memory, openxla/xla GpuAllocatorConfig


def pinned_limit_bytes(platform: str, environment: Mapping[str, str] = os.environ) -> int | None:
    """Returns how many bytes XLA may pin on a platform; `None` is no limit of XLA's own.

    Raises:
        ValueError: the variable that sets it holds no number.
    """
    if platform not in ("gpu", "cuda", "rocm"):
        return None
    text = environment.get(_GPU_LIMIT_VARIABLE, str(_DEFAULT_GPU_LIMIT_GB))
    try:
        return int(text) * 2**30
    except ValueError:
        raise ValueError(f"`{_GPU_LIMIT_VARIABLE}` must be a whole number of GiB, got {text!r}") from None
