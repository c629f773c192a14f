"""What the scheduler's side knows of a running request: its block tables, and how far it has come."""

from array import array
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvjax.groups import CacheLayout, Recurrent
from kvjax.handles import Lookup
from kvjax.law import needed
from kvjax.plan import NULL_BLOCK

# vLLM's null block, and the place that stands for a request's state in plans: the worker knows where that is.
VLLM_NULL = 0
STATE = 0


@dataclass(slots=True, eq=False)
class Tracked:
    """A request that vLLM has not finished.

    Args:
        request: vLLM's.
        num_preemptions: how often it was preempted when it was last scheduled.
        tables: block ids by place in the sequence, for each group, as vLLM allocated them; `None` while it holds none.
        before: tokens that were computed before its last step.
        computed: tokens that will be computed when its last step has run, drafts included.
        stored: of those, how many a store was planned for.
        admitted: whether vLLM gave it blocks since it last had none.
        stores: whether what it computes is stored; not if it began before everything was made a miss.
        found: the answer of its last lookup, if it is to be restored and was not admitted yet.
        answered: what was last asked of the books, if there was an answer and the request was not admitted yet.
        stores_under_way: stores of it that the worker has not told the end of.
        restores: whether it may have restored blocks; not after a load of its failed.
    """

    request: Any
    num_preemptions: int = 0
    tables: list[array] | None = None
    before: int = 0
    computed: int = 0
    stored: int = 0
    admitted: bool = False
    stores: bool = True
    found: Lookup | None = None
    answered: Any = None
    stores_under_way: int = 0
    restores: bool = True

    def begin(self, block_ids: Sequence[Sequence[int]], num_computed: int, num_scheduled: int) -> None:
        """Notes the first step after an admission, with all block ids."""
        self.tables = [array("i", ids) for ids in block_ids]
        self.num_preemptions = self.request.num_preemptions
        self.stored = num_computed
        self.step(None, num_computed, num_scheduled)

    def step(self, new_block_ids: Sequence[Sequence[int]] | None, num_computed: int, num_scheduled: int) -> None:
        """Notes a step, with the block ids that are new."""
        assert self.tables is not None, "a running request has block tables"
        for table, ids in zip(self.tables, new_block_ids or (), strict=False):
            table.extend(ids)
        self.before, self.computed = num_computed, num_computed + num_scheduled

    def forget_blocks(self) -> None:
        """Notes that vLLM took the blocks back."""
        self.tables = None
        self.before = self.computed = self.stored = 0
        self.admitted, self.stores = False, True

    @property
    def lost_its_blocks(self) -> bool:
        """Whether it was preempted since its last step."""
        return self.tables is not None and self.request.num_preemptions > self.num_preemptions

    def store_tables(self, layout: CacheLayout, num_tokens: int, slots: Container[str]) -> dict[str, np.ndarray]:
        """Returns tables to store from before the next step: what vLLM may have freed is null.

        vLLM keeps what the law needs, so blocks that the last step needed are as it left them until the next one.

        Args:
            layout: the groups, in the order of the tables.
            num_tokens: for which there is to be a store.
            slots: names of the recurrent groups whose states are in slots.
        """
        assert self.tables is not None, "a running request has block tables"
        tables = {}
        for group, ids in zip(layout.groups, self.tables, strict=True):
            if isinstance(group.kind, Recurrent):
                block_ids = None if group.name in slots else ids
                exact = num_tokens == self.computed
                tables[group.name] = state_table(num_tokens, group.tokens_per_block, block_ids, exact=exact)
                continue
            table = translated(ids)
            table[: needed(group.kind, self.before)[0] // group.tokens_per_block] = NULL_BLOCK
            tables[group.name] = table
        return tables


def translated(block_ids: Sequence[int]) -> np.ndarray:
    """Returns block ids of vLLM with the null block that plans have."""
    table = np.array(block_ids, np.int32)
    table[table == VLLM_NULL] = NULL_BLOCK
    return table


def load_tables(
    layout: CacheLayout, block_ids: Sequence[Sequence[int]], hit_tokens: int, slots: Container[str]
) -> dict[str, np.ndarray]:
    """Returns the tables to load a hit into; `slots` as for `Tracked.store_tables`."""
    return {
        group.name: state_table(hit_tokens, group.tokens_per_block, None if group.name in slots else ids, exact=True)
        if isinstance(group.kind, Recurrent)
        else translated(ids)
        for group, ids in zip(layout.groups, block_ids, strict=True)
    }


def state_table(num_tokens: int, tokens_per_block: int, block_ids: Sequence[int] | None, *, exact: bool) -> np.ndarray:
    """Returns a table with a request's state at the block that ends at `num_tokens`, if one does, and nothing else.

    Args:
        num_tokens: where there may be a state.
        tokens_per_block: of the group.
        block_ids: vLLM's, where states are in its blocks; `None` where they are in slots.
        exact: whether the request is at `num_tokens`.

    >>> state_table(32, 16, None, exact=True).tolist(), state_table(40, 16, None, exact=True).tolist()
    ([-1, 0], [-1, -1, -1])
    >>> state_table(32, 16, [0, 7, 9], exact=True).tolist()
    [-1, 7]
    """
    table = np.full(-(-num_tokens // tokens_per_block), NULL_BLOCK, np.int32)
    if exact and num_tokens and num_tokens % tokens_per_block == 0:
        table[-1] = STATE if block_ids is None else translated(block_ids)[len(table) - 1]
    return table
