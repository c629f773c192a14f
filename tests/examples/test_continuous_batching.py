"""`examples/continuous_batching.py` as a user runs it, and with faults planted."""

import json
from pathlib import Path

import continuous_batching
import jax.numpy as jnp
import pytest
from batching.loop import Loop
from batching.model import FULL, LOCAL, STATE, new_weights
from batching.sequences import Phase, Sequence
from continuous_batching import main

from tests.support.faults import Fault, RandomFaults, inject

SMALL = ["--requests", "8", "--new-tokens", "8", "--preempt-every", "4", "--json"]


def run(arguments, capsys: pytest.CaptureFixture[str]):
    code = main([*SMALL, *arguments])
    return code, json.loads(capsys.readouterr().out)


def test_tokens_are_the_same_whoever_is_preempted_or_aborted(capsys: pytest.CaptureFixture[str]):
    code, found = run([], capsys)
    assert code == 0
    assert found["tokens_identical"]
    roomy, offloaded, alone = found["modes"].values()
    assert roomy["preemptions"] == roomy["restored_tokens"] == roomy["aborted"] == 0
    assert offloaded["preemptions"] > 5
    assert alone["preemptions"] > 5
    assert offloaded["aborted"] == alone["aborted"] == 1
    assert offloaded["restored_tokens"] > 300
    assert offloaded["computed_tokens"] < alone["computed_tokens"]


def test_requests_are_restored_from_a_tier_by_another_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    first, second = (run(["--tier", f"file://{tmp_path}"], capsys) for _ in range(2))
    assert first[0] == second[0] == 0
    rows = [found["modes"]["small device, kvjax"] for _, found in (first, second)]
    assert rows[1]["computed_tokens"] < rows[0]["computed_tokens"] / 2


def test_loads_that_fail_cost_time_and_no_token(monkeypatch, capsys: pytest.CaptureFixture[str]):
    rates = {Fault.FAIL: 0.2, Fault.SHORT: 0.1, Fault.LATE: 0.3}

    class Faulty(Loop):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            if self.offloader is not None:
                inject(self.offloader, RandomFaults(0, rates))

    monkeypatch.setattr(continuous_batching, "Loop", Faulty)
    code, found = run([], capsys)
    assert code == 0
    assert found["modes"]["small device, kvjax"]["failed_loads"] > 0


def test_nobody_waits_for_ever_where_the_newest_is_always_preempted(capsys: pytest.CaptureFixture[str]):
    code, found = run(["--preempt-every", "1", "--requests", "6"], capsys)
    assert code == 0
    assert found["modes"]["small device, kvjax"]["preemptions"] > 20


def test_a_request_preempted_while_it_loads_forgets_that_load(monkeypatch, capsys: pytest.CaptureFixture[str]):
    taken = []

    class Hasty(Loop):
        def iterate(self):
            super().iterate()
            loading = [one for one in self.admitted if one.phase is Phase.LOADING]
            if loading and len(taken) < 12:
                self.preempt(loading[0])
                self.offloader.invalidate()  # it comes back with a miss
                taken.append(loading[0].name)

    monkeypatch.setattr(continuous_batching, "Loop", Hasty)
    code, _ = run([], capsys)
    assert code == 0
    assert len(taken) > 3


class TestLoop:
    @pytest.fixture
    def loop(self):
        blocks = {FULL: 4, LOCAL: 8, STATE: 2}
        return Loop(new_weights(0), blocks, offload=None, seats=2, rows=8, max_tokens=80)

    def test_what_the_device_could_never_hold_is_refused(self, loop):
        with pytest.raises(ValueError, match="`sequence` must fit an empty device"):
            loop.submit(Sequence("a", [1] * 60, 5))
        with pytest.raises(ValueError, match="`sequence` must have at most 80 tokens in the end, got 81"):
            loop.submit(Sequence("a", [1] * 60, 21))
        loop.submit(Sequence("a", [1] * 60, 4))
        while not loop.is_idle:
            loop.iterate()
            assert loop.counts.iterations < 50

    def test_what_ended_or_waits_is_neither_aborted_nor_preempted(self, loop):
        done, waiting = Sequence("a", [1] * 8, 1), Sequence("b", [2] * 8, 1)
        loop.submit(done)
        while not loop.is_idle:
            loop.iterate()
        loop.submit(waiting)
        for one in (done, waiting):
            loop.preempt(one)
        loop.abort(done)
        assert (done.phase, waiting.phase, loop.counts.preemptions) == (Phase.DONE, Phase.WAITING, 0)


def test_a_wrong_byte_shows(monkeypatch, capsys: pytest.CaptureFixture[str]):
    class Wrong(Loop):
        def _load(self, offloader, sequence, found):
            super()._load(offloader, sequence, found)
            self.caches = {name: jnp.zeros_like(cache) for name, cache in self.caches.items()}

    monkeypatch.setattr(continuous_batching, "Loop", Wrong)
    assert run([], capsys)[0] == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["--requests", "0"],
        ["--rows", "2"],
        ["--seats", "x"],
        ["--preempt-every", "-1"],
        ["--host-bytes", "1"],
        ["--tier", "ftp://x"],
        ["--unknown"],
    ],
)
def test_bad_input_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "continuous_batching: error: " in err.splitlines()[-1]
