"""What waits to go down: which chunks which tier lacks, and copies of those that leave the host pool before."""

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvjax.chunking import Chunking
from kvjax.pool import Change, ChunkPool
from kvjax.tiers import frame
from kvjax.tiers.buffers import Buffers
from kvjax.tiers.entries import EntryName
from kvjax.tiers.level import Frame, Level, Outgoing
from kvjax.tiers.pool_bytes import PoolBytes

_MOST_AT_A_TIME = 32
_MOST_BYTES_AT_A_TIME = 32 * 2**20
_KNOWN_AT_A_TIME = 512
# A chunk that is used in the pool all the time is touched in its tiers this often, in seconds.
_TOUCHED_AGAIN_S = 300.0
# Chunks wait for a level by their slots; when there are so many more of them than slots, most are gone.
_MOST_REFS_PER_SLOT = 4
_FEW_SLOTS = 1024


class Backlog:
    """The books of what tiers have and lack. All of it is done under the offloader's lock, but for `with_bytes`.

    Args:
        chunking: the layout and its chunks.
        pool: the host pool.
        bytes_of_pool: its bytes.
        levels: the tiers.
        lock: the offloader's.
        buffers: memory for frames.
    """

    def __init__(
        self,
        chunking: Chunking,
        pool: ChunkPool,
        bytes_of_pool: PoolBytes,
        levels: Sequence[Level],
        lock: threading.RLock,
        buffers: Buffers,
    ):
        self.changed = threading.Condition(lock)  # told whenever there may be something to do
        self._pool = pool
        self._bytes = bytes_of_pool
        self._levels = levels
        self._buffers = buffers
        self._sizes = [frame.entry_bytes(size or 0) for size in chunking.chunk_bytes]
        self._where = np.zeros(pool.num_slots, np.uint8)  # by slot, the bits of the tiers that have its chunk
        self._touched_at = np.full(pool.num_slots, -np.inf)  # by slot, when its chunk was last used in the tiers
        self._evicted: list[tuple[Outgoing, int]] = []  # not copied yet, with the bits of the tiers that lack them

    # --- for those who call the offloader -------------------------------------------------------------

    def note(self, change: Change) -> None:
        """Takes in that chunks became resident, or that they leave the pool; it asks the pool of their slots only."""
        if change.kind == "stored":
            self._where[change.slots] = 0
            self._touched_at[change.slots] = time.monotonic()
            self._want(change.slots, [level for level in self._levels if level.tier.write == "through"])
        elif change.reason == "evicted":
            self._note_evicted(change.slots)

    def came_from(self, slots: np.ndarray, levels: np.ndarray) -> None:
        """Notes from which tiers resident chunks came."""
        self._where[slots] |= np.left_shift(np.uint8(1), levels.astype(np.uint8))

    def use(self, slots: np.ndarray) -> None:
        """Takes in that chunks are used in the pool: what tiers have of them must not become old there, and may be gone
        behind our back."""
        now = time.monotonic()
        due = slots[(now - self._touched_at[slots] > _TOUCHED_AGAIN_S) & (self._where[slots] > 0)]
        if len(due):
            self._touched_at[due] = now
            pairs = self._pairs(due)
            for level in self._levels:
                level.uses.extend(pairs)
            self.changed.notify_all()

    def capture(self) -> None:
        """Copies chunks that were evicted and not written yet, before anything is written to their units."""
        evicted, self._evicted = self._evicted, []
        for item, bits in evicted:
            wanting = [level for level in self._levels if bits & int(level.bit)]
            takers = [level for level in wanting if self._has_room(level, item.name.num_bytes)]
            for level in wanting:
                level.counts.dropped += level not in takers
                level.num_undone += level not in takers
            copied = self._copied(item, len(takers)) if takers else None
            for level in takers:
                self._queue(level, item, copied)

    def want_all(self) -> tuple[np.ndarray, np.ndarray]:
        """All that is in the pool is to be written to every tier that is written to and lacks it. What a tier had may
        be gone: it is looked for. Returns the slots and epochs of what that is, `(n,)` each."""
        slots = self._pool.resident_slots()
        for level in self._levels:
            if level.writes:
                has = (self._where[slots] & level.bit) > 0
                self._want(slots[~has], [level])
                level.checks.extend(self._pairs(slots[has]))
        self.changed.notify_all()
        return slots, self._pool.epochs(slots)

    def lacks(self, slots: np.ndarray, epochs: np.ndarray) -> bool:
        """Whether a tier that is written to lacks any of these chunks that is still in the pool, as far as is known."""
        held = slots[self._pool.still_held(slots, epochs)]
        return any(
            not level.clearing.is_hidden(item.name.namespace)
            for level in self._levels
            if level.writes
            for item in self._outgoing(held[(self._where[held] & level.bit) == 0])
        )

    def read_ahead(self) -> None:
        """Where threads may not touch the pool, copies some of the chunks that are to be written."""
        if self._bytes.any_thread:
            return
        for level in self._levels:
            if level.health.is_up:
                for item in self._next_refs(level):
                    item.frame = self._copied(item)
                    level.frames.append(item)
                    self.changed.notify_all()

    def invalidate(self, namespace: bytes | None) -> None:
        """Entries of a namespace, or of all, are absent from now on, and are deleted in the background."""
        for level in self._levels:
            if namespace is None:
                level.clearing.hide_all()
            else:
                level.clearing.hide(namespace)
            # What waits was computed before, and would be written after the others were deleted.
            frames = list(level.frames)
            level.frames.clear()
            for item in frames:
                if namespace is None or item.name.namespace == namespace:
                    self.release(level, item)
                else:
                    level.frames.append(item)
        self.changed.notify_all()

    # --- for the writer -------------------------------------------------------------------------------

    def waits_for(self, level: Level) -> bool:
        """Whether anything waits that the writer can take."""
        refs = level.refs and self._bytes.any_thread
        return bool(level.frames or refs or level.checks or level.uses)

    def take(self, level: Level) -> list[Outgoing]:
        """Some distinct chunks to write: first those that left the pool."""
        batch: dict[EntryName, Outgoing] = {}
        num_bytes = 0
        while level.frames and len(batch) < _MOST_AT_A_TIME and num_bytes < _MOST_BYTES_AT_A_TIME:
            item = level.frames.popleft()
            num_bytes += item.name.num_bytes
            hidden = level.clearing.is_hidden(item.name.namespace)
            level.counts.dropped += hidden
            if hidden or item.name in batch:
                self.release(level, item)
            else:
                batch[item.name] = item
        if not batch and self._bytes.any_thread:
            for item in self._next_refs(level):
                if batch.setdefault(item.name, item) is not item:
                    self.release(level, item)
        return list(batch.values())

    def take_known(self, level: Level) -> tuple[list[Outgoing], bool]:
        """Some chunks that a level has, as far as is known: those that a flush looks for, or those in use, and whether
        it is these."""
        in_use = not level.checks
        queue = level.uses if in_use else level.checks
        pairs = [queue.popleft() for _ in range(min(_KNOWN_AT_A_TIME, len(queue)))]
        slots, epochs = np.array(pairs, np.int64).reshape(-1, 2).T
        good = self._pool.still_held(slots, epochs) & ((self._where[slots] & level.bit) > 0)
        return self._outgoing(slots[good]), in_use

    def with_bytes(self, batch: list[Outgoing]) -> list[Outgoing]:
        """Copies what is still in the pool; a chunk that left it meanwhile may have been copied in part, and was
        captured when it left."""
        fresh = [item for item in batch if item.frame is None]
        for item in fresh:
            item.frame = self._copied(item)
        if not fresh:
            return batch
        pairs = [(item.slot, item.epoch) for item in fresh]
        with self.changed:
            held = self._pool.still_held(*np.array(pairs, np.int64).T)
        lost = {item for item, is_held in zip(fresh, held.tolist(), strict=True) if not is_held}
        return [item for item in batch if item not in lost]

    def written(self, level: Level, items: Sequence[Outgoing]) -> None:
        """Notes that entries are in a tier."""
        slots = self._still_there(items)
        self._where[slots] |= level.bit
        level.clearing.turned_up(item.name for item in items)

    def lost(self, level: Level, items: Sequence[Outgoing], *, wanted: bool) -> None:
        """Notes that a tier has entries no more; they are to be written again if that is wanted."""
        slots = self._still_there(items)
        self._where[slots] &= ~level.bit
        if wanted:
            self._want(slots, [level])

    def not_written(self, level: Level, items: Sequence[Outgoing]) -> None:
        """Notes that chunks could not be written; those that have left the pool never will."""
        level.num_undone += len(items) - len(self._still_there(items))

    def release(self, level: Level, item: Outgoing) -> None:
        """A level has done with a chunk."""
        level.pending_bytes -= item.name.num_bytes
        if item.frame is not None:
            item.frame.users -= 1
            if not item.frame.users:
                self._buffers.give(item.frame.memory)

    def drop(self, level: Level) -> None:
        """Forgets what waits to be written to a level that is down; what is in the pool is tried when it leaves."""
        level.counts.dropped += len(level.frames)
        level.num_undone += len(level.frames)
        level.refs.clear()
        level.checks.clear()
        while level.frames:
            self.release(level, level.frames.popleft())

    # --- parts ----------------------------------------------------------------------------------------

    def _want(self, slots: np.ndarray, levels: Sequence[Level]) -> None:
        if len(slots) and levels:
            pairs = self._pairs(slots)
            for level in levels:
                level.refs.extend(pairs)
                if len(level.refs) > _MOST_REFS_PER_SLOT * max(_FEW_SLOTS, self._pool.num_slots):
                    self._forget_refs(level)
            self.changed.notify_all()

    def _forget_refs(self, level: Level) -> None:
        """Of what waits for a level, keeps what is still to be had, once: one that is down for long has many others."""
        slots, epochs = np.array(level.refs, np.int64).T
        held = self._pool.still_held(slots, epochs)
        level.refs.clear()
        level.refs.extend(dict.fromkeys(zip(slots[held].tolist(), epochs[held].tolist(), strict=True)))

    def _note_evicted(self, slots: np.ndarray) -> None:
        writable = np.uint8(sum(int(level.bit) for level in self._levels if level.writes))
        lacking = writable & ~self._where[slots]
        wanted = lacking > 0
        if wanted.any():
            bits = dict(zip(slots[wanted].tolist(), lacking[wanted].tolist(), strict=True))
            self._evicted += [(item, bits[item.slot]) for item in self._outgoing(slots[wanted])]

    def _outgoing(self, slots: np.ndarray) -> list[Outgoing]:
        """What is to be written of chunks; those without a namespace of their own are left out."""
        pool, found = self._pool, []
        groups = pool.groups(slots)
        for g in np.flatnonzero(np.bincount(groups)).tolist() if len(slots) else ():
            some = slots[groups == g]
            columns = (
                some.tolist(),
                pool.keys(some),
                pool.names(some),
                pool.chunk_idxs(some).tolist(),
                pool.epochs(some).tolist(),
                pool.units(some),
            )
            found += [
                Outgoing(EntryName(namespace, key, self._sizes[g]), chunk_idx, slot, epoch, units)
                for slot, key, namespace, chunk_idx, epoch, units in zip(*columns, strict=True)
                if namespace is not None
            ]
        return found

    def _has_room(self, level: Level, num_bytes: int) -> bool:
        return level.health.is_up and level.pending_bytes + num_bytes <= level.tier.max_pending_bytes

    def _copied(self, item: Outgoing, users: int = 1) -> Frame:
        """A new frame with the chunk's bytes."""
        memory = self._buffers.take(item.name.num_bytes)
        self._bytes.copy_out(item.name.group_idx, item.units, memory[frame.HEADER_BYTES :])
        return Frame(memory, users)

    def _queue(self, level: Level, item: Outgoing, copied: Frame | None) -> None:
        level.frames.append(replace(item, frame=copied))
        level.pending_bytes += item.name.num_bytes
        self.changed.notify_all()

    def _next_refs(self, level: Level) -> list[Outgoing]:
        """The next chunks of the pool that are to be written to a level; they count as pending from now on."""
        chosen: list[Outgoing] = []
        room = min(_MOST_BYTES_AT_A_TIME, level.tier.max_pending_bytes - level.pending_bytes)
        while level.refs and not chosen and room > 0:
            some = [level.refs.popleft() for _ in range(min(_MOST_AT_A_TIME, len(level.refs)))]
            slots, epochs = np.array(some, np.int64).T
            good = self._pool.still_held(slots, epochs) & ((self._where[slots] & level.bit) == 0)
            for item in self._outgoing(slots[good]):
                if level.clearing.is_hidden(item.name.namespace):
                    continue
                if room > 0:
                    chosen.append(item)
                    room -= item.name.num_bytes
                    level.pending_bytes += item.name.num_bytes
                else:
                    level.refs.appendleft((item.slot, item.epoch))
        return chosen

    def _pairs(self, slots: np.ndarray) -> list[tuple[int, int]]:
        """The slots with the epochs of their chunks."""
        return list(zip(slots.tolist(), self._pool.epochs(slots).tolist(), strict=True))

    def _still_there(self, items: Sequence[Outgoing]) -> np.ndarray:
        """The slots of those chunks that are still in the pool."""
        pairs = [(item.slot, item.epoch) for item in items]
        slots, epochs = np.array(pairs, np.int64).reshape(-1, 2).T
        return slots[self._pool.still_held(slots, epochs)]


def keep(item: Outgoing) -> None:
    """The tier may still read a chunk's frame: nobody gets its memory any more."""
    if item.frame is not None:
        item.frame.users += 1
