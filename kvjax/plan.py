"""Moves as arrays: which blocks of which group go to or come from which units. No effects.

A plan is all that passes from the ledger, which decides, to the mover, which moves.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvjax._arguments import check_chunking
from kvjax._checks import instance, integers, shown
from kvjax.chunking import Chunking
from kvjax.coverage import Hit, blocks_to_load
from kvjax.groups import Recurrent
from kvjax.packing import blocks_in_chunk

NULL_BLOCK = -1


@dataclass(frozen=True, slots=True, eq=False)
class GroupMoves:
    """Chunks of one group that move together. Arrays are read-only `int32`, padded to a power of two.

    Args:
        group_idx: the group.
        num_chunks: how many rows are real; the rest is padding.
        chunk_idx: `(padded,)`, places in the sequence; -1 in the padding.
        block_ids: `(padded, blocks in a chunk)`, places in the device cache; -1 where no block moves.
        unit_ids: `(padded, units_per_chunk)`, places in the host pool; -1 in the padding.
    """

    group_idx: int
    num_chunks: int
    chunk_idx: np.ndarray
    block_ids: np.ndarray
    unit_ids: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    moves: tuple[GroupMoves, ...]
    num_bytes: int

    @property
    def num_chunks(self) -> int:
        """Chunks over all groups."""
        return sum(moves.num_chunks for moves in self.moves)


@dataclass(frozen=True, slots=True, eq=False)
class StorePlan(_Plan):
    """Device to host. Every block of every chunk moves.

    Args:
        moves: in layout order, groups without a chunk left out.
        num_bytes: bytes of the chunks, without padding.
    """


@dataclass(frozen=True, slots=True, eq=False)
class LoadPlan(_Plan):
    """Host to device. Blocks with id -1 are skipped: the device holds them, or nothing needs them.

    Args:
        moves: in layout order, groups without a chunk left out.
        num_bytes: bytes of the chunks, without padding.
    """


def plan_store(
    chunking: Chunking,
    chunks: Mapping[str, Any],
    block_tables: Mapping[str, Any],
    unit_ids: Mapping[str, Any],
    *,
    num_blocks: Mapping[str, int] | None = None,
) -> StorePlan:
    """Returns the moves that store whole chunks.

    Args:
        chunking: the layout and its chunks.
        chunks: `chunk_idx` to store, by group name; a missing group stores none.
        block_tables: block ids by place in the sequence, by group name; -1 is the null block.
        unit_ids: `(chunks of the group, units_per_chunk)`, by group name.
        num_blocks: blocks of the device cache, by group name, where known; ids are checked against it.

    Raises:
        ValueError: a group unknown or scratch, a chunk given twice or negative, a table missing, too short,
            or with a null block or an id out of range where a chunk lies, or `unit_ids` missing or without a
            row for each chunk, or a unit that would be written twice.
    """
    check_chunking(chunking)
    moves = []
    for name, listed in instance(chunks, Mapping, "chunks").items():
        g = chunking.layout.index(name, "chunks")
        chosen = _distinct_chunks(name, listed)
        blocks = chunk_blocks(chunking, g, chosen, block_table(chunking, g, block_tables))
        if (blocks == NULL_BLOCK).any():
            raise ValueError(
                f"`block_tables` of group {name!r} must hold every block of a chunk to store, got the null block "
                f"in chunk {chosen[(blocks == NULL_BLOCK).any(axis=1)][0]}"
            )
        check_range(name, blocks, (num_blocks or {}).get(name))
        moves.append(_group_moves(g, chosen, blocks, unit_ids, name))
    _check_units_written_once(moves)
    return StorePlan(_in_order(moves), _num_bytes(chunking, moves))


def plan_load(
    chunking: Chunking,
    hit: Hit,
    block_tables: Mapping[str, Any],
    unit_ids: Mapping[str, Any],
    *,
    device_tokens: int | Mapping[str, int] = 0,
    num_blocks: Mapping[str, int] | None = None,
    shared: Mapping[str, np.ndarray] | None = None,
) -> LoadPlan:
    """Returns the moves that restore a hit.

    Whole blocks that the device holds, blocks without a needed token, and shared ones are skipped.

    Args:
        chunking: the layout and its chunks.
        hit: as `longest_hit` returned it.
        block_tables: block ids by place in the sequence, by group name; -1 is the null block.
        unit_ids: `(chunks of the group to load, units_per_chunk)`, by group name.
        device_tokens: as given to `longest_hit`.
        num_blocks: blocks of the device cache, by group name, where known; ids are checked against it.
        shared: masks `(chunks of the group to load, blocks in a chunk)`, by group name, of blocks that are
            written otherwise. A chunk of which nothing is left to write is left out.

    Raises:
        ValueError: a table missing, too short, or with the null block or an id out of range where a block
            must be written; a block that would be written twice; `unit_ids` missing or without a row for
            each chunk.
    """
    check_chunking(chunking)
    instance(hit, Hit, "hit")
    moves = []
    written: dict[str, dict[int, str]] = {}
    for g in chunking.layout.cached:
        group = chunking.layout.groups[g]
        chunks = hit.load[group.name]
        if not len(chunks):
            continue
        table = block_table(chunking, g, block_tables)
        held = device_tokens.get(group.name, 0) if isinstance(device_tokens, Mapping) else device_tokens
        wanted = blocks_to_load(chunking, g, hit.hit_tokens, held, chunks)
        blocks = chunk_blocks(chunking, g, chunks, table, needed=wanted)
        if shared is not None and group.name in shared:
            wanted = wanted & ~shared[group.name]
            own = wanted.any(axis=1)
            chunks, blocks, wanted = chunks[own], blocks[own], wanted[own]
            unit_ids = {**unit_ids, group.name: np.asarray(unit_ids[group.name])[own]}
            if not len(chunks):
                continue
        blocks = np.where(wanted, blocks, NULL_BLOCK)
        _check_destinations(chunking, g, blocks, wanted, written, (num_blocks or {}).get(group.name))
        moves.append(_group_moves(g, chunks, blocks, unit_ids, group.name))
    return LoadPlan(tuple(moves), _num_bytes(chunking, moves))


def block_table(chunking: Chunking, group_idx: int, block_tables: Mapping[str, Any]) -> np.ndarray:
    """Returns a group's block table as `int64`.

    Raises:
        ValueError: there is none, or one of a group that the layout has not, or it is not a 1-d sequence of ints of
            at least -1.
    """
    name = chunking.layout.groups[group_idx].name
    if not isinstance(block_tables, Mapping) or name not in block_tables:
        got = shown(list(block_tables) if isinstance(block_tables, Mapping) else block_tables)
        raise ValueError(f"`block_tables` must hold a table for group {name!r}, got {got}")
    unknown = block_tables.keys() - chunking.layout.names
    if unknown:
        raise ValueError(
            f"`block_tables` must name groups of the layout {list(chunking.layout.names)}, got {shown(unknown.pop())}"
        )
    table = integers(block_tables[name], f"`block_tables` of group {name!r} must be a 1-d sequence of block ids")
    if table.size and table.min() < NULL_BLOCK:
        raise ValueError(f"`block_tables` of group {name!r} must hold ids of at least -1, got {table.min()}")
    return table


def chunk_blocks(
    chunking: Chunking,
    group_idx: int,
    chunks: np.ndarray,
    table: np.ndarray,
    *,
    needed: np.ndarray | None = None,
) -> np.ndarray:
    """Returns the block ids of chunks, `(len(chunks), blocks in a chunk)`; -1 is the null block.

    Args:
        chunking: the layout and its chunks.
        group_idx: the group.
        chunks: `chunk_idx`.
        table: the group's block table.
        needed: mask of the blocks that matter; the table may end before the others.

    Raises:
        ValueError: the table ends before a block that matters.
    """
    blocks = blocks_in_chunk(chunking, group_idx)
    per_chunk = chunking.blocks_per_chunk[group_idx] or 0
    # A recurrent chunk holds one state, at its last block.
    first = per_chunk - 1 if isinstance(chunking.layout.groups[group_idx].kind, Recurrent) else 0
    places = chunks[:, None] * per_chunk + first + np.arange(blocks)
    if places.max(initial=-1) < len(table):
        return table[places]
    last = int((places if needed is None else places[needed]).max(initial=-1))
    if last >= len(table):
        name = chunking.layout.groups[group_idx].name
        raise ValueError(f"`block_tables` of group {name!r} must cover {last + 1} blocks, got {len(table)}")
    return np.where(places < len(table), np.append(table, NULL_BLOCK)[np.minimum(places, len(table))], NULL_BLOCK)


def _distinct_chunks(name: str, listed: Any) -> np.ndarray:
    chunks = integers(listed, f"`chunks` of group {name!r} must be a 1-d sequence of chunk indices")
    twice = _named_twice(chunks)
    if chunks.size and (chunks.min() < 0 or twice is not None):
        wrong = chunks.min() if chunks.min() < 0 else f"{twice} twice"
        raise ValueError(f"`chunks` of group {name!r} must be distinct non-negative chunk indices, got {wrong}")
    return chunks


def _check_units_written_once(moves: list[GroupMoves]) -> None:
    units = [move.unit_ids[: move.num_chunks].ravel() for move in moves]
    twice = _named_twice(np.concatenate([np.empty(0, np.int32), *units]))
    if twice is not None:
        raise ValueError(f"`unit_ids` must name each unit of a store once, got unit {twice} twice")


def _named_twice(ids: np.ndarray) -> int | None:
    """Returns the smallest id that is there more than once, `None` if all are distinct.

    >>> _named_twice(np.array([4, 7, 2, 7, 4])), _named_twice(np.array([4, 7, 2]))
    (4, None)
    """
    if (ids[1:] > ids[:-1]).all():
        return None
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest >= 0 and highest < 8 * len(ids):  # dense enough to tick off, which is quicker than to sort
        ticked = np.zeros(highest + 1, bool)
        ticked[ids] = True
        if np.count_nonzero(ticked) == len(ids):
            return None
    ordered = np.sort(ids)
    again = ordered[1:] == ordered[:-1]
    return int(ordered[again.argmax()]) if again.any() else None


def _check_destinations(
    chunking: Chunking,
    group_idx: int,
    blocks: np.ndarray,
    wanted: np.ndarray,
    written: dict[str, dict[int, str]],
    num_blocks: int | None,
) -> None:
    group = chunking.layout.groups[group_idx]
    ids = blocks[wanted]
    if (ids == NULL_BLOCK).any():
        raise ValueError(
            f"`block_tables` of group {group.name!r} must hold a block wherever one is restored, got the null block"
        )
    check_range(group.name, ids, num_blocks)
    twice = _named_twice(ids)
    if twice is not None:
        raise ValueError(
            f"`block_tables` of group {group.name!r} must name each restored block once, got block {twice} twice"
        )
    for leaf in _shared_leaves(chunking, group_idx):
        taken = written.setdefault(leaf, {})
        for block_id in ids.tolist():
            if taken.setdefault(block_id, group.name) != group.name:
                raise ValueError(
                    f"`block_tables` of groups {taken[block_id]!r} and {group.name!r} must name disjoint blocks of "
                    f"the leaf {leaf!r} that they share, got block {block_id} in both"
                )


def check_range(name: str, ids: np.ndarray, num_blocks: int | None) -> None:
    """Raises a `ValueError` that names the group if an id is not below `num_blocks`, where that is known."""
    if num_blocks is not None and ids.size and ids.max() >= num_blocks:
        raise ValueError(
            f"`block_tables` of group {name!r} must hold ids below {num_blocks}, the blocks of its cache, "
            f"got {ids.max()}"
        )


def _shared_leaves(chunking: Chunking, group_idx: int) -> set[str]:
    """Names of the group's leaves that other cached groups hold blocks in, too."""
    layout = chunking.layout
    others = {leaf.name for g in layout.cached if g != group_idx for leaf in layout.groups[g].leaves}
    return others & {leaf.name for leaf in layout.groups[group_idx].leaves}


def _group_moves(
    group_idx: int, chunks: np.ndarray, blocks: np.ndarray, unit_ids: Mapping[str, Any], name: str
) -> GroupMoves:
    if name not in unit_ids:
        raise ValueError(f"`unit_ids` must hold the units of group {name!r}, got {sorted(unit_ids)}")
    units = np.asarray(unit_ids[name])
    if units.ndim != 2 or len(units) != len(chunks) or (units.size and units.dtype.kind not in "iu"):
        raise ValueError(
            f"`unit_ids` of group {name!r} must be ints with one row for each of {len(chunks)} chunks, "
            f"got {units.dtype.name} of shape {units.shape}"
        )
    if units.size and units.min() < 0:
        raise ValueError(f"`unit_ids` of group {name!r} must be non-negative, got {units.min()}")
    return GroupMoves(
        group_idx=group_idx,
        num_chunks=len(chunks),
        chunk_idx=_padded(chunks),
        block_ids=_padded(blocks),
        unit_ids=_padded(units),
    )


def _padded(rows: np.ndarray) -> np.ndarray:
    length = 1 << max(0, len(rows) - 1).bit_length()
    padded = np.full((length, *rows.shape[1:]), -1, np.int32)
    padded[: len(rows)] = rows
    padded.flags.writeable = False
    return padded


def _in_order(moves: list[GroupMoves]) -> tuple[GroupMoves, ...]:
    return tuple(sorted((move for move in moves if move.num_chunks), key=lambda move: move.group_idx))


def _num_bytes(chunking: Chunking, moves: list[GroupMoves]) -> int:
    return sum(move.num_chunks * (chunking.chunk_bytes[move.group_idx] or 0) for move in moves)
