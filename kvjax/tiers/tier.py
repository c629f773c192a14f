"""What a level of storage below the host pool must do."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from kvjax._checks import integer, seconds, shown, text
from kvjax.tiers.entries import EntryName

Write = Literal["through", "back", "never"]
DEFAULT_TIMEOUT_S = 5.0
DEFAULT_PENDING_BYTES = 256 * 2**20


class TierError(OSError):
    """A tier could not do what it was asked. The text names no credentials."""


class TierFullError(TierError):
    """There is no room for an entry: the device is full, a quota or the memory limit is reached."""


class TierTimeoutError(TierError):
    """A tier did not answer by the deadline."""


class TierUnavailableError(TierError):
    """A tier cannot be reached, or refuses."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a tier holds.

    Args:
        num_entries: entries; `None` if the tier cannot tell.
        num_bytes: their bytes, frames and all; of a store that others fill, too, what it can tell of all.
        max_bytes: the budget; `None` for none.
    """

    num_entries: int | None
    num_bytes: int | None
    max_bytes: int | None


@dataclass(frozen=True, slots=True)
class Listed:
    """An entry as a listing tells of it, without reading it.

    Args:
        name: of the entry.
        num_bytes: that it has; `None` if the tier does not tell without being asked for each.
        used_s: when it was last used, in seconds of a clock of the tier's own; `None` likewise.
    """

    name: EntryName
    num_bytes: int | None = None
    used_s: float | None = None


class Tier(ABC):
    """Keeps entries, bytes by name, for as long as it likes: it may drop any of them at any time.

    An entry is immutable. Whoever writes a name writes the same bytes, so that writers need not agree, and an entry
    that is there need not be written again. What comes back is verified by the caller: a tier may return anything,
    but must not return more than it was asked for.

    Calls return at once. Their futures end soon after the deadline at the latest, with a `TierError` if nothing else
    came of it, whatever hangs. After a future has ended, or `cancel` of it has returned true, its buffer is not
    touched any more. All methods may be called from any thread.

    Args:
        name: for people and metrics, other than those of the tiers beside it. It holds no credentials.
        write: `"through"`: chunks are written when they become resident in the host pool; `"back"`: when they
            are evicted from it; `"never"`: the tier is only read.
        timeout_s: how long an operation may take, in seconds.
        max_pending_bytes: of entries that wait to be written or are being written or read, at most.

    Raises:
        ValueError: a value of the wrong type or range.
    """

    max_bytes: int | None = None  # the budget, where the tier has one: an offloader refuses one below an entry

    def __init__(
        self,
        name: str,
        *,
        write: Write = "through",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        max_pending_bytes: int = DEFAULT_PENDING_BYTES,
    ):
        self.name = text(name, "name")
        if write not in get_args(Write):
            raise ValueError(f"`write` must be one of {', '.join(map(repr, get_args(Write)))}, got {shown(write)}")
        limit = seconds(timeout_s, "timeout_s")
        if not limit:
            raise ValueError(f"`timeout_s` must be a positive number of seconds, got {shown(timeout_s)}")
        self.write: Write = write
        self.timeout_s = limit
        self.max_pending_bytes = integer(max_pending_bytes, "max_pending_bytes", at_least=1)

    @abstractmethod
    def put(self, names: Sequence[EntryName], frames: Sequence[memoryview], *, deadline: float) -> list[Future[bool]]:
        """Writes entries.

        Args:
            names: of the entries, distinct.
            frames: parallel to `names`: contiguous bytes, which stay as they are until the futures have ended.
            deadline: by the monotonic clock, in seconds.

        Returns:
            For each entry a future: true if it was written, false if it was there. It raises `TierFullError`, or
            another `TierError`, and then nothing under that name can be read but what was there before, or the whole
            entry, where only the answer was lost or came too late. That may turn up for `timeout_s` more, or until a
            `delete` of the name that was asked for later ends.
        """

    @abstractmethod
    def get(self, names: Sequence[EntryName], buffers: Sequence[memoryview], *, deadline: float) -> list[Future[int]]:
        """Reads entries.

        Args:
            names: of the entries.
            buffers: parallel to `names`: writable, contiguous, `num_bytes` of the entry each.
            deadline: by the monotonic clock, in seconds.

        Returns:
            For each entry a future of how many bytes it has; its first ones, as many as fit, are in the buffer. Of an
            entry that is larger than the buffer no more than that is read, and any larger number is told. It raises
            `KeyError` if there is no such entry, or a `TierError`.
        """

    @abstractmethod
    def exists(self, names: Sequence[EntryName], *, deadline: float) -> Future[np.ndarray]:
        """Returns a future of a mask of the entries that are there, as far as the tier knows."""

    @abstractmethod
    def delete(self, names: Sequence[EntryName], *, deadline: float) -> Future[int]:
        """Deletes entries; those that are not there are none. Returns a future of how many were there."""

    @abstractmethod
    def list(self, namespace: bytes | None = None) -> Iterator[EntryName]:
        """Yields the names of all entries, or of those of a namespace; what is none of ours is passed over.

        Raises:
            TierError: the tier cannot be listed, or not to the end.
        """

    def survey(self, namespace: bytes | None = None) -> Iterator[Listed]:
        """Yields what `list` does, with what the tier tells of each entry at no further cost.

        Raises:
            TierError: as `list` does.
        """
        return map(Listed, self.list(namespace))

    @abstractmethod
    def usage(self) -> Usage:
        """Returns what the tier holds, as far as it knows without asking for long.

        Raises:
            TierError: it cannot tell.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends what is under way, after `timeout_s` at the latest. A second call does nothing."""

    def touch(self, names: Sequence[EntryName], *, deadline: float) -> Future[np.ndarray]:
        """Says that chunks are in use, though they are read from a level above: where the tier has an order of
        eviction, their entries are used. Returns the same as `exists`."""
        return self.exists(names, deadline=deadline)

    def sweep(self) -> int:
        """Removes what interrupted writers left behind, as far as the tier can tell, and returns how many such things
        there were. What holds nothing, such as empty folders, may go, too."""
        return 0
