"""`block_copy` by DMA on a TPU."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from pallas_kernels._rows import check_dtype, in_host_memory
from pallas_kernels._tpu_blocks import check_host_leaf, check_platform, copy_blocks, gather_blocks


def block_copy(
    src: tuple[Array, ...],
    src_ids: Array,
    dst: tuple[Array, ...],
    dst_ids: Array,
    count: Array,
    *,
    platform: str,
    interpret: Any = None,
) -> tuple[Array, ...]:
    """See `pallas_kernels.block_copy`; a kernel starts the copies of all blocks of its leaves, then waits for them.

    Args:
        src: see `pallas_kernels.block_copy`.
        src_ids: see there.
        dst: see there.
        dst_ids: see there.
        count: see there.
        platform: see there.
        interpret: parameters of the interpreter that is to run the kernel, on any platform and with all leaves in
            device memory; `None` compiles it for a TPU.

    Raises:
        NotImplementedError: the platform is not `"tpu"`; elements are not 1, 2 or 4 whole bytes; a leaf in host memory
            has blocks other than whole pages of 32-bit words; or both leaves of a pair lie in host memory.
    """
    check_platform(platform, interpret)
    for name, leaves in (("src", src), ("dst", dst)):
        for i, leaf in enumerate(leaves):
            check_dtype(leaf.dtype)
            check_host_leaf(f"{name}[{i}]", leaf)
    for i, pair in enumerate(zip(src, dst, strict=True)):
        if all(map(in_host_memory, pair)):
            raise NotImplementedError(f"`src[{i}]` and `dst[{i}]` must not both lie in host memory")
    if any(source is leaf for source in src for leaf in dst):
        # One array as operand and as result of the kernel would be copied whole: its blocks are read beforehand.
        src = tuple(gather_blocks(src, src_ids, count, interpret=interpret))
        src_ids = jnp.arange(src_ids.shape[0], dtype=jnp.int32)
    return tuple(copy_blocks(src, src_ids, dst, dst_ids, count, interpret=interpret))
