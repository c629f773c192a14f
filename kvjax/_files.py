"""Reads JSON files; whatever is wrong with one becomes a single sentence."""

import json
from pathlib import Path
from typing import Any, NoReturn


def read_json(path: str, *, constants: bool = False) -> Any:
    """Returns the JSON document in a UTF-8 file.

    Args:
        path: of the file.
        constants: take NaN and infinities, which are no JSON, but which published configs hold.

    Raises:
        ValueError: the file is missing, a directory, unreadable, empty, not UTF-8 or not JSON, holds NaN or
            an infinity, has a key twice in one object, or is nested too deeply.
    """
    try:
        content = Path(path).read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise ValueError(f"{path!r} does not exist") from None
    except IsADirectoryError:
        raise ValueError(f"{path!r} is a directory, not a JSON file") from None
    except OSError as error:
        raise ValueError(f"{path!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path!r} is not UTF-8 text") from None
    except ValueError as error:  # a name that no file can have
        raise ValueError(f"{path!r} cannot be read: {error}") from None
    if not content.strip():
        raise ValueError(f"{path!r} is empty")
    try:
        return json.loads(content, parse_constant=float if constants else _refuse_constant, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError(f"{path!r} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path!r} is not JSON as kvjax reads it: {error}") from None


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} is there twice")
        found[key] = value
    return found
