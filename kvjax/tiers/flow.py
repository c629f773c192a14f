"""All tiers of an offloader: what goes down, what comes up, and whether it pays."""

import logging
import threading
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from kvjax._checks import shown
from kvjax.chunking import Chunking
from kvjax.coverage import Asked, Hit, asked, chunks_lacking, hit_of
from kvjax.decision import Decision, Option, Restore, decide
from kvjax.handles import Lookup
from kvjax.ledger import Ledger
from kvjax.pool import Change, PolicyError
from kvjax.positions import Restorable
from kvjax.promotions import Promotion
from kvjax.requests import Request
from kvjax.tiers import frame
from kvjax.tiers.backlog import Backlog
from kvjax.tiers.buffers import Buffers
from kvjax.tiers.entries import EntryName
from kvjax.tiers.fetch import Fetch
from kvjax.tiers.futures import result_of
from kvjax.tiers.level import Level
from kvjax.tiers.pool_bytes import Mover, PoolBytes
from kvjax.tiers.reader import Part, Reader
from kvjax.tiers.search import ABSENT, ChunksBelow, ChunksDownTo, tiers_of
from kvjax.tiers.speed import Speed
from kvjax.tiers.tier import Tier, TierTimeoutError
from kvjax.tiers.writer import Writer

_log = logging.getLogger(__name__)

MOST_TIERS = 8
# How long the tiers are asked, in seconds, at most, what they have of a prompt; after that they have nothing.
_ASKED_FOR_S = 0.25
_ASKED_GRACE_S = 0.01
_KEPT_FREE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """What of a request is in the pool and in the tiers.

    Args:
        request: the request.
        asked: with the chunks of all tiers.
        masks: those chunks, by `group_idx`.
        ranks: what other ranks can restore.
        most: the limit of the hit, in tokens.
    """

    request: Request
    asked: Asked
    masks: dict[int, ChunksBelow]
    ranks: Sequence[Restorable]
    most: int | None

    def hit(self, most: int | None = None) -> Hit:
        """Returns the hit of all levels, or the largest one of at most so many tokens."""
        limits = [limit for limit in (self.most, most) if limit is not None]
        return hit_of(self.asked, self.ranks, min(limits, default=None), with_limits=False)


class TierFlow:
    """Moves chunks between the host pool of a ledger and the tiers below it.

    Args:
        ledger: whose pool it is.
        mover: which owns the pool's bytes.
        tiers: from the fastest one down, as `opened` returns them.
        lock: the offloader's, which guards the ledger; it is free while tiers are waited for.
        ask_s: how long a lookup asks tiers at most, in seconds; `None`: a quarter of a second.
    """

    def __init__(
        self,
        ledger: Ledger,
        mover: Mover,
        tiers: Sequence[Tier],
        lock: threading.RLock,
        ask_s: float | None = None,
    ):
        self.levels = [Level(tier, index) for index, tier in enumerate(tiers)]
        self.load_speed = Speed()  # from the host pool to the device, in bytes
        self.prefill_speed = Speed()  # in tokens
        self.num_restored = self.num_recomputed = 0
        self._patience_s = _ASKED_FOR_S if ask_s is None else ask_s
        self._ledger = ledger
        self._chunking = ledger.chunking
        self._lock = lock
        self._bytes = PoolBytes(mover, ledger.units)
        self._sizes = [frame.entry_bytes(size or 0) for size in self._chunking.chunk_bytes]
        buffers = Buffers(_KEPT_FREE_BYTES)
        self._backlog = Backlog(self._chunking, ledger.pool, self._bytes, self.levels, lock, buffers)
        self._writer = Writer(self._chunking, self._backlog, self.levels)
        self._reader = Reader(self._bytes, self.levels, lock, buffers)
        self._closed = False

    # --- called under the offloader's lock ------------------------------------------------------------

    def note(self, change: Change) -> None:
        """Takes in a change of the pool."""
        self._backlog.note(change)

    def use(self, request: Request) -> None:
        """Takes in that a request was looked up: what its hit needs is used."""
        if self.levels and request.pins is not None:
            self._backlog.use(request.pins.slots)

    def capture(self) -> None:
        """Copies what was evicted, before anything is written in its place."""
        self._backlog.capture()

    def tick(self) -> None:
        """Does what must be done by those who call the offloader."""
        self._reader.land()
        self._backlog.read_ahead()

    def invalidate(self, namespace: bytes | None) -> None:
        """Entries of a namespace, or of all, are absent from now on, and are deleted in the background."""
        self._backlog.invalidate(namespace)

    def promote(
        self, request_id: Hashable, found: Found, hit: Hit, deadline_s: float
    ) -> tuple[Promotion, Fetch] | None:
        """Starts to bring what a hit needs and the pool lacks. Returns `None` if there is no room, the request's chunks
        were invalidated meanwhile, or the pool's policy fails."""
        try:
            promotion = self._ledger.prepare_promotion(request_id, found.request, hit, tiers_of(found.masks))
        except PolicyError as error:  # the next store raises it
            _log.warning("nothing is promoted: %s", error)
            promotion = None
        self._backlog.capture()
        if promotion is None:
            return None
        fetch = Fetch(promotion.num_chunks, time.monotonic() + deadline_s)
        keys, slots = promotion.reservation.keys, promotion.reservation.slots
        units: dict[int, np.ndarray] = {}
        for g in set(promotion.group_idxs.tolist()):
            of_group = np.flatnonzero(promotion.group_idxs == g)
            units.update(zip(of_group.tolist(), self._ledger.pool.units(slots[of_group]), strict=True))
        for level in self.levels:
            rows = np.flatnonzero(promotion.tiers == level.index)
            if len(rows):
                names = [
                    EntryName(found.request.namespace, keys[row], self._sizes[promotion.group_idxs[row]])
                    for row in rows.tolist()
                ]
                self._reader.read(level, Part(fetch, rows.tolist(), names, [units[row] for row in rows.tolist()]))
        return promotion, fetch

    def came(self, promotion: Promotion, fetch: Fetch) -> None:
        """Notes what a promotion that was completed brought, and from where."""
        reservation = promotion.reservation
        good = fetch.came & self._ledger.pool.still_held(reservation.slots, reservation.epochs)
        self._backlog.came_from(reservation.slots[good], promotion.tiers[good])

    # --- called without it ----------------------------------------------------------------------------

    def has_choice(self, request: Request, found: Lookup, restore: Restore) -> bool:
        """Whether there may be more than what the pool has, or less be better."""
        if request.limits.load_tokens == 0:
            return False
        return bool(self.levels and found.limited_by) or restore != "auto" or self.prefill_speed.seconds(1) is not None

    def find(self, request: Request, *, ranks: Sequence[Restorable] = ()) -> Found:
        """Looks for the chunks of a request in the pool and all tiers, where the hit may need them."""
        with self._lock:
            hidden = [level.clearing.is_hidden(request.namespace) for level in self.levels]
            for level in self.levels:
                level.clearing.note_used(request.namespace)
            self._backlog.changed.notify_all()
        levels = [level for level, is_hidden in zip(self.levels, hidden, strict=True) if not is_hidden]
        deadline = time.monotonic() + self._patience_s

        def ask(group_idx: int, keys: list[bytes]) -> np.ndarray:
            return self._ask(
                levels, [EntryName(request.namespace, key, self._sizes[group_idx]) for key in keys], deadline
            )

        masks = {g: ChunksBelow(chain, self._ledger.pool, g, ask, self._lock) for g, chain in request.chains.items()}
        looked = asked(self._chunking, request.num_tokens, masks, request.device_tokens, self._ledger.resume_multiple)
        limit = request.limits.load_tokens
        return Found(request, looked, masks, ranks, None if limit is None else request.fallback + limit)

    def decide(self, found: Found, here: int, restore: Restore) -> tuple[Decision, Hit]:
        """Decides whether restoring pays, and from where.

        Args:
            found: what is there.
            here: the hit of the host pool alone, in tokens.
            restore: what the caller wants.

        Returns:
            The decision, and the hit to go for.
        """
        whole = found.hit()
        hits = {"device": found.hit(found.request.fallback), "host": found.hit(here)}
        for level in self.levels if whole.hit_tokens > here else ():
            hits[level.tier.name] = whole if level is self.levels[-1] else self._hit_down_to(found, level)
        options: list[Option] = []
        ways: list[Hit] = []
        for source, hit in hits.items():
            if not options or hit.hit_tokens > ways[-1].hit_tokens:
                options.append(self._option(source, hit, found))
                ways.append(hit)
        decision = decide(options, restore)
        with self._lock:
            self.num_restored += decision.restores
            self.num_recomputed += not decision.restores and len(options) > 1
        return decision, ways[options.index(decision.chosen)]

    def fitting(self, found: Found, hit: Hit) -> Hit:
        """Returns a hit, or the largest one below it for which promotions may hold enough of the pool now."""
        low, high = found.request.fallback, hit.hit_tokens
        if self._may_promote(found, hit):
            return hit
        while high - low > 1:  # `low` fits, `high` does not
            middle = (low + high) // 2
            low, high = (middle, high) if self._may_promote(found, found.hit(middle)) else (low, middle)
        return found.hit(low)

    def flush(self, until: float | None) -> bool:
        """Writes all that the tiers lack of the pool, and tells whether they have all of it, and no other chunk that
        was on its way down failed meanwhile.

        Args:
            until: by the monotonic clock; `None` for as long as it takes.
        """
        with self._lock:
            wanted = self._backlog.want_all()
            return self._writer.flush(until, self.tick) and not self._backlog.lacks(*wanted)

    def close(self, timeout_s: float) -> None:
        """Ends all threads, and the tiers; threads that hang longer than that are left behind."""
        if self._closed:
            return
        self._closed = True
        threads = [*self._reader.stop(), *self._writer.stop()]
        closers = [threading.Thread(target=self._close, args=(level,), daemon=True) for level in self.levels]
        for closer in closers:
            closer.start()
        until = time.monotonic() + timeout_s
        for thread in (*closers, *threads):
            thread.join(max(0.0, until - time.monotonic()))

    # --- parts ----------------------------------------------------------------------------------------

    def _close(self, level: Level) -> None:
        try:
            level.tier.close()
        except Exception as error:  # noqa: BLE001  # whatever a tier raises, the others are closed
            with self._lock:
                level.failed("closing", error)

    def _may_promote(self, found: Found, hit: Hit) -> bool:
        with self._lock:
            return self._ledger.may_promote(found.request, hit, tiers_of(found.masks))

    def _ask(self, levels: Sequence[Level], names: list[EntryName], deadline: float) -> np.ndarray:
        """For each entry the number of the first tier that has it."""
        found = np.full(len(names), ABSENT, np.int64)
        for level in levels:
            left = np.flatnonzero(found == ABSENT)
            now = time.monotonic()
            if not len(left) or not level.health.is_up or now >= deadline:
                continue
            until = min(deadline, now + level.tier.timeout_s)
            try:
                there = level.tier.exists([names[place] for place in left.tolist()], deadline=until)
                there = result_of(there, until, _ASKED_GRACE_S)
                found[left[np.asarray(there, bool)]] = level.index
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001  # whatever a tier raises or returns, it has nothing
                with self._lock:
                    if isinstance(error, TierTimeoutError) and deadline - now < self._patience_s / 2:
                        level.counts.errors += 1  # others had taken its time
                    else:
                        level.failed("looking", error)
                continue
            with self._lock:
                level.health.answered()
        return found

    def _hit_down_to(self, found: Found, level: Level) -> Hit:
        """The hit without the tiers below one."""
        request = found.request
        masks = {g: ChunksDownTo(mask, level.index) for g, mask in found.masks.items()}
        looked = asked(self._chunking, request.num_tokens, masks, request.device_tokens, self._ledger.resume_multiple)
        return hit_of(looked, found.ranks, found.most, with_limits=False)

    def _option(self, source: str, hit: Hit, found: Found) -> Option:
        """What restoring a hit costs."""
        request = found.request
        wanted = chunks_lacking(self._chunking, request.num_tokens, hit.hit_tokens, request.device_tokens)
        sizes = [size or 0 for size in self._chunking.chunk_bytes]
        below = np.zeros(len(self.levels), np.int64)
        for g, chunks in wanted.items():
            tiers = found.masks[g].tiers[chunks]
            below += np.bincount(tiers[tiers >= 0], minlength=len(below)) * sizes[g]
        num_bytes = sum(len(chunks) * sizes[g] for g, chunks in wanted.items())
        with self._lock:
            parts = [self.levels[i].read_speed.seconds(int(below[i])) for i in np.flatnonzero(below).tolist()]
            load = self.load_speed.seconds(num_bytes) if num_bytes else 0.0
            left = request.num_tokens - hit.hit_tokens
            recompute = self.prefill_speed.seconds(left)
        known = [part for part in parts if part is not None]
        # Tiers are read side by side; a load that nobody measured yet is quick beside a tier.
        restore_s = None if len(known) < len(parts) else max(known, default=0.0) + (load or 0.0)
        return Option(source, hit.hit_tokens, num_bytes, int(below.sum()), restore_s, recompute)


def check_budgets(tiers: Sequence[Tier], chunking: Chunking) -> None:
    """Checks that every tier that is written to may hold an entry of each group, also on its way.

    Raises:
        ValueError: a budget is below the largest entry.
    """
    largest = max(chunking.layout.cached, key=lambda g: chunking.chunk_bytes[g] or 0)
    least = frame.entry_bytes(chunking.chunk_bytes[largest] or 0)
    for tier in tiers:
        budgets = {"max_bytes": tier.max_bytes, "max_pending_bytes": tier.max_pending_bytes}
        for name, budget in budgets.items():
            if tier.write != "never" and budget is not None and budget < least:
                raise ValueError(
                    f"`{name}` of the tier {tier.name!r} must hold at least one chunk of the largest group, "
                    f"{chunking.layout.groups[largest].name!r}, with its header: {least} bytes, got {budget}"
                )


def opened(tiers: Sequence[Tier | str], show_progress: bool | None = None) -> list[Tier]:
    """Returns tiers, those given by their URLs opened.

    Raises:
        ValueError: `tiers` is no sequence of tiers and URLs, there are too many, two have the same name, or one cannot
            be opened. Then none is left open that was opened here.
    """
    if isinstance(tiers, (str, Tier)) or not isinstance(tiers, Sequence):
        raise ValueError(f"`tiers` must be a sequence of tiers or their URLs, got {type(tiers).__name__}")
    if len(tiers) > MOST_TIERS:
        raise ValueError(f"`tiers` must be at most {MOST_TIERS}, got {len(tiers)}")
    for tier in tiers:
        if not isinstance(tier, (str, Tier)):
            raise ValueError(f"`tiers` must be tiers or their URLs, got {shown(tier)}")
    found: list[Tier] = []
    new: list[Tier] = []
    try:
        for tier in tiers:
            if isinstance(tier, str):
                from kvjax.tiers.urls import open_tier

                new.append(open_tier(tier, show_progress=show_progress))
            found.append(new[-1] if isinstance(tier, str) else tier)
        names = [tier.name for tier in found]
        if len(set(names)) < len(names):
            raise ValueError(f"`tiers` must have distinct names, got {', '.join(names)}")
        if {"device", "host"} & set(names):  # they are levels, too
            raise ValueError(f"`tiers` must not be named 'device' or 'host', got {', '.join(names)}")
    except BaseException:
        for tier in new:
            tier.close()
        raise
    return found
