"""The command as a process: its output, where that cannot be written, and interrupts, each in one line."""

import io
import os
import signal
import subprocess
import sys
import tomllib

import pytest

from kvjax.cli.tables import _Console, plain_table
from tests.cli.command import DESIGN, full, kvjax, saved, sliding
from tests.support.pages import ROOT

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


# An interrupt when a module is about to be imported, which loses the exception, as modules in C do.
INTERRUPTED = """
import runpy, signal, sys
{before}

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                raise ImportError(name) from None

sys.meta_path.insert(0, Finder())
sys.argv = ["kvjax", "--version"]
{start}
"""
STARTS = {
    "-m": 'runpy.run_module("kvjax", run_name="__main__", alter_sys=True)',
    "script": "from kvjax.__main__ import entry; sys.exit(entry())",
}


def interrupted(start: str, module: str, before: str = "") -> tuple[int, str, str]:
    code = INTERRUPTED.format(before=before, module=module, start=STARTS[start])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("module", ["kvjax.cli", "numpy", "numpy._core._multiarray_umath", "kvjax.cli.workload"])
def test_an_interrupt_of_what_is_loaded_at_the_start_is_one_line(start, module):
    assert interrupted(start, module) == (130, "", "kvjax: interrupted\n")


def test_interrupts_that_are_ignored_are_ignored_from_the_start():
    code, out, err = interrupted("-m", "numpy", "signal.signal(signal.SIGINT, signal.SIG_IGN)")
    assert (code, out[:6], err) == (0, "kvjax ", "")


def test_an_interrupt_of_a_command_that_runs_lets_it_clear_up(tmp_path):
    code = """
import signal, sys
from kvjax.__main__ import entry
from kvjax.cli import workload
workload.workload_calls = lambda _: iter(lambda: signal.raise_signal(signal.SIGINT), 0)
sys.argv = ["kvjax", "workload", "scan", "--out", "trace"]
entry()
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"kvjax: interrupted\n")
    assert list(tmp_path.iterdir()) == []


def test_the_program_begins_with_nothing_that_takes_long():
    code = "import kvjax.__main__, sys; print(*(name for name in sys.modules if name in sys.argv))"
    heavy = ["numpy", "xxhash", "argparse", "json", "logging", "kvjax.cli", "kvjax.groups"]
    assert subprocess.run([sys.executable, "-c", code, *heavy], capture_output=True, check=True).stdout == b"\n"
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert scripts == {"kvjax": "kvjax.__main__:entry"}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# --- blanks ---------------------------------------------------------------------------------------------


def test_no_line_of_a_command_ends_in_a_blank(tmp_path):
    geometry, present = saved(tmp_path, DESIGN), saved(tmp_path, {"global": [0, 1, 2]}, "present.json")
    trace, tier = tmp_path / "trace", f"file://{tmp_path}/tier"
    for argv in (
        ["plan", geometry, "--host-bytes", "1GiB"],
        ["hit", geometry, "--num-tokens", 4096, "--present", present],
        ["hit", geometry, "--num-tokens", 4096, "--present", present, "--explain"],
        ["workload", "scan", "--out", trace, "--requests", 3],
        ["replay", trace, geometry, "--host-bytes", "1GiB"],
        ["tier", "usage", tier],
        ["tier", "inspect", tier],
        ["bench", "hit", "--tokens", 4096],
        ["doctor", "--no-test"],
        ["plan", "--help"],
    ):
        (tmp_path / "tier").mkdir(exist_ok=True)
        ran = kvjax(*argv)
        assert ran.code == 0, ran
        assert [line for line in ran.out.splitlines() if line != line.rstrip()] == [], argv


def test_a_terminal_gets_no_blanks_at_the_end_of_a_line_and_all_its_styles():
    table = plain_table("first", "second")
    table.add_row("x", "a longer cell")
    out = io.StringIO()
    _Console(file=out, force_terminal=True, color_system="standard", width=80).print(table)
    heading, row = out.getvalue().splitlines()
    assert heading == "\x1b[1mfirst\x1b[0m\x1b[1m \x1b[0m\x1b[1m \x1b[0m\x1b[1msecond\x1b[0m"
    assert row == "x      a longer cell"
