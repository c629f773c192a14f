"""`kvjax bench moves`: stores and loads, beside a copy of as many bytes in host memory."""

import argparse
import itertools
import os
import platform
import reprlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvjax._checks import integer
from kvjax.cli.hit_plot import check_target
from kvjax.cli.options import integer as integer_text
from kvjax.cli.options import size
from kvjax.groups import cache_dtype

TOKENS_PER_BLOCK = 16
_DTYPES = ("bfloat16", "float32", "float8_e4m3fn", "uint8")
_BLOCK_BYTES = (2**12, 2**14, 2**16, 2**18, 2**20, 2**22)
_BYTES = 128 * 2**20
_TRANSFERS = ("auto", "direct", "staged")
_DESCRIPTION = """\
Times stores (device to host pool) and loads (host pool to device) of one group's blocks, in GB/s of 10^9 bytes.

The grid is every dtype with every number of leaves and every block size. A block's bytes are over all leaves of the
group: with 4 leaves, a block of 64 KiB is 4 rows of 16 KiB. The caches hold twice the blocks that move; these lie at
random places, are one chunk each, and go to units in shuffled order. A store counts until the host pool holds the
bytes, a load until the caches do. What was loaded is compared with what was stored, byte by byte, before anything is
timed. Moves take turns with np.copyto of as many bytes in pieces of 1 MiB ("memcpy") and in one call; every figure is
a median, and "ratio" is a move's rate over memcpy's. Few bytes mean little: memcpy of what fits the processor's cache
is faster than any memory.

--vs naive adds the loop that one would write first. Store: `np.asarray(cache[block])` for each block of each leaf,
then one assignment to the NumPy pool by fancy index. Load: the rows taken from the pool by fancy index, then
`device_put` and a jitted `cache.at[block].set(row)`, the cache donated, for each block of each leaf. It takes as many
blocks as it moves in about half a second ("timed_blocks"), at least one; "exact" says if their bytes arrived."""


@dataclass(frozen=True, slots=True)
class Case:
    """What one configuration moves.

    Args:
        dtype: element type of the leaves.
        block_bytes: bytes of one block, over all leaves.
        num_leaves: arrays that hold the blocks.
        num_blocks: blocks that move; the caches hold twice as many.
        transfer: which transport to ask for.
    """

    dtype: np.dtype
    block_bytes: int
    num_leaves: int
    num_blocks: int
    transfer: str

    @property
    def num_bytes(self) -> int:
        """Bytes that move."""
        return self.num_blocks * self.block_bytes


def add_parser(benches: Any) -> argparse.ArgumentParser:
    """Adds the benchmark and returns its parser."""
    parser = benches.add_parser(
        "moves",
        help="stores and loads, beside memcpy",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--dtypes",
        type=_list_of(str),
        default=_DTYPES,
        metavar="D,...",
        help=f"element types (default {','.join(_DTYPES)})",
    )
    add(
        "--block-bytes",
        type=_list_of(size),
        default=_BLOCK_BYTES,
        metavar="S,...",
        help="bytes of one block over all leaves (default 4KiB,16KiB,64KiB,256KiB,1MiB,4MiB)",
    )
    add(
        "--leaves",
        type=_list_of(integer_text),
        default=(1, 4),
        metavar="N,...",
        help="arrays of the group (default 1,4)",
    )
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument(
        "--bytes", type=size, default=_BYTES, metavar="S", help="bytes that one move moves (default 128MiB)"
    )
    amount.add_argument(
        "--num-blocks",
        type=_list_of(integer_text),
        metavar="N,...",
        help="blocks that one move moves, instead of --bytes",
    )
    add(
        "--transfer",
        type=_list_of(_transfer),
        default=("auto",),
        metavar="T,...",
        help=f"transports: {', '.join(_TRANSFERS)} (default auto)",
    )
    add("--vs", choices=["naive"], help="measure the obvious loop, too")
    add("--repeats", type=integer_text, default=5, metavar="R", help="moves that a median is taken of (default 5)")
    add("--plot", metavar="FILE", help="draw ratios to a .png, .svg or .pdf file (needs matplotlib, the extra `plot`)")
    return parser


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the rows as the JSON document that the command prints, after drawing them if that is asked for.

    Raises:
        ValueError: an option that no configuration can have, more bytes than the machine has memory for, a
            transport that this machine cannot take, or a picture that cannot be drawn.
        RuntimeError: a load brought other bytes than those stored.
    """
    from kvjax.observe.progress import progress_bar

    if args.plot is not None:
        check_target(args.plot)
    repeats = integer(args.repeats, "--repeats", at_least=1)
    cases = list(cases_of(args))
    from kvjax.cli.bench_moves_run import check_memory, rows_of

    check_memory(cases)
    rows = []
    with progress_bar("bench moves", len(cases)) as advance:
        for case in cases:
            rows += rows_of(case, repeats=repeats, naive=args.vs == "naive")
            advance(1)
    document = {
        "bench": "moves",
        "bytes": None if args.num_blocks else args.bytes,
        "repeats": repeats,
        "machine": platform.machine(),
        "num_cpus": os.cpu_count(),
        "rows": rows,
    }
    if args.plot is not None:
        from kvjax.cli.bench_moves_plot import draw

        draw(document, args.plot)
    return document


def cases_of(args: argparse.Namespace) -> Iterator[Case]:
    """Yields the grid: every transport, dtype, number of leaves and block size, and every number of blocks given.

    Raises:
        ValueError: a value that is out of range, an unknown dtype, or a block that does not split into the leaves.
    """
    try:
        dtypes = [cache_dtype(name) for name in args.dtypes]
    except ValueError as error:
        raise ValueError(f"argument --dtypes: {error}") from error
    for transfer, dtype, leaves, block_bytes in itertools.product(args.transfer, dtypes, args.leaves, args.block_bytes):
        least = integer(leaves, "--leaves", at_least=1) * TOKENS_PER_BLOCK * dtype.itemsize
        if block_bytes < least or block_bytes % least:
            raise ValueError(
                f"`--block-bytes` must be multiples of {least} bytes, {TOKENS_PER_BLOCK} elements of {dtype.name} "
                f"times {leaves} leaves, got {block_bytes}"
            )
        for num_blocks in args.num_blocks or (args.bytes // block_bytes,):
            if not args.num_blocks and not num_blocks:
                raise ValueError(f"`--bytes` must be at least one block, {block_bytes} bytes, got {args.bytes}")
            yield Case(dtype, block_bytes, leaves, integer(num_blocks, "--num-blocks", at_least=1), transfer)


def _list_of(element: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    return lambda text: tuple(element(part) for part in text.split(","))


def _transfer(text: str) -> str:
    if text not in _TRANSFERS:
        raise argparse.ArgumentTypeError(f"must be among {', '.join(_TRANSFERS)}, got {reprlib.repr(text)}")
    return text
