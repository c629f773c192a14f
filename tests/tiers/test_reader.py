"""The reader: who may have the memory of an entry, and when."""

import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest

from kvjax.keys import chunk_key
from kvjax.tiers import futures
from kvjax.tiers.buffers import Buffers
from kvjax.tiers.entries import EntryName
from kvjax.tiers.fetch import Fetch
from kvjax.tiers.frame import HEADER_BYTES, write_header
from kvjax.tiers.level import Level
from kvjax.tiers.reader import Part, Reader
from tests.support.tiers import MemoryTier

NAME = EntryName(bytes(16), chunk_key(bytes(16), 0, bytes(16)), HEADER_BYTES + 100)
LONG_S = 30


class SlowPool:
    """A pool into which a copy takes as long as a test wants."""

    any_thread = True

    def __init__(self):
        self.copying, self.go_on = threading.Event(), threading.Event()
        self.held = np.zeros(100, np.uint8)

    def copy_in(self, group_idx, unit_ids, data):
        self.copying.set()
        assert self.go_on.wait(LONG_S)
        self.held[:] = data


class ByHand(MemoryTier):
    """Its futures end when a test says so."""

    def get(self, names, buffers, *, deadline):
        self.given, self.futures = buffers, [Future() for _ in names]
        self.asked.set()
        return self.futures

    asked: threading.Event


@pytest.fixture
def parts(monkeypatch):
    monkeypatch.setattr("kvjax.tiers.reader.GRACE_S", 0.0)
    assert futures.GRACE_S > 0
    pool, buffers, tier = SlowPool(), Buffers(10_000), ByHand(timeout_s=0.05)
    tier.asked = threading.Event()
    level = Level(tier, 0)
    reader = Reader(pool, [level], threading.RLock(), buffers)
    yield pool, buffers, tier, level, reader
    for thread in reader.stop():
        thread.join(LONG_S)
    tier.close()


def begin(reader, level, tier) -> Fetch:
    fetch = Fetch(1, time.monotonic() + LONG_S)
    reader.read(level, Part(fetch, [0], [NAME], [np.array([0])]))
    assert tier.asked.wait(LONG_S)
    return fetch


def entry() -> bytearray:
    frame = bytearray(range(100)).rjust(NAME.num_bytes, b"\0")
    write_header(memoryview(frame), NAME, group_name="g", chunk_idx=0, tokens_per_chunk=4)
    return frame


def finish_reading(level) -> None:
    while not level.counts.errors:
        time.sleep(0)


def test_memory_from_which_a_chunk_is_still_copied_is_nobody_elses(parts):
    """The copy into the pool took longer than anybody waits for a read; the memory was handed out meanwhile, and the
    pool got the bytes of another entry."""
    pool, buffers, tier, level, reader = parts
    fetch = begin(reader, level, tier)
    tier.given[0][:] = entry()
    ends = threading.Thread(target=tier.futures[0].set_result, args=(NAME.num_bytes,))
    ends.start()
    assert pool.copying.wait(LONG_S)
    finish_reading(level)  # the reader has gone on
    other = buffers.take(NAME.num_bytes)
    other[:] = 0xEE
    pool.go_on.set()
    ends.join(LONG_S)
    assert fetch.settle(LONG_S)
    assert fetch.came.all()
    assert pool.held.tolist() == list(range(100))


def test_memory_of_a_future_that_never_ends_is_nobody_elses(parts):
    _, buffers, tier, level, reader = parts
    tier.futures = []
    fetch = begin(reader, level, tier)
    tier.futures[0].set_running_or_notify_cancel()  # it cannot be cancelled any more
    finish_reading(level)
    assert fetch.settle(LONG_S)
    assert not fetch.came.any()
    others = [buffers.take(NAME.num_bytes) for _ in range(4)]
    tier.given[0][:] = entry()
    assert not any(other.any() for other in others)


def test_memory_is_used_again_once_a_chunk_is_in_the_pool(parts):
    pool, buffers, tier, level, reader = parts
    pool.go_on.set()
    fetch = begin(reader, level, tier)
    tier.given[0][:] = entry()
    tier.futures[0].set_result(NAME.num_bytes)
    assert fetch.settle(LONG_S)
    while level.counts.chunks_read == 0:
        time.sleep(0)
    assert memoryview(tier.given[0]).obj is buffers.take(NAME.num_bytes).base.obj
