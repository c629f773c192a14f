"""Moves, block by block and token by token."""

from typing import Any

from kvjax.chunking import Chunking
from kvjax.groups import Recurrent
from tests.oracles import law

Rows = dict[int, list[tuple[int, list[int], list[int]]]]
NULL = -1


def blocks_of_chunk(chunking: Chunking, group_idx: int, chunk_idx: int) -> list[int]:
    """Places in the sequence of the blocks whose bytes a chunk holds: one state, its last, if recurrent."""
    per_chunk = chunking.blocks_per_chunk[group_idx] or 0
    places = [chunk_idx * per_chunk + i for i in range(per_chunk)]
    return places[-1:] if isinstance(chunking.layout.groups[group_idx].kind, Recurrent) else places


def store_rows(chunking: Chunking, chunks: Any, tables: Any, units: Any) -> Rows:
    """By group: chunk, its block ids, its units."""
    rows: Rows = {}
    for group_idx, group in enumerate(chunking.layout.groups):
        for row, chunk_idx in enumerate(chunks.get(group.name, [])):
            blocks = [int(tables[group.name][place]) for place in blocks_of_chunk(chunking, group_idx, chunk_idx)]
            rows.setdefault(group_idx, []).append((int(chunk_idx), blocks, [int(u) for u in units[group.name][row]]))
    return rows


def load_rows(
    chunking: Chunking, position: int, device_tokens: int | dict[str, int], load: Any, tables: Any, units: Any
) -> Rows:
    """By group: chunk, the ids of the blocks to write and -1 for the others, its units."""
    prefix = law.device_prefix(chunking, device_tokens)
    rows: Rows = {}
    for group_idx, group in enumerate(chunking.layout.groups):
        if not group.is_cached:
            continue
        missing = law.needed(group.kind, position) - law.needed(group.kind, prefix[group.name])
        for row, chunk_idx in enumerate(load[group.name]):
            blocks = []
            for place in blocks_of_chunk(chunking, group_idx, chunk_idx):
                if isinstance(group.kind, Recurrent):
                    write = (place + 1) * group.tokens_per_block in missing
                else:
                    first = place * group.tokens_per_block
                    write = any(token in missing for token in range(first, first + group.tokens_per_block))
                blocks.append(int(tables[group.name][place]) if write else NULL)
            rows.setdefault(group_idx, []).append((int(chunk_idx), blocks, [int(u) for u in units[group.name][row]]))
    return rows
