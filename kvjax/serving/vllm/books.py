"""The books, as the scheduler's side uses them: of a host pool in another process, or of one in its own."""

import logging
from collections.abc import Hashable, Mapping
from typing import Any, Protocol

import numpy as np

from kvjax.chunking import resolve_chunking
from kvjax.handles import Load, Lookup, Store
from kvjax.ledger import Ledger
from kvjax.packing import cut_into_units
from kvjax.serving.vllm.messages import Geometry
from kvjax.serving.vllm.options import Options
from kvjax.stats import Stats, ledger_stats

_LOG = logging.getLogger(__name__)


class Books(Protocol):
    """What the scheduler's side asks of the books."""

    @property
    def ledger(self) -> Ledger:
        """Of the host pool."""
        ...

    def lookup(self, request_id: Hashable, **arguments: Any) -> Lookup | None:
        """As `Ledger.lookup`; or `None` while what the request wants is on its way to the host pool."""
        ...

    def look_again(self, request_id: Hashable) -> Lookup:
        """As `Ledger.look_again`."""
        ...

    def take_on(self, request_id: Hashable, **arguments: Any) -> None:
        """As `lookup`, for a request that is running: nothing is restored for it."""
        ...

    def extend(self, request_id: Hashable, **arguments: Any) -> None:
        """As `Ledger.extend`."""
        ...

    def prepare_load(self, request_id: Hashable, tables: Mapping[str, np.ndarray]) -> Load:
        """As `Ledger.prepare_load`."""
        ...

    def prepare_store(
        self, request_id: Hashable, tables: Mapping[str, np.ndarray], num_tokens: int, *, checkpoint: bool
    ) -> Store:
        """As `Ledger.prepare_store`."""
        ...

    def complete(self, work: Load | Store, moved: Mapping[int, np.ndarray]) -> bool:
        """Ends a load or a store, and returns whether all of it was moved.

        Args:
            work: as it was prepared.
            moved: by `group_idx`, a mask of the rows of its plan; empty if nothing was moved.
        """
        ...

    def finish(self, request_id: Hashable) -> None:
        """As `Ledger.finish`."""
        ...

    def invalidate(self) -> None:
        """Makes everything a miss."""
        ...

    def stats(self) -> Stats:
        """As `Offloader.stats`; of jobs and tiers nothing where there is a ledger only."""
        ...


class LedgerBooks:
    """Books of a host pool that a worker in another process owns.

    Args:
        options: the connector's settings.
        geometry: what the worker told of its arrays.
        model: see `kvjax.Ledger`.
        resume_multiple: see `kvjax.Ledger`.
    """

    def __init__(self, options: Options, geometry: Geometry, *, model: str, resume_multiple: int):
        chunking = resolve_chunking(geometry.layout, **options.chunking)
        self._num_blocks = geometry.num_blocks
        self._host_bytes = options.host_bytes
        self._num_open = 0
        self._told_too_small = False
        self.ledger = Ledger(
            chunking,
            cut_into_units(chunking, geometry.unit_bytes),
            host_bytes=options.host_bytes,
            model=model,
            resume_multiple=resume_multiple,
            checkpoint_tokens=options.checkpoint_tokens,
            store_after=options.store_after,
        )

    def lookup(self, request_id: Hashable, **arguments: Any) -> Lookup:
        """See `Books`."""
        return self.ledger.lookup(request_id, **arguments)

    def look_again(self, request_id: Hashable) -> Lookup:
        """See `Books`."""
        return self.ledger.look_again(request_id)

    def take_on(self, request_id: Hashable, **arguments: Any) -> None:
        """See `Books`."""
        self.ledger.lookup(request_id, max_load_tokens=0, **arguments)

    def extend(self, request_id: Hashable, **arguments: Any) -> None:
        """See `Books`."""
        self.ledger.extend(request_id, **arguments)

    def prepare_load(self, request_id: Hashable, tables: Mapping[str, np.ndarray]) -> Load:
        """See `Books`."""
        load = self.ledger.prepare_load(request_id, tables, num_blocks=self._num_blocks)
        self._num_open += 1
        return load

    def prepare_store(
        self, request_id: Hashable, tables: Mapping[str, np.ndarray], num_tokens: int, *, checkpoint: bool
    ) -> Store:
        """See `Books`."""
        store = self.ledger.prepare_store(
            request_id, tables, num_tokens, checkpoint=checkpoint, num_blocks=self._num_blocks
        )
        self._num_open += 1
        if self.ledger.too_small and not self._told_too_small:
            self._told_too_small = True
            _LOG.warning("%s", self.ledger.too_small)
        return store

    def complete(self, work: Load | Store, moved: Mapping[int, np.ndarray]) -> bool:
        """See `Books`."""
        self._num_open -= 1
        ok = moved or not work.num_chunks
        if isinstance(work, Load):
            return self.ledger.complete_load(work, ok=ok) == work.hit_tokens
        return self.ledger.complete_store(work, ok=ok)

    def finish(self, request_id: Hashable) -> None:
        """See `Books`."""
        self.ledger.finish(request_id)

    def invalidate(self) -> None:
        """See `Books`."""
        self.ledger.invalidate()

    def stats(self) -> Stats:
        """See `Books`."""
        return ledger_stats(self.ledger, self._host_bytes, self._num_open)
