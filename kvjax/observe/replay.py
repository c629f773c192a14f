"""Replays a trace on a ledger of any geometry, budget and policy: no clock, no device, no bytes.

Jobs end at once. Block tables are full: stores find what an engine has that frees blocks only below `retained_from`
and ends steps at `next_cut`. A request with a hit loads it, if not where the trace says, before its first store.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvjax.chunking import Chunking
from kvjax.handles import Lookup
from kvjax.ledger import Ledger
from kvjax.observe.calls import (
    Call,
    ExtendCall,
    FinishCall,
    InvalidateCall,
    LoadCall,
    LookupCall,
    StoreCall,
    Trace,
)
from kvjax.observe.hash_units import check_units, unit_hashes, whole_chains
from kvjax.observe.replay_counts import ReplayCounts
from kvjax.observe.replay_figures import ReplayFigures
from kvjax.packing import Units
from kvjax.pool import Policy


@dataclass(slots=True, eq=False)
class _Open:
    """A request that was looked up and not finished."""

    chain: bytes
    own: bytes
    num_tokens: int = 0
    hit_tokens: int = 0
    loaded: bool = False


class Replay:
    """A replay under way: takes the calls of a trace one by one.

    Args:
        trace: the trace.
        chunking: the layout and its chunks; its hash unit is a multiple of the trace's or divides it.
        units: how chunks are cut into units of the pool.
        host_bytes: budget of the host pool.
        policy: the pool's order of eviction, LRU by default; it must be new.
        checkpoint_tokens: see `Ledger`.
        resume_multiple: see `Ledger`.
        store_after: see `Ledger`.

    Raises:
        ValueError: hash units that do not fit each other, calls that do not follow on each other, or what `Ledger`
            refuses.
    """

    def __init__(
        self,
        trace: Trace,
        chunking: Chunking,
        units: Units,
        *,
        host_bytes: int,
        policy: Policy | None = None,
        checkpoint_tokens: int | Literal["auto"] | None = "auto",
        resume_multiple: int = 1,
        store_after: int = 1,
    ):
        check_units(trace.tokens_per_hash, chunking.tokens_per_hash)
        self.ledger = Ledger(
            chunking,
            units,
            host_bytes=host_bytes,
            policy=policy,
            checkpoint_tokens=checkpoint_tokens,
            resume_multiple=resume_multiple,
            store_after=store_after,
        )
        self._trace, self._chunking, self._units = trace, chunking, units
        self._chains = iter(whole_chains(trace))
        self._open: dict[str, _Open] = {}
        self._counts = ReplayCounts(chunking, units)
        self._num_requests = 0

    def take(self, call: Call) -> Lookup | None:
        """Carries out the trace's next call, and returns the answer of a lookup."""
        found = None
        match call:
            case LookupCall():
                found = self._lookup(call)
            case ExtendCall(request, num_tokens):
                known = self._open[request]
                self.ledger.extend(request, hashes=self._hashes(known, num_tokens), num_tokens=num_tokens)
                known.num_tokens = num_tokens
            case LoadCall(request):
                self._load(request)
            case StoreCall(request, num_tokens, checkpoint):
                self._store(request, num_tokens, checkpoint)
            case FinishCall(request):
                self.ledger.finish(request)
                del self._open[request]
            case InvalidateCall(namespace):
                self.ledger.invalidate(None if namespace is None else self.ledger.namespace(namespace))
        self._counts.add_call(self.ledger.pool)
        return found

    def figures(self) -> ReplayFigures:
        """Returns what was done so far."""
        return self._counts.figures(self.ledger)

    def _lookup(self, call: LookupCall) -> Lookup:
        before = self._open.get(call.request)
        own = b"own" + self._num_requests.to_bytes(8, "little") if before is None else before.own
        opened = _Open(next(self._chains), own)
        found = self.ledger.lookup(
            call.request,
            hashes=self._hashes(opened, call.num_tokens),
            num_tokens=call.num_tokens,
            device_tokens=self._on_device(call.device_tokens),
            salt=call.namespace,
            max_store_tokens=call.max_store_tokens,
            max_load_tokens=call.max_load_tokens,
            skip=call.skip,
        )
        opened.num_tokens = call.num_tokens
        opened.hit_tokens = found.hit_tokens
        self._open[call.request] = opened
        if before is None:
            self._num_requests += 1
            self._counts.add_request(call.num_tokens, found)
        return found

    def _load(self, request: str) -> None:
        known = self._open[request]
        if known.loaded:
            return
        load = self.ledger.prepare_load(request, self._tables(known.hit_tokens))
        self.ledger.complete_load(load, ok=True)
        known.loaded = True
        self._counts.add_load(load.plan)

    def _store(self, request: str, num_tokens: int, checkpoint: bool) -> None:
        if self._open[request].hit_tokens:
            self._load(request)
        store = self.ledger.prepare_store(request, self._tables(num_tokens), num_tokens, checkpoint=checkpoint)
        self.ledger.complete_store(store, ok=True)

    def _hashes(self, known: _Open, num_tokens: int) -> list[bytes]:
        """The hashes of the units between the request's tokens so far and `num_tokens`."""
        unit = self._chunking.tokens_per_hash
        first, stop = known.num_tokens // unit, num_tokens // unit
        return unit_hashes(known.chain, self._trace.tokens_per_hash, unit, first, stop, known.own)

    def _on_device(self, recorded: int | Mapping[str, int]) -> int | Mapping[str, int]:
        """What the device held. Where the trace has other groups, what it held of all of them."""
        names = {self._chunking.layout.names[g] for g in self._chunking.layout.cached}
        if isinstance(recorded, int) or names.issuperset(recorded):
            return recorded
        return min(recorded.values())

    def _tables(self, num_tokens: int) -> dict[str, np.ndarray]:
        """Full block tables, whose groups share no block."""
        tables = {}
        start = 0
        for g in self._chunking.layout.cached:
            group = self._chunking.layout.groups[g]
            stop = start + -(-num_tokens // group.tokens_per_block)
            tables[group.name] = np.arange(start, stop)
            start = stop
        return tables


def replay(
    trace: Trace,
    chunking: Chunking,
    units: Units,
    *,
    host_bytes: int,
    policy: Policy | None = None,
    checkpoint_tokens: int | Literal["auto"] | None = "auto",
    resume_multiple: int = 1,
    store_after: int = 1,
    on_call: Callable[[], object] = lambda: None,
) -> ReplayFigures:
    """Replays a whole trace and returns what was done; `on_call` is called after each call, the rest as for `Replay`.

    Raises:
        ValueError: see `Replay`.
    """
    run = Replay(
        trace,
        chunking,
        units,
        host_bytes=host_bytes,
        policy=policy,
        checkpoint_tokens=checkpoint_tokens,
        resume_multiple=resume_multiple,
        store_after=store_after,
    )
    for call in trace.calls:
        run.take(call)
        on_call()
    return run.figures()
