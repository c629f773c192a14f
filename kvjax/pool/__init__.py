"""Chunks and policies of the host pool: ids and bytes counted, never bytes touched."""

from kvjax.pool.arc import ARC as ARC
from kvjax.pool.index import fingerprints as fingerprints
from kvjax.pool.lru import LRU as LRU
from kvjax.pool.policy import Access as Access
from kvjax.pool.policy import Policy as Policy
from kvjax.pool.policy import PolicyError as PolicyError
from kvjax.pool.pool import ChunkPool as ChunkPool
from kvjax.pool.records import Change as Change
from kvjax.pool.records import Pins as Pins
from kvjax.pool.records import PoolCounts as PoolCounts
from kvjax.pool.records import Reservation as Reservation

POLICIES: dict[str, type[Policy]] = {"lru": LRU, "arc": ARC}
