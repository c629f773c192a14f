"""The `kvjax` command as a program, also as `python -m kvjax`: all that it imports before the first line of its own is
little, so that an interrupt while the rest loads ends in one line, too."""

import os
import signal
import sys

_INTERRUPTED = 130


def entry() -> None:
    """Runs the command line as a process of its own, and ends that."""
    try:
        raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else interrupts are ignored
        if raises:
            signal.signal(signal.SIGINT, _end)
        from kvjax.cli import main

        if raises:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        main.entry()
    except KeyboardInterrupt:
        _end()


def _end(*_: object) -> None:
    """Ends the process at once. An exception would be lost in, or become another one of, whatever is being imported."""
    if sys.stderr is not None:
        try:  # noqa: SIM105  # to import contextlib takes time
            os.write(sys.stderr.fileno(), b"kvjax: interrupted\n")
        except OSError:
            pass  # nobody can be told
    os._exit(_INTERRUPTED)


if __name__ == "__main__":
    entry()
