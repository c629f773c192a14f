"""What the pool hands out: reservations, pins, counts and changes."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

Reason = Literal["evicted", "invalidated"]


@dataclass(frozen=True, slots=True, eq=False)
class Reservation:
    """Chunks that are being written. One `complete_store` ends it.

    Args:
        keys: of the chunks, in the order asked for; those held already are left out.
        places: parallel to `keys`: their places in what was asked for.
        slots: parallel to `keys`.
        epochs: parallel to `keys`: the chunk's epoch.
    """

    keys: tuple[bytes, ...]
    places: np.ndarray
    slots: np.ndarray
    epochs: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Pins:
    """Chunks that are being read and stay where they are until `unpin`.

    Args:
        slots: the chunks.
        epochs: parallel to `slots`: the chunks' epochs.
    """

    slots: np.ndarray
    epochs: np.ndarray


@dataclass(slots=True)
class PoolCounts:
    """What the pool did so far, in chunks; arrays are by `group_idx`.

    Args:
        stored_by_group: chunks that became resident.
        evicted_by_group: chunks that made room for others.
        stored: chunks that became resident.
        evicted: chunks that made room for others.
        refused: stores for which there was no room; not chunks.
        failed: chunks whose store failed.
        stale: chunks invalidated while they were being written.
        invalidated: chunks invalidated, those among them.
    """

    stored_by_group: np.ndarray
    evicted_by_group: np.ndarray
    stored: int = 0
    evicted: int = 0
    refused: int = 0
    failed: int = 0
    stale: int = 0
    invalidated: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """Chunks that lookups find from now on, or no more. Arrays are parallel.

    Every chunk that was stored is removed once, at the latest when its key is stored again. What was invalidated
    with its namespace is told by and by, as it is cleared away.

    Args:
        kind: `"stored"` or `"removed"`.
        reason: of a removal; `""` otherwise.
        keys: of the chunks.
        group_idxs: their groups.
        chunk_idxs: their places in the sequence.
        slots: where they are, or were until now: what the pool knows of a slot can be read as long as it tells.
    """

    kind: Literal["stored", "removed"]
    reason: Reason | Literal[""]
    keys: tuple[bytes, ...]
    group_idxs: np.ndarray
    chunk_idxs: np.ndarray
    slots: np.ndarray
