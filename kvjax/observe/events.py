"""What became of chunks, told to others: a callback of the user, or a file of JSON lines."""

import json
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from typing import Literal

from kvjax._checks import shown

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KVEvent:
    """Chunks of one group that became resident in a tier, or ceased to be.

    Args:
        kind: `"stored"` or `"removed"`.
        group: name of the group.
        tier: the tier, `"host"` for the pool.
        keys: keys of the chunks.
        token_spans: parallel to `keys`: the tokens `[start, stop)` of its sequence that a chunk covers; of a recurrent
            chunk those since the state before it.
        reason: of a removal: `"evicted"`, `"invalidated"` or `"failed"`; empty for `"stored"`.

    Raises:
        ValueError: the spans are not one for each key, or the reason does not suit the kind.
    """

    kind: Literal["stored", "removed"]
    group: str
    tier: str
    keys: tuple[bytes, ...]
    token_spans: tuple[tuple[int, int], ...]
    reason: Literal["", "evicted", "invalidated", "failed"] = ""

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.token_spans):
            raise ValueError(
                f"`token_spans` must hold one span for each of {len(self.keys)} keys, got {len(self.token_spans)}"
            )
        if (self.kind == "stored") != (self.reason == ""):
            raise ValueError(f"`reason` must say why chunks are removed, and only that, got {shown(self.reason)}")


class GuardedCallback:
    """Calls a user's callback so that no exception of it reaches the caller.

    The first exception is logged with its traceback, all are counted in `failures`. `KeyboardInterrupt` and the
    like pass.

    Args:
        callback: called with each event, in the thread that tells it.
        name: of the argument, for the message.

    Raises:
        ValueError: `callback` cannot be called.
    """

    def __init__(self, callback: Callable[[KVEvent], object], name: str = "callback"):
        if not callable(callback):
            raise ValueError(f"`{name}` must be callable with one event, got {shown(callback)}")
        self.failures = 0
        self._callback = callback
        self._lock = threading.Lock()

    def __call__(self, event: KVEvent) -> None:
        """Tells an event; never raises an `Exception`."""
        try:
            self._callback(event)
        except Exception:  # noqa: BLE001  # whatever the user's code raises, serving goes on
            with self._lock:
                self.failures += 1
                first = self.failures == 1
            if first:
                _log.exception("the event callback %r raised; later exceptions of it are only counted", self._callback)


class JSONLinesEvents:
    """A callback that appends each event to a file as one line, and flushes it. Thread-safe.

    A line is `{"kind", "group", "tier", "keys": [hex …], "token_spans": [[start, stop] …], "reason"}`.

    Args:
        path: the file; lines are added to one that exists.

    Raises:
        ValueError: the file cannot be opened for writing.
    """

    def __init__(self, path: str | PathLike[str]):
        try:
            self._file = open(path, "ab")  # noqa: SIM115  # `close` ends it
        except (OSError, ValueError) as error:
            raise ValueError(f"`path` must name a file that can be written, got {shown(str(path))}: {error}") from None
        self._lock = threading.Lock()

    def __call__(self, event: KVEvent) -> None:
        """Writes one line.

        Raises:
            OSError: it cannot be written, as the disk is full, say. What fits no more is written with a later event.
            ValueError: the file was closed.
        """
        document = {
            "kind": event.kind,
            "group": event.group,
            "tier": event.tier,
            "keys": [key.hex() for key in event.keys],
            "token_spans": event.token_spans,
            "reason": event.reason,
        }
        line = json.dumps(document).encode() + b"\n"
        with self._lock:
            if self._file.closed:
                raise ValueError("events must not be told after `close`")
            self._file.write(line)
            self._file.flush()

    def close(self) -> None:
        """Ends the file. A second call does nothing.

        Raises:
            OSError: lines that found no room before still find none.
        """
        with self._lock:
            self._file.close()

    def __enter__(self) -> "JSONLinesEvents":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
