"""A transport whose moves go wrong: a seeded wrapper around a real one, for the CPU backend.

Every store and load is cut into pieces of a few chunks, and each piece goes well or meets a `Fault`. Units that a
store is to write hold garbage until it wrote them, so that a chunk that was not moved and is read all the same shows.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from enum import StrEnum
from typing import Any

import jax
import numpy as np

from kvjax import Offloader
from kvjax.memory.host import WORD, HostMemory
from kvjax.memory.transports import Transport
from kvjax.plan import GroupMoves


class Fault(StrEnum):
    """What goes wrong with a piece of a move.

    * `RAISE`: it cannot be issued, and nothing after it is.
    * `FAIL`: it is issued and fails later. A store leaves garbage in the units, a load writes nothing.
    * `HANG`: it is under way until the test releases it, and then goes well.
    * `LATE`: it is under way for some polls, or until someone waits for it, and then goes well.
    * `SHORT`: only the first half of it is moved, and nothing after it.
    """

    RAISE = "raise"
    FAIL = "fail"
    HANG = "hang"
    LATE = "late"
    SHORT = "short"


Choose = Callable[[str], Fault | None]  # from `"store"` or `"load"`, once for each piece


class InjectedError(RuntimeError):
    """What an injected fault raises."""


class FaultsAt:
    """Pieces that go wrong, counted from now on for each operation.

    Args:
        faults: what happens to which piece of which operation, `"store"` or `"load"`, from 0 on.
    """

    def __init__(self, faults: Mapping[tuple[str, int], Fault]):
        self._faults = faults
        self._issued: Counter[str] = Counter()

    def __call__(self, operation: str) -> Fault | None:
        self._issued[operation] += 1
        return self._faults.get((operation, self._issued[operation] - 1))


class FaultsInOrder:
    """What happens to the next pieces, whatever they are of; those after them go well.

    Args:
        faults: one for each piece, `None` where it goes well.
    """

    def __init__(self, faults: Iterable[Fault | None]):
        self._faults = iter(faults)

    def __call__(self, operation: str) -> Fault | None:
        return next(self._faults, None)


class RandomFaults:
    """Each piece goes wrong by chance.

    Args:
        seed: of the chances.
        rates: how likely each fault is; what is left of 1 goes well.
    """

    def __init__(self, seed: int, rates: Mapping[Fault, float]):
        self._rng = np.random.default_rng(seed)
        self._faults = list(rates)
        self._below = np.cumsum([rates[fault] for fault in self._faults])

    def __call__(self, operation: str) -> Fault | None:
        place = int(np.searchsorted(self._below, self._rng.random(), side="right"))
        return self._faults[place] if place < len(self._faults) else None


def no_faults(operation: str) -> None:
    """Everything goes well."""


class HeldBack(Future[None]):
    """A move that ends when it is released: by the test, after some polls, or as someone waits for it.

    Args:
        end: called once as it ends.
        polls: after how many calls of `done` it ends, and then it also ends when it is waited for; `None`: only
            when it is released.
        error: how it ends; `None`: well.
    """

    def __init__(self, end: Callable[[], None], *, polls: int | None, error: Exception | None = None):
        super().__init__()
        self._end, self._polls, self._error = end, polls, error
        self._lock = threading.RLock()
        self._released = False

    def done(self) -> bool:
        if self._polls is not None and not super().done():
            self._polls -= 1
            if self._polls < 0:
                self.release()
        return super().done()

    def result(self, timeout: float | None = None) -> None:
        if self._polls is not None:
            self.release()
        return super().result(timeout)

    def release(self) -> None:
        """Ends the move. A second call does nothing."""
        with self._lock:
            if self._released:
                return
            self._released = True
            self._end()
            if self._error is None:
                self.set_result(None)
            else:
                self.set_exception(self._error)


class FaultyTransport:
    """A transport that does what the one it wraps does, but for the faults that `choose` asks for.

    `counts` says how often each fault was injected, by operation and fault, and `violations` what must never
    happen: units that are written while a move that was not over still read or wrote them.

    Args:
        inner: moves the bytes; its pool is in the process's memory.
        unit_bytes: of a unit of the pool.
        choose: called for each piece; can be replaced at any time.
        rows_per_piece: chunks in a piece.
        num_polls: how many polls a `LATE` or `FAIL` piece takes.
        settles: wait for each piece that goes well as it is issued, so that nothing depends on how long it takes.
    """

    def __init__(
        self,
        inner: Transport,
        unit_bytes: int,
        choose: Choose = no_faults,
        *,
        rows_per_piece: int = 2,
        num_polls: int = 3,
        settles: bool = False,
    ):
        self._settles = settles
        self.inner = inner
        self.choose = choose
        self.rows_per_piece = rows_per_piece
        self.num_polls = num_polls
        self.counts: Counter[tuple[str, Fault]] = Counter()
        self.violations: list[str] = []
        self._garbage = np.random.default_rng(0)
        self._words_per_unit = unit_bytes // WORD.itemsize
        self._lock = threading.Lock()
        self._busy: Counter[int] = Counter()  # units of moves that are held back
        self._hanging: list[HeldBack] = []

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def most_staged_units(self) -> int:
        return self.inner.most_staged_units

    @property
    def memory(self) -> HostMemory:
        memory = self.inner.memory
        assert memory is not None, "the pool is in the process's memory"
        return memory

    def read(self, group_idx: int, unit_ids: np.ndarray) -> np.ndarray:
        return self.inner.read(group_idx, unit_ids)

    def revive(self) -> bool:
        return self.inner.revive()

    def close(self) -> None:
        self.inner.close()

    @property
    def num_hanging(self) -> int:
        """Pieces that hang."""
        return len(self._hanging)

    def release(self, most: int | None = None) -> None:
        """Ends the pieces that hang, the oldest first; at most so many, or all."""
        with self._lock:
            released, self._hanging = self._hanging[:most], [] if most is None else self._hanging[most:]
        for piece in released:
            piece.release()

    def store(self, caches: Mapping[str, jax.Array], moves: GroupMoves) -> Iterator[tuple[int, Any]]:
        units = moves.unit_ids[: moves.num_chunks].ravel()
        with self._lock:
            overlap = [unit for unit in units.tolist() if self._busy[unit]]
        if overlap:
            self.violations.append(f"a store writes units {overlap}, with which a move is not over")
        self._scribble(units)
        for part, fault in self._pieces("store", moves):
            units = part.unit_ids[: part.num_chunks]
            if fault is Fault.HANG or fault is Fault.LATE:
                _settle(self.inner.store(caches, part))
                written = self.inner.read(part.group_idx, units)
                self._scribble(units.ravel())
                yield part.num_chunks, self._held_back(part, fault, written)
            elif fault is Fault.FAIL:
                yield part.num_chunks, self._held_back(part, fault, None)
            elif part.num_chunks:
                yield from self._issued(self.inner.store(caches, part))

    def load(self, caches: dict[str, jax.Array], moves: GroupMoves) -> Iterator[tuple[int, Any]]:
        for part, fault in self._pieces("load", moves):
            if fault is Fault.HANG or fault is Fault.LATE:
                _settle(self.inner.load(caches, part))
            if fault is Fault.HANG or fault is Fault.LATE or fault is Fault.FAIL:
                yield part.num_chunks, self._held_back(part, fault, None)
            elif part.num_chunks:
                yield from self._issued(self.inner.load(caches, part))

    # --- parts

    def _pieces(self, operation: str, moves: GroupMoves) -> Iterator[tuple[GroupMoves, Fault | None]]:
        """The pieces of a move that are issued, each with what goes wrong with it."""
        for low in range(0, moves.num_chunks, self.rows_per_piece):
            high = min(low + self.rows_per_piece, moves.num_chunks)
            fault = self.choose(operation)
            if fault is not None:
                self.counts[operation, fault] += 1
            if fault is Fault.RAISE:
                raise InjectedError(f"a {operation} could not be issued")
            if fault is Fault.SHORT:
                yield _rows(moves, low, (low + high) // 2), fault
                return
            yield _rows(moves, low, high), fault

    def _issued(self, pieces: Iterable[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        for num_rows, under_way in pieces:
            if self._settles:
                _settle([(num_rows, under_way)])
            yield num_rows, under_way

    def _held_back(self, part: GroupMoves, fault: Fault, written: np.ndarray | None) -> HeldBack:
        """A piece under way; of a store, `written` are the bytes that reach the units as it ends."""
        units = part.unit_ids[: part.num_chunks].ravel()

        def end() -> None:
            if written is not None:
                self.memory.write(units, written.view(WORD).reshape(len(units), -1))
            with self._lock:
                self._busy.subtract(units.tolist())

        error = InjectedError("a piece failed on its way") if fault is Fault.FAIL else None
        piece = HeldBack(end, polls=None if fault is Fault.HANG else self.num_polls, error=error)
        with self._lock:
            self._busy.update(units.tolist())
            if fault is Fault.HANG:
                self._hanging.append(piece)
        return piece

    def _scribble(self, units: np.ndarray) -> None:
        garbage = self._garbage.integers(0, 2**32, (len(units), self._words_per_unit), WORD.type)
        self.memory.write(units, garbage)


def inject(offloader: Offloader, choose: Choose = no_faults, **options: Any) -> FaultyTransport:
    """Puts a `FaultyTransport` in place of an offloader's transport, and returns it."""
    mover: Any = offloader.mover
    faulty = FaultyTransport(mover._transport, offloader.ledger.units.unit_bytes, choose, **options)
    mover._transport = faulty
    return faulty


def _settle(pieces: Iterable[tuple[int, Any]]) -> None:
    for _, under_way in pieces:
        if isinstance(under_way, Future):
            under_way.result()
        elif under_way is not None:
            under_way.block_until_ready()


def _rows(moves: GroupMoves, low: int, high: int) -> GroupMoves:
    rows = slice(low, high)
    return GroupMoves(moves.group_idx, high - low, moves.chunk_idx[rows], moves.block_ids[rows], moves.unit_ids[rows])
