"""What a ledger hands out: the answer of a lookup, loads and stores under way, and its counts."""

from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np

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
    """

    hit_tokens: int
    device_tokens: int
    load: dict[str, np.ndarray]
    load_bytes: int
    limited_by: tuple[str, ...]
    checkpoints: tuple[int, ...] = ()


@dataclass(slots=True)
class LedgerCounts:
    """What happened so far."""

    lookups: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0
    chunks_loaded: int = 0
    bytes_loaded: int = 0
    chunks_stored: int = 0
    bytes_stored: int = 0
    chunks_dropped: int = 0
    loads_failed: int = 0
    stores_failed: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """A load that was prepared. One `complete_load` ends it.

    Args:
        request_id: the request it is for.
        plan: the moves.
        pins: what it reads.
        hit_tokens: the prefix in the caches once it is done.
        device_tokens: the prefix in the caches if it fails.
    """

    request_id: Hashable
    plan: LoadPlan
    pins: Pins
    hit_tokens: int
    device_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Store:
    """A store that was prepared. One `complete_store` ends it."""

    request_id: Hashable
    plan: StorePlan
    reservations: tuple[Reservation, ...]
    request: Request = field(repr=False)
    checkpoints: tuple[int, ...] = ()
