"""What a policy of eviction is: order, and nothing else."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Access:
    """What one request asks for or stores, or a part of it. Arrays are parallel, one entry for each slot.

    Args:
        number: of the access; a larger one is more recent. Calls with the same number are parts of one access, and
            others may come in between. No slot is named by an access older than the last one that named it.
        slots: distinct, in any order, known to the policy or new.
        ranks: within the access the highest rank leaves first, and slots of equal rank are of no use
            without each other.
        counted: true where this request asks for the chunk for the first time and could read it. False for
            what it stores, and for what it comes back to.
        fingerprints: `uint64`, of the chunk's content: the same when the chunk comes back in another slot.
    """

    number: int
    slots: np.ndarray
    ranks: np.ndarray
    counted: np.ndarray
    fingerprints: np.ndarray


class PolicyError(ValueError):
    """A policy answered what it must not. Nothing changed."""


class Policy(Protocol):
    """Decides in which order chunks leave a full pool.

    A policy sees slots (small ints that stand for chunks) and knows nothing of bytes or pins. The pool skips
    the victims it must not take and tells the policy which ones went. What a policy answers is checked.

    A request reads its chunks from the first token on, so a chunk must not leave before those that come after
    it in its request: every access names the whole prefix that the request has in the pool, and a policy that
    keeps what is more recent, and within an access what has a lower rank, keeps prefixes that are of use.

    A policy that raises in `touch` or `remove` is replaced; `victims` that raises, or names what it must not, makes
    the store fail that needed room.
    """

    def touch(self, access: Access) -> None:
        """One access of one request, or a part of one. The arrays are the policy's to keep."""
        ...

    def remove(self, slots: np.ndarray, *, evicted: bool) -> None:
        """Forgets slots, whether they made room for others (`evicted`) or were dropped. Unknown ones are ignored. The
        array is the policy's to keep."""
        ...

    def victims(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields all slots in eviction order, each once, as pairs `(slots, ranks)` of arrays of integers, of any length
        but 0.

        Neighbours of a pair that have equal ranks leave at once. Slots that leave at once are in one pair.
        """
        ...

    def slots(self) -> np.ndarray:
        """Returns every slot known, in any order, for integrity checks."""
        ...
