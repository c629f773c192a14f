"""Tiers for tests: one in the process's memory, and one that goes wrong."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from kvjax.tiers.answers import Answer
from kvjax.tiers.deadlines import Deadlines
from kvjax.tiers.entries import EntryName, folder_of, parse_name
from kvjax.tiers.tier import Tier, TierError, TierFullError, Usage
from tests.support.faulty_tier import FaultyTier as FaultyTier
from tests.support.tier_faults import Fault as Fault


class MemoryTier(Tier):
    """Entries in a dictionary. A thread of its own answers, one operation after the other.

    Args:
        name: as for every tier.
        max_bytes: what does not fit pushes out those that were longest not read or written; `None`: no limit.
        entries: bytes by the entries' texts, shared with other tiers in the process; by default an empty one.
        options: of every tier.
    """

    def __init__(
        self,
        name: str = "memory",
        *,
        max_bytes: int | None = None,
        entries: OrderedDict[str, bytes] | None = None,
        **options: Any,
    ):
        super().__init__(name, **options)
        self.max_bytes = max_bytes
        self.entries: OrderedDict[str, bytes] = OrderedDict() if entries is None else entries
        self._lock = threading.Lock()
        self._closed = False
        self._worker = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._deadlines = Deadlines(name)

    def put(self, names: Sequence[EntryName], frames: Sequence[memoryview], *, deadline: float) -> list[Future[bool]]:
        return [*self._each(lambda name, frame: self._put(name.text, bytes(frame)), names, frames, deadline)]

    def get(self, names: Sequence[EntryName], buffers: Sequence[memoryview], *, deadline: float) -> list[Future[int]]:
        return [*self._each(lambda name, buffer: self._get(name.text, buffer), names, buffers, deadline)]

    def exists(self, names: Sequence[EntryName], *, deadline: float) -> Future[np.ndarray]:
        return self._one(lambda: np.array([name.text in self.entries for name in names], bool), deadline)

    def delete(self, names: Sequence[EntryName], *, deadline: float) -> Future[int]:
        return self._one(lambda: sum(self.entries.pop(name.text, None) is not None for name in names), deadline)

    def list(self, namespace: bytes | None = None) -> Iterator[EntryName]:
        self._check_open()
        with self._lock:
            texts = [text for text in self.entries if text.startswith(folder_of(namespace))]
        return iter([name for text in texts if (name := parse_name(text)) is not None])

    def usage(self) -> Usage:
        self._check_open()
        with self._lock:
            return Usage(len(self.entries), self._num_bytes(), self.max_bytes)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._worker.shutdown()
        self._deadlines.close(TierError("the tier is closed"))

    def _put(self, text: str, frame: bytes) -> bool:
        if text in self.entries:
            return False
        if self.max_bytes is not None and len(frame) > self.max_bytes:
            raise TierFullError(f"an entry of {len(frame)} bytes does not fit into {self.max_bytes}")
        while self.max_bytes is not None and self._num_bytes() + len(frame) > self.max_bytes:
            self.entries.popitem(last=False)
        self.entries[text] = frame
        return True

    def _get(self, text: str, buffer: memoryview) -> int:
        frame = self.entries[text]
        self.entries.move_to_end(text)
        fitting = frame[: len(buffer)]
        buffer[: len(fitting)] = fitting
        return len(frame)

    def _num_bytes(self) -> int:
        return sum(map(len, self.entries.values()))

    def _check_open(self) -> None:
        if self._closed:
            raise TierError("the tier is closed")

    def _each(self, operation: Callable, names: Sequence, views: Sequence, deadline: float) -> Sequence[Future]:
        answers: list[Answer] = [Answer() for _ in names]
        steps = [lambda name=name, view=view: operation(name, view) for name, view in zip(names, views, strict=True)]
        self._submit(answers, steps, deadline)
        return answers

    def _one(self, operation: Callable, deadline: float) -> Future:
        answer: Answer = Answer()
        self._submit([answer], [operation], deadline)
        return answer

    def _submit(self, answers: Sequence[Answer], steps: Sequence[Callable], deadline: float) -> None:
        self._deadlines.watch(answers, deadline)
        with self._lock:
            if not self._closed:
                for answer, step in zip(answers, steps, strict=True):
                    self._worker.submit(self._answer, answer, step)

    def _answer(self, answer: Answer, step: Callable) -> None:
        if not answer.begin():
            return
        try:
            with self._lock:
                result = step()
        except (KeyError, TierError) as error:
            answer.fail(error)
        else:
            answer.give(result)
