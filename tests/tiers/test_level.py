"""What an offloader says of a tier: in the log, of its budget, and after a flush."""

import logging
import threading

import numpy as np
import pytest

import kvjax
from kvjax.tiers import Tier, TierError, TierFullError, TierUnavailableError
from kvjax.tiers.frame import HEADER_BYTES
from kvjax.tiers.level import Level
from kvjax.tiers.log_limit import LogLimit
from tests.support.clock import Clock
from tests.support.entries import entry
from tests.support.served import serve
from tests.support.serving_engine import ServingEngine
from tests.support.tier_faults import Fault, FaultsOf, no_faults
from tests.support.tiers import FaultyTier, MemoryTier

PROMPT = np.arange(100, 132)
LAYOUT = kvjax.CacheLayout(
    [
        kvjax.GroupSpec("small", kvjax.FullAttention(), 4, [kvjax.LeafSpec("s", (4, 2), "float32")]),
        kvjax.GroupSpec("large", kvjax.SlidingWindow(8), 4, [kvjax.LeafSpec("l", (4, 8), "float32")]),
    ]
)
LEAST = 4 * 8 * 4 + HEADER_BYTES  # bytes of an entry of the group "large"
LONG_S = 60.0


def engine_with(*tiers, host_bytes=2**16) -> ServingEngine:
    return ServingEngine(LAYOUT, 64, host_bytes=host_bytes, transfer="direct", checkpoint_tokens=None, tiers=tiers)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def level(clock, caplog):
    caplog.set_level(logging.INFO, logger="kvjax")
    tier = MemoryTier()
    yield Level(tier, 0, clock)
    tier.close()


# --- the log --------------------------------------------------------------------------------------------


def test_few_lines_a_minute_and_the_next_one_says_how_many_were_left_out(clock):
    limit = LogLimit(2, clock)
    assert [limit.left_out() for _ in range(5)] == [0, 0, None, None, None]
    clock.now += 59
    assert limit.left_out() is None
    clock.now += 1
    assert [limit.left_out() for _ in range(3)] == [4, 0, None]


def test_an_outage_is_told_on_whatever_day(level, clock, caplog):
    for _day in range(3):
        caplog.clear()
        for _ in range(3000):
            level.failed("writing", TierUnavailableError("memory: cannot be reached"))
        level.health.answered()
        said = [record.getMessage() for record in caplog.records]
        assert len(said) == 20 + 2
        assert said[0].startswith("memory: writing failed: TierUnavailableError: cannot be reached")
        assert said.count("memory: is down, is left alone for a while, and is then asked again") == 1
        assert said[-1] == "memory: answers again"
        clock.now += 24 * 3600


def test_what_was_left_out_is_counted_in_the_next_line(level, clock, caplog):
    for _ in range(1025):
        level.failed("writing", TierFullError("no room"))
    clock.now += 61
    level.found_bad(entry(1).name, "checksum")
    assert caplog.records[-1].getMessage().endswith(f"removed: {entry(1).name.text} (1,005 more lines were left out)")
    assert len(caplog.records) == 21


def test_a_tier_that_goes_up_and_down_all_the_time_does_not_fill_the_log(level, caplog):
    for _ in range(1000):
        for _ in range(3):
            level.failed("writing", TierError("no"))
        level.health.answered()
    assert len(caplog.records) == 40


def test_a_tier_that_fails_now_and_then_is_not_said_to_be_down(level, caplog):
    for _ in range(5):
        level.failed("writing", TierError("no"))
        level.health.answered()
    assert all("failed" in record.getMessage() for record in caplog.records)


# --- budgets --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["max_bytes", "max_pending_bytes"])
@pytest.mark.parametrize(
    "url",
    [
        "file://{folder}/tier?{option}={budget}",
        "redis://localhost:1?{option}={budget}",
        "s3://bucket/a/?endpoint=http://127.0.0.1:1&{option}={budget}",
    ],
    ids=["file", "redis", "s3"],
)
def test_a_budget_below_an_entry_is_refused(url, option, tmp_path, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    said = rf"^`{option}` of the tier '{url[:4]}[^']*' must hold at least one chunk of the largest group, 'large', "
    for budget in (5, LEAST - 1):
        with pytest.raises(ValueError, match=rf"{said}with its header: {LEAST} bytes, got {budget}$"):
            engine_with(url.format(folder=tmp_path, option=option, budget=budget))
    engine_with(url.format(folder=tmp_path, option=option, budget=LEAST)).offloader.close(flush=False)
    engine_with(url.format(folder=tmp_path, option=option, budget=5) + "&write=never").offloader.close(flush=False)


def test_tiers_that_were_opened_for_nothing_are_closed(tmp_path, monkeypatch):
    closed = []
    monkeypatch.setattr("kvjax.tiers.kvstore.KVStoreTier.close", lambda tier: closed.append(tier.name))
    mine = MemoryTier(max_bytes=5)
    with pytest.raises(ValueError, match="'memory'"):
        engine_with(f"file://{tmp_path}", mine)
    assert closed == [f"file://{tmp_path}"]
    mine.close()


def test_tiers_have_no_budget_unless_they_say_so():
    assert Tier.max_bytes is None


def test_a_tier_of_one_entry_is_written(tmp_path):
    engine = engine_with(f"file://{tmp_path}?max_bytes={LEAST}")
    serve(engine, "first", PROMPT)
    engine.offloader.flush()
    assert engine.offloader.stats().tiers[0].chunks_written > 1
    engine.offloader.close()


# --- flush ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "fault"), [("put", Fault.FULL), ("put", Fault.IO_ERROR), ("exists", Fault.IO_ERROR)]
)
def test_a_flush_tells_that_nothing_was_written(operation, fault):
    faulty = FaultyTier(MemoryTier(timeout_s=LONG_S), FaultsOf({operation: fault}))
    engine = engine_with(faulty)
    serve(engine, "first", PROMPT)
    assert not engine.offloader.flush(timeout_s=LONG_S)
    assert not engine.offloader.flush(timeout_s=LONG_S)
    assert len(faulty.inner.entries) == 0
    faulty.choose = no_faults
    engine.offloader._flow.levels[0].health._until = 0.0  # as if the pause were over
    assert engine.offloader.flush(timeout_s=LONG_S)
    assert len(faulty.inner.entries) == engine.offloader.stats().tiers[0].chunks_written > 0
    engine.offloader.close()


def test_a_flush_tells_of_one_chunk_that_found_no_room():
    faulty, refused = FaultyTier(MemoryTier(timeout_s=LONG_S)), []

    def choose(operation, name):
        if operation != "put":
            return None
        if not refused:
            refused.append(name)
        return Fault.FULL if name in refused else None

    faulty.choose = choose
    engine = engine_with(faulty)
    serve(engine, "first", PROMPT)
    assert not engine.offloader.flush(timeout_s=LONG_S)
    assert len(faulty.inner.entries) > 1
    assert refused[0].text not in faulty.inner.entries
    faulty.choose = no_faults
    assert engine.offloader.flush(timeout_s=LONG_S)
    assert refused[0].text in faulty.inner.entries
    engine.offloader.close()


def test_a_flush_tells_that_it_could_not_look():
    """What a tier had is looked for; whether it is there still, nobody knows then."""
    faulty = FaultyTier(MemoryTier(timeout_s=LONG_S))
    engine = engine_with(faulty)
    serve(engine, "first", PROMPT)
    assert engine.offloader.flush(timeout_s=LONG_S)
    faulty.choose = FaultsOf({"exists": Fault.IO_ERROR})
    assert not engine.offloader.flush(timeout_s=LONG_S)
    engine.offloader.close(flush=False)


def test_a_flush_tells_of_what_left_the_pool_and_could_not_be_written():
    faulty, flushing = FaultyTier(MemoryTier(write="back", timeout_s=LONG_S)), threading.Event()

    def held_up(_operation, _name):
        if threading.current_thread().name.endswith("writer"):
            flushing.wait(LONG_S)

    faulty.choose = held_up
    engine = engine_with(faulty, host_bytes=1024)
    for n in range(3):
        serve(engine, f"{n}", PROMPT + 1000 * n)
    flow = engine.offloader._flow
    level, tick = flow.levels[0], flow.tick
    gone = [item.name for item in (*level.in_hand, *level.frames)][:1]
    assert gone
    assert not faulty.inner.entries

    def choose(operation, name):
        return Fault.IO_ERROR if operation == "put" and name in gone else None

    def ticked():
        faulty.choose = choose
        flushing.set()
        tick()

    flow.tick = ticked
    assert not engine.offloader.flush(timeout_s=LONG_S)
    assert faulty.inner.entries.keys().isdisjoint(name.text for name in gone)
    faulty.choose = no_faults
    level.health._until = 0.0  # as if the pause were over
    engine.offloader.flush(timeout_s=LONG_S)
    assert engine.offloader.flush(timeout_s=LONG_S), "what is in the pool is all there"
    engine.offloader.close()
