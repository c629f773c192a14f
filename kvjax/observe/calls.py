"""The calls of a trace, as values: what an engine asked of a ledger, with prefix hashes in place of tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvjax._checks import shown
from kvjax.keys import HASH_BYTES

# The longest request of a trace: it bounds the memory that a replay of a hostile one takes.
MOST_TOKENS = 2**25


@dataclass(frozen=True, slots=True)
class LookupCall:
    """A request is looked up.

    Args:
        request: names the request; one that is looked up again starts afresh.
        namespace: under which it shares chunks, `HASH_BYTES` long.
        num_tokens: tokens of the prompt.
        hashes: prefix hashes of its whole hash units, `HASH_BYTES` each, in one piece.
        device_tokens: the prefix that the device holds, of all groups or by group name.
        max_store_tokens: only chunks of the first so many tokens are stored; `None` is no limit.
        max_load_tokens: at most so many tokens are restored; `None` is no limit.
        skip: nothing is restored or stored.
    """

    request: str
    namespace: bytes
    num_tokens: int
    hashes: bytes
    device_tokens: int | Mapping[str, int] = 0
    max_store_tokens: int | None = None
    max_load_tokens: int | None = None
    skip: bool = False


@dataclass(frozen=True, slots=True)
class ExtendCall:
    """A request has more tokens.

    Args:
        request: the request.
        num_tokens: its tokens from now on.
        hashes: prefix hashes of the units that the new tokens complete, in one piece.
    """

    request: str
    num_tokens: int
    hashes: bytes


@dataclass(frozen=True, slots=True)
class LoadCall:
    """The hit of a request's last lookup is loaded."""

    request: str


@dataclass(frozen=True, slots=True)
class StoreCall:
    """What a request's checkpoints want is stored.

    Args:
        request: the request.
        num_tokens: tokens whose cache is written.
        checkpoint: whether `num_tokens` becomes a checkpoint.
    """

    request: str
    num_tokens: int
    checkpoint: bool = False


@dataclass(frozen=True, slots=True)
class FinishCall:
    """A request ends."""

    request: str


@dataclass(frozen=True, slots=True)
class InvalidateCall:
    """Chunks become misses: those of a namespace, or all if it is `None`."""

    namespace: bytes | None = None


Call = LookupCall | ExtendCall | LoadCall | StoreCall | FinishCall | InvalidateCall


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """A recorded or made run.

    Args:
        tokens_per_hash: tokens that a hash covers.
        calls: in the order in which they were made.
        created_by: what wrote it, with its version.
        geometry: of the cache it was recorded from, as a geometry file has it, or `None`.
        blocks_per_chunk: of that cache, by group name, or `None`.
        cut_off: whether the last line was cut off, and is left out.
    """

    tokens_per_hash: int
    calls: Sequence[Call]
    created_by: str = ""
    geometry: Mapping[str, Any] | None = None
    blocks_per_chunk: Mapping[str, int] | None = None
    cut_off: bool = False


class CallOrder:
    """Checks that calls follow on each other as an engine's do.

    Args:
        tokens_per_hash: tokens that a hash covers.
    """

    def __init__(self, tokens_per_hash: int):
        self._unit = tokens_per_hash
        self._tokens: dict[str, int] = {}  # of the requests that are open
        self._unloaded: set[str] = set()  # of those, the ones that were not loaded since they were looked up

    def check(self, call: Call) -> None:
        """Takes the next call.

        Raises:
            ValueError: the call names a request that is not open, loads one twice, shortens one, stores more tokens
                than it has, or has not one hash for each whole unit. Then the call is not taken.
        """
        if isinstance(call, InvalidateCall):
            return
        known = self._tokens.get(call.request)
        if isinstance(call, LookupCall):
            self._check_hashes(call.hashes, 0, call.num_tokens)
            self._tokens[call.request] = call.num_tokens
            self._unloaded.add(call.request)
            return
        if known is None:
            raise ValueError(f"`request` must be one that was looked up and not finished, got {shown(call.request)}")
        if isinstance(call, ExtendCall):
            if call.num_tokens < known:
                raise ValueError(f"`num_tokens` must be at least the {known} of before, got {call.num_tokens}")
            self._check_hashes(call.hashes, known, call.num_tokens)
            self._tokens[call.request] = call.num_tokens
        elif isinstance(call, LoadCall):
            if call.request not in self._unloaded:
                raise ValueError(
                    f"`request` must be looked up again before it is loaded again, got {shown(call.request)}"
                )
            self._unloaded.remove(call.request)
        elif isinstance(call, StoreCall):
            if call.num_tokens > known:
                raise ValueError(
                    f"`num_tokens` must be at most the {known} tokens that the request has, got {call.num_tokens}"
                )
        else:
            del self._tokens[call.request]
            self._unloaded.discard(call.request)

    def _check_hashes(self, hashes: bytes, before: int, num_tokens: int) -> None:
        expected = num_tokens // self._unit - before // self._unit
        if len(hashes) != expected * HASH_BYTES:
            raise ValueError(
                f"`hashes` must hold one hash of {HASH_BYTES} bytes for each whole unit of {self._unit} tokens, "
                f"{expected} in all, got {len(hashes)} bytes"
            )
