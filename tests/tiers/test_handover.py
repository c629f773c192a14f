"""Futures end once, by their deadline, and their buffers are not touched afterwards."""

import threading
from concurrent.futures import wait

import pytest

from kvjax.tiers import TierTimeoutError
from kvjax.tiers.handover import EndedError, Handover
from tests.support.entries import LONG_S


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
