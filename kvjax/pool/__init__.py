"""Units and policies of the host pool: ids and bytes counted, never bytes touched."""

from kvjax.pool.lru import LRU as LRU
from kvjax.pool.policy import Policy as Policy
from kvjax.pool.pool import ChunkPool as ChunkPool
from kvjax.pool.pool import Pins as Pins
from kvjax.pool.pool import Reservation as Reservation
