"""Times of the phases that a chunk goes through in a pool's books, of any manager behind the `Manager` methods."""

import gc
import hashlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from kvjax._checks import integer

_Result = TypeVar("_Result")
_Row = dict[str, Any]

# As many bytes as vLLM's keys have: a SHA-256 hash and the group.
_GROUP_OF_KEY = (0).to_bytes(4, "big")


class Manager(Protocol):
    """Books of offloaded chunks with a fixed number of places. One call of a method is for all chunks of a request."""

    peer: str
    policy: str
    has_finish: bool

    def new_request(self, request_id: str, keys: list[bytes]) -> Any:
        """Returns what the other methods take as `request`: the keys, and what they need beside them. Not timed."""
        ...

    def lookup(self, request: Any) -> int:
        """Returns how many of the request's chunks can be loaded."""
        ...

    def prepare_store(self, request: Any) -> Any:
        """Makes room for all of the request's chunks and returns what `complete_store` needs, `None` if refused."""
        ...

    def complete_store(self, request: Any, store: Any) -> None:
        """Makes the chunks of `prepare_store` ones that can be loaded."""
        ...

    def prepare_load(self, request: Any) -> Any:
        """Keeps the request's chunks in place and returns what `complete_load` needs."""
        ...

    def complete_load(self, request: Any, load: Any) -> None:
        """Ends `prepare_load`."""
        ...

    def touch(self, request: Any) -> None:
        """Makes the request's chunks the last used."""
        ...

    def finish(self, request: Any) -> None:
        """Ends the request. Called only if `has_finish`."""
        ...


@dataclass(slots=True)
class Calls:
    """Seconds of each call, by phase."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def timed(self, phase: str, call: Callable[..., _Result], *arguments: Any) -> _Result:
        """Returns what `call` returns, and notes how long it took."""
        start = time.perf_counter()
        result = call(*arguments)
        taken = time.perf_counter() - start
        self.seconds.setdefault(phase, []).append(taken)
        return result

    def rows(self, chunks_per_request: int) -> Iterator[_Row]:
        """Yields a row a phase: the median and the mean call, per chunk, and the longest one."""
        for phase, seconds in self.seconds.items():
            yield {
                "phase": phase,
                "num_calls": len(seconds),
                "us_per_chunk": round(statistics.median(seconds) / chunks_per_request * 1e6, 4),
                "mean_us_per_chunk": round(statistics.fmean(seconds) / chunks_per_request * 1e6, 4),
                "longest_call_ms": round(max(seconds) * 1e3, 3),
            }


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests by number, which share no chunk.

    Args:
        manager: whose requests they are.
        chunks_per_request: chunks of each.
    """

    manager: Manager
    chunks_per_request: int

    def new(self, number: int) -> Any:
        """Returns a request that has the keys of `number`, as objects of its own: it hashes them anew."""
        return self.manager.new_request(str(number), request_keys(number, self.chunks_per_request))

    def store(self, numbers: Iterable[int], calls: Calls) -> None:
        """Stores requests one after the other.

        Raises:
            RuntimeError: the manager refused one.
        """
        manager = self.manager
        for number in numbers:
            request = self.new(number)
            store = calls.timed("prepare_store", manager.prepare_store, request)
            if store is None:
                raise RuntimeError(f"{manager.peer} refused to store request {number} although nothing is in use")
            calls.timed("complete_store", manager.complete_store, request, store)
            self._finish(request, calls)

    def load(self, numbers: Iterable[int], calls: Calls) -> None:
        """Looks up and loads requests that are resident, one after the other."""
        manager = self.manager
        for number in numbers:
            request = self.new(number)
            calls.timed("lookup", manager.lookup, request)
            load = calls.timed("prepare_load", manager.prepare_load, request)
            calls.timed("complete_load", manager.complete_load, request, load)
            self._finish(request, calls)

    def touch(self, numbers: Iterable[int], calls: Calls) -> None:
        """Touches requests that are resident, one after the other."""
        for number in numbers:
            calls.timed("touch", self.manager.touch, self.new(number))

    def resident(self, numbers: Iterable[int], num_chunks: int) -> list[int]:
        """Returns those of `numbers` all of whose chunks can be loaded.

        Raises:
            RuntimeError: the chunks that can be loaded are not `num_chunks`.
        """
        found = {number: self.manager.lookup(self.new(number)) for number in numbers}
        if sum(found.values()) != num_chunks:
            raise RuntimeError(
                f"{self.manager.peer} must hold {num_chunks} chunks, but {sum(found.values())} are found"
            )
        return [number for number, num_hits in found.items() if num_hits == self.chunks_per_request]

    def _finish(self, request: Any, calls: Calls) -> None:
        if self.manager.has_finish:
            calls.timed("finish", self.manager.finish, request)


def request_keys(number: int, num_keys: int) -> list[bytes]:
    """Returns the keys of a request's chunks, 36 bytes each, as new objects whenever it is called.

    >>> [len(key) for key in request_keys(0, 2)], request_keys(0, 2) == request_keys(0, 2)
    ([36, 36], True)
    """
    return [hashlib.sha256(b"%d:%d" % (number, place)).digest() + _GROUP_OF_KEY for place in range(num_keys)]


@contextmanager
def collector(mode: str) -> Iterator[None]:
    """Leaves Python's garbage collector as it is (`"on"`), or hides from it all that lives now (`"frozen"`)."""
    gc.collect()
    if mode == "on":
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def measure(manager: Manager, num_chunks: int, *, chunks_per_request: int = 256) -> Iterator[_Row]:
    """Times a manager while its pool fills, then twice while it stays full, and at last while half of it is read.

    Full, half of the resident requests, drawn at random, are looked up, loaded and touched; then as many new requests
    as the pool holds are stored, each of which evicts. The first time the garbage collector is as Python starts it
    (`"gc": "on"`); the second all that the pool holds by then is frozen, so that no collection walks it (`"frozen"`).
    In the end the half that was stored first is pinned, and stores of an eighth of the pool have to evict past it.

    Args:
        manager: with `num_chunks` places, all of them free.
        num_chunks: a multiple of `chunks_per_request`, at least 2 requests.
        chunks_per_request: chunks of every call.

    Returns:
        Rows with `peer`, `policy`, `resident_chunks` (places of the pool; all are taken unless `pool` is `"free"`),
        `pool` (`"free"`, `"full"` or `"half pinned"`), `gc`, `phase`, `num_calls`, `us_per_chunk` (median over calls),
        `mean_us_per_chunk` (with what few long calls do for the others) and `longest_call_ms`. `"finish"` is of loads
        and stores alike.

    Raises:
        ValueError: `num_chunks` or `chunks_per_request` is not as above.
        RuntimeError: the manager refused a store or lost chunks.
    """
    integer(chunks_per_request, "chunks_per_request", at_least=1)
    integer(num_chunks, "num_chunks", at_least=2 * chunks_per_request)
    if num_chunks % chunks_per_request:
        raise ValueError(f"`num_chunks` must be a multiple of {chunks_per_request}, got {num_chunks}")
    return _measure(manager, num_chunks, chunks_per_request)


def _measure(manager: Manager, num_chunks: int, chunks_per_request: int) -> Iterator[_Row]:
    requests = Requests(manager, chunks_per_request)
    num_requests = num_chunks // chunks_per_request
    known = {"bench": "pool", "peer": manager.peer, "policy": manager.policy, "resident_chunks": num_chunks}

    calls = Calls()
    requests.store(range(num_requests), calls)
    for row in calls.rows(chunks_per_request):
        yield {**known, "pool": "free", "gc": "on", **row}

    resident = requests.resident(range(num_requests), num_chunks)
    for turn, mode in enumerate(("on", "frozen"), start=1):
        drawn = np.random.default_rng(turn).permutation(resident)[: max(1, len(resident) // 2)].tolist()
        calls = Calls()
        with collector(mode):
            requests.load(drawn, calls)
            requests.touch(drawn, calls)
            requests.store(range(turn * num_requests, (turn + 1) * num_requests), calls)
        for row in calls.rows(chunks_per_request):
            yield {**known, "pool": "full", "gc": mode, **row}
        resident = requests.resident(range((turn + 1) * num_requests), num_chunks)

    oldest = [requests.new(number) for number in resident[: len(resident) // 2]]
    loads = [manager.prepare_load(request) for request in oldest]
    calls = Calls()
    requests.store(range(3 * num_requests, 3 * num_requests + max(1, num_requests // 8)), calls)
    for request, load in zip(oldest, loads, strict=True):
        manager.complete_load(request, load)
    for row in calls.rows(chunks_per_request):
        yield {**known, "pool": "half pinned", "gc": "on", **row}
