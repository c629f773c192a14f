"""`kvjax bench pool`: the books of the host pool, phase by phase.

The time per chunk is by the wall clock, and a median, so that what disturbs a few calls does not count. The longest
call is the one with the most processor time of the calling thread, which other processes do not lengthen.
"""

import argparse
import gc
import os
import platform
import random
import reprlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from kvjax._checks import integer
from kvjax.cli.options import integer as integer_text
from kvjax.pool import POLICIES, ChunkPool, Pins, Reservation

CHUNKS_PER_REQUEST = 256
PHASES = {
    "prepare_store": "units reserved for a request's chunks while the pool is filled from empty",
    "complete_store": "those chunks become resident",
    "lookup": "a request's keys, made anew, are found; the pool is full from here on",
    "touch": "the policy is told that a request asked for its chunks",
    "prepare_load": "a request's chunks are pinned",
    "complete_load": "and unpinned",
    "prepare_store_evicting": "units reserved for new chunks, for which as many others are evicted",
    "complete_store_full": "those chunks become resident",
    "invalidate": "a request's chunks are dropped by their keys",
    "release": "units reserved for chunks whose store failed are given back",
}
_KEY_BYTES = 28  # as `kvjax.keys` makes them
_CHUNKS = (131_072, 524_288)
_DESCRIPTION = f"""\
Times the bookkeeping of a host pool: no bytes move. Every call is for one request of {CHUNKS_PER_REQUEST} chunks of one
unit each; requests are taken at random from those that are resident. The phases, in this order:

{{phases}}

"us_per_chunk" is the median call's time by the wall clock, over its chunks. "longest_call_ms" is the longest call of
the phase, the first one included, in processor time of the calling thread: what the kernel does for it and garbage
collection count, but not a look at objects from before the benchmark (`gc.freeze`), nor what other processes take."""


def add_parser(benches: Any) -> argparse.ArgumentParser:
    """Adds the benchmark and returns its parser."""
    width = max(map(len, PHASES))
    phases = "\n".join(f"  {name:{width}}  {meaning}" for name, meaning in PHASES.items())
    parser = benches.add_parser(
        "pool",
        help="the bookkeeping of the host pool",
        description=_DESCRIPTION.format(phases=phases),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--chunks",
        type=_integers,
        default=_CHUNKS,
        metavar="N,...",
        help=f"resident chunks, multiples of {CHUNKS_PER_REQUEST} (default {','.join(map(str, _CHUNKS))})",
    )
    parser.add_argument(
        "--policy",
        type=_policies,
        default=tuple(POLICIES),
        metavar="P,...",
        help=f"policies: {', '.join(POLICIES)} (default all)",
    )
    parser.add_argument(
        "--requests",
        type=integer_text,
        default=1000,
        metavar="R",
        help="calls of each phase from `lookup` on; of `invalidate` no more than requests are resident (default 1000)",
    )
    return parser


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures as the JSON document that the command prints.

    Raises:
        ValueError: `--requests` is not positive, or `--chunks` not a positive multiple of a request's.
    """
    from kvjax.observe.progress import progress_bar

    num_requests = integer(args.requests, "--requests", at_least=1)
    for num_chunks in args.chunks:
        if num_chunks <= 0 or num_chunks % CHUNKS_PER_REQUEST:
            raise ValueError(f"`--chunks` must be positive multiples of {CHUNKS_PER_REQUEST}, got {num_chunks}")
    rows = []
    with progress_bar("bench pool", len(args.chunks) * len(args.policy) * len(PHASES)) as advance:
        for num_chunks in args.chunks:
            for policy in args.policy:
                for phase, times in PoolLoop(policy, num_chunks, num_requests).phases():
                    rows += [
                        _row(policy, num_chunks, name, of_phase) for name, of_phase in zip(phase, times, strict=True)
                    ]
                    advance(len(phase))
    return {
        "bench": "pool",
        "chunks_per_request": CHUNKS_PER_REQUEST,
        "requests": num_requests,
        "machine": platform.machine(),
        "num_cpus": os.cpu_count(),
        "rows": rows,
    }


class Times:
    """How long the calls of one phase took, in seconds: by the wall clock, and of the thread's processor time."""

    def __init__(self):
        self.wall: list[float] = []
        self.thread: list[float] = []

    def of(self, call: Callable[[], Any]) -> Any:
        """Calls, notes the times, and returns what was returned."""
        wall, thread = time.perf_counter(), time.thread_time()
        result = call()
        self.thread.append(time.thread_time() - thread)
        self.wall.append(time.perf_counter() - wall)
        return result


class PoolLoop:
    """A pool of chunks of one unit each, and the requests whose chunks are resident.

    Args:
        policy: a name in `POLICIES`.
        num_chunks: chunks that fill the pool.
        num_requests: calls of each phase.
    """

    def __init__(self, policy: str, num_chunks: int, num_requests: int):
        self._pool = ChunkPool(num_chunks, [1], POLICIES[policy]())
        self._random = random.Random(0)
        self._resident: list[bytes] = []  # keys of each request, joined: no object that a garbage collector looks at
        self._num_requests = num_requests
        self._groups = np.zeros(CHUNKS_PER_REQUEST, np.int64)
        self._ranks = np.arange(CHUNKS_PER_REQUEST)

    def phases(self) -> Iterator[tuple[Sequence[str], Sequence[Times]]]:
        """Yields the names of phases that were measured together, with their times."""
        gc.collect()
        gc.freeze()
        try:
            num_fills = self._pool.num_units // CHUNKS_PER_REQUEST
            yield ("prepare_store", "complete_store"), self._store(num_fills)
            yield ("lookup", "touch", "prepare_load", "complete_load"), self._load()
            yield ("prepare_store_evicting", "complete_store_full"), self._store(self._num_requests)
            yield ("invalidate",), [self._invalidate()]
            yield ("release",), [self._release()]
        finally:
            gc.unfreeze()

    def _store(self, num_requests: int) -> tuple[Times, Times]:
        prepare, complete = Times(), Times()
        for _ in range(num_requests):
            keys = self._new_keys()
            reservation: Reservation = prepare.of(lambda keys=keys: self._pool.prepare_store(keys, self._groups))
            complete.of(lambda done=reservation: self._pool.complete_store(done, ok=True))
            self._resident.append(b"".join(keys))
        self._resident = [joined for joined in self._resident if (self._pool.find(_split(joined)) >= 0).all()]
        return prepare, complete

    def _load(self) -> tuple[Times, Times, Times, Times]:
        lookup, touch, pin, unpin = Times(), Times(), Times(), Times()
        for _ in range(self._num_requests):
            keys = _split(self._random.choice(self._resident))
            slots: np.ndarray = lookup.of(lambda keys=keys: self._pool.find(keys))
            access = self._pool.new_access()
            touch.of(lambda slots=slots, access=access: self._pool.touch(slots, self._ranks, access=access))
            pins: Pins = pin.of(lambda slots=slots: self._pool.pin(slots))
            unpin.of(lambda pins=pins: self._pool.unpin(pins))
        return lookup, touch, pin, unpin

    def _invalidate(self) -> Times:
        times = Times()
        for joined in self._random.sample(self._resident, min(self._num_requests, len(self._resident))):
            keys = _split(joined)
            times.of(lambda keys=keys: self._pool.invalidate(keys))
        return times

    def _release(self) -> Times:
        times = Times()
        for _ in range(self._num_requests):
            reservation = self._pool.prepare_store(self._new_keys(), self._groups)
            assert reservation is not None, "what was invalidated left room"
            times.of(lambda failed=reservation: self._pool.complete_store(failed, ok=False))
        return times

    def _new_keys(self) -> list[bytes]:
        return _split(self._random.randbytes(CHUNKS_PER_REQUEST * _KEY_BYTES))


def _split(joined: bytes) -> list[bytes]:
    return [joined[at : at + _KEY_BYTES] for at in range(0, len(joined), _KEY_BYTES)]


def _row(policy: str, num_chunks: int, phase: str, times: Times) -> dict[str, Any]:
    return {
        "bench": "pool",
        "policy": policy,
        "resident_chunks": num_chunks,
        "phase": phase,
        "us_per_chunk": round(statistics.median(times.wall) / CHUNKS_PER_REQUEST * 1e6, 4),
        "longest_call_ms": round(max(times.thread) * 1e3, 4),
    }


def _integers(text: str) -> tuple[int, ...]:
    return tuple(integer_text(part) for part in text.split(","))


def _policies(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in POLICIES:
            raise argparse.ArgumentTypeError(f"must be among {', '.join(POLICIES)}, got {reprlib.repr(name)}")
    return names
