"""Changes of the pool as events."""

from collections.abc import Iterator

import numpy as np

from kvjax.chunking import Chunking
from kvjax.observe.events import KVEvent
from kvjax.pool import Change

HOST_TIER = "host"


def events_of(chunking: Chunking, change: Change) -> Iterator[KVEvent]:
    """Yields one event for each group of a change, in layout order."""
    for g in np.unique(change.group_idxs).tolist():
        places = np.flatnonzero(change.group_idxs == g).tolist()
        tokens = chunking.tokens_per_chunk[g] or 0
        starts = [int(change.chunk_idxs[place]) * tokens for place in places]
        yield KVEvent(
            kind=change.kind,
            group=chunking.layout.groups[g].name,
            tier=HOST_TIER,
            keys=tuple(change.keys[place] for place in places),
            token_spans=tuple((start, start + tokens) for start in starts),
            reason=change.reason,
        )
