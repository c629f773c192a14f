"""A tier that goes wrong: a seeded wrapper around any other."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from kvjax.tiers.answers import Answer
from kvjax.tiers.deadlines import Deadlines
from kvjax.tiers.entries import EntryName
from kvjax.tiers.tier import Tier, TierError, Usage
from tests.support.tier_faults import (
    APPLIES,
    ERRORS,
    HUGE_BYTES,
    NOT_DONE,
    OF_BYTES,
    Choose,
    Fault,
    Spoiler,
    no_faults,
)

LATE_S = 60.0  # what is late has so long, which it does not need


class FaultyTier(Tier):
    """A tier that does what the one it wraps does, but for the faults that `choose` asks for.

    Entries that go well go to the wrapped tier in one call, and their futures are that tier's own; a thread does what
    goes wrong. `counts` says how often each fault was injected, by operation and fault.

    Args:
        inner: keeps the entries; its options become those of this tier. Closed with this tier.
        choose: called for each entry of each operation; can be replaced at any time.
        seed: of flipped bits and garbage.
    """

    def __init__(self, inner: Tier, choose: Choose = no_faults, *, seed: int = 0):
        super().__init__(
            f"faulty-{inner.name}",
            write=inner.write,
            timeout_s=inner.timeout_s,
            max_pending_bytes=inner.max_pending_bytes,
        )
        self.inner = inner
        self.choose = choose
        self.counts: Counter[tuple[str, Fault]] = Counter()
        self._spoiler = Spoiler(seed)
        self._lock = threading.Lock()
        self._closed = False
        self._late: list[tuple[Answer, threading.Event]] = []
        self._worker = ThreadPoolExecutor(1, thread_name_prefix=self.name)
        self._deadlines = Deadlines(self.name)

    def settle(self) -> None:
        """Waits for all that went wrong, also for what was done after its future had ended."""
        with self._lock:
            late = [submitted for answer, submitted in self._late if answer.done()]
        for submitted in late:
            submitted.wait(LATE_S)
        self._worker.submit(int).result()

    def put(self, names: Sequence[EntryName], frames: Sequence[memoryview], *, deadline: float) -> list[Future[bool]]:
        for name, frame in zip(names, frames, strict=True):
            self._spoiler.remember(name, bytes(frame))
        return self._each("put", names, frames, deadline)

    def get(self, names: Sequence[EntryName], buffers: Sequence[memoryview], *, deadline: float) -> list[Future[int]]:
        return self._each("get", names, buffers, deadline)

    def exists(self, names: Sequence[EntryName], *, deadline: float) -> Future[np.ndarray]:
        faults = [self._chosen("exists", name) for name in names]
        lies = np.array([fault is Fault.LIE for fault in faults], bool)
        evicted = [name for name, fault in zip(names, faults, strict=True) if fault is Fault.EVICT]

        def look(by: float) -> np.ndarray:
            if evicted:
                self.inner.delete(evicted, deadline=by).result()
            return self.inner.exists(names, deadline=by).result() ^ lies

        return self._start(look, faults, deadline)

    def delete(self, names: Sequence[EntryName], *, deadline: float) -> Future[int]:
        faults = [self._chosen("delete", name) for name in names]
        deleted = [name for name, fault in zip(names, faults, strict=True) if fault is not Fault.DROP]
        num_kept = len(names) - len(deleted)
        return self._start(lambda by: self.inner.delete(deleted, deadline=by).result() + num_kept, faults, deadline)

    def usage(self) -> Usage:
        self._raise_chosen("usage")
        return self.inner.usage()

    def sweep(self) -> int:
        return self.inner.sweep()

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self.inner.close()
        self._deadlines.close(TierError("the tier is closed"))
        self._worker.shutdown()

    def _each(
        self, operation: str, names: Sequence[EntryName], views: Sequence[memoryview], deadline: float
    ) -> list[Future]:
        faults = [self._chosen(operation, name) for name in names]
        well = [at for at, fault in enumerate(faults) if fault is None]
        call = self.inner.put if operation == "put" else self.inner.get
        theirs = call([names[at] for at in well], [views[at] for at in well], deadline=deadline)
        futures: dict[int, Future] = dict(zip(well, theirs, strict=True))
        for at, fault in enumerate(faults):
            if fault is not None:
                start = self._start_put if operation == "put" else self._start_get
                futures[at] = start(names[at], views[at], fault, deadline)
        return [futures[at] for at in range(len(names))]

    def _start_put(self, name: EntryName, frame: memoryview, fault: Fault, deadline: float) -> Future[bool]:
        written = self._spoiler.spoil(fault, name, bytes(frame))

        def write(by: float) -> bool:
            if fault is Fault.DROP:
                return True
            done = self.inner.put([name], [memoryview(written)], deadline=by)[0].result()
            if fault is Fault.EVICT:
                self.inner.delete([name], deadline=by).result()
            return done

        return self._start(write, [fault], deadline)

    def _start_get(self, name: EntryName, buffer: memoryview, fault: Fault, deadline: float) -> Future[int]:
        answer: Answer[int] = Answer()
        read = bytearray(name.num_bytes)

        def look(by: float) -> int:
            if fault is Fault.EVICT:
                self.inner.delete([name], deadline=by).result()
            num_bytes = self.inner.get([name], [memoryview(read)], deadline=by)[0].result()
            data = self._spoiler.spoil(fault, name, bytes(read[:num_bytes]))
            if answer.begin():
                fitting = data[: len(buffer)]
                buffer[: len(fitting)] = fitting
            if fault is Fault.HUGE:
                return HUGE_BYTES
            return len(data) if fault in OF_BYTES else num_bytes

        return self._start(look, [fault], deadline, answer)

    def _start(
        self,
        operation: Callable[[float], Any],
        faults: Sequence[Fault | None],
        deadline: float,
        answer: Answer | None = None,
    ) -> Future:
        """Does an operation in the worker, as the worst of its entries' faults has it."""
        ours: Answer = Answer() if answer is None else answer
        error = next((ERRORS[fault] for fault in faults if fault is not None and fault in ERRORS), None)
        self._deadlines.watch([ours], deadline)
        if Fault.LATE in faults:
            self._do_after(ours, operation)
        elif Fault.HANG not in faults:
            does = not (set(faults) & NOT_DONE)
            self._submit(_done, ours, operation if does else None, deadline, error)
        return ours

    def _do_after(self, answer: Answer, operation: Callable[[float], Any]) -> None:
        """Does an operation once its future has ended without it."""
        submitted = threading.Event()
        with self._lock:
            self._late.append((answer, submitted))

        def submit(_: Future) -> None:
            self._submit(_done, answer, operation, time.monotonic() + LATE_S, None)
            submitted.set()

        answer.add_done_callback(submit)

    def _submit(self, *call: Any) -> None:
        with self._lock:
            if not self._closed:
                self._worker.submit(*call)

    def _chosen(self, operation: str, name: EntryName | None) -> Fault | None:
        fault = self.choose(operation, name)
        if fault is None or fault not in APPLIES[operation]:
            return None
        self.counts[operation, fault] += 1
        return fault

    def _raise_chosen(self, operation: str) -> None:
        fault = self._chosen(operation, None)
        if fault is not None:
            raise ERRORS[fault]()

    def list(self, namespace: bytes | None = None) -> Iterator[EntryName]:
        self._raise_chosen("list")
        return self.inner.list(namespace)


def _done(answer: Answer, operation: Callable[[float], Any] | None, by: float, error: Any) -> None:
    """Does the operation, if there is one, and tells what came of it, or the error."""
    try:
        value = None if operation is None else operation(by)
    except (KeyError, TierError) as failed:
        answer.fail(failed)
        return
    if error is None:
        answer.give(value)
    else:
        answer.fail(error())
