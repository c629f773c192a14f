"""Reads JSON files; whatever is wrong with one becomes a single sentence."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

_MOST_BYTES = 2**28


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
