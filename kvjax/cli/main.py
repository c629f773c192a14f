"""The `kvjax` command: parses arguments, runs one command, and turns bad input into one line.

A command is a module with `add_parser(commands)`, which adds its options and sets `run`, and
`run(args) -> int`, which raises `ValueError` for bad input before it writes anything to standard output.
"""

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, TextIO

import kvjax
from kvjax.cli import bench, doctor, hit, plan, replay, tier, workload

_COMMANDS = (plan, hit, replay, workload, bench, tier, doctor)
BAD_INPUT = 2
UNWRITTEN = 1
INTERRUPTED = 130


class _UsageError(Exception):
    """The arguments do not form a command."""


class _Parser(argparse.ArgumentParser):
    """Raises what is wrong with the arguments, with the command's name and without the usage text."""

    def error(self, message: str) -> NoReturn:
        raise _UsageError(f"{self.prog}: error: {message}")

    def _print_message(self, message: str, file: Any = None) -> None:
        """As argparse has it, but help that cannot be written is no success."""
        print(message, end="", file=file)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code: 0, 2 for bad input, 1 if what it says cannot be written, or
    130 after an interrupt.

    Args:
        argv: the arguments without the program's name; `None` takes those of the process.
    """
    if sys.stdout is None:  # closed before Python started
        _complain("kvjax: error: standard output is closed")
        return UNWRITTEN
    try:
        with _some_stderr():
            code = _run(argv)
        sys.stdout.flush()
    except KeyboardInterrupt:
        _complain("kvjax: interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # the reader has gone, and knows
        _discard(sys.stdout)
        return UNWRITTEN
    except OSError as error:  # of the output: the commands turn those of files into bad input
        _discard(sys.stdout)
        _complain(f"kvjax: error: standard output cannot be written: {error.strerror or error}")
        return UNWRITTEN
    return code


def entry() -> NoReturn:
    """Runs the command line as a process of its own, and ends that."""
    code = main()
    if code == INTERRUPTED and "jax" in sys.modules:
        os._exit(code)  # JAX may crash when the interpreter ends while it compiles; nothing is left to write
    sys.exit(code)


def _run(argv: Sequence[str] | None) -> int:
    try:
        args = parser().parse_args(argv)
    except _UsageError as error:
        return _refuse(str(error))
    except SystemExit as done:  # --help and --version
        return int(done.code or 0)
    try:
        return args.run(args)
    except ValueError as error:
        return _refuse(f"kvjax {args.command}: error: {error}")


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the whole command line."""
    made = _Parser(prog="kvjax", description="plan and inspect the offload of paged KV caches", allow_abbrev=False)
    made.add_argument("--version", action="version", version=f"kvjax {kvjax.__version__}")
    commands = made.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add_parser(commands)
    return made


def _refuse(message: str) -> int:
    _complain(" ".join(message.splitlines()))
    return BAD_INPUT


def _complain(line: str) -> None:
    if sys.stderr is not None:
        try:
            print(line, file=sys.stderr)
        except OSError:
            _discard(sys.stderr)


def _discard(stream: TextIO) -> None:
    """What Python would still flush at exit must not raise again."""
    with contextlib.suppress(io.UnsupportedOperation):  # a stream that is no file has nothing left to flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextlib.contextmanager
def _some_stderr() -> Iterator[None]:
    """Where standard error is closed, warnings go nowhere: `print` would send them to standard output."""
    if sys.stderr is not None:
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        yield
