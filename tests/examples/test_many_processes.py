"""`examples/many_processes.py` as a user runs it."""

import json

import pytest
from many_processes import main


def test_processes_serve_the_same_tokens_with_kvjax(capsys: pytest.CaptureFixture[str]):
    assert main(["--requests", "6", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens_identical"]
    assert len(found["processes"]) == 2
    assert all(process == found["processes"][0] for process in found["processes"])
    assert found["processes"][0]["restored_tokens"] > 300
    assert found["processes"][0]["preemptions"] > 3


def test_a_process_that_dies_ends_the_others_with_one_line(capsys: pytest.CaptureFixture[str]):
    assert main(["--lose", "1"]) == 3
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("many_processes: error: ")


@pytest.mark.parametrize(
    "arguments",
    [["--processes", "3"], ["--processes", "0"], ["--lose", "0"], ["--lose", "2"], ["--x"], ["--rank", "y"]],
)
def test_bad_input_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
