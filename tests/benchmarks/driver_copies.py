"""The copies of the CUDA driver, as the limit of what a transfer can reach, and a stand-in for machines without it."""

import ctypes
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np


def seconds(function: Callable[[], object], repeats: int = 7) -> float:
    """The median time of a call after a first one."""
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


class PinnedMemcpy:
    """`cuMemcpyAsync` between page-locked and device memory, by the driver's own functions.

    Args:
        num_bytes: bytes of the two buffers.
    """

    def __init__(self, num_bytes: int):
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._num_bytes = num_bytes
        context, self._stream = ctypes.c_void_p(), ctypes.c_void_p()
        self._host, self._device = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self._call("cuCtxSetCurrent", context)
        self._call("cuStreamCreate", ctypes.byref(self._stream), 0)
        self._call("cuMemHostAlloc", ctypes.byref(self._host), ctypes.c_size_t(num_bytes), 0)
        self._call("cuMemAlloc_v2", ctypes.byref(self._device), ctypes.c_size_t(num_bytes))

    def gb_per_s(self, direction: str, block_bytes: int) -> float:
        """Speed of `"store"` (device to host) or `"load"`, in copies of `block_bytes`."""
        return self._num_bytes / seconds(partial(self._copy, direction, block_bytes)) / 1e9

    def _copy(self, direction: str, block_bytes: int) -> None:
        name, target, source = "cuMemcpyDtoHAsync_v2", self._host.value or 0, self._device.value or 0
        if direction == "load":
            name, target, source = "cuMemcpyHtoDAsync_v2", source, target
        for at in range(0, self._num_bytes, block_bytes):
            addresses = ctypes.c_void_p(target + at), ctypes.c_void_p(source + at)
            self._call(name, *addresses, ctypes.c_size_t(block_bytes), self._stream)
        self._call("cuStreamSynchronize", self._stream)

    def _call(self, name: str, *args: Any) -> None:
        result = getattr(self._driver, name)(*args)
        if result:
            raise RuntimeError(f"{name} ended with CUDA error {result}")


class HostMemcpy:
    """`np.copyto` in pieces of 1 MiB, which stands for `PinnedMemcpy` in a dry run."""

    def __init__(self, num_bytes: int):
        self._source = np.ones((-(-num_bytes // 2**20), 2**20), np.uint8)
        self._target = np.zeros_like(self._source)

    def gb_per_s(self, direction: str, block_bytes: int) -> float:
        """Speed of a copy of all bytes, whatever the arguments."""
        pairs = list(zip(self._target, self._source, strict=True))
        return self._source.nbytes / seconds(lambda: [np.copyto(target, source) for target, source in pairs]) / 1e9
