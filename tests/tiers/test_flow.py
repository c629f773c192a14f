"""An offloader with tiers: what comes back is what was stored, or it is a miss; and nobody waits for ever."""

import threading
import time
from collections import OrderedDict

import numpy as np
import pytest

import kvjax
from kvjax.memory.direct import DirectTransport
from kvjax.tiers.entries import EntryName, parse_name
from kvjax.tiers.frame import HEADER_BYTES
from tests.support import layouts
from tests.support.served import end, restored, serve
from tests.support.serving_engine import Served, ServingEngine
from tests.support.tier_faults import Fault, FaultsOf, no_faults
from tests.support.tiers import FaultyTier, MemoryTier

PROMPT = np.arange(100, 132)
MIXED = kvjax.CacheLayout(
    [
        kvjax.GroupSpec("full", kvjax.FullAttention(), 4, [kvjax.LeafSpec("f", (4, 8), "float32")]),
        kvjax.GroupSpec("window", kvjax.SlidingWindow(6), 4, [kvjax.LeafSpec("w", (4, 6), "bfloat16")]),
        kvjax.GroupSpec("ring", kvjax.Scratch(), 2, block_bytes=8),
        kvjax.GroupSpec("state", kvjax.Recurrent(), 8, [kvjax.LeafSpec("s", (7,), "float32")]),
    ]
)
DRAFT = kvjax.CacheLayout(
    [
        kvjax.GroupSpec("full", kvjax.FullAttention(), 4, [kvjax.LeafSpec("f", (4, 8), "float32")]),
        kvjax.GroupSpec(
            "draft", kvjax.FullAttention(), 4, [kvjax.LeafSpec("d", (4, 2), "float32")], lookahead_tokens=6
        ),
    ]
)
# A timeout that what hangs does not meet, and one that nothing else exceeds.
SOON_S = 0.1
LONG_S = 60.0
HANGING = (Fault.HANG, Fault.LATE)


def engine_with(*tiers, layout=MIXED, host_bytes=64 * 1024, transfer="direct", **options):
    engine = ServingEngine(
        layout,
        128,
        host_bytes=host_bytes,
        transfer="staged" if transfer == "pinned" else transfer,
        checkpoint_tokens=None,
        tiers=tiers,
        **options,
    )
    if transfer == "pinned":
        mover, units = engine.offloader.mover, engine.offloader.ledger.units
        mover._transport.close()
        mover._transport = DirectTransport(
            mover.caches,
            engine.chunking,
            units,
            num_units=engine.offloader.ledger.pool.num_units,
            staging_units=10**5 // units.unit_bytes,
            show_progress=False,
        )
    return engine


def names_of(tier: MemoryTier) -> list[EntryName]:
    return [parse_name(text) for text in tier.entries]


def groups_in(tier: MemoryTier) -> list[int]:
    return sorted(name.group_idx for name in names_of(tier))


def stored_in(entries: OrderedDict, prompt=PROMPT, layout=MIXED, **options) -> None:
    """Serves a prompt in a process of its own, as it were; then the tier has its chunks."""
    engine = engine_with(MemoryTier(entries=entries), layout=layout, **options)
    serve(engine, "first", prompt)
    engine.offloader.close()


@pytest.fixture
def entries():
    held = OrderedDict()
    stored_in(held)
    return held


@pytest.mark.parametrize("write", ["through", "back"])
@pytest.mark.parametrize(
    ("name", "transfer"),
    [
        ("gemma", "direct"),
        ("uniform", "direct"),
        ("llama4", "direct"),
        *(("hybrid", t) for t in ("direct", "staged", "pinned")),
    ],
)
def test_a_new_process_restores_what_one_before_it_stored(name, write, transfer):
    layout = layouts.ALL[name]
    held = OrderedDict()
    engine = engine_with(MemoryTier(entries=held, write=write), layout=layout, transfer=transfer)
    serve(engine, "first", PROMPT, step=8)
    engine.offloader.close()
    again = engine_with(MemoryTier(entries=held, write=write), layout=layout, transfer=transfer)
    there = restored(again, PROMPT)
    alone = engine_with(layout=layout, transfer=transfer)
    serve(alone, "first", PROMPT, step=8)
    assert there == restored(alone, PROMPT) > 0
    assert again.bytes_compared == alone.bytes_compared
    stats = again.offloader.stats()
    assert stats.chunks_promoted == stats.tiers[0].chunks_read > 0
    assert stats.chunks_stored == 0
    assert stats.bytes_promoted == stats.tiers[0].bytes_read == stats.bytes_loaded
    for one in (again, alone):
        one.offloader.close()


def test_a_request_that_is_restored_from_a_tier_counts_once(entries):
    engine = engine_with(MemoryTier(entries=entries))
    assert restored(engine, PROMPT) == 32
    stats = engine.offloader.stats()
    assert (stats.lookups, stats.lookup_tokens, stats.hit_tokens) == (1, 33, 32)
    assert stats.bytes_loaded == sum(
        count * engine.chunking.chunk_bytes[engine.layout.names.index(name)]
        for name, count in {"full": 8, "window": 2, "state": 1}.items()
    )
    engine.offloader.close()


def test_a_tier_that_has_nothing_changes_no_rate():
    """The same requests with and without a tier that is never used: one definition of the hit rate."""
    rates = []
    for tiers in ([], [MemoryTier(write="never")]):
        engine = engine_with(*tiers, layout=layouts.UNIFORM)
        for n in range(6):
            serve(engine, n, np.arange(32) + 1000 * (n % 3))
        stats = engine.offloader.stats()
        rates.append((stats.lookups, stats.lookup_tokens, stats.hit_tokens, stats.chunks_stored, stats.chunks_loaded))
        engine.offloader.close()
    assert rates[0] == rates[1]


def test_only_what_the_hit_needs_is_promoted(entries):
    """Of a prompt's chunks the tier has all; a hit needs all of the full group, two of a window, and one state."""
    engine = engine_with(MemoryTier(entries=entries))
    found = engine.look_up(Served("again", np.append(PROMPT, 1)))
    assert found.hit_tokens == 32
    assert {name: len(chunks) for name, chunks in found.load.items()} == {"full": 8, "window": 2, "ring": 0, "state": 1}
    assert engine.offloader.stats().chunks_promoted == 11
    assert len(entries) > 11
    engine.offloader.close()


def test_a_draft_heads_chunks_come_too():
    """The chunks after the position must be resident for a draft head, though they are not loaded."""
    held = OrderedDict()
    stored_in(held, layout=DRAFT)
    engine = engine_with(MemoryTier(entries=held), layout=DRAFT)
    assert restored(engine, PROMPT) == 26
    assert engine.offloader.stats().chunks_promoted == 7 + 8
    engine.offloader.close()


BAD_BYTES = [
    Fault.FLIP,
    Fault.TRUNCATE,
    Fault.EXTEND,
    Fault.SWAP,
    Fault.STALE_LAYOUT,
    Fault.WRONG_KEY,
    Fault.ZEROS,
    Fault.GARBAGE,
]


@pytest.mark.parametrize(
    ("operation", "fault"),
    [*((operation, fault) for operation in ("put", "get") for fault in BAD_BYTES), ("get", Fault.HUGE)],
)
def test_a_chunk_of_wrong_bytes_is_a_miss_and_removed_and_those_before_it_survive(fault, operation):
    inner = MemoryTier(entries=OrderedDict())
    faulty = FaultyTier(inner)
    engine = engine_with(faulty, layout=layouts.UNIFORM)
    key = engine.offloader.ledger
    serve(engine, "other", PROMPT + 1000)
    spoilt = _name_of_chunk(engine, key, 5)
    if operation == "put":
        faulty.choose = FaultsOf({"put": fault}, [spoilt])
    serve(engine, "first", PROMPT)
    engine.offloader.flush()
    faulty.choose = FaultsOf({"get": fault}, [spoilt]) if operation == "get" else no_faults
    _forget_host(engine)
    assert restored(engine, PROMPT) == 5 * 4
    stats = engine.offloader.stats().tiers[0]
    assert (stats.bad_chunks, sum(stats.bad_by_reason.values()), stats.errors) == (1, 1, 0)
    faulty.settle()
    faulty.choose = no_faults
    assert spoilt.text not in inner.entries
    assert restored(engine, PROMPT) == 5 * 4
    engine.offloader.close()
    assert len(inner.entries) >= 5


@pytest.mark.parametrize(
    "fault", [Fault.IO_ERROR, Fault.PERMISSION, Fault.UNAVAILABLE, Fault.HANG, Fault.LATE, Fault.EVICT]
)
def test_a_chunk_that_cannot_be_read_is_a_miss_and_those_before_it_survive(entries, fault):
    held = OrderedDict()
    stored_in(held, layout=layouts.UNIFORM)
    faulty = FaultyTier(MemoryTier(entries=held, timeout_s=2.0 if fault in HANGING else LONG_S))
    engine = engine_with(faulty, layout=layouts.UNIFORM)
    faulty.choose = FaultsOf({"get": fault}, [_name_of_chunk(engine, engine.offloader.ledger, 5)])
    assert restored(engine, PROMPT) == 5 * 4
    stats = engine.offloader.stats().tiers[0]
    assert stats.bad_chunks == 0
    assert (stats.missing_chunks, stats.errors) == ((1, 0) if fault is Fault.EVICT else (0, 1))
    faulty.choose = no_faults
    faulty.settle()
    assert restored(engine, PROMPT) == (5 * 4 if fault is Fault.EVICT else 32)
    engine.offloader.check_integrity()
    engine.offloader.close()


@pytest.mark.parametrize(
    "fault",
    [
        Fault.FULL,
        Fault.IO_ERROR,
        Fault.PERMISSION,
        Fault.UNAVAILABLE,
        Fault.HANG,
        Fault.LATE,
        Fault.LOST,
        Fault.DROP,
        Fault.EVICT,
    ],
)
@pytest.mark.parametrize("write", ["through", "back"])
def test_a_tier_that_cannot_be_written_costs_misses_and_nothing_else(fault, write):
    inner = MemoryTier(entries=OrderedDict(), timeout_s=SOON_S if fault in HANGING else LONG_S, write=write)
    faulty = FaultyTier(inner, FaultsOf({"put": fault}))
    engine = engine_with(faulty)
    serve(engine, "first", PROMPT)
    engine.offloader.flush(timeout_s=5)
    assert restored(engine, PROMPT) == 32  # from the host pool
    stats = engine.offloader.stats().tiers[0]
    assert stats.full_chunks == (stats.full_chunks + stats.errors + stats.chunks_written + stats.dropped_chunks) * (
        fault is Fault.FULL
    )
    assert stats.pending_bytes == 0
    faulty.choose = no_faults
    faulty.settle()
    engine.offloader.ledger.invalidate()  # the host pool is empty
    engine.offloader._flow.levels[0].health.answered()  # as if its pause were over
    kept = fault in (Fault.LATE, Fault.LOST)  # some were written all the same
    assert bool(inner.entries) == kept
    assert restored(engine, PROMPT) <= (32 if kept else 0)
    engine.offloader.check_integrity()
    engine.offloader.close()


@pytest.mark.parametrize("fault", [Fault.IO_ERROR, Fault.UNAVAILABLE, Fault.HANG, Fault.LATE, Fault.LIE])
def test_a_tier_that_cannot_be_asked_has_nothing(entries, fault):
    timeout_s = SOON_S if fault in HANGING else LONG_S
    faulty = FaultyTier(MemoryTier(entries=entries, timeout_s=timeout_s), FaultsOf({"exists": fault}))
    engine = engine_with(faulty)
    before = time.monotonic()
    assert restored(engine, PROMPT) == 0
    assert time.monotonic() - before < 60
    engine.offloader.close(flush=False)


def test_hashes_of_ones_own_that_are_ints_are_warned_of_once(caplog):
    engine = engine_with(MemoryTier(), layout=layouts.UNIFORM)
    for n in range(3):
        engine.offloader.lookup(n, hashes=[1, 2], num_tokens=8)
        engine.offloader.lookup(str(n), hashes=[b"1" * 16], num_tokens=4)
    assert sum("`hashes` are ints" in record.message for record in caplog.records) == 1
    engine.offloader.close()


def test_a_tier_that_says_it_has_what_it_has_not_costs_a_miss():
    faulty = FaultyTier(MemoryTier(), FaultsOf({"exists": Fault.LIE}))
    engine = engine_with(faulty)
    assert restored(engine, PROMPT) == 0
    assert engine.offloader.stats().tiers[0].missing_chunks > 0
    engine.offloader.check_integrity()
    engine.offloader.close(flush=False)


def test_a_tier_that_fails_again_and_again_is_left_alone(entries):
    faulty = FaultyTier(MemoryTier(entries=entries, timeout_s=LONG_S), FaultsOf({"exists": Fault.UNAVAILABLE}))
    engine = engine_with(faulty)
    for number in range(10):
        assert restored(engine, PROMPT + number) == 0
    assert faulty.counts["exists", Fault.UNAVAILABLE] < 10 * 3
    assert not engine.offloader.stats().tiers[0].is_up
    faulty.choose = no_faults
    engine.offloader._flow.levels[0].health._until = 0.0  # as if the pause were over
    assert restored(engine, PROMPT) == 32
    assert engine.offloader.stats().tiers[0].is_up
    engine.offloader.close()


def test_the_next_tier_is_asked_for_what_the_first_lacks():
    upper, lower = OrderedDict(), OrderedDict()
    stored_in(lower)
    both = [MemoryTier("upper", entries=upper), MemoryTier("lower", entries=lower)]
    engine = engine_with(*both)
    assert restored(engine, PROMPT) == 32
    engine.offloader.flush()
    assert len(upper) == engine.offloader.stats().tiers[1].chunks_read  # written through as they became resident
    engine.offloader.close()
    for text in [text for text in upper if parse_name(text).group_idx == 1]:
        del upper[text]
    engine = engine_with(MemoryTier("upper", entries=upper), MemoryTier("lower", entries=lower))
    assert restored(engine, PROMPT) == 32
    assert [tier.chunks_read for tier in engine.offloader.stats().tiers] == [9, 2]
    engine.offloader.close()


def test_what_is_evicted_goes_to_a_tier_that_is_written_back_and_comes_again():
    tier = MemoryTier(write="back")
    engine = engine_with(tier, host_bytes=5000)
    prompts = [np.arange(32) + 1000 * n for n in range(6)]
    for n, prompt in enumerate(prompts):
        serve(engine, n, prompt)
        assert restored(engine, prompt) == 32
    assert engine.offloader.stats().evicted_chunks > 0
    assert engine.offloader.stats().tiers[0].dropped_chunks == 0
    assert [restored(engine, prompt) for prompt in prompts] == [32] * 6
    engine.offloader.check_integrity()
    engine.offloader.close()


def test_a_chunk_that_leaves_the_pool_while_it_is_copied_is_written_as_it_was():
    """The writer copied a chunk's units while they were given to another chunk: its bytes got the first one's name."""
    tier = MemoryTier()
    engine = engine_with(tier, host_bytes=5000)
    bytes_of_pool = engine.offloader._flow._bytes
    copy_out, copying, go_on, held_up = bytes_of_pool.copy_out, threading.Event(), threading.Event(), []

    def late(*args):
        if _of_writer() and not go_on.is_set():
            held_up.append(args)
            copying.set()
            assert go_on.wait(LONG_S)
        copy_out(*args)

    bytes_of_pool.copy_out = late
    serve(engine, "first", PROMPT)
    assert copying.wait(LONG_S)
    for n in range(1, 8):
        serve(engine, n, PROMPT + 1000 * n)
    assert engine.offloader.stats().evicted_chunks > 14
    go_on.set()
    engine.offloader.close()
    again = engine_with(MemoryTier(entries=tier.entries))
    for n in range(8):
        assert restored(again, PROMPT + 1000 * n) == 32
    assert again.offloader.stats().tiers[0].bad_chunks == 0
    again.offloader.close()


def test_every_chunk_is_written_whatever_its_place_in_the_pool_held_before():
    tier = MemoryTier()
    engine = engine_with(tier, host_bytes=5000)
    for n in range(8):
        serve(engine, n, PROMPT + 1000 * n)
        while not engine.offloader._flow.levels[0].idle:
            engine.offloader.poll()
    stats = engine.offloader.stats()
    assert stats.evicted_chunks > 0
    assert stats.tiers[0].dropped_chunks == 0
    assert len(tier.entries) == stats.chunks_stored == 8 * 14
    engine.offloader.close()


def test_what_a_tier_has_is_not_written_again_though_it_leaves_the_pool_again_and_again():
    tier = MemoryTier()
    engine = engine_with(tier, host_bytes=5000)
    prompts = [np.arange(32) + 1000 * n for n in range(6)]
    for n, prompt in enumerate(prompts):
        serve(engine, n, prompt)
    engine.offloader.flush()
    asked, exists = [], tier.exists
    tier.exists = lambda names, **how: (_of_writer() and asked.extend(names), exists(names, **how))[1]
    evicted, before = engine.offloader.stats().evicted_chunks, dict(tier.entries)
    for _ in range(2):
        assert [restored(engine, prompt) for prompt in prompts] == [32] * 6  # promoted, and evicted by the next ones
    assert engine.offloader.stats().evicted_chunks > evicted
    while not engine.offloader._flow.levels[0].idle:
        engine.offloader.poll()
    assert asked == []
    assert tier.entries == before
    engine.offloader.close()


def test_what_a_tier_lost_is_written_again_by_a_flush():
    tier = MemoryTier()
    engine = engine_with(tier)
    serve(engine, "first", PROMPT)
    assert engine.offloader.flush()
    before = dict(tier.entries)
    tier.entries.clear()
    assert engine.offloader.flush()
    assert tier.entries == before
    engine.offloader.close()


def test_a_flush_counts_nothing_twice_and_leaves_nothing_waiting_where_a_tier_is_down():
    faulty = FaultyTier(MemoryTier(timeout_s=LONG_S))
    engine = engine_with(faulty)
    serve(engine, "first", PROMPT)
    for _ in range(3):
        assert engine.offloader.flush()
    stats = engine.offloader.stats().tiers[0]
    assert (stats.chunks_written, stats.chunks_known) == (14, 0)
    level = engine.offloader._flow.levels[0]
    faulty.choose = lambda *_: Fault.UNAVAILABLE
    for _ in range(5):
        engine.offloader.flush(timeout_s=5)
    assert not engine.offloader.flush()
    assert level.idle
    engine.offloader.close()


def test_what_the_pool_uses_all_the_time_does_not_become_old_in_a_tier():
    """A prompt that never left the pool was never read from the tier, which evicted it first: a restart lost it."""
    tier = MemoryTier(max_bytes=20_000)
    touched, touch = [], tier.touch

    def told(names, **how):
        touched.extend(names)
        for name in names:
            if name.text in tier.entries:
                tier.entries.move_to_end(name.text)
        return touch(names, **how)

    tier.touch = told
    engine = engine_with(tier, host_bytes=5000)
    serve(engine, "hot", PROMPT)
    engine.offloader.flush()
    backlog = engine.offloader._flow._backlog
    for n in range(1, 40):
        serve(engine, n, PROMPT + 1000 * n)
        engine.offloader.flush()
        backlog._touched_at[:] = -np.inf  # as if minutes had passed
        assert restored(engine, PROMPT) == 32
        while engine.offloader._flow.levels[0].uses:
            engine.offloader.poll()
    assert touched
    engine.offloader.close(flush=False)
    again = engine_with(MemoryTier(entries=tier.entries))
    assert restored(again, PROMPT) == 32
    assert restored(again, PROMPT + 1000) == 0
    again.offloader.close()


def test_what_a_tier_lost_is_written_again_when_it_is_used():
    tier = MemoryTier()
    engine = engine_with(tier)
    serve(engine, "first", PROMPT)
    engine.offloader.flush()
    before = dict(tier.entries)
    tier.entries.clear()
    engine.offloader._flow._backlog._touched_at[:] = -np.inf  # as if minutes had passed
    assert restored(engine, PROMPT) == 32
    while engine.offloader._flow.levels[0].uses or not engine.offloader._flow.levels[0].idle:
        engine.offloader.poll()
    assert tier.entries
    assert tier.entries.items() <= before.items()
    engine.offloader.close()


def test_a_tier_that_is_only_read_is_not_written(entries):
    before = dict(entries)
    engine = engine_with(MemoryTier(entries=entries, write="never"))
    assert restored(engine, PROMPT) == 32
    serve(engine, "new", PROMPT + 1)
    engine.offloader.invalidate()
    assert restored(engine, PROMPT) == 0
    engine.offloader.close()
    assert dict(entries) == before


class TestInvalidation:
    def test_what_was_invalidated_is_a_miss_at_once_and_deleted(self, entries):
        engine = engine_with(MemoryTier(entries=entries))
        engine.invalidate()
        assert restored(engine, PROMPT) == 0
        engine.offloader.flush()
        assert not entries
        serve(engine, "new", PROMPT)  # other weights, the same name
        _forget_host(engine)
        assert restored(engine, PROMPT) == 32
        engine.offloader.close()

    @pytest.mark.parametrize("operation", ["list", "delete"])
    def test_as_long_as_it_cannot_be_deleted_it_is_a_miss(self, entries, operation):
        faulty = FaultyTier(MemoryTier(entries=entries, timeout_s=LONG_S), FaultsOf({operation: Fault.IO_ERROR}))
        engine = engine_with(faulty)
        engine.invalidate()
        for _ in range(3):
            assert restored(engine, PROMPT) == 0
        faulty.choose = no_faults
        engine.offloader._flow.levels[0].health.answered()
        serve(engine, "new", PROMPT)
        assert engine.offloader.flush(timeout_s=30)
        _forget_host(engine)
        assert restored(engine, PROMPT) == 32
        engine.offloader.close()

    def test_one_tenants_chunks_are_invalidated_alone(self):
        tier = MemoryTier()
        engine = engine_with(tier)
        for salt in (b"", b"tenant"):
            serve(engine, salt, PROMPT, salt=salt)
        engine.offloader.flush()
        both = len(tier.entries)
        engine.invalidate(b"tenant")
        engine.offloader.flush()
        assert len(tier.entries) == both // 2
        _forget_host(engine)
        assert restored(engine, PROMPT) == 32
        engine.offloader.close()

    def test_the_same_name_for_other_weights_deletes_and_another_name_does_not(self, entries):
        engine = engine_with(MemoryTier(entries=entries))
        engine.offloader.update_model("other")
        engine.offloader.flush()
        assert entries
        engine.offloader.update_model("")
        assert restored(engine, PROMPT) == 32
        engine.offloader.update_model("")
        engine.offloader.flush()
        assert restored(engine, PROMPT) == 0
        engine.offloader.close()

    @pytest.mark.parametrize("what", ["a namespace", "all"])
    def test_evicted_chunks_that_wait_are_not_written_after_the_others_were_deleted(self, what):
        """Copies of evicted chunks waited for a slow tier; the namespace was invalidated, cleared and found again, and
        then they were written: old bytes under good names."""
        tier = MemoryTier(write="back", timeout_s=30)
        gate, exists = threading.Event(), tier.exists
        tier.exists = lambda *args, **how: (_of_writer() and gate.wait(), exists(*args, **how))[1]
        engine = engine_with(tier, host_bytes=5000)
        for n in range(6):
            serve(engine, n, PROMPT + 1000 * n)
        assert engine.offloader.stats().tiers[0].waiting_chunks > 0
        engine.invalidate(b"" if what == "a namespace" else None)
        gate.set()
        assert engine.offloader.flush(timeout_s=30)
        assert not tier.entries
        assert engine.offloader.stats().tiers[0].pending_bytes == 0
        for n in range(6):
            assert restored(engine, PROMPT + 1000 * n) == 0
        engine.offloader.close()

    @pytest.mark.parametrize("fault", [Fault.LATE, Fault.LOST, Fault.HANG])
    def test_an_entry_that_may_still_turn_up_is_not_found_after_an_invalidation(self, fault):
        """A write that was given up was done after the entries of its namespace had been deleted."""
        inner = MemoryTier(timeout_s=1)
        faulty = FaultyTier(inner, FaultsOf({"put": fault}))
        engine = engine_with(faulty)
        level = engine.offloader._flow.levels[0]
        serve(engine, "first", PROMPT)
        while not level.counts.errors or level.num_writing:
            time.sleep(0)
        engine.invalidate()
        level.health.answered()
        faulty.choose = no_faults
        faulty.settle()  # what is late is done by now
        assert engine.offloader.flush(timeout_s=30)
        assert not inner.entries
        assert restored(engine, PROMPT) == 0
        serve(engine, "new", PROMPT)
        _forget_host(engine)
        assert restored(engine, PROMPT) == 32, "the tier is of use again"
        engine.offloader.close()

    def test_a_write_that_failed_long_ago_delays_no_invalidation(self):
        inner = MemoryTier(timeout_s=600)
        faulty = FaultyTier(inner, FaultsOf({"put": Fault.LOST}))
        engine = engine_with(faulty)
        level = engine.offloader._flow.levels[0]
        serve(engine, "first", PROMPT)
        engine.offloader.flush(timeout_s=5)
        faulty.choose = no_faults
        level.health.answered()
        level.clearing._turn_up_until.clear()  # as if its time were over
        engine.invalidate()
        assert engine.offloader.flush(timeout_s=60)
        assert not level.clearing.uncertain
        assert not inner.entries
        engine.offloader.close()

    def test_chunks_on_their_way_down_are_not_written_any_more(self):
        inner = MemoryTier(timeout_s=SOON_S)
        faulty = FaultyTier(inner, FaultsOf({"exists": Fault.HANG}))
        engine = engine_with(faulty)
        serve(engine, "first", PROMPT)
        engine.invalidate()
        faulty.choose = no_faults
        engine.offloader._flow.levels[0].health.answered()
        engine.offloader.flush(timeout_s=30)
        assert not inner.entries
        engine.offloader.close()


class TestPromotions:
    def test_requests_with_one_prompt_share_what_comes(self, entries):
        tier = FaultyTier(MemoryTier(entries=entries, timeout_s=30), FaultsOf({"get": Fault.HANG}))
        engine = engine_with(tier)
        tokens = np.append(PROMPT, 1)
        requests = [Served(n, tokens) for n in range(5)]
        for request in requests:
            found = engine.look_up(request, wait_s=0)
            assert (found.hit_tokens, found.promised_tokens) == (0, 32)
        assert tier.counts["get", Fault.HANG] == 11
        for request in requests[1:]:
            assert engine.offloader.promotion(request.request_id).work.num_chunks == 0
        engine.offloader.cancel(engine.offloader.promotion(0))
        tier.choose = no_faults
        results = engine.offloader.poll()
        assert [(result.operation, result.ok) for result in results] == [("promote", False), *[("promote", True)] * 4]
        for request in requests:
            end(engine, request)
        assert engine.offloader.ledger.pool.open_pins() == set()
        assert restored(engine, PROMPT) == 32
        engine.offloader.close()

    def test_a_program_that_fails_to_put_a_chunk_into_the_pool_costs_a_miss(self, entries, monkeypatch):
        engine = engine_with(MemoryTier(entries=entries), transfer="pinned")
        write = engine.offloader.mover.write_chunks
        calls = iter([True])

        def fails_once(*args):
            if next(calls, False):
                raise RuntimeError("no such kernel")
            write(*args)

        monkeypatch.setattr(engine.offloader.mover, "write_chunks", fails_once)
        assert restored(engine, PROMPT) < 32
        assert restored(engine, PROMPT) == 32
        engine.offloader.check_integrity()
        engine.offloader.close()

    def test_what_comes_late_is_found_by_the_next_lookup(self, entries):
        engine = engine_with(MemoryTier(entries=entries))
        request = Served("again", np.append(PROMPT, 1))
        found = engine.look_up(request, wait_s=0)
        assert found.promised_tokens == 32
        job = engine.offloader.promotion("again")
        assert job is None or engine.offloader.wait(job).ok
        assert engine.look_up(request).hit_tokens == 32
        engine.loaded(request, engine.offloader.wait(engine.load(request)))
        end(engine, request)
        engine.offloader.close()

    @pytest.mark.parametrize("how", ["finished", "cancelled", "late", "looked up again", "closed"])
    def test_a_promotion_that_hangs_leaves_nothing_behind(self, entries, how):
        tier = FaultyTier(MemoryTier(entries=entries, timeout_s=SOON_S), FaultsOf({"get": Fault.HANG}))
        engine = engine_with(tier, deadline_s=0.01 if how == "late" else None)
        request = Served("again", np.append(PROMPT, 1))
        assert engine.look_up(request, wait_s=0).promised_tokens == 32
        offloader = engine.offloader
        job = offloader.promotion("again")
        if how == "closed":
            offloader.close(flush=False)
            return
        if how == "cancelled":
            assert offloader.cancel(job)
        elif how == "looked up again":
            engine.look_up(request, restore="never")
        result = offloader.wait(job)
        assert (result.ok, result.valid_tokens) == (False, None)
        end(engine, request)
        offloader.wait()
        assert offloader.ledger.pool.open_pins() == offloader.ledger.pool.open_reservations() == set()
        assert offloader.ledger.pool.num_free_units == offloader.ledger.pool.num_units
        offloader.check_integrity()
        offloader.close(flush=False)

    def test_promotions_leave_half_of_the_pool_to_stores(self):
        held = OrderedDict()
        stored_in(held, layout=layouts.UNIFORM)
        chunk = layouts.UNIFORM.groups[0].block_bytes
        engine = engine_with(MemoryTier(entries=held), layout=layouts.UNIFORM, host_bytes=10 * chunk)
        found = engine.look_up(Served("again", np.append(PROMPT, 1)))
        assert 0 < found.hit_tokens <= 5 * 4
        assert engine.offloader.stats().chunks_promoted <= 5
        engine.offloader.check_integrity()
        engine.offloader.close()

    def test_chunks_of_a_finished_request_stay_in_the_pool(self, entries):
        engine = engine_with(MemoryTier(entries=entries))
        request = Served("gone", np.append(PROMPT, 1))
        engine.look_up(request, wait_s=0)
        job = engine.offloader.promotion("gone")
        end(engine, request)
        assert job is None or engine.offloader.wait(job).ok
        assert engine.offloader.ledger.pool.open_pins() == set()
        assert engine.offloader.stats().resident_chunks == 11
        engine.offloader.close()

    def test_a_prefetch_brings_a_prompt_before_its_request(self, entries):
        tier = MemoryTier(entries=entries)
        engine = engine_with(tier)
        job = engine.offloader.prefetch(np.append(PROMPT, 1))
        result = engine.offloader.wait(job)
        assert (result.operation, result.request_id, result.ok, result.num_chunks) == ("promote", None, True, 11)
        entries.clear()
        assert restored(engine, PROMPT) == 32
        assert engine.offloader.prefetch(np.append(PROMPT, 1)) is None
        assert engine.offloader.ledger.pool.namespaces.in_use == 1
        engine.offloader.close(flush=False)

    def test_a_limit_of_tokens_holds_for_lower_tiers(self):
        held = OrderedDict()
        stored_in(held, layout=layouts.UNIFORM)
        engine = engine_with(MemoryTier(entries=held), layout=layouts.UNIFORM)
        assert engine.look_up(Served("some", np.append(PROMPT, 1)), max_load_tokens=19).hit_tokens == 19
        assert engine.offloader.stats().chunks_promoted == 5
        assert engine.look_up(Served("none", np.append(PROMPT, 1)), skip=True).hit_tokens == 0
        engine.offloader.close()


def test_ranks_that_have_a_prompt_in_their_tiers_alone_resume_it_together():
    """Each rank told the others what its pool had, which was nothing; no tier was ever read."""
    tokens, ranks = np.append(PROMPT, 1), []
    for shard in ("0", "1"):
        held = OrderedDict()
        stored_in(held, shard=shard)
        if shard == "1":  # one chunk is lost: the other rank could go further
            del held[next(text for text in held if parse_name(text).group_idx == 0)]
        ranks.append(engine_with(MemoryTier(entries=held), shard=shard))
    told = [engine.offloader.restorable(tokens) for engine in ranks]
    assert told[0].largest() == 32 > told[1].largest()
    hits = [
        engine.look_up(Served("r", tokens), ranks=[other]).hit_tokens
        for engine, other in zip(ranks, reversed(told), strict=True)
    ]
    assert hits[0] == hits[1] == (told[0] & told[1]).largest()
    again = [engine.offloader.ledger.restorable(tokens) for engine in ranks]
    assert all(hits[0] in one for one in again)
    for engine in ranks:
        assert engine.offloader.ledger.num_requests == 1
        engine.offloader.close(flush=False)


class TestDecisions:
    def test_without_a_measured_rate_all_is_restored(self, entries):
        engine = engine_with(MemoryTier(entries=entries))
        found = engine.look_up(Served("again", np.append(PROMPT, 1)))
        assert found.decision.chosen.source == "memory"
        assert (found.decision.forced, found.decision.recompute_s) == (False, None)
        assert [option.source for option in found.decision.options] == ["device", "memory"]
        assert found.decision.chosen.tier_bytes == found.decision.chosen.num_bytes == found.load_bytes
        engine.offloader.close()

    def test_what_is_computed_faster_than_it_is_restored_is_computed(self, entries):
        engine = engine_with(MemoryTier(entries=entries))
        offloader, tokens = engine.offloader, np.append(PROMPT, 1)
        offloader.note_prefill(1000, 0.001)
        first = engine.look_up(Served("first", tokens))
        assert first.hit_tokens == 32, "a tier that was not measured is tried"
        offloader._flow.levels[0].read_speed.add(1000, 10.0)
        for request_id in ("first", "second"):
            engine.drop_blocks(Served(request_id, tokens))
        offloader.finish("first")
        _forget_host(engine)
        second = engine.look_up(Served("second", tokens))
        assert (second.hit_tokens, second.decision.chosen.source) == (0, "device")
        assert second.decision.restore_s > second.decision.recompute_s
        assert offloader.stats().requests_recomputed == 1
        always = engine.look_up(Served("second", tokens), restore="always")
        assert (always.hit_tokens, always.decision.forced) == (32, True)
        never = engine.look_up(Served("second", tokens), restore="never")
        assert (never.hit_tokens, never.decision.forced) == (0, True)
        offloader.close()

    def test_the_host_pool_alone_may_be_the_best(self, entries):
        """Half of the prompt is in the host pool; the rest is in a tier that is slow."""
        engine = engine_with(MemoryTier(entries=entries), layout=MIXED)
        serve(engine, "half", PROMPT[:16])
        engine.offloader.note_prefill(1000, 1.0)
        engine.offloader._flow.levels[0].read_speed.add(1000, 10.0)
        engine.offloader._flow.load_speed.add(10**9, 1e-3)
        found = engine.look_up(Served("again", np.append(PROMPT, 1)))
        assert (found.hit_tokens, found.decision.chosen.source) == (16, "host")
        assert [option.hit_tokens for option in found.decision.options] == [0, 16, 32]
        engine.offloader.close()

    def test_words_that_are_none_are_refused(self, entries):
        engine = engine_with(MemoryTier(entries=entries))
        with pytest.raises(ValueError, match="`restore` must be one of 'auto', 'always', 'never', got 'perhaps'"):
            engine.offloader.lookup("a", [1, 2], restore="perhaps")
        with pytest.raises(ValueError, match="`wait_s` must be a number of seconds"):
            engine.offloader.lookup("a", [1, 2], wait_s=-1)
        with pytest.raises(ValueError, match="`num_tokens` must be a positive int, got 0"):
            engine.offloader.note_prefill(0, 1.0)
        assert engine.offloader.ledger.num_requests == 0
        engine.offloader.close()


def _spec(**changes):
    shape = {"name": "f", "block_shape": (4, 8), "dtype": "float32"} | changes
    return kvjax.CacheLayout([kvjax.GroupSpec("full", kvjax.FullAttention(), 4, [kvjax.LeafSpec(**shape)])])


@pytest.mark.parametrize(
    "other",
    [
        {"layout": _spec(dtype="int32")},
        {"layout": _spec(block_shape=(4, 2, 4))},
        {"layout": _spec(name="g")},
        {"model": "other weights"},
        {"shard": "tp 1 of 2"},
        {"blocks_per_chunk": 2},
    ],
    ids=lambda other: next(iter(other)),
)
def test_what_means_something_else_never_hits(other):
    """Equal sizes, another meaning: a float page read as ints, another shape of as many elements, another shard."""
    held = OrderedDict()
    stored_in(held, layout=_spec())
    engine = engine_with(MemoryTier(entries=held), **{"layout": _spec()} | other)
    assert restored(engine, PROMPT) == 0
    assert engine.offloader.stats().tiers[0].bad_chunks == 0
    engine.offloader.close()
    same = engine_with(MemoryTier(entries=held), layout=_spec())
    assert restored(same, PROMPT) == 32
    same.offloader.close()


def test_memory_for_chunks_on_their_way_is_bounded():
    """Chunks that leave the pool while the tier hangs are dropped beyond its budget, and counted."""
    entry = MIXED.groups[0].block_bytes + HEADER_BYTES
    tier = FaultyTier(
        MemoryTier(write="back", timeout_s=30, max_pending_bytes=4 * entry), FaultsOf({"put": Fault.HANG})
    )
    engine = engine_with(tier, host_bytes=3000)
    for n in range(8):
        serve(engine, n, np.arange(32) + 1000 * n)
        assert engine.offloader.stats().tiers[0].pending_bytes <= 4 * entry
    stats = engine.offloader.stats()
    assert 0 < stats.tiers[0].dropped_chunks < stats.evicted_chunks
    assert engine.offloader._flow.levels[0].num_undone == stats.tiers[0].dropped_chunks, "which a flush tells"
    engine.offloader.close(flush=False, timeout_s=1)


@pytest.mark.parametrize(
    ("tiers", "message"),
    [
        ([3], "`tiers` must be tiers or their URLs, got 3"),
        ([MemoryTier("a"), MemoryTier("a")], "`tiers` must have distinct names, got a, a"),
        ([MemoryTier("host")], "`tiers` must not be named 'device' or 'host', got host"),
        ([MemoryTier(str(n)) for n in range(9)], "`tiers` must be at most 8, got 9"),
    ],
)
def test_tiers_that_are_none_are_refused(tiers, message):
    with pytest.raises(ValueError, match=message):
        engine_with(*tiers)


def test_one_url_is_no_sequence_of_tiers():
    with pytest.raises(ValueError, match="`tiers` must be a sequence of tiers or their URLs, got str"):
        ServingEngine(MIXED, 8, host_bytes=4096, tiers="file:///tmp")


def test_a_request_that_ends_while_it_is_looked_for_is_left_alone(entries):
    tier = MemoryTier(entries=entries)
    engine = engine_with(tier)
    asked = tier.exists

    def exists(*args, **kwargs):
        if engine.offloader.ledger.num_requests:
            engine.offloader.finish("again")
        return asked(*args, **kwargs)

    tier.exists = exists
    found = engine.offloader.lookup("again", np.append(PROMPT, 1))
    assert found.hit_tokens == 0
    assert engine.offloader.ledger.pool.open_pins() == set()
    engine.offloader.check_integrity()
    engine.offloader.close()


def _name_of_chunk(engine: ServingEngine, ledger: kvjax.Ledger, chunk_idx: int) -> EntryName:
    """The entry of a chunk of the prompt in the only group."""
    request = ledger.new_request(np.append(PROMPT, 1), hashes=None, num_tokens=None, salt=b"")
    (key,) = request.chains[0].keys(np.array([chunk_idx]))
    ledger.forget(request)
    return EntryName(request.namespace, key, HEADER_BYTES + engine.chunking.chunk_bytes[0])


def _forget_host(engine: ServingEngine) -> None:
    """The host pool is empty, the tiers have what was in it."""
    engine.offloader.flush(timeout_s=5)
    engine.offloader.ledger.invalidate()


def _of_writer() -> bool:
    return threading.current_thread().name.endswith("writer")
