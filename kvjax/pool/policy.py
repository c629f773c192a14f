"""What a policy of eviction is: order, and nothing else."""

from collections.abc import Iterator
from typing import Protocol

import numpy as np


class Policy(Protocol):
    """Decides in which order chunks leave a full pool.

    A policy sees slots (small ints that stand for resident chunks) and knows nothing of keys, bytes or
    pins. The pool skips the victims it must not take and tells the policy which ones went.
    """

    def touch(self, slots: np.ndarray, ranks: np.ndarray) -> None:
        """One access of one request: to known slots and to slots new to the policy.

        Args:
            slots: distinct slots, in any order.
            ranks: parallel to `slots`. Within the access the highest rank leaves first, and slots of
                equal rank are of no use without each other.
        """
        ...

    def remove(self, slots: np.ndarray) -> None:
        """Forgets slots, whether they were evicted or dropped otherwise."""
        ...

    def victims(self) -> Iterator[np.ndarray]:
        """Yields all slots in eviction order, in sets that leave at once. Changes nothing."""
        ...

    def slots(self) -> np.ndarray:
        """Returns every slot known, in any order, for integrity checks."""
        ...
