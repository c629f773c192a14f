"""Reads JSON files, and writes files as a whole; whatever is wrong with one becomes a single sentence."""

import contextlib
import io
import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

_MOST_BYTES = 2**28
_BUFFER_BYTES = 2**20
_MOST_LINKS = 40  # as the kernel has it
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


@contextmanager
def replacing(path: str) -> Iterator[BinaryIO]:
    """Opens a file that is to be written: all of it takes the place of what was there when the block ends well, and
    nothing changes if it ends otherwise. Until then it is a file beside it, whose name begins with `.kvjax-`.

    What is no regular file, such as a pipe or a device, is written as it is, and so is a file in a folder that takes
    no other.

    Args:
        path: of the file. Links are followed.

    Raises:
        ValueError: it cannot be written; so ends any `OSError` of the block, too.
    """
    try:
        target = _replaced(path)
        beside = None if target is None else _beside(target)
        if target is None or beside is None:
            with io.BufferedWriter(io.FileIO(path, "w"), _BUFFER_BYTES) as file:
                yield file
            return
        temporary, number = beside
        try:
            with io.BufferedWriter(io.FileIO(number, "w"), _BUFFER_BYTES) as file:
                yield file
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise ValueError(f"{path!r} cannot be written: {error.strerror or error}") from error


def _replaced(path: str) -> str | None:
    """Returns the path of the regular file, there or not, that a path leads to; `None` if it leads to anything else, or
    to what a process has open, as `/dev/stdout` does."""
    for _ in range(_MOST_LINKS):
        try:
            mode = os.lstat(path).st_mode
        except FileNotFoundError:
            return path if os.path.basename(path) else None
        if not stat.S_ISLNK(mode):
            return path if stat.S_ISREG(mode) else None
        folder = os.path.realpath(os.path.dirname(path) or ".")
        if folder.startswith(("/dev/", "/proc/")) or folder == "/dev":
            return None
        path = os.path.join(folder, os.readlink(path))
    return None


def _beside(target: str) -> tuple[str, int] | None:
    """Makes a new file in the folder of another, with its permissions if that is there, and returns its path and
    number; `None` if only the other may be written."""
    path = os.path.join(os.path.dirname(target), f".kvjax-{os.getpid()}-{os.urandom(4).hex()}")
    there = os.path.exists(target)
    if there and not os.access(target, os.W_OK):
        return None  # which opening it will say
    try:
        number = os.open(path, _NEW, 0o666)
    except PermissionError:
        if there:
            return None
        raise
    if there:
        with contextlib.suppress(OSError):
            os.fchmod(number, stat.S_IMODE(os.stat(target).st_mode))
    return path, number


def read_json(path: str, *, may_hold_constants: Callable[[Any], bool] = lambda _document: False) -> Any:
    """Returns the JSON document in a UTF-8 file, which is read once and may be a pipe.

    Args:
        path: of the file.
        may_hold_constants: tells of a document whether it may hold NaN and infinities, which are no JSON, but
            which published configs have.

    Raises:
        ValueError: the file is missing, a directory, unreadable, empty, over 256 MiB, not UTF-8 or not JSON,
            holds NaN or an infinity, has a key twice in one object, or is nested too deeply.
    """
    if not path:
        raise ValueError("'' names no file")
    try:
        with Path(path).open("rb") as file:
            found = file.read(_MOST_BYTES + 1)
        if len(found) > _MOST_BYTES:
            raise ValueError(f"{path!r} must be at most {_MOST_BYTES} bytes, and is more")
        content = found.decode("utf-8")
    except FileNotFoundError:
        raise ValueError(f"{path!r} does not exist") from None
    except IsADirectoryError:
        raise ValueError(f"{path!r} is a directory, not a JSON file") from None
    except OSError as error:
        raise ValueError(f"{path!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path!r} is not UTF-8 text") from None
    except ValueError as error:  # too much, or a name that no file can have
        text = str(error)
        raise ValueError(text if text.startswith(repr(path)) else f"{path!r} cannot be read: {text}") from None
    if not content.strip():
        raise ValueError(f"{path!r} is empty")
    words: list[str] = []

    def constant(word: str) -> float:
        words.append(word)
        return float(word)

    try:
        document = json.loads(content, parse_constant=constant, object_pairs_hook=_object)
        if words and not may_hold_constants(document):
            raise ValueError(f"{words[0]} is not a JSON number")
    except RecursionError:
        raise ValueError(f"{path!r} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path!r} is not JSON as kvjax reads it: {error}") from None
    return document


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} is there twice")
        found[key] = value
    return found
