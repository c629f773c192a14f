"""What is promoted for a request: by the law, what the hit of pool and tiers together needs, and nothing else."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax import FullAttention, Ledger, SlidingWindow
from kvjax.coverage import asked, hit_of
from kvjax.packing import cut_into_units
from kvjax.tiers.search import ABSENT, ChunksBelow, ChunksDownTo, tiers_of
from tests.oracles import law
from tests.oracles.layouts import cut, group, random_instance, random_presence
from tests.support.ledgers import picks


def ledger_of(chunking, multiple=1, *, chunks=1000):
    return Ledger(
        chunking,
        cut_into_units(chunking, 1),
        host_bytes=chunks * max(size for size in chunking.chunk_bytes if size),
        resume_multiple=multiple,
        checkpoint_tokens=None,
    )


def fill(ledger, num_tokens, present) -> dict[str, list[int]]:
    """The pool holds chunks of the prompt `0, 1, 2 …`; returns those among them that the prompt has."""
    chunking = ledger.chunking
    request = ledger.new_request(range(num_tokens), hashes=None, num_tokens=None, salt=b"")
    there = {}
    for g, chain in request.chains.items():
        name = chunking.layout.groups[g].name
        chunks = np.array([c for c in present.get(name, ()) if c < len(chain)], np.int64)
        there[name] = chunks.tolist()
        reservation = ledger.pool.prepare_store(chain.keys(chunks), [g] * len(chunks), namespace=request.space)
        ledger.pool.complete_store(reservation, ok=True)
    ledger.forget(request)
    return there


class Tiers:
    """Chunks of the prompt by tier and group; counts what is asked."""

    def __init__(self, chunking, presences):
        self.chunking = chunking
        self.presences = presences
        self.num_calls = 0

    def masks(self, ledger, request):
        def ask(g, keys):
            self.num_calls += 1
            chain = request.chains[g]
            name = self.chunking.layout.groups[g].name
            by_key = dict(zip(chain.keys(np.arange(len(chain))), range(len(chain)), strict=True))
            found = np.full(len(keys), ABSENT)
            for tier, presence in reversed(list(enumerate(self.presences))):
                found[[by_key[key] in presence.get(name, ()) for key in keys]] = tier
            return found

        lock = threading.RLock()
        return {g: ChunksBelow(chain, ledger.pool, g, ask, lock) for g, chain in request.chains.items()}


def search(ledger, request, tiers):
    masks = tiers.masks(ledger, request)
    looked = asked(ledger.chunking, request.num_tokens, masks, request.device_tokens, ledger.resume_multiple)
    return hit_of(looked), masks


def together(*presences):
    names = {name for presence in presences for name in presence}
    return {name: sorted({c for presence in presences for c in presence.get(name, ())}) for name in names}


@settings(max_examples=150, deadline=None)
@given(picks(), st.integers(0, 2**32))
def test_the_hit_is_that_of_all_levels_and_only_what_it_needs_is_brought(pick, seed):
    instance = random_instance(pick)
    chunking, total, device = instance.chunking, instance.num_tokens, instance.device_tokens
    ledger = ledger_of(chunking, instance.resume_multiple)
    host = fill(ledger, total, instance.present)
    lower = [random_presence(pick, chunking, total) for _ in range(2)]
    lower = [
        {
            name: [c for c in chunks if (c + 1) * chunking.tokens_per_chunk[chunking.layout.names.index(name)] <= total]
            for name, chunks in one.items()
        }
        for one in lower
    ]
    found = ledger.lookup("a", range(total), device_tokens=device)
    request = ledger.request("a")
    hit, masks = search(ledger, request, Tiers(chunking, lower))
    everywhere = together(host, *lower)
    expected = law.longest_hit(chunking, total, everywhere, device, instance.resume_multiple)
    assert hit.hit_tokens == expected.hit_tokens >= found.hit_tokens
    for last in (0, 1):
        some = {g: ChunksDownTo(mask, last) for g, mask in masks.items()}
        looked = asked(chunking, total, some, device, instance.resume_multiple)
        down_to = law.longest_hit(chunking, total, together(host, *lower[: last + 1]), device, instance.resume_multiple)
        assert hit_of(looked).hit_tokens == down_to.hit_tokens

    promotion = ledger.prepare_promotion("a", request, hit, tiers_of(masks))
    assert promotion is not None
    ledger.check_integrity()
    brought: dict[str, list[int]] = {name: [] for name in chunking.layout.names}
    for g, chunk, tier in zip(promotion.group_idxs, promotion.chunk_idxs, promotion.tiers, strict=True):
        name = chunking.layout.names[g]
        brought[name].append(int(chunk))
        assert tier == next(n for n, presence in enumerate(lower) if chunk in presence.get(name, ()))
    on_device = law.held_by_device(chunking, device)
    prefixes = set(law.device_prefix(chunking, device).values())
    at_device = len(prefixes) == 1 and hit.hit_tokens in prefixes  # restorable as it is
    for spec, tokens in law.cached_groups(chunking):
        lacking = law.required(spec.kind, spec.lookahead_tokens, hit.hit_tokens) - on_device[spec.name]
        wanted = (
            set(law.chunks_with(lacking, spec.kind, tokens)) - set(host.get(spec.name, ())) if not at_device else set()
        )
        assert set(brought[spec.name]) == wanted, spec.name

    came = np.random.default_rng(seed).random(promotion.num_chunks) < pick(0, 2) / 2
    assert ledger.complete_promotion(promotion, ok=came) == np.count_nonzero(came)
    ledger.check_integrity()
    arrived: dict[str, list[int]] = {}
    for g, chunk, good in zip(promotion.group_idxs, promotion.chunk_idxs, came, strict=True):
        if good:
            arrived.setdefault(chunking.layout.names[g], []).append(int(chunk))
    after = law.longest_hit(chunking, total, together(host, arrived), device, instance.resume_multiple)
    again = ledger.look_again("a")
    assert (again.hit_tokens, again.limited_by) == (after.hit_tokens, after.limited_by)
    assert {name: chunks.tolist() for name, chunks in again.load.items()} == after.load
    if came.all():
        assert again.hit_tokens == expected.hit_tokens
    ledger.check_integrity()
    ledger.finish("a")
    assert ledger.pool.open_pins() == ledger.pool.open_reservations() == set()
    ledger.check_integrity()


FULL = cut(group("full", FullAttention(), 4), group("window", SlidingWindow(8), 4))
ALL = [{"full": range(100), "window": range(100)}]


def promoting(ledger, request_id="a", length=41):
    ledger.lookup(request_id, range(length))
    request = ledger.request(request_id)
    hit, masks = search(ledger, request, Tiers(FULL, ALL))
    return ledger.prepare_promotion(request_id, request, hit, tiers_of(masks))


def test_what_was_promoted_stays_until_its_request_is_looked_up_again_or_ends():
    ledger = ledger_of(FULL)
    for how in ("looked up", "looked up again", "finished"):
        promotion = promoting(ledger)
        ledger.complete_promotion(promotion, ok=True)
        kept = sum(len(pins.slots) for pins in ledger.pool.open_pins())
        assert kept == 12
        if how == "finished":
            ledger.finish("a")
            assert ledger.pool.open_pins() == set()
        else:
            found = ledger.lookup("a", range(41)) if how == "looked up" else ledger.look_again("a")
            assert found.hit_tokens == 40
            assert sum(len(pins.slots) for pins in ledger.pool.open_pins()) == 12
            ledger.finish("a")
        ledger.pool.invalidate()
        ledger.check_integrity()


def test_what_another_promotion_brings_is_awaited_and_not_brought_twice():
    ledger = ledger_of(FULL)
    first, second = promoting(ledger, "a"), promoting(ledger, "b")
    assert (first.num_chunks, second.num_chunks, second.after) == (12, 0, (first,))
    assert not ledger.may_complete(second)
    ledger.complete_promotion(first, ok=True)
    assert ledger.may_complete(second)
    ledger.complete_promotion(second, ok=True)
    assert ledger.look_again("b").hit_tokens == 40


def test_promotions_take_half_of_the_pool_at_most_all_together():
    ledger = ledger_of(FULL, chunks=40)
    assert promoting(ledger, "a", 41) is not None
    other = ledger.lookup("b", range(500, 541))
    assert other.hit_tokens == 0
    request = ledger.request("b")
    hit, masks = search(ledger, request, Tiers(FULL, ALL))
    assert hit.hit_tokens == 40
    before = ledger.pool.num_free_units
    assert ledger.prepare_promotion("b", request, hit, tiers_of(masks)) is None
    assert ledger.pool.num_free_units == before
    ledger.check_integrity()


def test_a_promotion_of_a_namespace_that_was_invalidated_is_none():
    ledger = ledger_of(FULL)
    ledger.lookup("a", range(41))
    request = ledger.request("a")
    hit, masks = search(ledger, request, Tiers(FULL, ALL))
    ledger.invalidate(ledger.namespace())
    assert ledger.prepare_promotion("a", request, hit, tiers_of(masks)) is None
    ledger.check_integrity()


def test_what_is_invalidated_while_it_comes_is_not_published():
    ledger = ledger_of(FULL)
    promotion = promoting(ledger)
    ledger.invalidate()
    assert ledger.complete_promotion(promotion, ok=True) == 0
    assert ledger.look_again("a").hit_tokens == 0
    ledger.finish("a")
    ledger.check_integrity()


def test_a_promotion_is_completed_once():
    ledger = ledger_of(FULL)
    promotion = promoting(ledger)
    ledger.complete_promotion(promotion, ok=False)
    with pytest.raises(ValueError, match="a promotion must be one that was prepared here and not completed yet"):
        ledger.complete_promotion(promotion, ok=False)
    ledger.check_integrity()


def test_tiers_are_asked_for_spans_and_not_chunk_by_chunk():
    ledger = ledger_of(FULL, chunks=10000)
    ledger.lookup("a", range(4001))
    tiers = Tiers(FULL, [{"full": range(2000), "window": range(2000)}])
    hit, _ = search(ledger, ledger.request("a"), tiers)
    assert hit.hit_tokens == 4000
    assert tiers.num_calls < 40
