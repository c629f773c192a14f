"""What a ledger hands out: the answer of a lookup, loads and stores under way, and its counts."""

from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np

from kvjax.decision import Decision
from kvjax.plan import LoadPlan, StorePlan
from kvjax.pool import Pins, Reservation
from kvjax.requests import Request


@dataclass(frozen=True, slots=True, eq=False)
class Lookup:
    """What a request can have without computing it.

    Args:
        hit_tokens: length of the prefix that is restorable, what the device holds included.
        device_tokens: as given to `lookup`; the longest of them where groups differ.
        load: for every group, the ascending `int64` `chunk_idx` that a load will read.
        load_bytes: bytes of those chunks.
        limited_by: the groups that keep the next larger candidate from being a hit.
        checkpoints: where the request is stored for later ones, ascending, as far as is known by now: the
            prompt's end, a junction with prompts that share a part of it, and every `checkpoint_tokens`.
        arriving: for every group with chunks to load, `(len(load), blocks in a chunk)` `int64` ids of the blocks
            into which loads of other requests, under way, restore the same chunks; -1 where none does. A request
            that shares these blocks (in its block tables, with `share=True`) does not load them again. They are
            those requests' until their jobs have results. One that ends before the load is prepared brings nothing
            any more, and its blocks are written once more, with the same bytes.
        promised_tokens: where the request could resume once what is on its way to the pool from lower tiers has come;
            `hit_tokens` if nothing is.
        decision: whether restoring pays and from where, with what the ways cost; `None` if there was no choice.
    """

    hit_tokens: int
    device_tokens: int
    load: dict[str, np.ndarray]
    load_bytes: int
    limited_by: tuple[str, ...]
    checkpoints: tuple[int, ...] = ()
    arriving: dict[str, np.ndarray] = field(default_factory=dict)
    promised_tokens: int = 0
    decision: Decision | None = None


@dataclass(slots=True)
class LedgerCounts:
    """What happened so far. No count ever falls. Those of groups are arrays by `group_idx`.

    Args:
        loaded_by_group: chunks restored.
        dropped_by_group: chunks that could not be stored as a block was freed before they were complete.
        lookups: requests looked up; one that is looked up again before it is finished counts once.
        lookup_tokens: their prompts' tokens; of a request that is looked up again with more, those, too.
        hit_tokens: of those, tokens that need no computing: of each request, the most that a lookup found.
        chunks_stored: chunks that became resident.
        bytes_stored: their bytes, without padding.
        bytes_loaded: bytes of chunks restored, without padding.
        loads_failed: loads that ended badly, or in part.
        stores_failed: stores that ended badly, or in part.
        loads_shared: loads that wait for another request's instead of moving all that they need.
        chunks_declined: chunks not stored as they were not asked for often enough, or lie beyond what their
            request may store.
        stores_too_large: stores of which the empty pool has no room for all.
        stores_outdated: stores of requests whose namespace was invalidated after they were looked up.
    """

    loaded_by_group: np.ndarray
    dropped_by_group: np.ndarray
    lookups: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0
    bytes_loaded: int = 0
    bytes_stored: int = 0
    chunks_stored: int = 0
    loads_failed: int = 0
    stores_failed: int = 0
    loads_shared: int = 0
    chunks_declined: int = 0
    stores_too_large: int = 0
    stores_outdated: int = 0

    @property
    def chunks_loaded(self) -> int:
        """Chunks restored."""
        return int(self.loaded_by_group.sum())

    @property
    def chunks_dropped(self) -> int:
        """Chunks that could not be stored as a block was freed before they were complete."""
        return int(self.dropped_by_group.sum())


@dataclass(frozen=True, slots=True, eq=False)
class LoadRows:
    """Chunks of one group in a load, one row for each.

    Args:
        chunk_idx: `(n,)` ascending `int64`.
        epochs: `(n,)` `int64`, which chunks they are.
        of_others: `(n,)`: true where loads of other requests bring blocks of the chunk.
    """

    chunk_idx: np.ndarray
    epochs: np.ndarray
    of_others: np.ndarray


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Load:
    """A load that was prepared. One `complete_load` ends it.

    Args:
        request_id: the request it is for.
        plan: the moves: what it loads itself.
        pins: what it reads, and what it waits for.
        hit_tokens: the prefix in the caches once it is done.
        device_tokens: the prefix in the caches if it fails.
        request: whose load it is.
        rows: by `group_idx`, all chunks of the hit that the device lacks.
        after: loads of other requests that restore some of them into blocks that both share.
        stale: the chunks were invalidated between the lookup and the load: it does nothing, and fails.
    """

    request_id: Hashable
    plan: LoadPlan
    pins: Pins
    hit_tokens: int
    device_tokens: int
    request: Request = field(repr=False)
    rows: dict[int, LoadRows] = field(repr=False)
    after: "tuple[Load, ...]" = ()
    stale: bool = False

    @property
    def num_chunks(self) -> int:
        """Chunks that it moves itself."""
        return self.plan.num_chunks

    @property
    def num_bytes(self) -> int:
        """Their bytes, without padding."""
        return self.plan.num_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Store:
    """A store that was prepared. One `complete_store` ends it, after those of the loads that it depends on.

    Args:
        request_id: the request it is for.
        plan: the moves.
        reservations: of the chunks.
        epochs: by `group_idx`, parallel to the rows of the plan: which chunks they are.
        request: whose store it is.
        checkpoints: for which it stores.
        after: loads of the request that were under way when it was prepared, and those added since.
    """

    request_id: Hashable
    plan: StorePlan
    reservations: tuple[Reservation, ...]
    epochs: dict[int, np.ndarray] = field(repr=False)
    request: Request = field(repr=False)
    checkpoints: tuple[int, ...] = ()
    after: list[Load] = field(default_factory=list, repr=False)

    @property
    def num_chunks(self) -> int:
        """Chunks that it moves."""
        return self.plan.num_chunks

    @property
    def num_bytes(self) -> int:
        """Their bytes, without padding."""
        return self.plan.num_bytes
