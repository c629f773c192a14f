"""The page of the command line, from the parsers of `kvjax`."""

import argparse
from collections.abc import Iterator

from kvjax.cli.main import parser

from .docstrings import one_line, table

_HEAD = """# Command line

`kvjax COMMAND`, or `python -m kvjax COMMAND`. This page is made from the code by `python docs/make.py`.

* With `--json`, standard output holds exactly one JSON document on one line; progress and warnings go to standard
  error.
* Exit code 0: done. 1: the answer is no (bad entries, a transport that does not work), or the output cannot be written.
  2: bad input, with one line on standard error and nothing on standard output. 130: interrupted.
* Sizes are digits with an optional B, KiB, MiB, GiB or TiB.
"""


def page() -> str:
    """Returns the page."""
    parts = [_HEAD]
    for name, told, command in _commands(parser()):
        level = "#" * len(name.split())
        parts.append(f"{level} {name}\n\n{_sentence(told)}\n")
        own = [action for action in command._actions if not isinstance(action, argparse._HelpAction)]
        options = [action for action in own if not isinstance(action, argparse._SubParsersAction)]
        if options:
            parts.append(f"```text\n{_usage(name, options)}\n```\n")
            parts.append(table(("argument", "meaning"), [_row(action) for action in options]))
    return "\n".join(parts)


def _commands(of: argparse.ArgumentParser, before: str = "kvjax") -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """Each command below a parser: its words, its help, its parser."""
    for group in of._actions:
        if isinstance(group, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in group._choices_actions}
            for name, command in group.choices.items():
                yield f"{before} {name}", helps[name], command
                yield from _commands(command, f"{before} {name}")


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}.".replace("..", ".")


def _usage(name: str, options: list[argparse.Action]) -> str:
    positional = [action for action in options if not action.option_strings]
    needed = [action for action in options if action.option_strings and action.required]
    words = [_form(action) if action.required else f"[{_form(action)}]" for action in (*positional, *needed)]
    return " ".join([name, *words, "[options]"])


def _form(action: argparse.Action) -> str:
    """An argument as it is written: its name, and what stands for its value."""
    value = action.metavar if isinstance(action.metavar, str) else ""
    if not value and action.choices is not None:
        value = "|".join(map(str, action.choices))
    if not action.option_strings:
        return value or action.dest.upper()
    takes = action.nargs != 0
    return f"{action.option_strings[-1]} {value or action.dest.upper()}" if takes else action.option_strings[-1]


def _row(action: argparse.Action) -> tuple[str, str]:
    told = one_line((action.help or "") % {"default": action.default} if action.help else "")
    return f"`{_form(action).replace('|', ' or ')}`", told
