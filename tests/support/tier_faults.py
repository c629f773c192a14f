"""What goes wrong in tiers below the host pool, when, and what it makes of an entry's bytes."""

import errno
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum

import numpy as np

from kvjax.keys import HASH_BYTES, NAMESPACE_BYTES, chunk_key, key_hash
from kvjax.tiers.entries import EntryName
from kvjax.tiers.frame import read_header, write_header
from kvjax.tiers.tier import TierError, TierFullError, TierUnavailableError


class Fault(StrEnum):
    """What goes wrong with an entry in an operation. Faults of bytes strike what `put` writes or what `get` reads.

    * `FLIP`, `TRUNCATE`, `EXTEND`: a bit is flipped, the second half is missing, there is more than there was.
    * `SWAP`: the bytes of another entry that passed here, of the same size if there was one.
    * `STALE_LAYOUT`, `WRONG_KEY`: a sound frame, but of another namespace or of another chunk.
    * `ZEROS`, `GARBAGE`: of the same length.
    * `HUGE`: `get` tells of 2**62 bytes.
    * `FULL`, `IO_ERROR`, `PERMISSION`, `UNAVAILABLE`: nothing is done and the error is told; `FULL` by `put` alone.
    * `HANG`: nothing is done and nothing is told, until it is cancelled or the deadline passes.
    * `LATE`: it is done after it was cancelled or the deadline had passed.
    * `LOST`: `put` and `delete` are done, and tell that the tier is unavailable.
    * `DROP`: `put` and `delete` do nothing, and tell that they did.
    * `EVICT`: the entry is gone: before `get` or `exists` looks for it, or right after `put` wrote it.
    * `LIE`: `exists` tells the contrary.
    """

    FLIP = "flip"
    TRUNCATE = "truncate"
    EXTEND = "extend"
    SWAP = "swap"
    STALE_LAYOUT = "stale layout"
    WRONG_KEY = "wrong key"
    ZEROS = "zeros"
    GARBAGE = "garbage"
    HUGE = "huge"
    FULL = "full"
    IO_ERROR = "io error"
    PERMISSION = "permission"
    UNAVAILABLE = "unavailable"
    HANG = "hang"
    LATE = "late"
    LOST = "lost"
    DROP = "drop"
    EVICT = "evict"
    LIE = "lie"


OF_BYTES = frozenset(
    {
        Fault.FLIP,
        Fault.TRUNCATE,
        Fault.EXTEND,
        Fault.SWAP,
        Fault.STALE_LAYOUT,
        Fault.WRONG_KEY,
        Fault.ZEROS,
        Fault.GARBAGE,
        Fault.HUGE,
    }
)
ERRORS: dict[Fault, Callable[[], TierError]] = {
    Fault.FULL: lambda: TierFullError(errno.ENOSPC, "injected: no room"),
    Fault.IO_ERROR: lambda: TierError(errno.EIO, "injected: input/output error"),
    Fault.PERMISSION: lambda: TierError(errno.EACCES, "injected: not permitted"),
    Fault.UNAVAILABLE: lambda: TierUnavailableError("injected: cannot be reached"),
    Fault.LOST: lambda: TierUnavailableError("injected: the connection broke before the answer"),
}
_ANY = frozenset({Fault.IO_ERROR, Fault.PERMISSION, Fault.UNAVAILABLE})
_WAITS = frozenset({Fault.HANG, Fault.LATE})
APPLIES: dict[str, frozenset[Fault]] = {
    "put": (OF_BYTES - {Fault.HUGE}) | _ANY | _WAITS | {Fault.FULL, Fault.LOST, Fault.DROP, Fault.EVICT},
    "get": OF_BYTES | _ANY | _WAITS | {Fault.EVICT},
    "exists": _ANY | _WAITS | {Fault.EVICT, Fault.LIE},
    "delete": _ANY | _WAITS | {Fault.LOST, Fault.DROP},
    "list": _ANY,
    "usage": _ANY,
}
NOT_DONE = frozenset({Fault.FULL, Fault.IO_ERROR, Fault.PERMISSION, Fault.UNAVAILABLE})
HUGE_BYTES = 2**62

# From `"put"`, `"get"`, `"exists"` or `"delete"`, once for each entry, or `"list"` or `"usage"`, with no name.
Choose = Callable[[str, EntryName | None], Fault | None]


class FaultsAt:
    """Entries that meet a fault, counted from now on for each operation.

    Args:
        faults: what happens to which entry of which operation, from 0 on.
    """

    def __init__(self, faults: Mapping[tuple[str, int], Fault]):
        self._faults = faults
        self._seen: Counter[str] = Counter()

    def __call__(self, operation: str, name: EntryName | None) -> Fault | None:
        self._seen[operation] += 1
        return self._faults.get((operation, self._seen[operation] - 1))


class FaultsOf:
    """Every entry meets the fault of its operation.

    Args:
        faults: by operation.
        names: only these entries do; `None`: all.
    """

    def __init__(self, faults: Mapping[str, Fault], names: Iterable[EntryName] | None = None):
        self._faults = faults
        self._names = None if names is None else frozenset(names)

    def __call__(self, operation: str, name: EntryName | None) -> Fault | None:
        return self._faults.get(operation) if self._names is None or name in self._names else None


class RandomFaults:
    """Each entry of each operation meets a fault by chance; those that cannot befall an operation do not.

    Args:
        seed: of the chances.
        rates: how likely each fault is; what is left of 1 goes well.
        operations: that go wrong; all by default.
    """

    def __init__(self, seed: int, rates: Mapping[Fault, float], operations: Iterable[str] = tuple(APPLIES)):
        self._rng = np.random.default_rng(seed)
        self._faults = list(rates)
        self._below = np.cumsum([rates[fault] for fault in self._faults])
        self._operations = frozenset(operations)
        self._lock = threading.Lock()

    def __call__(self, operation: str, name: EntryName | None) -> Fault | None:
        with self._lock:
            place = int(np.searchsorted(self._below, self._rng.random(), side="right"))
        fault = self._faults[place] if place < len(self._faults) else None
        return fault if operation in self._operations and fault in APPLIES[operation] else None


def no_faults(operation: str, name: EntryName | None) -> None:
    """Everything goes well."""


class Spoiler:
    """Gives wrong bytes.

    Args:
        seed: of the chances.
    """

    def __init__(self, seed: int):
        self._rng = np.random.default_rng(seed)
        self._lock = threading.Lock()
        self._passed: deque[tuple[EntryName, bytes]] = deque(maxlen=16)

    def remember(self, name: EntryName, frame: bytes) -> None:
        """Keeps the entry, to be swapped with others later."""
        with self._lock:
            self._passed.append((name, frame))

    def spoil(self, fault: Fault, name: EntryName, frame: bytes) -> bytes:
        """Returns what the fault makes of an entry's bytes: the same, if it is none of bytes."""
        with self._lock:
            match fault:
                case Fault.FLIP:
                    at = int(self._rng.integers(len(frame)))
                    return frame[:at] + bytes([frame[at] ^ 1 << int(self._rng.integers(8))]) + frame[at + 1 :]
                case Fault.TRUNCATE:
                    return frame[: len(frame) // 2]
                case Fault.EXTEND:
                    return frame + self._rng.bytes(1)
                case Fault.SWAP:
                    return self._other(name)
                case Fault.STALE_LAYOUT:
                    namespace = bytes(byte ^ 0xFF for byte in name.namespace)
                    return _reframed(frame, _renamed(name, namespace, key_hash(name.key)))
                case Fault.WRONG_KEY:
                    return _reframed(frame, _renamed(name, name.namespace, self._rng.bytes(HASH_BYTES)))
                case Fault.ZEROS:
                    return bytes(len(frame))
                case Fault.GARBAGE:
                    return self._rng.bytes(len(frame))
                case _:
                    return frame

    def _other(self, name: EntryName) -> bytes:
        others = [(one.num_bytes == name.num_bytes, frame) for one, frame in self._passed if one != name]
        if not others:
            return self._rng.bytes(name.num_bytes)
        return max(others, key=lambda other: other[0])[1]


def _renamed(name: EntryName, namespace: bytes, digest: bytes) -> EntryName:
    return EntryName(namespace, chunk_key(digest, name.group_idx, namespace[:NAMESPACE_BYTES]), name.num_bytes)


def _reframed(frame: bytes, name: EntryName) -> bytes:
    """A sound frame of the same chunk's bytes under another name."""
    header, new = read_header(frame), bytearray(frame)
    write_header(
        memoryview(new),
        name,
        group_name=header.group_name,
        chunk_idx=header.chunk_idx,
        tokens_per_chunk=header.tokens_per_chunk,
    )
    return bytes(new)
