"""Promotions under way: chunks that come from lower tiers to the pool, and what they keep there meanwhile."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvjax._intervals import EMPTY
from kvjax.chunking import Chunking
from kvjax.coverage import Hit, chunks_lacking
from kvjax.packing import Units
from kvjax.pool import ChunkPool, Pins, Reservation
from kvjax.requests import Request
from kvjax.retention import ranks_above

# The part of the pool that promotions may hold at a time; the rest is left to the stores of requests that run.
_PART_OF_POOL = 2


@dataclass(frozen=True, slots=True, eq=False)
class Promotion:
    """Chunks on their way from lower tiers to the pool. One `complete_promotion` ends it. Arrays are by row.

    Args:
        request_id: the request it is for; `None` for none.
        request: whose chunks they are.
        hit_tokens: the hit once all of them are there.
        reservation: of the chunks.
        group_idxs: their groups.
        chunk_idxs: their places in the sequence.
        tiers: where each comes from: the number of its tier, the first one below the pool being 0.
        num_bytes: of the chunks, without padding.
        pins: what the hit needs besides and is in the pool.
        after: other promotions that bring some of what the hit needs.
    """

    request_id: Hashable
    request: Request = field(repr=False)
    hit_tokens: int
    reservation: Reservation = field(repr=False)
    group_idxs: np.ndarray = field(repr=False)
    chunk_idxs: np.ndarray = field(repr=False)
    tiers: np.ndarray = field(repr=False)
    num_bytes: int
    pins: Pins = field(repr=False)
    after: "tuple[Promotion, ...]" = field(default=(), repr=False)

    @property
    def num_chunks(self) -> int:
        """Chunks that it brings."""
        return len(self.tiers)


class Promotions:
    """The promotions of a ledger that were prepared and not completed, and what they brought and is still kept.

    Args:
        chunking: the layout and its chunks.
        units: how chunks are cut into units of the pool.
        pool: which takes the chunks.
        requests: the requests that were looked up and not finished, by id.
    """

    def __init__(self, chunking: Chunking, units: Units, pool: ChunkPool, requests: Mapping[Hashable, Request]):
        self._chunking = chunking
        self._pool = pool
        self._requests = requests
        self._widths = np.array([width or 0 for width in units.units_per_chunk], np.int64)
        self._open: dict[Promotion, None] = {}
        self._kept: dict[Request, list[tuple[Pins, int]]] = {}  # with the units that promotions brought
        self._units = 0  # that open promotions reserve, or that are kept
        self.promoted_by_group = np.zeros(len(chunking.layout.groups), np.int64)

    def check_open(self, promotion: Any) -> None:
        """Raises a `ValueError` if a promotion was not prepared here, or was completed."""
        if not isinstance(promotion, Promotion) or promotion not in self._open:
            raise ValueError("a promotion must be one that was prepared here and not completed yet")

    def all_ended(self, promotions: "tuple[Promotion, ...]") -> bool:
        """Whether none of some promotions is open."""
        return not any(promotion in self._open for promotion in promotions)

    def pins(self) -> list[Pins]:
        """Returns what open promotions keep in the pool, and what was brought and is not loaded yet."""
        kept = [pins for parts in self._kept.values() for pins, _ in parts]
        return [*(promotion.pins for promotion in self._open), *kept]

    def open_reservations(self) -> list[Reservation]:
        """Returns what the open promotions reserved."""
        return [promotion.reservation for promotion in self._open]

    def prepare(
        self, request_id: Hashable, request: Request, hit: Hit, tiers: Mapping[int, np.ndarray]
    ) -> Promotion | None:
        """Reserves what a hit needs and the pool lacks, see `Ledger.prepare_promotion`."""
        if request.generation != self._pool.namespaces.generation[request.space]:
            return None
        wanted = chunks_lacking(self._chunking, request.num_tokens, hit.hit_tokens, request.device_tokens)
        absent: dict[int, np.ndarray] = {}
        held = []
        for g, chain in request.chains.items():
            chain.look(wanted[g])
            there = chain.held_among(wanted[g])
            held.append(chain.slots(wanted[g][there]))
            missing = wanted[g][~there]
            absent[g] = missing[tiers[g][missing] >= 0]
        slots = np.concatenate(held)
        ready = self._pool.ready(slots)
        widths = sum(len(chunks) * int(self._widths[g]) for g, chunks in absent.items())
        if not self._may_hold(widths):
            return None
        pins = self._pool.pin(slots[ready])
        reservation = None
        try:
            reservation = self._reserve(request, wanted, absent, slots)
        finally:
            if reservation is None:
                self._pool.unpin(pins)
        if reservation is None:
            return None
        group_idxs = np.repeat(list(absent), [len(chunks) for chunks in absent.values()])
        sources = [tiers[g][chunks] for g, chunks in absent.items()]
        sizes = np.array([size or 0 for size in self._chunking.chunk_bytes], np.int64)
        promotion = Promotion(
            request_id,
            request,
            hit.hit_tokens,
            reservation,
            group_idxs,
            np.concatenate([EMPTY, *absent.values()]),
            np.concatenate(sources).astype(np.int64),
            int(sizes[group_idxs].sum()),
            pins,
            self._bringing(slots[~ready]),
        )
        self._open[promotion] = None
        self._units += widths
        return promotion

    def complete(self, promotion: Promotion, ok: bool | np.ndarray) -> int:
        """Publishes the chunks that came, see `Ledger.complete_promotion`."""
        self.check_open(promotion)
        published = self._pool.complete_store(promotion.reservation, ok=ok)
        del self._open[promotion]
        brought = int(self._widths[promotion.group_idxs[published]].sum())
        self._units += brought - int(self._widths[promotion.group_idxs].sum())
        self.promoted_by_group += np.bincount(
            promotion.group_idxs[published], minlength=len(self.promoted_by_group)
        ).astype(np.int64)
        new = self._pool.pin(promotion.reservation.slots[published])
        self._kept.setdefault(promotion.request, []).extend([(promotion.pins, 0), (new, brought)])
        if self._requests.get(promotion.request_id) is not promotion.request:
            self.release(promotion.request)
        return int(np.count_nonzero(published))

    def release(self, request: Request) -> None:
        """Lets go of what was brought for a request."""
        for pins, units in self._kept.pop(request, ()):
            self._pool.unpin(pins)
            self._units -= units

    def check_integrity(self) -> None:
        """Raises an `AssertionError` if the units that are held do not add up."""
        held = sum(int(self._widths[promotion.group_idxs].sum()) for promotion in self._open)
        assert self._units == held + sum(units for parts in self._kept.values() for _, units in parts)

    def may_fit(self, request: Request, hit: Hit, tiers: Mapping[int, np.ndarray]) -> bool:
        """Whether what a hit wants of tiers is no more than promotions may hold now."""
        wanted = chunks_lacking(self._chunking, request.num_tokens, hit.hit_tokens, request.device_tokens)
        units = sum(int(np.count_nonzero(tiers[g][c] >= 0)) * int(self._widths[g]) for g, c in wanted.items())
        return self._may_hold(units)

    # --- parts ----------------------------------------------------------------------------------------

    def _may_hold(self, units: int) -> bool:
        """Whether promotions may hold so many units more."""
        return self._units + units <= self._pool.num_units // _PART_OF_POOL

    def _reserve(
        self, request: Request, wanted: Mapping[int, np.ndarray], absent: Mapping[int, np.ndarray], kept: np.ndarray
    ) -> Reservation | None:
        """Reserves the absent chunks, and notes in the request's chains where they will be."""
        ranked, _ = ranks_above(self._chunking, wanted, 0)
        ranks = [EMPTY, *(ranked[g][1][np.isin(wanted[g], chunks)] for g, chunks in absent.items())]
        keys = [key for g, chunks in absent.items() for key in request.chains[g].keys(chunks)]
        group_idxs = np.repeat(list(absent), [len(chunks) for chunks in absent.values()])
        reservation = self._pool.prepare_store(
            keys,
            group_idxs,
            np.concatenate(ranks),
            kept=kept,
            chunk_idxs=np.concatenate([EMPTY, *absent.values()]),
            namespace=request.space,
            trial=True,
        )
        if reservation is not None:
            start = 0
            for g, chunks in absent.items():
                request.chains[g].note(chunks, reservation.slots[start : start + len(chunks)])
                start += len(chunks)
        return reservation

    def _bringing(self, slots: np.ndarray) -> tuple[Promotion, ...]:
        """The open promotions that write some slots."""
        return tuple(other for other in self._open if np.isin(slots, other.reservation.slots).any())
