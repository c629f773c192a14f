"""Traces: what an engine asked of its offloader, as JSON lines that a replay reads. Never tokens.

The first line is the header, then there is one line for each call:

    {"format": "kvjax-trace", "version": 1, "tokens_per_hash": 16, "created_by": "kvjax 0.1.0",
     "geometry": as a geometry file or null, "blocks_per_chunk": {group: n} or null}
    {"call": "lookup", "request": "7", "namespace": "…", "num_tokens": 40, "hashes": "…", "device_tokens": 0}
    {"call": "load", "request": "7"}
    {"call": "store", "request": "7", "num_tokens": 40, "checkpoint": false}
    {"call": "extend", "request": "7", "num_tokens": 56, "hashes": "…"}
    {"call": "finish", "request": "7"}
    {"call": "invalidate", "namespace": "…" or null}

`hashes` are the prefix hashes of the whole hash units, 32 hexadecimal digits each, in one string: of `lookup` all, of
`extend` those that the new tokens complete. `device_tokens` is an int or `{group: int}`.
A lookup with limits also has `max_store_tokens`, `max_load_tokens` or `"skip": true`.
"""

import io
import json
import logging
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import replace
from os import PathLike
from typing import Any, BinaryIO

import kvjax
from kvjax._checks import integer, shown
from kvjax.chunking import Chunking
from kvjax.geometry import geometry_of
from kvjax.observe.calls import (
    MOST_TOKENS,
    Call,
    CallOrder,
    ExtendCall,
    FinishCall,
    InvalidateCall,
    LoadCall,
    LookupCall,
    StoreCall,
    Trace,
)
from kvjax.observe.trace_lines import call_line, call_of, header_line, header_of

_log = logging.getLogger(__name__)
_BUFFER_BYTES = 2**20
_MOST_LINE_BYTES = 2**28


class TraceWriter:
    """Records calls to a file. Thread-safe and buffered; what is not flushed yet is lost with the process.

    Once it is open, no fault of the file reaches the caller: the first one is logged, ends the record and is told by
    `failed`. What was written until then can be read.

    Args:
        path: the file; one that exists is replaced.
        tokens_per_hash: tokens that a hash covers.
        chunking: of the cache that is recorded, so that a replay needs no geometry file.
        name: what a message calls `path`.

    Raises:
        ValueError: the file cannot be opened for writing, or `tokens_per_hash` is no positive int.
    """

    def __init__(
        self, path: str | PathLike[str], *, tokens_per_hash: int, chunking: Chunking | None = None, name: str = "path"
    ):
        unit = integer(tokens_per_hash, "tokens_per_hash", at_least=1, below=MOST_TOKENS)
        self._path = str(path)
        self._failed = ""
        self._lock = threading.Lock()
        try:
            self._file = io.BufferedWriter(io.FileIO(path, "w"), _BUFFER_BYTES)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"`{name}` must name a file that can be written, got {shown(self._path)}: {error}"
            ) from None
        self._write_line(first_line(unit, chunking))

    @property
    def failed(self) -> str:
        """Why the record ended early; empty if it did not."""
        return self._failed

    def write(self, call: Call) -> None:
        """Records a call; nothing after a fault or `close`."""
        self._write_line(line_of(call))

    def lookup(
        self,
        request_id: Hashable,
        *,
        namespace: bytes,
        num_tokens: int,
        hashes: Iterable[bytes],
        device_tokens: int | Mapping[str, int] = 0,
        max_store_tokens: int | None = None,
        max_load_tokens: int | None = None,
        skip: bool = False,
    ) -> None:
        """Records a lookup; the arguments are those of `LookupCall`. A limit that no request reaches is none."""
        self.write(
            LookupCall(
                _name(request_id),
                namespace,
                num_tokens,
                b"".join(hashes),
                device_tokens,
                _limit(max_store_tokens),
                _limit(max_load_tokens),
                skip,
            )
        )

    def extend(self, request_id: Hashable, *, num_tokens: int, hashes: Iterable[bytes]) -> None:
        """Records that a request has more tokens, see `ExtendCall`."""
        self.write(ExtendCall(_name(request_id), num_tokens, b"".join(hashes)))

    def load(self, request_id: Hashable) -> None:
        """Records a load."""
        self.write(LoadCall(_name(request_id)))

    def store(self, request_id: Hashable, *, num_tokens: int, checkpoint: bool = False) -> None:
        """Records a store, see `StoreCall`."""
        self.write(StoreCall(_name(request_id), num_tokens, checkpoint))

    def finish(self, request_id: Hashable) -> None:
        """Records the end of a request."""
        self.write(FinishCall(_name(request_id)))

    def invalidate(self, namespace: bytes | None = None) -> None:
        """Records that chunks became misses, see `InvalidateCall`."""
        self.write(InvalidateCall(namespace))

    def flush(self) -> None:
        """Hands what is buffered to the operating system."""
        with self._lock:
            if not self._file.closed:
                self._guarded(self._file.flush)

    def close(self) -> None:
        """Ends the file. A second call does nothing."""
        with self._lock:
            if not self._file.closed:
                self._guarded(self._file.close)

    def __enter__(self) -> "TraceWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write_line(self, line: bytes) -> None:
        with self._lock:
            if not self._file.closed:
                self._guarded(lambda: self._file.write(line))

    def _guarded(self, act: Callable[[], object]) -> None:
        """Does something to the file; its first fault ends the record."""
        try:
            act()
        except OSError as error:
            self._failed = self._failed or f"{self._path!r} cannot be written: {error.strerror or error}"
            _log.error("recording ends: %s", self._failed)
            self._abandon()

    def _abandon(self) -> None:
        """Ends the file without the lines that are still buffered."""
        try:
            self._file.raw.close()
        except OSError:
            _log.debug("the file of a failed record could not be closed", exc_info=True)


def first_line(tokens_per_hash: int, chunking: Chunking | None = None) -> bytes:
    """Returns the header of a trace; the arguments are those of `TraceWriter`."""
    return _line(header_line(tokens_per_hash, f"kvjax {kvjax.__version__}", *_cache(chunking)))


def line_of(call: Call) -> bytes:
    """Returns the line of a call."""
    return _line(call_line(call))


def read_trace(path: str | PathLike[str]) -> Trace:
    """Returns the trace in a file. A last line that was cut off, as by a kill, is left out, and `cut_off` is true.

    Raises:
        ValueError: the file cannot be read, or a line is not what it must be. The text names the line.
    """
    name = str(path)
    try:
        file = io.BufferedReader(io.FileIO(path))
    except (OSError, ValueError) as error:
        raise ValueError(f"{name!r} cannot be read: {error}") from None
    with file:
        try:
            return _read(name, file)
        except OSError as error:
            raise ValueError(f"{name!r} cannot be read: {error}") from None


def _read(name: str, file: BinaryIO) -> Trace:
    header: Trace | None = None
    order = CallOrder(1)
    calls: list[Call] = []
    number = 0
    while line := file.readline(_MOST_LINE_BYTES + 1):
        number += 1
        whole = line.endswith(b"\n")
        try:
            document = _document(line)
        except ValueError as error:
            if whole or header is None or len(line) > _MOST_LINE_BYTES:
                raise ValueError(f"{name!r}, line {number}: {error}") from None
            return replace(header, calls=calls, cut_off=True)
        try:
            if header is None:
                header = header_of(document)
                order = CallOrder(header.tokens_per_hash)
                continue
            call = call_of(document)
            order.check(call)
        except ValueError as error:
            raise ValueError(f"{name!r}, line {number}: {error}") from None
        calls.append(call)
    if header is None:
        raise ValueError(f"{name!r} is empty")
    return replace(header, calls=calls)


def _document(line: bytes) -> Any:
    if len(line) > _MOST_LINE_BYTES:
        raise ValueError(f"a line must be at most {_MOST_LINE_BYTES} bytes, and is more")
    try:
        return json.loads(line)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8 text") from None
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None


def _line(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"


def _cache(chunking: Chunking | None) -> tuple[dict[str, Any] | None, dict[str, int] | None]:
    """The geometry of a header and its blocks per chunk."""
    if chunking is None:
        return None, None
    names = chunking.layout.names
    return geometry_of(chunking.layout), {names[g]: chunking.blocks_per_chunk[g] or 1 for g in chunking.layout.cached}


def _limit(tokens: int | None) -> int | None:
    return None if tokens is None or tokens > MOST_TOKENS else tokens


def _name(request_id: Hashable) -> str:
    """What a request is called in a trace: its id, if that is text, else with its type. Ids that differ have names that
    differ, as far as their texts do."""
    if isinstance(request_id, str):
        return request_id
    try:
        return f"{type(request_id).__name__} {request_id!r}"
    except Exception:  # noqa: BLE001  # the id is the user's own, and recording must not break serving
        return f"{type(request_id).__name__} of hash {hash(request_id)}"
