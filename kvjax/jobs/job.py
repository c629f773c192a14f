"""One load or store in flight."""

from collections.abc import Hashable
from dataclasses import dataclass, field

from kvjax.handles import Load, Store
from kvjax.mover import Transfer
from kvjax.promotions import Promotion
from kvjax.tiers.fetch import Fetch


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a job ended.

    Args:
        job_id: counts the offloader's jobs.
        request_id: the request it was for.
        operation: `"load"`, `"store"` or `"promote"`.
        ok: false if not all chunks were moved. Those that were not are misses, and of a load the tokens beyond
            `valid_tokens` must be recomputed.
        num_chunks: chunks that the job was to move; those that a load shares with another one are moved by that.
        num_bytes: their bytes, without padding.
        valid_tokens: of a load: the prefix that is in the caches.
        error: what went wrong, empty if nothing did.
    """

    job_id: int
    request_id: Hashable
    operation: str
    ok: bool
    num_chunks: int
    num_bytes: int
    valid_tokens: int | None
    error: str = ""


@dataclass(slots=True, eq=False)
class Job:
    """A load, store or promotion under way; `result` is there once it was seen to end.

    What a request stores after a load that failed is not kept until somebody has seen the load's result, by `poll`,
    `wait` or here: it may have been computed from blocks that were not restored.

    Args:
        job_id: counts the offloader's jobs.
        request_id: the request it is for.
        operation: `"load"`, `"store"` or `"promote"`.
        work: what the ledger prepared.
        transfer: the moves under way.
        issued_at: by the monotonic clock, in seconds.
        deadline: by the same clock; `None` for none.
        owner: the jobs that it is one of.
        ended: how it ended, for the offloader's own use.
        was_told: whether somebody has seen that.
    """

    job_id: int
    request_id: Hashable
    operation: str
    work: Load | Store | Promotion = field(repr=False)
    transfer: Transfer | Fetch = field(repr=False)
    issued_at: float = field(default=0.0, repr=False)
    deadline: float | None = field(default=None, repr=False)
    owner: object = field(default=None, repr=False)
    ended: JobResult | None = field(default=None, repr=False)
    was_told: bool = field(default=False, repr=False)

    @property
    def result(self) -> JobResult | None:
        """How the job ended; `None` as long as it was not seen to end."""
        self.was_told = self.was_told or self.ended is not None
        return self.ended
