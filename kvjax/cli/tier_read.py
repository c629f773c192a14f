"""Entries of a tier, read and checked a few at a time, in bounded memory."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from kvjax.tiers import frame
from kvjax.tiers.buffers import Buffers, view_of
from kvjax.tiers.entries import EntryName
from kvjax.tiers.futures import result_of
from kvjax.tiers.tier import Tier, TierError, TierTimeoutError, TierUnavailableError

DEFAULT_MOST_BYTES = 2**30
_AT_A_TIME = 16
_BYTES_AT_A_TIME = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Checked:
    """What became of reading an entry.

    Args:
        name: of the entry.
        header: its header, if that is right.
        bad: why it is not what its name says; `None` if nothing is known to be wrong.
        unread: why it could not be read, or not as a whole; `None` if it could.
    """

    name: EntryName
    header: frame.Header | None = None
    bad: str | None = None
    unread: str | None = None


def check_headers(tier: Tier, names: Iterable[EntryName]) -> Iterator[Checked]:
    """Reads and checks the headers of entries, in order.

    Raises:
        TierError: the tier cannot be reached, or is slower than its `timeout_s`.
    """
    buffers = Buffers(_AT_A_TIME * frame.HEADER_BYTES)
    for batch in _batches(names, frame.HEADER_BYTES):
        yield from _read(tier, batch, frame.HEADER_BYTES, buffers)


def check_whole(tier: Tier, names: Iterable[EntryName], most_bytes: int = DEFAULT_MOST_BYTES) -> Iterator[Checked]:
    """Reads and verifies entries, in order. Of those that claim more than `most_bytes`, the header alone is read.

    Raises:
        TierError: the tier cannot be reached, or is slower than its `timeout_s`.
    """
    buffers = Buffers(_BYTES_AT_A_TIME)
    for batch in _batches(names, most_bytes):
        for found in _read(tier, batch, most_bytes, buffers):
            whole = found.name.num_bytes <= most_bytes or found.bad or found.unread
            yield found if whole else replace(found, unread=f"larger than {most_bytes} B")


def _batches(names: Iterable[EntryName], most_bytes: int) -> Iterator[list[EntryName]]:
    batch: list[EntryName] = []
    num_bytes = 0
    for name in names:
        more = _bytes_read(name, most_bytes)
        if batch and (len(batch) == _AT_A_TIME or num_bytes + more > _BYTES_AT_A_TIME):
            yield batch
            batch, num_bytes = [], 0
        batch.append(name)
        num_bytes += more
    if batch:
        yield batch


def _bytes_read(name: EntryName, most_bytes: int) -> int:
    return name.num_bytes if name.num_bytes <= most_bytes else frame.HEADER_BYTES


def _read(tier: Tier, names: list[EntryName], most_bytes: int, buffers: Buffers) -> list[Checked]:
    memories = [buffers.take(_bytes_read(name, most_bytes)) for name in names]
    views = [view_of(memory) for memory in memories]
    deadline = time.monotonic() + tier.timeout_s
    found = []
    gone: list[TierError] = []
    for name, memory, view, future in zip(
        names, memories, views, tier.get(names, views, deadline=deadline), strict=True
    ):
        try:
            found.append(_checked(name, view, result_of(future, deadline)))
        except KeyError:
            found.append(Checked(name, unread="gone"))
        except TierError as error:
            found.append(Checked(name, unread=str(error)))
            if isinstance(error, (TierTimeoutError, TierUnavailableError)):
                gone.append(error)
        if future.done():
            buffers.give(memory)
    if len(gone) == len(names):
        raise gone[0]
    return found


def _checked(name: EntryName, view: memoryview, num_bytes: int) -> Checked:
    """Checks what was read.

    Args:
        name: of the entry.
        view: into which the entry was read, or, if its name tells of more, the entry's header.
        num_bytes: that the entry has, as far as the tier tells.
    """
    header = None
    try:
        header = frame.header_of(view[:num_bytes], name)
        if name.num_bytes == len(view):
            frame.verify(view[:num_bytes] if num_bytes <= len(view) else view[:0], name)
        elif num_bytes <= len(view):
            raise frame.BadFrameError("length")
    except frame.BadFrameError as error:
        return Checked(name, header, bad=error.reason)
    return Checked(name, header)
