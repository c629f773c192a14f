"""Counts what a replay does, call by call."""

from dataclasses import dataclass, field

from kvjax.chunking import Chunking
from kvjax.handles import Lookup
from kvjax.ledger import Ledger
from kvjax.observe.replay_figures import GroupFigures, ReplayFigures
from kvjax.packing import Units
from kvjax.plan import LoadPlan
from kvjax.pool import ChunkPool


@dataclass(slots=True, eq=False)
class _Held:
    """Units held after each call."""

    peak: int = 0
    total: int = 0

    def add(self, units: int) -> None:
        self.peak = max(self.peak, units)
        self.total += units


@dataclass(slots=True, eq=False)
class _OfGroup:
    """Chunks of one group, and the units it held."""

    loaded: int = 0
    held: _Held = field(default_factory=_Held)


class ReplayCounts:
    """What a replay did so far.

    Args:
        chunking: the layout and its chunks.
        units: how chunks are cut into units of the pool.
    """

    def __init__(self, chunking: Chunking, units: Units):
        self._chunking, self._units = chunking, units
        self._groups = {g: _OfGroup() for g in chunking.layout.cached}
        self._held = _Held()
        self._calls = self._requests = 0
        self._lookup_tokens = self._hit_tokens = self._device_tokens = 0

    def add_request(self, num_tokens: int, found: Lookup) -> None:
        """Counts the first lookup of a request of `num_tokens` tokens, and what it found."""
        self._requests += 1
        self._lookup_tokens += num_tokens
        self._hit_tokens += found.hit_tokens
        self._device_tokens += found.device_tokens

    def add_load(self, plan: LoadPlan) -> None:
        """Counts a load."""
        for moves in plan.moves:
            self._groups[moves.group_idx].loaded += moves.num_chunks

    def add_call(self, pool: ChunkPool) -> None:
        """Counts a call, and what the pool holds after it."""
        self._calls += 1
        self._held.add(pool.num_units - pool.num_free_units)
        units = pool.units_by_group().tolist()
        for g, counts in self._groups.items():
            counts.held.add(units[g])

    def figures(self, ledger: Ledger) -> ReplayFigures:
        """Returns what was counted, and what the ledger counted by itself."""
        return ReplayFigures(
            requests=self._requests,
            lookup_tokens=self._lookup_tokens,
            hit_tokens=self._hit_tokens,
            device_tokens=self._device_tokens,
            refused_stores=ledger.pool.counts.refused + ledger.counts.stores_too_large,
            chunks_dropped=ledger.counts.chunks_dropped,
            peak_bytes_held=self._held.peak * self._units.unit_bytes,
            mean_bytes_held=self._mean(self._held),
            groups=tuple(self._figures_of(g, counts, ledger.pool) for g, counts in self._groups.items()),
        )

    def _mean(self, held: _Held) -> float:
        return held.total * self._units.unit_bytes / self._calls if self._calls else 0.0

    def _figures_of(self, g: int, counts: _OfGroup, pool: ChunkPool) -> GroupFigures:
        chunk_bytes = self._chunking.chunk_bytes[g] or 0
        stored, evicted = int(pool.counts.stored_by_group[g]), int(pool.counts.evicted_by_group[g])
        return GroupFigures(
            name=self._chunking.layout.names[g],
            chunks_stored=stored,
            bytes_stored=stored * chunk_bytes,
            chunks_loaded=counts.loaded,
            bytes_loaded=counts.loaded * chunk_bytes,
            chunks_evicted=evicted,
            bytes_evicted=evicted * chunk_bytes,
            peak_bytes_held=counts.held.peak * self._units.unit_bytes,
            mean_bytes_held=self._mean(counts.held),
        )
