"""What an offloader did and holds, as one snapshot."""

from dataclasses import dataclass

from kvjax.observe.durations import DurationCounts


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
        refused_stores: times that the pool had no room for a store.
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
        groups: the cached groups in layout order.
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
    groups: tuple[GroupStats, ...]
