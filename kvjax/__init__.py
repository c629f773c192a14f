"""kvjax: offload paged KV-cache blocks of models whose layers form mixed groups."""

from kvjax.chunking import Chunking as Chunking
from kvjax.chunking import resolve_chunking as resolve_chunking
from kvjax.coverage import Hit as Hit
from kvjax.coverage import longest_hit as longest_hit
from kvjax.coverage import next_cut as next_cut
from kvjax.coverage import retained_from as retained_from
from kvjax.coverage import store_set as store_set
from kvjax.groups import CacheLayout as CacheLayout
from kvjax.groups import ChunkedLocal as ChunkedLocal
from kvjax.groups import FullAttention as FullAttention
from kvjax.groups import GroupSpec as GroupSpec
from kvjax.groups import LeafSpec as LeafSpec
from kvjax.groups import Recurrent as Recurrent
from kvjax.groups import Scratch as Scratch
from kvjax.groups import SlidingWindow as SlidingWindow

__version__ = "0.1.0"
