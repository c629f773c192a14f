"""The parts of Mosaic GPU kernels that move rows, with plain loads and stores.

Those reach host memory too, where asynchronous copies do not. A row is `array[row_id]` of an array `(rows, lanes)`.
The index of its first byte is computed in 64 bits, so arrays may be of any size.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels._gpu_cut import Cut, check_index
from pallas_kernels._rows import in_host_memory

# An SM of Hopper or Blackwell holds 16 thread blocks of 128 threads: a GPU of 128 SMs or more runs this many at once.
# Each then moves piece after piece, so no more are started than there is room for, however long the ids are.
_MAX_THREAD_BLOCKS = 2048


def check_platform(platform: str, interpret: Any) -> None:
    """Refuses platforms other than a GPU, unless the kernels are interpreted.

    Raises:
        NotImplementedError: it is another platform, or jax lacks a package that Mosaic GPU needs.
    """
    if platform not in ("gpu", "cuda") and interpret is None:
        raise NotImplementedError(f"Mosaic GPU kernels run on 'gpu' only, not on {platform!r}")
    _mosaic_gpu()


def as_rows(array: Array, num_rows: int, dtype: Any) -> Array:
    """An array's bytes as `(num_rows, elements of dtype)`; XLA:GPU makes no copy for it."""
    array = array.reshape(num_rows, -1)
    wide, narrow = jnp.dtype(dtype).itemsize, array.dtype.itemsize
    if wide > narrow:
        array = array.reshape(num_rows, -1, wide // narrow)
    return lax.bitcast_convert_type(array, dtype).reshape(num_rows, -1)


def from_rows(rows: Array, like: Array) -> Array:
    """The inverse of `as_rows`, for an array of the shape and dtype of `like`."""
    return as_rows(rows, rows.shape[0], like.dtype).reshape(like.shape)


def copy_piece(src: Any, src_at: tuple[Any, Any], dst: Any, dst_at: tuple[Any, Any], cut: Cut, piece: Any) -> None:
    """Copies one piece of a row, in a kernel.

    Args:
        src: reference to `(rows, lanes)`.
        src_at: row and lane where what is cut starts.
        dst: as `src`, in other memory.
        dst_at: as `src_at`.
        cut: how it is cut.
        piece: which piece.
    """

    def copy(first: Any, lanes: int) -> None:
        dst[_span(dst_at, first, lanes)] = _in_vectors(src[_span(src_at, first, lanes)], cut)

    def copy_lane(lane: Array) -> None:
        dst[dst_at[0], dst_at[1] + lane] = src[src_at[0], src_at[1] + lane]

    _run_piece(cut, piece, copy, copy_lane)


def zero_piece(dst: Any, dst_at: tuple[Any, Any], cut: Cut, piece: Any) -> None:
    """Writes zeros to one piece of a row, in a kernel; for the arguments see `copy_piece`."""

    def fill(first: Any, lanes: int) -> None:
        dst[_span(dst_at, first, lanes)] = _in_vectors(jnp.zeros(lanes, dst.dtype), cut)

    def fill_lane(lane: Array) -> None:
        dst[dst_at[0], dst_at[1] + lane] = jnp.zeros((), dst.dtype)

    _run_piece(cut, piece, fill, fill_lane)


def run_part(index: Any, parts: Sequence[tuple[int, Callable[[Any], None]]]) -> None:
    """Runs, in a kernel, the part that an index falls to.

    Args:
        index: int32 scalar, below the sum of the parts' sizes.
        parts: how many indices fall to each part, in order, and what is called with the index counted from its
            part's first one.
    """
    first = 0
    for size, part in parts:
        pl.when((index >= first) & (index < first + size))(partial(part, index - first))
        first += size


def kernels(written: Sequence[Array]) -> list[list[int]]:
    """Divides arrays among kernels: those in device memory go to one, each in host memory to one of its own.

    XLA:GPU of jax 0.10.2 dies of a kernel that writes several arrays of which one lies in host memory.

    Args:
        written: the arrays that are to be written.

    Returns:
        For each kernel, the places of its arrays.
    """
    in_host = [[place] for place, array in enumerate(written) if in_host_memory(array)]
    on_device = [place for place, array in enumerate(written) if not in_host_memory(array)]
    return [on_device, *in_host] if on_device else in_host


def launch(
    move: Callable[..., None],
    num_pieces: int,
    max_items: int,
    count: Array,
    read: Sequence[Array],
    written: Sequence[Array],
    *,
    name: str,
    interpret: Any,
) -> list[Array]:
    """Runs a kernel that moves all pieces of the first `count` items.

    Args:
        move: called as `move(item, piece, read, written)` with references to the arrays; it moves that piece.
        num_pieces: pieces of an item.
        max_items: the largest `count`.
        count: int32 scalar; below 0 it is 0.
        read: arrays to read, in device or host memory each.
        written: arrays to write, in place if their memory may be re-used; see `kernels`.
        name: of the kernel.
        interpret: parameters of the interpreter that runs the kernel on a CPU; `None` compiles it for a GPU.

    Returns:
        The arrays of `written`, updated.

    Raises:
        NotImplementedError: an int32 cannot count the pieces.
    """
    # A thread block's loop counts up to the pieces and one step over.
    check_index(f"pieces that `{name}` moves, and thread blocks,", max_items * num_pieces + _MAX_THREAD_BLOCKS)
    thread_blocks = min(max_items * num_pieces, _MAX_THREAD_BLOCKS)

    def body(count_ref: Any, *refs: Any) -> None:
        @pl.loop(lax.axis_index("thread_block"), count_ref[0] * num_pieces, step=thread_blocks)
        def _(index: Array) -> None:
            item, piece = lax.div(index, num_pieces), lax.rem(index, num_pieces)
            move(item, piece, refs[: len(read)], refs[len(read) :])

    plgpu = _mosaic_gpu()
    # The interpreter of jax 0.10.2 has to be told where a reference lies; compiled, it lies where its array does.
    memory_space = None if interpret is None else plgpu.GMEM
    refs = [jax.new_ref(array, memory_space=memory_space) for array in written]
    pl.kernel(
        body,
        out_type=(),
        mesh=plgpu.Mesh(grid=(thread_blocks,), grid_names=("thread_block",)),
        # A kernel never reads what it writes, so its loads and stores need no order.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=False if interpret is None else interpret,
        name=name,
    )(count.reshape(1), *read, *refs)
    return [jax.freeze(ref) for ref in refs]


def _run_piece(cut: Cut, piece: Array, move: Callable[[Any, int], None], move_lane: Callable[[Array], None]) -> None:
    """Moves a piece: run by run of lanes, each given by its first lane and their number, or lane by lane."""
    whole = partial(move, piece * cut.piece_lanes, cut.piece_lanes)
    if not cut.vector_lanes:
        pl.loop(0, cut.row_lanes)(move_lane)
    elif not cut.tail:
        whole()
    else:
        if cut.whole_pieces:
            pl.when(piece < cut.whole_pieces)(whole)

        @pl.when(piece == cut.whole_pieces)
        def _() -> None:
            for first, lanes in cut.tail:
                move(first, lanes)


def _span(row_at: tuple[Any, Any], first: Any, lanes: int) -> tuple[Any, Any]:
    return row_at[0], pl.ds(row_at[1] + first, lanes)


def _in_vectors(lanes: Array, cut: Cut) -> Array:
    """Lays out a piece so that a thread loads and stores whole vectors, and neighbours neighbouring ones."""
    plgpu = _mosaic_gpu()
    return plgpu.layout_cast(lanes, plgpu.Layout.WG_STRIDED(lanes.shape, vec_size=cut.vector_lanes))


def _mosaic_gpu() -> Any:
    """The module of Mosaic GPU: it takes half a second to import, and absl-py, which jax 0.10.2 does not require.

    Raises:
        NotImplementedError: it cannot be imported.
    """
    try:
        from jax.experimental.pallas import mosaic_gpu
    except ImportError as error:
        raise NotImplementedError(f"Mosaic GPU kernels need a package that is not installed: {error}") from error
    return mosaic_gpu
