"""Children run once, several at a time, and say why they failed."""

import os
from concurrent.futures import CancelledError

import pytest

from tests.aot.children import Child, Children


@pytest.fixture
def runner():
    made = Children(at_a_time=2)
    yield made
    made.close()


@pytest.fixture
def module_of(tmp_path, monkeypatch):
    """Makes modules that children can run."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def write(name: str, text: str) -> str:
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        return name

    return write


def test_the_last_line_that_a_child_prints_is_its_result(runner, module_of):
    module = module_of("talks", "import json, sys\nprint('at work')\nprint(json.dumps(sys.argv[1:]))")
    assert runner.result(Child(module, ("v4", "planted"))) == ["v4", "planted"]


def test_a_child_runs_once_and_others_of_the_same_module_too(runner, module_of):
    module = module_of("counts", "import os\nprint(os.getpid())")
    one, other = Child(module, ("one",)), Child(module, ("other",))
    runner.start(one)
    assert runner.result(one) == runner.result(Child(module, ("one",)))
    assert runner.result(one) != runner.result(other)


def test_two_children_run_at_the_same_time(runner, module_of, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    writes = Child(module_of("writes", f"print(open({str(fifo)!r}, 'w').write('here'))"))
    reads = Child(module_of("reads", f"print(len(open({str(fifo)!r}).read()))"))
    runner.start(writes)  # waits in `open` until the other one opens it too
    assert (runner.result(reads), runner.result(writes)) == (4, 4)


def test_a_child_that_fails_says_why(runner, module_of):
    module = module_of("fails", "raise SystemExit('ptxas is missing')")
    with pytest.raises(RuntimeError, match=r"-m fails 1` ended with 1: ptxas is missing"):
        runner.result(Child(module, ("1",)))


def test_a_child_that_is_aborted_says_why(runner, module_of):
    module = module_of("aborts", "import os, sys\nprint('check failed', file=sys.stderr, flush=True)\nos.abort()")
    with pytest.raises(RuntimeError, match=r"-m aborts` ended with -6: check failed"):
        runner.result(Child(module))


def test_a_child_that_hangs_is_killed_and_fails(runner, module_of):
    module = module_of("hangs", "import signal\nsignal.pause()")
    with pytest.raises(RuntimeError, match=r"-m hangs` took longer than 0\.5 s: "):
        runner.result(Child(module, limit_s=0.5))


def test_closing_kills_what_runs_and_drops_what_waits(module_of, tmp_path):
    runner, fifo = Children(at_a_time=1), tmp_path / "fifo"
    os.mkfifo(fifo)
    runs = Child(module_of("runs", f"import signal\nopen({str(fifo)!r}, 'w').close()\nsignal.pause()"))
    waits = Child(module_of("waits", f"open({str(tmp_path / 'made')!r}, 'w')"))
    runner.start(runs)
    runner.start(waits)
    fifo.read_text(encoding="utf-8")  # until it runs
    runner.close()
    with pytest.raises(RuntimeError, match=r"-m runs` ended with -9"):
        runner.result(runs)
    with pytest.raises(CancelledError):
        runner.result(waits)
    assert not (tmp_path / "made").exists()
