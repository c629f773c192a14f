"""Entries written to a tier and read from it, beside plain files of the same bytes."""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.keys import HASH_BYTES, NAMESPACE_BYTES, chunk_key
from kvjax.tiers import Tier, open_tier
from kvjax.tiers.entries import EntryName
from kvjax.tiers.frame import BadFrameError, entry_bytes, verify, write_header
from kvjax.tiers.futures import result_of

_MOST_AT_A_TIME = 16
_MOST_BYTES_AT_A_TIME = 16 * 2**20
_BATCHES_UNDER_WAY = 2
_MOVES = ("write", "read")


class Entries:
    """Chunks of random bytes, with names that nobody else has.

    Args:
        chunk_bytes: bytes of a chunk.
        num_chunks: chunks.
    """

    def __init__(self, chunk_bytes: int, num_chunks: int):
        random = np.random.default_rng()
        self.num_bytes = chunk_bytes * num_chunks
        self.entry_bytes = entry_bytes(chunk_bytes)
        self.frames = [bytearray(random.bytes(self.entry_bytes)) for _ in range(num_chunks)]
        self.buffers = [bytearray(self.entry_bytes) for _ in range(num_chunks)]
        self.new_names()

    def new_names(self) -> None:
        """Makes other entries of the chunks."""
        namespace = os.urandom(HASH_BYTES)
        self.names = [
            EntryName(namespace, chunk_key(os.urandom(HASH_BYTES), 0, namespace[:NAMESPACE_BYTES]), self.entry_bytes)
            for _ in self.frames
        ]

    def batches(self) -> Iterator[slice]:
        """Yields what is begun at a time."""
        at_a_time = max(1, min(_MOST_AT_A_TIME, _MOST_BYTES_AT_A_TIME // self.entry_bytes))
        for low in range(0, len(self.names), at_a_time):
            yield slice(low, min(low + at_a_time, len(self.names)))


class TierMoves:
    """The entries, moved to a tier and back.

    Args:
        tier: the tier.
        entries: the entries.
    """

    def __init__(self, tier: Tier, entries: Entries):
        self._tier = tier
        self._entries = entries

    def write(self) -> None:
        """Makes the frames and writes them.

        Raises:
            TierError: one could not be written.
        """
        self._move(self._write_framed)

    def write_unchecked(self) -> None:
        """Writes the frames as they are."""
        self._move(self._write_as_is)

    def read(self) -> None:
        """Reads the entries and verifies each in the thread that read it, as an offloader does.

        Raises:
            TierError: one could not be read.
            KeyError: one is gone.
            kvjax.tiers.frame.BadFrameError: one is not what was written.
        """
        self._move(self._begin_verified)

    def read_unchecked(self) -> None:
        """Reads the entries and looks at none."""
        self._move(self._begin_reading)

    def delete(self) -> None:
        """Deletes the entries, as far as the tier is there."""
        deadline = self._deadline()
        result_of(self._tier.delete(self._entries.names, deadline=deadline), deadline)

    def _move(self, begin: Callable[[slice], Sequence[Future]]) -> None:
        under_way: deque[tuple[Sequence[Future], float]] = deque()
        for batch in self._entries.batches():
            if len(under_way) == _BATCHES_UNDER_WAY:
                _await(*under_way.popleft())
            deadline = self._deadline()
            under_way.append((begin(batch), deadline))
        while under_way:
            _await(*under_way.popleft())

    def _write_framed(self, batch: slice) -> Sequence[Future]:
        for at in range(batch.start, batch.stop):
            frame, name = memoryview(self._entries.frames[at]), self._entries.names[at]
            write_header(frame, name, group_name="bench", chunk_idx=at, tokens_per_chunk=16)
        return self._write_as_is(batch)

    def _write_as_is(self, batch: slice) -> Sequence[Future]:
        frames = [memoryview(frame) for frame in self._entries.frames[batch]]
        return self._tier.put(self._entries.names[batch], frames, deadline=self._deadline())

    def _begin_reading(self, batch: slice) -> Sequence[Future]:
        buffers = [memoryview(buffer) for buffer in self._entries.buffers[batch]]
        return self._tier.get(self._entries.names[batch], buffers, deadline=self._deadline())

    def _begin_verified(self, batch: slice) -> Sequence[Future]:
        verified: list[Future[None]] = []
        for at, future in enumerate(self._begin_reading(batch), batch.start):
            verified.append(Future())
            future.add_done_callback(partial(self._verify, at, verified[-1]))
        return verified

    def _verify(self, at: int, verified: Future[None], read: Future[int]) -> None:
        try:
            if read.result() != self._entries.entry_bytes:
                raise BadFrameError("length")
            verify(memoryview(self._entries.buffers[at]), self._entries.names[at])
        except BaseException as error:  # noqa: BLE001  # told to whoever waits
            verified.set_exception(error)
        else:
            verified.set_result(None)

    def _deadline(self) -> float:
        return time.monotonic() + self._tier.timeout_s


def _await(futures: Sequence[Future], deadline: float) -> None:
    for future in futures:
        result_of(future, deadline)


class PlainFiles:
    """The bytes of the entries in a plain file each.

    Args:
        folder: for the files.
        entries: the entries.
    """

    def __init__(self, folder: Path, entries: Entries):
        folder.mkdir(exist_ok=True)
        self._entries = entries
        self._paths = [folder / str(number) for number in range(len(entries.names))]

    def write(self) -> None:
        """Writes the files."""
        for path, frame in zip(self._paths, self._entries.frames, strict=True):
            path.write_bytes(frame)

    def read(self) -> None:
        """Reads the files."""
        for path, buffer in zip(self._paths, self._entries.buffers, strict=True):
            with path.open("rb", buffering=0) as file:
                file.readinto(buffer)

    def delete(self) -> None:
        """Deletes the files."""
        for path in self._paths:
            path.unlink(missing_ok=True)


def move_rows(url: str, folder: Path, chunk_bytes: int, num_chunks: int, rounds: int) -> list[dict[str, Any]]:
    """Returns the figures of writing and of reading: the best of all rounds.

    Args:
        url: of the tier.
        folder: for plain files.
        chunk_bytes: bytes of a chunk.
        num_chunks: chunks.
        rounds: which count; one before them warms up.

    Raises:
        ValueError: the tier cannot be used, or has no room.
        TierError: the tier fails.
    """
    entries = Entries(chunk_bytes, num_chunks)
    tier = open_tier(url, show_progress=False)
    try:
        _check_room(tier, entries.entry_bytes * num_chunks)
        moves, plain = TierMoves(tier, entries), PlainFiles(folder, entries)
        seconds = [_round(moves, plain, entries) for _ in range(1 + rounds)][1:]
    finally:
        tier.close()
    best = {name: min(of_one[name] for of_one in seconds) for name in seconds[0]}
    common = {"tier": tier.name, "chunk_bytes": chunk_bytes, "num_chunks": num_chunks}
    return [{**common, "move": move, **_figures(best, move, entries.num_bytes, num_chunks)} for move in _MOVES]


def _round(moves: TierMoves, plain: PlainFiles, entries: Entries) -> dict[str, float]:
    """Returns the seconds of every move; what was written is deleted."""
    took: dict[str, float] = {}

    def timed(name: str, call: Callable[[], None]) -> None:
        begun = time.perf_counter()
        call()
        took[name] = time.perf_counter() - begun

    entries.new_names()
    try:
        timed("plain write", plain.write)
        timed("write", moves.write)
        timed("plain read", plain.read)
        timed("read", moves.read)
        timed("read unchecked", moves.read_unchecked)
        moves.delete()
        timed("write unchecked", moves.write_unchecked)
    finally:
        moves.delete()
        plain.delete()
    return took


def _figures(best: dict[str, float], move: str, num_bytes: int, num_chunks: int) -> dict[str, float]:
    took, plain, unchecked = best[move], best[f"plain {move}"], best[f"{move} unchecked"]
    return {
        "mib_per_s": round(num_bytes / 2**20 / took, 2),
        "ms_per_chunk": round(took / num_chunks * 1e3, 4),
        "plain_mib_per_s": round(num_bytes / 2**20 / plain, 2),
        "plain_ms_per_chunk": round(plain / num_chunks * 1e3, 4),
        "ratio": round(plain / took, 4),
        "unchecked_mib_per_s": round(num_bytes / 2**20 / unchecked, 2),
        "checksum_share": round(max(0.0, 1 - unchecked / took), 4),
    }


def _check_room(tier: Tier, num_bytes: int) -> None:
    usage = tier.usage()
    if usage.max_bytes is not None and usage.max_bytes - (usage.num_bytes or 0) < num_bytes:
        raise ValueError(
            f"{tier.name} must have room for {num_bytes} bytes more, or entries of others would be evicted"
        )
