"""`block_copy` in plain JAX."""

from jax import Array, lax

from pallas_kernels._rows import check_dtype, read_row, to_device, to_space_of, write_row


def block_copy(
    src: tuple[Array, ...],
    src_ids: Array,
    dst: tuple[Array, ...],
    dst_ids: Array,
    count: Array,
    *,
    platform: str,
) -> tuple[Array, ...]:
    """See `pallas_kernels.block_copy`; a loop over the first `count` ids copies one block of every leaf a turn.

    Raises:
        NotImplementedError: elements are not 1, 2 or 4 whole bytes; or a leaf lies in host memory and the
            platform is not `"cpu"`.
    """
    for leaf in src:
        check_dtype(leaf.dtype)
    leaves_in = tuple(to_device(leaf, platform) for leaf in src)

    def copy_one(i: Array, leaves_out: tuple[Array, ...]) -> tuple[Array, ...]:
        src_id, dst_id = src_ids[i], dst_ids[i]
        return tuple(
            write_row(out, (dst_id,), read_row(leaf, (src_id,), platform), platform)
            for leaf, out in zip(leaves_in, leaves_out, strict=True)
        )

    copied = lax.fori_loop(0, count, copy_one, tuple(to_device(leaf, platform) for leaf in dst))
    return tuple(to_space_of(updated, leaf) for updated, leaf in zip(copied, dst, strict=True))
