"""The lines of a trace file: calls to JSON objects and back, with every value checked on the way back."""

import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from kvjax._checks import quoted, shown
from kvjax.geometry import type_name
from kvjax.keys import HASH_BYTES
from kvjax.observe.calls import (
    MOST_TOKENS,
    Call,
    ExtendCall,
    FinishCall,
    InvalidateCall,
    LoadCall,
    LookupCall,
    StoreCall,
    Trace,
)

FORMAT = "kvjax-trace"
VERSION = 1


def call_line(call: Call) -> dict[str, Any]:
    """Returns a call as the JSON object of its line."""
    match call:
        case LookupCall():
            device = call.device_tokens
            held = (
                {str(name): int(tokens) for name, tokens in device.items()} if isinstance(device, Mapping) else device
            )
            return {
                "call": "lookup",
                "request": call.request,
                "namespace": call.namespace.hex(),
                "num_tokens": int(call.num_tokens),
                "hashes": call.hashes.hex(),
                "device_tokens": held if isinstance(held, dict) else int(held),
                **_limits(call),
            }
        case ExtendCall():
            hashes = call.hashes.hex()
            return {"call": "extend", "request": call.request, "num_tokens": int(call.num_tokens), "hashes": hashes}
        case LoadCall():
            return {"call": "load", "request": call.request}
        case StoreCall():
            line = {"call": "store", "request": call.request, "num_tokens": int(call.num_tokens)}
            return line | {"checkpoint": bool(call.checkpoint)}
        case FinishCall():
            return {"call": "finish", "request": call.request}
        case InvalidateCall():
            return {"call": "invalidate", "namespace": None if call.namespace is None else call.namespace.hex()}


def _limits(call: LookupCall) -> dict[str, Any]:
    """The limits of a lookup, where it has some."""
    limits = {"max_store_tokens": call.max_store_tokens, "max_load_tokens": call.max_load_tokens}
    found: dict[str, Any] = {name: int(limit) for name, limit in limits.items() if limit is not None}
    return found | ({"skip": True} if call.skip else {})


def call_of(document: Any) -> Call:
    """Returns the call of a line.

    Args:
        document: the line as `json.loads` returns it.

    Raises:
        ValueError: it is no object, the call is unknown, a key is unknown or missing, or a value has the wrong type
            or range. The text names the key.
    """
    if not isinstance(document, dict):
        raise ValueError(f"a call must be an object, got {type_name(document)}")
    word = document.get("call")
    if not isinstance(word, str) or word not in _CALLS:
        raise ValueError(f"`call` must be one of {', '.join(_CALLS)}, got {shown(word)}")
    made, readers = _CALLS[word]
    optional = _LIMITS if word == "lookup" else {}
    _check_keys(document, f"a {word} call", ("call", *readers), tuple(optional))
    given = readers | {name: read for name, read in optional.items() if name in document}
    call = made(**{name: read(document[name], name) for name, read in given.items()})
    if isinstance(call, LookupCall):
        held = call.device_tokens
        longest = max(held.values(), default=0) if isinstance(held, Mapping) else held
        if longest >= call.num_tokens:
            raise ValueError(f"`device_tokens` must be below the {call.num_tokens} tokens of the prompt, got {longest}")
    return call


def header_line(
    tokens_per_hash: int,
    created_by: str,
    geometry: Mapping[str, Any] | None = None,
    blocks_per_chunk: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Returns the first line of a trace as its JSON object."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "tokens_per_hash": tokens_per_hash,
        "created_by": created_by,
        "geometry": geometry,
        "blocks_per_chunk": blocks_per_chunk,
    }


def header_of(document: Any) -> Trace:
    """Returns a trace without calls, as its first line says.

    Raises:
        ValueError: it is no header of this format and version, or a value has the wrong type or range.
    """
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"the first line of a trace must be an object with `format` {FORMAT!r}")
    if document.get("version") != VERSION:
        raise ValueError(f"`version` must be {VERSION}, got {shown(document.get('version'))}")
    _check_keys(document, "the header", tuple(header_line(1, "")))
    blocks = document["blocks_per_chunk"]
    geometry = document["geometry"]
    if geometry is not None and not isinstance(geometry, dict):
        raise ValueError(f"`geometry` must be an object or null, got {type_name(geometry)}")
    return Trace(
        tokens_per_hash=_int(document["tokens_per_hash"], "tokens_per_hash", 1),
        calls=(),
        created_by=_text(document["created_by"], "created_by"),
        geometry=geometry,
        blocks_per_chunk=None if blocks is None else _by_group(blocks, "blocks_per_chunk", 1),
    )


def _check_keys(document: dict[str, Any], label: str, known: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
    for key in document:
        if key not in (*known, *optional):
            listed = ", ".join((*known, *optional))
            raise ValueError(f"{label} has the unknown key {reprlib.repr(key)}; known are {listed}")
    for key in known:
        if key not in document:
            raise ValueError(f"{label} must have the key {key!r}")


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{quoted(name)} must be a string, got {type_name(value)}")
    return value


def _flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{quoted(name)} must be true or false, got {type_name(value)}")
    return value


def _int(value: Any, name: str, at_least: int) -> int:
    if type(value) is not int:
        raise ValueError(f"{quoted(name)} must be an int, got {type_name(value)}")
    if not at_least <= value <= MOST_TOKENS:
        raise ValueError(f"{quoted(name)} must be an int from {at_least} to {MOST_TOKENS}, got {shown(value)}")
    return value


def _tokens(value: Any, name: str) -> int:
    return _int(value, name, 0)


def _prompt_tokens(value: Any, name: str) -> int:
    return _int(value, name, 1)


def _by_group(value: Any, name: str, at_least: int) -> dict[str, int]:
    if not isinstance(value, dict):
        raise ValueError(f"{quoted(name)} must be an object of ints by group name, got {type_name(value)}")
    return {group: _int(number, f"{name} of {reprlib.repr(group)}", at_least) for group, number in value.items()}


def _device_tokens(value: Any, name: str) -> int | dict[str, int]:
    return _by_group(value, name, 0) if isinstance(value, dict) else _tokens(value, name)


def _hex(value: Any, name: str) -> bytes:
    text = _text(value, name)
    try:
        decoded = bytes.fromhex(text)
    except ValueError:
        raise ValueError(f"{quoted(name)} must be hexadecimal digits, got {shown(text)}") from None
    if 2 * len(decoded) != len(text):
        raise ValueError(f"{quoted(name)} must be hexadecimal digits without spaces, got {shown(text)}")
    return decoded


def _namespace(value: Any, name: str) -> bytes:
    namespace = _hex(value, name)
    if len(namespace) != HASH_BYTES:
        raise ValueError(f"{quoted(name)} must be {HASH_BYTES} bytes in hexadecimal digits, got {len(namespace)}")
    return namespace


def _namespace_or_all(value: Any, name: str) -> bytes | None:
    return None if value is None else _namespace(value, name)


_LIMITS: dict[str, Callable[[Any, str], Any]] = {
    "max_store_tokens": _tokens,
    "max_load_tokens": _tokens,
    "skip": _flag,
}
_CALLS: dict[str, tuple[Callable[..., Call], dict[str, Callable[[Any, str], Any]]]] = {
    "lookup": (
        LookupCall,
        {
            "request": _text,
            "namespace": _namespace,
            "num_tokens": _prompt_tokens,
            "hashes": _hex,
            "device_tokens": _device_tokens,
        },
    ),
    "extend": (ExtendCall, {"request": _text, "num_tokens": _tokens, "hashes": _hex}),
    "load": (LoadCall, {"request": _text}),
    "store": (StoreCall, {"request": _text, "num_tokens": _tokens, "checkpoint": _flag}),
    "finish": (FinishCall, {"request": _text}),
    "invalidate": (InvalidateCall, {"namespace": _namespace_or_all}),
}
