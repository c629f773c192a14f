"""The small parts between an offloader and its tiers: speeds, decisions, health, fetches, buffers, frames, names."""

import math
import time
from concurrent.futures import Future

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.decision import Option, decide
from kvjax.keys import HASH_BYTES, chunk_key
from kvjax.tiers.buffers import Buffers, view_of
from kvjax.tiers.clearing import Clearing
from kvjax.tiers.entries import MOST_ENTRY_BYTES, ROOT, EntryName, folder_of, parse_name
from kvjax.tiers.fetch import Fetch
from kvjax.tiers.frame import (
    HEADER_BYTES,
    MAGIC,
    BadFrameError,
    entry_bytes,
    read_header,
    verify,
    write_header,
)
from kvjax.tiers.futures import result_of
from kvjax.tiers.health import Health
from kvjax.tiers.speed import Speed
from kvjax.tiers.tier import TierTimeoutError
from tests.support.clock import Clock

DIGESTS = st.binary(min_size=HASH_BYTES, max_size=HASH_BYTES)


def names():
    return st.builds(
        lambda namespace, digest, group, size: EntryName(namespace, chunk_key(digest, group, namespace), size),
        DIGESTS,
        DIGESTS,
        st.integers(0, 2**32 - 1),
        st.integers(HEADER_BYTES + 1, 2000),
    )


class TestNames:
    @given(names())
    def test_a_name_is_read_from_its_text(self, name):
        assert parse_name(name.text) == name
        assert name.text.startswith(folder_of(name.namespace))

    @given(names(), st.data())
    def test_nothing_else_is_a_name(self, name, data):
        text = list(name.text)
        place = data.draw(st.integers(0, len(text) - 1))
        text[place] = data.draw(st.sampled_from("gG/.\\\0 A-"))
        other = parse_name("".join(text))
        assert other is None or other == name

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "..",
            f"{ROOT}/../x",
            f"/{ROOT}/",
            f"{ROOT}/{'0' * 32}/00-5/00/{'0' * 32}",
            f"{ROOT}/{'0' * 32}/0-0/00/{'0' * 32}",
        ],
    )
    def test_texts_that_lead_elsewhere_are_none(self, text):
        assert parse_name(text) is None

    def test_a_name_of_an_absurd_size_is_none(self):
        text = f"{ROOT}/{'0' * 32}/0-{MOST_ENTRY_BYTES + 1}/00/{'0' * 32}"
        assert parse_name(text) is None

    def test_a_name_in_the_folder_of_another_hash_is_none(self):
        assert parse_name(f"{ROOT}/{'0' * 32}/0-500/11/{'0' * 32}") is None


def framed(name: EntryName, rng: np.random.Generator) -> bytearray:
    frame = bytearray(rng.integers(0, 256, name.num_bytes, np.uint8).tobytes())
    write_header(memoryview(frame), name, group_name="füll", chunk_idx=7, tokens_per_chunk=32)
    return frame


class TestFrames:
    @given(names(), st.integers(0, 2**32), st.data())
    def test_what_was_written_is_verified_and_nothing_else(self, name, seed, data):
        frame = framed(name, np.random.default_rng(seed))
        payload = bytes(frame[HEADER_BYTES:])
        assert bytes(verify(memoryview(frame), name)) == payload
        at = data.draw(st.integers(0, len(frame) - 1))
        frame[at] ^= data.draw(st.integers(1, 255))
        with pytest.raises(BadFrameError):
            verify(memoryview(frame), name)

    @given(names(), names(), st.integers(0, 2**32))
    def test_an_entry_under_another_name_is_refused(self, name, other, seed):
        same_size = EntryName(other.namespace, other.key, name.num_bytes)
        frame = framed(name, np.random.default_rng(seed))
        if same_size != name:
            with pytest.raises(BadFrameError):
                verify(memoryview(frame), same_size)

    def test_a_group_of_the_same_hash_is_refused(self):
        name = EntryName(bytes(16), chunk_key(bytes(16), 0, bytes(16)), 300)
        other = EntryName(bytes(16), chunk_key(bytes(16), 1, bytes(16)), 300)
        with pytest.raises(BadFrameError, match="key"):
            verify(memoryview(framed(name, np.random.default_rng(0))), other)

    @given(names(), st.integers(0, 2**32), st.integers(0, 200))
    def test_another_length_is_refused(self, name, seed, cut):
        frame = framed(name, np.random.default_rng(seed))
        for wrong in (frame[: len(frame) - 1 - cut], frame + bytes(cut + 1)):
            with pytest.raises(BadFrameError, match="length"):
                verify(memoryview(wrong), name)

    def test_a_header_tells_what_a_person_wants_to_know(self):
        name = EntryName(bytes(16), chunk_key(bytes(16), 3, bytes(16)), entry_bytes(100))
        header = read_header(framed(name, np.random.default_rng(0)))
        assert (header.group_idx, header.group_name, header.chunk_idx) == (3, "füll", 7)
        assert (header.token_span, header.payload_bytes) == ((224, 256), 100)

    @given(st.binary(max_size=300))
    def test_anything_at_all_is_no_header(self, data):
        with pytest.raises(BadFrameError):
            read_header(data)
        with pytest.raises(BadFrameError):
            read_header(MAGIC + data)


class TestSpeed:
    def test_a_line_is_found(self):
        speed = Speed(Clock())
        for amount in (1e6, 4e6, 2e6, 8e6):
            speed.add(amount, 0.01 + amount / 1e9)
        assert speed.latency_s == pytest.approx(0.01)
        assert speed.per_second == pytest.approx(1e9)
        assert speed.seconds(16e6) == pytest.approx(0.026)

    def test_equal_amounts_tell_no_latency(self):
        speed = Speed(Clock())
        for _ in range(5):
            speed.add(1e6, 0.002)
        assert (speed.latency_s, speed.seconds(2e6)) == (0.0, pytest.approx(0.004))

    def test_what_was_measured_long_ago_says_nothing(self):
        clock = Clock()
        speed = Speed(clock)
        speed.add(1e6, 10.0)
        clock.now += 61
        assert speed.seconds(1) is speed.per_second is speed.latency_s is None
        speed.add(1e6, 0.001)
        assert speed.seconds(1e6) == pytest.approx(0.001)

    def test_newer_measurements_count_for_more(self):
        speed = Speed(Clock())
        for seconds in [1.0] * 50 + [0.01] * 50:
            speed.add(1e6, seconds)
        assert speed.seconds(1e6) < 0.05

    @given(st.lists(st.tuples(st.floats(-1, 1e12), st.floats(-1, 1e6)), max_size=30), st.floats(0, 1e12))
    def test_no_estimate_is_negative(self, measured, amount):
        speed = Speed(Clock())
        for each in measured:
            speed.add(*each)
        found = speed.seconds(amount)
        assert found is None or (found >= 0 and math.isfinite(found))


def option(source, tokens, restore_s, recompute_s):
    return Option(source, tokens, tokens * 10, tokens * 5, restore_s, recompute_s)


class TestDecisions:
    WAYS = (option("device", 0, 0.0, 4.0), option("host", 50, 0.1, 2.0), option("disk", 100, 5.0, 0.0))

    def test_the_way_that_takes_least_time_is_taken(self):
        decision = decide(self.WAYS, "auto")
        assert (decision.chosen.source, decision.restores, decision.forced) == ("host", True, False)
        assert (decision.restore_s, decision.recompute_s) == (5.0, 4.0)

    @pytest.mark.parametrize(("restore", "source"), [("always", "disk"), ("never", "device")])
    def test_the_caller_may_force_either(self, restore, source):
        decision = decide(self.WAYS, restore)
        assert (decision.chosen.source, decision.forced) == (source, True)

    def test_what_was_not_measured_is_tried(self):
        ways = (*self.WAYS[:2], option("disk", 100, None, 0.0))
        assert decide(ways, "auto").chosen.source == "disk"
        assert decide(ways, "auto").restore_s is None

    def test_as_long_as_nobody_tells_how_fast_tokens_are_computed_all_is_restored(self):
        ways = [option(way.source, way.hit_tokens, way.restore_s, None) for way in self.WAYS]
        assert decide(ways, "auto").chosen.source == "disk"

    @given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=6))
    def test_no_other_way_takes_less(self, costs):
        ways = [option(str(n), n, *cost) for n, cost in enumerate(costs)]
        chosen = decide(ways, "auto").chosen
        assert chosen.restore_s + chosen.recompute_s == min(map(sum, costs))


class TestHealth:
    def test_three_failures_in_a_row_and_it_is_left_alone_for_longer_each_time(self):
        clock = Clock()
        health = Health(clock)
        for _ in range(2):
            health.failed()
        health.answered()
        for _ in range(2):
            health.failed()
            assert health.is_up
        pauses = []
        for _ in range(9):
            health.failed()
            assert not health.is_up
            pauses.append(health.pause_s)
            clock.now += health.pause_s
            assert health.is_up
            assert health.pause_s == 0
        assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
        health.answered()
        health.failed()
        assert health.is_up

    def test_failures_that_were_under_way_prolong_no_pause(self):
        clock = Clock()
        health = Health(clock)
        for _ in range(10):
            health.failed()
        assert health.pause_s == 0.5
        assert health.times_down == 1


class TestFetch:
    def test_it_ends_when_every_row_came_or_failed(self):
        fetch, written = Fetch(3, math.inf), []
        assert fetch.land(1, lambda: written.append(1))
        assert not fetch.land(1, lambda: written.append("twice"))
        fetch.fail(0, "lost")
        fetch.fail(0, "once more")
        fetch.end([0, 1])
        assert fetch.land(2, lambda: written.append(2))
        assert not fetch.done()
        fetch.end([2, 1])
        assert fetch.done()
        assert fetch.settle()
        assert (fetch.came.tolist(), fetch.why_not, written) == ([False, True, True], "lost", [1, 2])

    def test_after_it_was_abandoned_nothing_is_written(self):
        fetch, written, future = Fetch(2, math.inf), [], Future()
        fetch.watch([future])
        fetch.land(0, lambda: written.append(0))
        fetch.abandon("late")
        assert fetch.done()
        assert future.cancelled()
        assert not fetch.land(1, lambda: written.append(1))
        fetch.fail(1, "lost")
        assert (fetch.came.tolist(), fetch.why_not, written) == ([True, False], "late", [0])
        after = Future()
        fetch.watch([after])
        assert after.cancelled()

    def test_one_that_has_ended_cannot_be_abandoned(self):
        fetch = Fetch(0, math.inf)
        assert fetch.done()
        fetch.abandon("late")
        assert fetch.why_not == ""
        assert not fetch.abandoned


class TestBuffers:
    def test_memory_is_used_again_and_bounded(self):
        buffers = Buffers(1000)
        first, second = buffers.take(600), buffers.take(600)
        assert len(view_of(first)) == 600
        buffers.give(first)
        buffers.give(second)  # beyond what is kept
        assert buffers.take(600) is first
        assert buffers.take(600) is not second
        assert not np.shares_memory(first, second)


class TestResults:
    def test_a_future_that_never_ends_is_given_up(self):
        future = Future()
        with pytest.raises(TierTimeoutError, match="no answer by the deadline"):
            result_of(future, -1e9)
        assert future.cancelled()

    def test_an_error_that_looks_like_a_timeout_is_told_as_it_is(self):
        future = Future()
        future.set_exception(TimeoutError("of the tier"))
        with pytest.raises(TimeoutError, match="of the tier"):
            result_of(future, math.inf)


class TestClearing:
    ONE, OTHER = bytes(16), bytes([1] * 16)

    @pytest.fixture
    def clearing(self):
        return Clearing(timeout_s=5, clears=True)

    def clear(self, clearing, namespace, *, meanwhile=lambda: None, now=None):
        times = clearing.times_hidden(namespace)
        meanwhile()
        clearing.cleared(namespace, times, time.monotonic() if now is None else now)

    def test_what_is_hidden_twice_while_it_is_cleared_is_cleared_once_more(self, clearing):
        clearing.hide(self.ONE)
        assert clearing.next_to_clear() == self.ONE
        self.clear(clearing, self.ONE, meanwhile=lambda: clearing.hide(self.ONE))
        assert clearing.is_hidden(self.ONE)
        self.clear(clearing, self.ONE)
        assert not clearing.is_hidden(self.ONE)
        assert not clearing.waiting

    def test_all_are_hidden_those_that_were_used_at_once_and_others_when_they_are_asked_for(self, clearing):
        clearing.note_used(self.ONE)
        clearing.hide_all()
        assert list(clearing.waiting) == [self.ONE]
        assert clearing.is_hidden(self.OTHER)
        assert list(clearing.waiting) == [self.ONE, self.OTHER]
        for one in (self.ONE, self.OTHER):
            self.clear(clearing, one)
            assert not clearing.is_hidden(one)

    def test_an_entry_that_may_turn_up_has_its_namespace_cleared_once_more(self, clearing):
        name = EntryName(self.ONE, chunk_key(self.ONE, 0, self.ONE), 500)
        clearing.may_turn_up([name])
        clearing.hide(self.ONE)
        clearing.hide(self.OTHER)
        self.clear(clearing, self.ONE)
        assert clearing.is_hidden(self.ONE)
        assert clearing.next_to_clear() == self.OTHER, "others do not wait for it"
        self.clear(clearing, self.OTHER)
        assert clearing.next_to_clear() is None
        assert 0 < clearing.clears_in_s <= 5
        assert clearing.waiting
        self.clear(clearing, self.ONE, now=math.inf)
        assert not clearing.is_hidden(self.ONE)
        assert not clearing.uncertain

    def test_names_that_may_turn_up_are_bounded(self, clearing, monkeypatch):
        monkeypatch.setattr("kvjax.tiers.clearing.MOST_UNCERTAIN", 10)
        for n in range(100):
            namespace = n.to_bytes(16, "big")
            clearing.may_turn_up(EntryName(namespace, chunk_key(bytes([k] * 16), 0, namespace), 500) for k in range(50))
            clearing.note_used(namespace)
        assert len(clearing.uncertain) <= 10
        assert all(len(names) <= 10 for names in clearing.uncertain.values())

    def test_an_entry_that_is_there_will_not_turn_up(self, clearing):
        name = EntryName(self.ONE, chunk_key(self.ONE, 0, self.ONE), 500)
        clearing.may_turn_up([name])
        clearing.turned_up([name, name])
        assert not clearing.uncertain

    def test_of_a_tier_that_is_only_read_what_is_hidden_stays_hidden(self):
        clearing = Clearing(timeout_s=5, clears=False)
        clearing.hide(self.ONE)
        assert clearing.is_hidden(self.ONE)
        assert clearing.next_to_clear() is None
        assert not clearing.waiting
