"""What an offloader did and holds, as one snapshot."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvjax.ledger import Ledger
from kvjax.observe.durations import DurationCounts, Durations

if TYPE_CHECKING:
    from kvjax.jobs import Jobs
    from kvjax.tiers.flow import TierFlow
    from kvjax.tiers.level import Level


@dataclass(frozen=True, slots=True)
class GroupStats:
    """What of an offloader's work was for one cached group. Bytes held are with padding, others without.

    Args:
        name: of the group.
        resident_chunks: chunks that a lookup finds.
        bytes_held: units that its chunks hold times their bytes, those being written and those that were
            invalidated and not cleared away among them.
        chunks_stored: chunks that became resident so far.
        bytes_stored: their bytes.
        chunks_loaded: chunks restored so far.
        bytes_loaded: their bytes.
        chunks_evicted: chunks that made room for others.
        chunks_dropped: chunks that could not be stored, as a block was freed before they were complete.
    """

    name: str
    resident_chunks: int
    bytes_held: int
    chunks_stored: int
    bytes_stored: int
    chunks_loaded: int
    bytes_loaded: int
    chunks_evicted: int
    chunks_dropped: int


@dataclass(frozen=True, slots=True)
class TierStats:
    """What a tier below the host pool did for an offloader. Bytes are of chunks, without frames and padding.

    Args:
        name: of the tier.
        is_up: false while it is left alone, as it failed again and again.
        chunks_written: chunks written so far.
        bytes_written: their bytes.
        chunks_known: chunks that were there already when they were to be written.
        chunks_read: chunks read, and found to be what was written.
        bytes_read: their bytes.
        missing_chunks: chunks that were gone when they were to be read.
        bad_chunks: entries that were not what they should be, and were removed.
        bad_by_reason: the same, by reason.
        dropped_chunks: chunks not written, as too many others waited or the tier was down.
        full_chunks: chunks for which the tier had no room.
        errors: operations that failed in another way.
        cleared_chunks: entries deleted as their chunks were invalidated.
        waiting_chunks: chunks that wait to be written.
        pending_bytes: memory that is held for those that left the pool, or are being written.
        read_latency_s: the fixed part of the time that a read takes, in seconds; `None` if none was measured lately.
        read_bytes_per_s: the rate; `None` likewise.
        write_bytes_per_s: the rate of writing; `None` likewise.
    """

    name: str
    is_up: bool
    chunks_written: int
    bytes_written: int
    chunks_known: int
    chunks_read: int
    bytes_read: int
    missing_chunks: int
    bad_chunks: int
    bad_by_reason: dict[str, int]
    dropped_chunks: int
    full_chunks: int
    errors: int
    cleared_chunks: int
    waiting_chunks: int
    pending_bytes: int
    read_latency_s: float | None
    read_bytes_per_s: float | None
    write_bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class Stats:
    """What an offloader did and holds. What it did never falls.

    Args:
        budget_bytes: the host pool's budget.
        bytes_held: units in use times their bytes: the sum over `groups`.
        resident_chunks: chunks that a lookup finds.
        chunks_stored: chunks that became resident so far.
        bytes_stored: their bytes, without padding.
        chunks_loaded: chunks restored so far; those that a load shares with another one count once.
        bytes_loaded: their bytes, without padding.
        evicted_chunks: chunks that made room for others.
        dropped_chunks: chunks that could not be stored, as a block was freed before they were complete.
        chunks_not_admitted: chunks that were not stored, as they were not asked for often enough or lie beyond what
            their request may store.
        stale_chunks: chunks that were invalidated while they were being written.
        outdated_stores: stores of requests whose namespace was invalidated after they were looked up.
        refused_stores: times that the pool had no room for a store, or is smaller than all of one.
        shared_loads: loads that share blocks with another one.
        failed_jobs: jobs that ended badly, or in part.
        cancelled_jobs: jobs that were cancelled.
        late_jobs: jobs that were not done by their deadline.
        lookups: requests looked up; again before they are finished does not count.
        lookup_tokens: their tokens.
        hit_tokens: of those, tokens that need no computing.
        open_requests: requests not finished.
        open_jobs: jobs without a result.
        given_up_jobs: jobs cancelled or late whose transfers still go on; their chunks stay where they are.
        most_staged_bytes: the most that was staged at a time.
        load_seconds: how long loads took, from their issue until they were seen to end.
        store_seconds: how long stores took.
        promote_seconds: how long promotions took.
        chunks_promoted: chunks that came to the pool from lower tiers.
        bytes_promoted: their bytes, without padding.
        requests_restored: requests that had the choice, and for which restoring paid.
        requests_recomputed: those for which it did not.
        groups: the cached groups in layout order.
        tiers: the tiers below the host pool, in order.
    """

    budget_bytes: int
    bytes_held: int
    resident_chunks: int
    chunks_stored: int
    bytes_stored: int
    chunks_loaded: int
    bytes_loaded: int
    evicted_chunks: int
    dropped_chunks: int
    chunks_not_admitted: int
    stale_chunks: int
    outdated_stores: int
    refused_stores: int
    shared_loads: int
    failed_jobs: int
    cancelled_jobs: int
    late_jobs: int
    lookups: int
    lookup_tokens: int
    hit_tokens: int
    open_requests: int
    open_jobs: int
    given_up_jobs: int
    most_staged_bytes: int
    load_seconds: DurationCounts
    store_seconds: DurationCounts
    promote_seconds: DurationCounts
    chunks_promoted: int
    bytes_promoted: int
    requests_restored: int
    requests_recomputed: int
    groups: tuple[GroupStats, ...]
    tiers: tuple[TierStats, ...] = ()


@dataclass(frozen=True, slots=True)
class _NoJobs:
    """What jobs tell where moves are made elsewhere; see `Jobs`."""

    num_open: int
    num_cancelled: int = 0
    num_late: int = 0
    num_given_up: int = 0
    load_seconds: Durations = field(default_factory=Durations)
    store_seconds: Durations = field(default_factory=Durations)
    promote_seconds: Durations = field(default_factory=Durations)


@dataclass(frozen=True, slots=True)
class _NoTiers:
    """What the flow to lower tiers tells where there are none; see `TierFlow`."""

    num_restored: int = 0
    num_recomputed: int = 0
    levels: tuple["Level", ...] = ()


def ledger_stats(ledger: Ledger, budget_bytes: int, open_jobs: int) -> Stats:
    """Returns what a ledger alone did and holds, where the moves are made, and timed, elsewhere."""
    return stats_of(ledger, _NoJobs(open_jobs), _NoTiers(), budget_bytes, most_staged_bytes=0)


def stats_of(
    ledger: Ledger, jobs: "Jobs | _NoJobs", flow: "TierFlow | _NoTiers", budget_bytes: int, most_staged_bytes: int
) -> Stats:
    """Returns what a ledger, its jobs and its tiers did and hold."""
    counts, pool = ledger.counts, ledger.pool
    promoted = ledger.promoted_by_group
    return Stats(
        budget_bytes=budget_bytes,
        bytes_held=(pool.num_units - pool.num_free_units) * ledger.units.unit_bytes,
        resident_chunks=pool.num_resident,
        chunks_stored=counts.chunks_stored,
        bytes_stored=counts.bytes_stored,
        chunks_loaded=counts.chunks_loaded,
        bytes_loaded=counts.bytes_loaded,
        evicted_chunks=pool.counts.evicted,
        dropped_chunks=counts.chunks_dropped,
        chunks_not_admitted=counts.chunks_declined,
        stale_chunks=pool.counts.stale,
        outdated_stores=counts.stores_outdated,
        refused_stores=pool.counts.refused + counts.stores_too_large,
        shared_loads=counts.loads_shared,
        failed_jobs=counts.loads_failed + counts.stores_failed,
        cancelled_jobs=jobs.num_cancelled,
        late_jobs=jobs.num_late,
        lookups=counts.lookups,
        lookup_tokens=counts.lookup_tokens,
        hit_tokens=counts.hit_tokens,
        open_requests=ledger.num_requests,
        open_jobs=jobs.num_open,
        given_up_jobs=jobs.num_given_up,
        most_staged_bytes=most_staged_bytes,
        load_seconds=jobs.load_seconds.snapshot(),
        store_seconds=jobs.store_seconds.snapshot(),
        promote_seconds=jobs.promote_seconds.snapshot(),
        chunks_promoted=int(promoted.sum()),
        bytes_promoted=sum(
            number * (size or 0) for number, size in zip(promoted.tolist(), ledger.chunking.chunk_bytes, strict=True)
        ),
        requests_restored=flow.num_restored,
        requests_recomputed=flow.num_recomputed,
        groups=_groups(ledger),
        tiers=tuple(_tier(level) for level in flow.levels),
    )


def _tier(level: "Level") -> TierStats:
    counts = level.counts
    return TierStats(
        name=level.tier.name,
        is_up=level.health.is_up,
        chunks_written=counts.chunks_written,
        bytes_written=counts.bytes_written,
        chunks_known=counts.chunks_known,
        chunks_read=counts.chunks_read,
        bytes_read=counts.bytes_read,
        missing_chunks=counts.misses,
        bad_chunks=counts.bad.total(),
        bad_by_reason=dict(counts.bad),
        dropped_chunks=counts.dropped,
        full_chunks=counts.full,
        errors=counts.errors,
        cleared_chunks=counts.cleared,
        waiting_chunks=len(level.refs) + len(level.frames),
        pending_bytes=level.pending_bytes,
        read_latency_s=level.read_speed.latency_s,
        read_bytes_per_s=level.read_speed.per_second,
        write_bytes_per_s=level.write_speed.per_second,
    )


def _groups(ledger: Ledger) -> tuple[GroupStats, ...]:
    counts, pool = ledger.counts, ledger.pool
    resident, units = pool.resident_by_group().tolist(), pool.units_by_group().tolist()
    found = []
    for g in ledger.chunking.layout.cached:
        size = ledger.chunking.chunk_bytes[g] or 0
        stored = int(pool.counts.stored_by_group[g] - ledger.promoted_by_group[g])
        loaded = int(counts.loaded_by_group[g])
        found.append(
            GroupStats(
                name=ledger.chunking.layout.groups[g].name,
                resident_chunks=resident[g],
                bytes_held=units[g] * ledger.units.unit_bytes,
                chunks_stored=stored,
                bytes_stored=stored * size,
                chunks_loaded=loaded,
                bytes_loaded=loaded * size,
                chunks_evicted=int(pool.counts.evicted_by_group[g]),
                chunks_dropped=int(counts.dropped_by_group[g]),
            )
        )
    return tuple(found)
