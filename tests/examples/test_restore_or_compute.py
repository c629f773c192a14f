"""`examples/restore_or_compute.py` as a user runs it."""

import doctest
import json
from pathlib import Path

import pytest
import restore_or_compute
from restore_or_compute import main


def test_prompts_are_restored_and_nothing_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["--tier", f"file://{tmp_path}", "--tokens", "40,100", "--rounds", "1"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(row["tokens"], row["restored_tokens"]) for row in found["prompts"]] == [(40, 32), (100, 96)]
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert main(arguments) == 0
    assert "Restoring" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["--tokens", "9,3"], ["--tokens", "0"], ["--rounds", "0"], ["--tier", "ftp://x"]]
)
def test_bad_input_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(["--tier", "file:///tmp/none", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)


def test_doctest():
    assert doctest.testmod(restore_or_compute).failed == 0
