"""One configuration of `kvjax bench moves`: a mover on caches of random bytes, timed and checked."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from kvjax.chunking import resolve_chunking
from kvjax.cli.bench_moves import TOKENS_PER_BLOCK, Case
from kvjax.cli.bench_moves_blocks import Blocks
from kvjax.cli.bench_moves_naive import NaiveLoop
from kvjax.cli.doctor_probe import local_devices
from kvjax.cli.timing import MemoryCopy, alternating
from kvjax.coverage import longest_hit
from kvjax.groups import CacheLayout, FullAttention, GroupSpec, LeafSpec
from kvjax.memory.host import check_available
from kvjax.memory.registration import register
from kvjax.memory.transports import granule_bytes
from kvjax.mover import Mover
from kvjax.packing import cut_into_units, unit_bytes
from kvjax.plan import plan_load, plan_store

# Caches twice, as arrays and as what they are compared with, each of twice the bytes that move; the pool, two arrays
# to copy between, and what a comparison makes.
_MEMORY_PER_BYTE = 10
_GROUP = "full"


class MoverLoop:
    """Stores and loads through a `Mover`, as an engine does.

    Args:
        blocks: what moves.
        device: where the caches are.

    Raises:
        ValueError: the transport cannot be taken on this device.
    """

    def __init__(self, blocks: Blocks, device: Any):
        case = blocks.case
        leaves = tuple(LeafSpec(name, blocks.shape, case.dtype) for name in blocks.leaves)
        layout = CacheLayout([GroupSpec(_GROUP, FullAttention(), TOKENS_PER_BLOCK, leaves)])
        chunking = resolve_chunking(layout)
        self._caches = blocks.caches(device)
        granule = granule_bytes(register(layout, self._caches))
        units = cut_into_units(chunking, unit_bytes(chunking, granule))
        per_chunk = units.units_per_chunk[0] or 0
        held = (blocks.places[:, None] * per_chunk + np.arange(per_chunk)).astype(np.int32)
        chunks = np.arange(case.num_blocks)
        hit = longest_hit(chunking, case.num_blocks * TOKENS_PER_BLOCK + 1, {_GROUP: chunks})
        self.case = case
        self.timed_blocks = {"store": case.num_blocks, "load": case.num_blocks}
        self._blocks = blocks
        self._store_plan = plan_store(chunking, {_GROUP: chunks}, {_GROUP: blocks.source}, {_GROUP: held})
        self._load_plan = plan_load(chunking, hit, {_GROUP: blocks.target}, {_GROUP: held})
        self.mover = Mover(
            chunking, units, self._caches, num_units=held.size, show_progress=False, transfer=case.transfer
        )
        self.transfer = self.mover.transfer

    def store(self) -> None:
        """Stores the source blocks; the host pool holds them when it returns."""
        self._caches, moves = self.mover.store(self._caches, self._store_plan)
        moves.wait()

    def load(self) -> None:
        """Loads the target blocks; the caches hold them when it returns."""
        self._caches, moves = self.mover.load(self._caches, self._load_plan)
        moves.wait()
        jax.block_until_ready(self._caches)

    def is_exact(self) -> bool:
        """True if a store and a load move every byte of the blocks, and no other."""
        self.store()
        self.load()
        return self._blocks.moved(self._caches, self.case.num_blocks)

    def close(self) -> None:
        """Ends the mover."""
        self.mover.close()


def check_memory(cases: Sequence[Case]) -> None:
    """Checks that the machine has the memory for the largest case.

    Raises:
        ValueError: it has not.
    """
    largest = max(case.num_bytes for case in cases)
    try:
        check_available(_MEMORY_PER_BYTE * largest)
    except MemoryError as error:
        raise ValueError(
            f"`--bytes`, or `--num-blocks` blocks, must be at most a {_MEMORY_PER_BYTE}th of the memory that this "
            f"machine has available, got {largest} bytes"
        ) from error


def rows_of(case: Case, *, repeats: int, naive: bool) -> Iterator[dict[str, Any]]:
    """Yields the rows of one configuration: a store and a load by the mover and, if asked for, by the naive loop.

    Raises:
        ValueError: the transport cannot be taken on this machine.
        RuntimeError: the mover's load brought other bytes than those stored.
    """
    device = local_devices([])[0]
    blocks, copy = Blocks(case), MemoryCopy(case.num_bytes)
    loop = MoverLoop(blocks, device)
    try:
        exact = loop.is_exact()
        if not exact:
            raise RuntimeError(f"the {loop.transfer} transfer brought other bytes than those stored: {case}")
        yield from _timed(loop, exact, copy, device, repeats)
    finally:
        loop.close()
    if naive:
        del loop  # and its caches
        loop = NaiveLoop(blocks, device)
        yield from _timed(loop, loop.is_exact(), copy, device, repeats)


def _timed(
    loop: MoverLoop | NaiveLoop, exact: bool, copy: MemoryCopy, device: Any, repeats: int
) -> Iterator[dict[str, Any]]:
    case = loop.case
    for direction, move in (("store", loop.store), ("load", loop.load)):
        memcpy, one_copy, taken = alternating((copy.in_pieces, copy.at_once, move), repeats)
        timed_blocks = loop.timed_blocks[direction]
        rate, limit = timed_blocks * case.block_bytes / taken, case.num_bytes / memcpy
        yield {
            "bench": "moves",
            "direction": direction,
            "transfer": loop.transfer,
            "backend": device.platform,
            "device": device.device_kind,
            "jax": jax.__version__,
            "dtype": case.dtype.name,
            "block_bytes": case.block_bytes,
            "num_blocks": case.num_blocks,
            "num_leaves": case.num_leaves,
            "gb_per_s": _rounded(rate / 1e9),
            "memcpy_gb_per_s": _rounded(limit / 1e9),
            "ratio": _rounded(rate / limit),
            "one_copy_gb_per_s": _rounded(case.num_bytes / one_copy / 1e9),
            "num_bytes": case.num_bytes,
            "timed_blocks": timed_blocks,
            "exact": exact,
        }


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
