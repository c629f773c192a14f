"""`block_copy`: its contract and its implementations."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jax import Array
from jax.typing import ArrayLike

from pallas_kernels import _checks
from pallas_kernels.block_copy import mosaic_gpu, mosaic_tpu, reference
from pallas_kernels.dispatch import dispatch

IMPLEMENTATIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "mosaic_tpu": mosaic_tpu.block_copy,
        "mosaic_gpu": mosaic_gpu.block_copy,
        "reference": reference.block_copy,
    }
)


def block_copy(
    src: Sequence[Array],
    src_ids: Array,
    dst: Sequence[Array],
    dst_ids: Array,
    count: ArrayLike,
    *,
    platform: str | None = None,
    implementation: str | None = None,
) -> tuple[Array, ...]:
    """Copies block `src_ids[i]` of `src[k]` to block `dst_ids[i]` of `dst[k]`, for all k and for `i < count`.

    It is made to be called inside a jitted function. There it works in place on leaves of `dst` that are
    donated, and neither other ids nor another count compile anything again. All bits of copied and of
    untouched blocks are kept.

    The ids are not checked: an id out of range among the first `count` gives unspecified blocks or worse.
    Check ids on the host before the launch. Ids from `count` on may hold anything. If `dst_ids` repeats an
    id, which of its blocks arrives is unspecified. `src` is read as it was before the call.

    Args:
        src: leaves `(num_blocks, *block_shape)`, in device or in host memory each.
        src_ids: int32 `(length,)`, blocks to read; they may repeat.
        dst: as many leaves, each with the block shape and dtype of its partner in `src`; numbers of blocks and
            memory spaces may differ.
        dst_ids: int32 `(length,)`, blocks to write.
        count: number of ids that count, an integer scalar; it is usually traced.
        platform: platform the program is made for; `None` is the default backend.
        implementation: name of the implementation to use; `None` is the first that can.

    Returns:
        The leaves of `dst` in their order, each in its memory space.

    Raises:
        ValueError: the leaves do not match in number, block shape or dtype; the ids are not int32 of one
            length; `count` is no integer scalar; or `implementation` is unknown.
        NotImplementedError: the named implementation cannot take the arguments.
        ExceptionGroup: no implementation can; it holds each one's reason.
    """
    src, dst = _checks.arrays("src", src), _checks.arrays("dst", dst)
    _check_partners(src, dst)
    src_ids, dst_ids = _checks.ids("src_ids", src_ids, ("length",)), _checks.ids("dst_ids", dst_ids, ("length",))
    if src_ids.shape != dst_ids.shape:
        raise ValueError(f"`src_ids` and `dst_ids` must have one length, got {src_ids.shape[0]} and {dst_ids.shape[0]}")
    count = _checks.count(count, src_ids.shape[0])
    args = (src, src_ids, dst, dst_ids, count)
    return dispatch("block_copy", IMPLEMENTATIONS, *args, platform=platform, implementation=implementation)


def _check_partners(src: tuple[Array, ...], dst: tuple[Array, ...]) -> None:
    if len(src) != len(dst):
        raise ValueError(f"`src` and `dst` must have equally many leaves, got {len(src)} and {len(dst)}")
    for i, (s, d) in enumerate(zip(src, dst, strict=True)):
        for name, leaf in (("src", s), ("dst", d)):
            if leaf.ndim < 1 or 0 in leaf.shape:
                raise ValueError(
                    f"`{name}[{i}]` must have shape (num_blocks, *block_shape) without a zero, "
                    f"got shape {tuple(leaf.shape)}"
                )
        if s.shape[1:] != d.shape[1:] or s.dtype != d.dtype:
            raise ValueError(
                f"`src[{i}]` and `dst[{i}]` must agree in block shape and dtype, got "
                f"{_checks.describe(s)} and {_checks.describe(d)}"
            )
