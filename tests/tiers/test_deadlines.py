"""Deadlines of futures."""

import threading
import time

import pytest

from kvjax.tiers.answers import Answer
from kvjax.tiers.deadlines import Deadlines
from kvjax.tiers.handover import Handover
from kvjax.tiers.tier import TierTimeoutError, TierUnavailableError
from tests.support.entries import LONG_S, later

CLOSED = TierUnavailableError("x is closed")


def test_deadlines_end_futures_in_their_order_and_leave_ended_ones():
    deadlines = Deadlines("file:///x")
    late, early, ended = Handover(), Handover(), Handover()
    order = []
    for future in (late, early):
        future.add_done_callback(order.append)
    now = time.monotonic()
    deadlines.watch([late], now + 0.02)
    deadlines.watch([early, ended], now + 0.01)
    ended.finish(3)
    for future in (late, early):
        with pytest.raises(TierTimeoutError, match="file:///x did not answer"):
            future.result(LONG_S)
    assert order == [early, late]
    assert ended.result() == 3
    deadlines.close(CLOSED)


def test_a_deadline_that_has_passed_ends_a_future_at_once():
    deadlines, future = Deadlines("x"), Handover()
    deadlines.watch([future], time.monotonic() - 1)
    assert isinstance(future.exception(timeout=0), TierTimeoutError)


def test_closing_ends_all_and_what_comes_later():
    deadlines = Deadlines("x")
    before, after = Handover(), Handover()
    deadlines.watch([before], later())
    deadlines.close(CLOSED)
    deadlines.watch([after], later())
    for future in (before, after):
        assert isinstance(future.exception(timeout=0), TierUnavailableError)


def test_closing_waits_for_what_ends_by_itself():
    deadlines, future = Deadlines("x"), Handover()
    deadlines.watch([future], later())
    threading.Timer(0.02, future.finish, [5]).start()
    deadlines.close(CLOSED, LONG_S)
    assert future.result(0) == 5


@pytest.mark.parametrize("kind", [Handover, Answer])
def test_what_has_ended_or_is_being_ended_does_not_expire(kind):
    deadlines, future = Deadlines("x"), kind()
    if kind is Answer:
        assert future.begin()
    else:
        future.finish(1)
    deadlines.watch([future], time.monotonic() - 1)
    deadlines.close(CLOSED)
    if kind is Answer:
        future.give(1)
    assert future.result(0) == 1


def test_many_calls_that_ended_are_not_remembered_until_their_deadlines():
    deadlines = Deadlines("x")
    for _ in range(5000):
        future = Handover()
        deadlines.watch([future], later(1e6))
        future.finish(1)
    assert len(deadlines._waiting) <= 1024
    deadlines.close(CLOSED)
