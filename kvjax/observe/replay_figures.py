"""What a replay tells: figures of the whole and of each group."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupFigures:
    """What a replay did with the chunks of one cached group. Bytes are unpadded but for those held.

    Args:
        name: the group.
        chunks_stored: chunks that became resident.
        bytes_stored: their bytes.
        chunks_loaded: chunks restored.
        bytes_loaded: their bytes.
        chunks_evicted: chunks that made room for others.
        bytes_evicted: their bytes.
        peak_bytes_held: the most bytes of units held after a call.
        mean_bytes_held: the mean of them over all calls.
    """

    name: str
    chunks_stored: int
    bytes_stored: int
    chunks_loaded: int
    bytes_loaded: int
    chunks_evicted: int
    bytes_evicted: int
    peak_bytes_held: int
    mean_bytes_held: float


@dataclass(frozen=True, slots=True)
class ReplayFigures:
    """What a replay did.

    Args:
        requests: requests looked up. One that is looked up again before it is finished is the same request.
        lookup_tokens: tokens of their prompts, at the first lookup.
        hit_tokens: of those, tokens that need no computing, what the device held included.
        device_tokens: of those, tokens that the device held.
        refused_stores: times that the pool had no room for a store.
        chunks_dropped: chunks that could not be stored, as the request did not have them whole.
        peak_bytes_held: the most bytes of units held after a call.
        mean_bytes_held: the mean of them over all calls.
        groups: of each cached group, in layout order.
    """

    requests: int
    lookup_tokens: int
    hit_tokens: int
    device_tokens: int
    refused_stores: int
    chunks_dropped: int
    peak_bytes_held: int
    mean_bytes_held: float
    groups: tuple[GroupFigures, ...]

    @property
    def hit_rate(self) -> float:
        """`hit_tokens / lookup_tokens`, 0 without a lookup."""
        return self.hit_tokens / self.lookup_tokens if self.lookup_tokens else 0.0

    @property
    def bytes_stored(self) -> int:
        """Bytes stored, over all groups."""
        return sum(group.bytes_stored for group in self.groups)

    @property
    def bytes_loaded(self) -> int:
        """Bytes loaded, over all groups."""
        return sum(group.bytes_loaded for group in self.groups)

    @property
    def bytes_evicted(self) -> int:
        """Bytes evicted, over all groups."""
        return sum(group.bytes_evicted for group in self.groups)
