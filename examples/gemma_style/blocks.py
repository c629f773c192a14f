"""Blocks of the device cache: one free list and, per sequence, one block table a group."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

NULL_BLOCK = -1


class BlockPool:
    """The free blocks of one group.

    Args:
        num_blocks: blocks of the group's caches.
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_used(self) -> int:
        """Blocks that a table holds."""
        return self.num_blocks - len(self._free)

    def take(self) -> int | None:
        """Returns a free block, or `None` if there is none. What it holds is left over from its last owner."""
        return self._free.pop() if self._free else None

    def give_back(self, block_ids: Iterable[int]) -> None:
        """Makes blocks free again."""
        self._free.extend(block_ids)

    def check_integrity(self, tables: Iterable[np.ndarray]) -> None:
        """Recounts: every block is free or in exactly one table."""
        held = np.concatenate([np.empty(0, np.int64), *(table[table != NULL_BLOCK] for table in tables)])
        everything = np.sort(np.concatenate([held, np.array(self._free, np.int64)]))
        assert np.array_equal(everything, np.arange(self.num_blocks)), "a block is lost, or has two owners"


@dataclass(eq=False)
class Session:
    """One conversation as the engine sees it.

    Args:
        name: names it in the tables.
        tables: block ids by place in the sequence, by group; -1 where there is none.
        tokens: all its tokens so far.
        cached_tokens: length of the prefix whose keys and values the device holds.
        computed_tokens: length of the prefix whose keys and values were computed at any time.
        num_turns: turns served.
    """

    name: str
    tables: dict[str, np.ndarray]
    tokens: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    computed_tokens: int = 0
    num_turns: int = 0

    @classmethod
    def empty(cls, name: str, table_blocks: Mapping[str, int]) -> "Session":
        """Returns a session without tokens, with tables of so many blocks."""
        return cls(name, {group: np.full(count, NULL_BLOCK, np.int64) for group, count in table_blocks.items()})
