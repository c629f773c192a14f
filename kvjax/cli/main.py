"""The `kvjax` command: parses arguments, runs one command, and turns bad input into one line.

A command is a module with `add_parser(commands)`, which adds its options and sets `run`, and
`run(args) -> int`, which raises `ValueError` for bad input before it writes anything to standard output.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import kvjax
from kvjax.cli import hit, plan

_COMMANDS = (plan, hit)
BAD_INPUT = 2


class _UsageError(Exception):
    """The arguments do not form a command."""


class _Parser(argparse.ArgumentParser):
    """Raises what is wrong with the arguments, with the command's name and without the usage text."""

    def error(self, message: str) -> NoReturn:
        raise _UsageError(f"{self.prog}: error: {message}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code: 0, or 2 for bad input.

    Args:
        argv: the arguments without the program's name; `None` takes those of the process.
    """
    try:
        code = _run(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has gone. What Python would still flush at exit must not raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _run(argv: Sequence[str] | None) -> int:
    try:
        args = _parser().parse_args(argv)
    except _UsageError as error:
        return _refuse(str(error))
    except SystemExit as done:  # --help and --version
        return int(done.code or 0)
    try:
        return args.run(args)
    except ValueError as error:
        return _refuse(f"kvjax {args.command}: error: {error}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="kvjax", description="plan and inspect the offload of paged KV caches", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"kvjax {kvjax.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add_parser(commands)
    return parser


def _refuse(message: str) -> int:
    print(" ".join(message.splitlines()), file=sys.stderr)
    return BAD_INPUT
