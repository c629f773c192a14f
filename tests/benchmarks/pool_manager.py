"""kvjax's own pool behind the methods that `bench_pool_phases` times."""

from dataclasses import dataclass

import numpy as np

import kvjax
from kvjax.pool import ChunkPool, Pins, Policy, Reservation


@dataclass(frozen=True, slots=True, eq=False)
class PoolRequest:
    """A request of one group.

    Args:
        keys: of its chunks, in the order of their tokens.
        ranks: parallel to `keys`, see `Policy.touch`.
    """

    keys: list[bytes]
    ranks: np.ndarray

    @property
    def group_idxs(self) -> list[int]:
        """The group of each chunk."""
        return [0] * len(self.keys)


class PoolManager:
    """A `ChunkPool` of one group whose chunks take a unit each; see `bench_pool_phases.Manager`.

    Args:
        num_chunks: chunks that the pool has room for.
        policy: its order of eviction, not used yet.
        name: what the rows call the policy.
    """

    peer = f"kvjax {kvjax.__version__}"
    has_finish = False  # a request keeps nothing in the pool

    def __init__(self, num_chunks: int, policy: Policy, name: str):
        self.policy = name
        self._pool = ChunkPool(num_chunks, [1], policy)

    def new_request(self, request_id: str, keys: list[bytes]) -> PoolRequest:
        """See `Manager.new_request`."""
        del request_id
        return PoolRequest(keys, np.arange(len(keys)))

    def lookup(self, request: PoolRequest) -> int:
        """See `Manager.lookup`."""
        return int((self._pool.find(request.keys) >= 0).sum())

    def prepare_store(self, request: PoolRequest) -> Reservation | None:
        """See `Manager.prepare_store`."""
        return self._pool.prepare_store(request.keys, request.group_idxs, request.ranks)

    def complete_store(self, request: PoolRequest, store: Reservation) -> None:
        """See `Manager.complete_store`."""
        del request
        self._pool.complete_store(store, ok=True)

    def prepare_load(self, request: PoolRequest) -> Pins:
        """See `Manager.prepare_load`."""
        return self._pool.pin(self._pool.find(request.keys))

    def complete_load(self, request: PoolRequest, load: Pins) -> None:
        """See `Manager.complete_load`."""
        del request
        self._pool.unpin(load)

    def touch(self, request: PoolRequest) -> None:
        """See `Manager.touch`."""
        self._pool.touch(self._pool.held(request.keys), request.ranks, access=self._pool.new_access())

    def finish(self, request: PoolRequest) -> None:
        """See `Manager.finish`."""
        del request
