"""The command's output: where it cannot be written, one line says so and the exit code is not 0."""

import os
import subprocess
import sys

import pytest

from tests.cli.command import DESIGN, full, kvjax, saved, sliding

COMMANDS = [["plan"], ["plan", "--json"], ["plan", "--help"], ["--version"]]


def ran(folder, argv, redirected: str, unbuffered: str = "", geometry=DESIGN) -> subprocess.CompletedProcess[str]:
    """Runs the command in a shell, with the streams redirected as the shell writes it."""
    words = [sys.executable, "-m", "kvjax", *argv]
    if argv[0] == "plan":
        words.insert(4, str(saved(folder, geometry)))
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {redirected}', "sh", *words],
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
@pytest.mark.parametrize("argv", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_device_is_one_line(tmp_path, argv, unbuffered):
    done = ran(tmp_path, argv, "> /dev/full", unbuffered)
    assert done.returncode == 1
    assert done.stderr == "kvjax: error: standard output cannot be written: No space left on device\n"


@pytest.mark.parametrize("argv", COMMANDS, ids=" ".join)
def test_a_closed_output_is_one_line(tmp_path, argv):
    done = ran(tmp_path, argv, ">&-")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "kvjax: error: standard output is closed\n"


def test_with_both_streams_closed_the_exit_code_says_it(tmp_path):
    assert ran(tmp_path, ["plan"], ">&- 2>&-").returncode == 1


@pytest.mark.parametrize("redirected", ["2>&-", "2> /dev/full"])
def test_bad_input_puts_nothing_on_the_output_where_there_is_no_error_stream(tmp_path, redirected):
    done = ran(tmp_path, ["plan", "--block-size", "0"], redirected)
    assert (done.returncode, done.stdout) == (2, "")


def test_warnings_do_not_mix_with_the_document_where_the_error_stream_is_closed(tmp_path):
    """`print` to an error stream that is None goes to standard output."""
    geometry = {"groups": [full("a", 16), sliding("w", 16, 17)]}
    argv = ["plan", "--json", "--blocks-per-chunk", "2"]
    assert "warning" in ran(tmp_path, argv, "", geometry=geometry).stderr
    done = ran(tmp_path, argv, "2>&-", geometry=geometry)
    assert done.returncode == 0
    assert done.stdout.startswith('{"tokens_per_hash": 16')
    assert done.stdout.count("\n") == 1


def test_an_interrupt_ends_in_one_line(monkeypatch):
    def interrupted(_args):
        raise KeyboardInterrupt

    monkeypatch.setattr("kvjax.cli.bench.run", interrupted)
    ran = kvjax("bench", "hit", "--tokens", "4096")
    assert (ran.code, ran.out, ran.err) == (130, "", "kvjax: interrupted\n")
