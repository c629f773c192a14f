"""Futures end once, by their deadline, and their buffers are not touched afterwards."""

import threading
import time
from concurrent.futures import wait

import pytest

from kvjax.tiers import TierTimeoutError, TierUnavailableError
from kvjax.tiers.handover import Deadlines, EndedError, Handover
from tests.support.entries import LONG_S, later


@pytest.mark.parametrize("end", [lambda f: f.finish(1), lambda f: f.fail(KeyError()), lambda f: f.cancel()])
def test_an_ended_future_hands_out_nothing_and_keeps_its_end(end):
    future = Handover()
    assert future.touch(lambda: 5) == 5
    assert end(future)
    told = (future.cancelled(), None if future.cancelled() else future.exception())
    with pytest.raises(EndedError):
        future.touch(pytest.fail)
    assert not future.finish(2)
    assert not future.fail(ValueError())
    assert future.cancel() == future.cancelled()
    assert future.done()
    assert told == (future.cancelled(), None if future.cancelled() else future.exception())


def test_those_who_wait_for_several_learn_of_a_cancelled_one():
    future = Handover()
    assert future.cancel()
    assert wait([future], timeout=LONG_S).done == {future}


@pytest.mark.parametrize("end", [lambda f: f.cancel(), lambda f: f.fail(TierTimeoutError())])
def test_a_future_does_not_end_while_its_buffer_is_touched(end):
    future, touching, go_on = Handover(), threading.Event(), threading.Event()
    seen = []

    def move() -> None:
        touching.set()
        go_on.wait(LONG_S)
        seen.append(future.done())

    mover = threading.Thread(target=future.touch, args=(move,))
    mover.start()
    assert touching.wait(LONG_S)
    ender = threading.Thread(target=end, args=(future,))
    ender.start()
    go_on.set()
    mover.join()
    ender.join()
    assert seen == [False]
    assert future.done()


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
    deadlines.close(0)


def test_a_deadline_that_has_passed_ends_a_future_at_once():
    deadlines, future = Deadlines("x"), Handover()
    deadlines.watch([future], time.monotonic() - 1)
    assert isinstance(future.exception(timeout=0), TierTimeoutError)


def test_closing_ends_all_and_what_comes_later():
    deadlines = Deadlines("x")
    before, after = Handover(), Handover()
    deadlines.watch([before], later())
    deadlines.close(0.0)
    deadlines.watch([after], later())
    for future in (before, after):
        assert isinstance(future.exception(timeout=0), TierUnavailableError)


def test_many_calls_that_ended_are_not_remembered_until_their_deadlines():
    deadlines = Deadlines("x")
    for _ in range(5000):
        future = Handover()
        deadlines.watch([future], later(1e6))
        future.finish(1)
    assert len(deadlines._waiting) <= 1024
    deadlines.close(0)
