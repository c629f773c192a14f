"""The geometry file: a cache layout as plain data, as `kvjax plan` and `kvjax hit` read it.

    {"tokens_per_hash": null,
     "groups": [{"name": "local", "kind": "sliding", "window_tokens": 1024, "tokens_per_block": 16,
                 "block_bytes": 65536, "num_layers": 50, "lookahead_tokens": 0}]}

The kinds are `full`, `sliding` (with `window_tokens`), `chunked` (with `chunk_tokens`), `recurrent` and
`scratch`. `tokens_per_hash`, `num_layers` and `lookahead_tokens` may be left out.
"""

from collections.abc import Mapping
from typing import Any

from kvjax._checks import shown, text
from kvjax.groups import CacheLayout, ChunkedLocal, FullAttention, GroupSpec, Kind, Recurrent, Scratch, SlidingWindow

_KINDS = {
    "full": FullAttention,
    "sliding": SlidingWindow,
    "chunked": ChunkedLocal,
    "recurrent": Recurrent,
    "scratch": Scratch,
}
_PARAMETER = {"sliding": "window_tokens", "chunked": "chunk_tokens"}
_REQUIRED = ("name", "kind", "tokens_per_block", "block_bytes")
_OPTIONAL = ("num_layers", "lookahead_tokens")
_CONFIG_KEYS = ("model_type", "architectures", "num_hidden_layers", "text_config")


def layout_from_geometry(geometry: Any) -> CacheLayout:
    """Returns the layout that the content of a geometry file describes.

    Args:
        geometry: the file's JSON document, as `json.loads` returns it.

    Raises:
        ValueError: it is no object, a key is unknown or missing, a kind is unknown or has another kind's
            parameter, or a value has the wrong type or range. The text names the key.

    >>> geometry = {"groups": [{"name": "local", "kind": "sliding", "window_tokens": 1024,
    ...                         "tokens_per_block": 16, "block_bytes": 65536}]}
    >>> layout_from_geometry(geometry).groups[0].kind
    SlidingWindow(window_tokens=1024)
    """
    if not isinstance(geometry, Mapping):
        raise ValueError(f"a geometry must be an object with the key `groups`, got {type_name(geometry)}")
    _check_keys(geometry, "the geometry", required=("groups",), optional=("tokens_per_hash",))
    groups, unit = geometry["groups"], geometry.get("tokens_per_hash")
    if not isinstance(groups, list):
        raise ValueError(f"`groups` must be a list of groups, got {type_name(groups)}")
    if isinstance(unit, (list, Mapping)):
        raise ValueError(f"`tokens_per_hash` must be a positive int or null, got {type_name(unit)}")
    return CacheLayout(tuple(_group(group, place) for place, group in enumerate(groups)), tokens_per_hash=unit)


def geometry_of(layout: CacheLayout) -> dict[str, Any]:
    """Returns a layout as the content of a geometry file, its leaves as the bytes of a block.

    >>> layout_from_geometry(geometry_of(CacheLayout([GroupSpec("all", FullAttention(), 16, block_bytes=64)])))
    ... # doctest: +ELLIPSIS
    CacheLayout(groups=(GroupSpec(name='all', ...
    """
    groups = [
        {
            "name": group.name,
            **kind_fields(group.kind),
            "tokens_per_block": group.tokens_per_block,
            "block_bytes": group.block_bytes,
            "num_layers": group.num_layers,
            "lookahead_tokens": group.lookahead_tokens,
        }
        for group in layout.groups
    ]
    return {"tokens_per_hash": layout.tokens_per_hash, "groups": groups}


def is_model_config(document: Any) -> bool:
    """True if a JSON document looks like a model's `config.json` and not like a geometry."""
    return isinstance(document, Mapping) and "groups" not in document and any(key in document for key in _CONFIG_KEYS)


def kind_fields(kind: Kind) -> dict[str, Any]:
    """Returns a kind as the fields of a geometry file.

    >>> kind_fields(ChunkedLocal(8192))
    {'kind': 'chunked', 'chunk_tokens': 8192}
    """
    word = next(word for word, made in _KINDS.items() if isinstance(kind, made))
    parameter = _PARAMETER.get(word)
    return {"kind": word} | ({parameter: getattr(kind, parameter)} if parameter else {})


def _group(fields: Any, place: int) -> GroupSpec:
    if not isinstance(fields, Mapping):
        raise ValueError(f"`groups` must hold objects, got {type_name(fields)} at place {place}")
    label = f"group {fields['name']!r}" if isinstance(fields.get("name"), str) else f"the group at place {place}"
    _check_keys(fields, label, required=_REQUIRED, optional=(*_OPTIONAL, *_PARAMETER.values()))
    for key, value in fields.items():
        if isinstance(value, (list, Mapping)):
            raise ValueError(f"`{key}` of {label} must be a plain value, got {type_name(value)}")
    word = fields["kind"]
    if not isinstance(word, str) or word not in _KINDS:
        raise ValueError(f"`kind` of {label} must be one of {', '.join(_KINDS)}, got {shown(word)}")
    own = _PARAMETER.get(word)
    for owner, parameter in _PARAMETER.items():
        if parameter in fields and parameter != own:
            raise ValueError(f"`{parameter}` of {label} belongs to the kind {owner}, not to {word}")
    if own and own not in fields:
        raise ValueError(f"{label} must have the key {own!r}, as its kind is {word}")
    text(fields["name"], f"name of {label}")
    if fields["block_bytes"] is None:
        raise ValueError(f"`block_bytes` of {label} must be a positive int, got None")
    kind = _kind(word, own, fields, label)
    given = {key: fields[key] for key in ("tokens_per_block", "block_bytes", *_OPTIONAL) if key in fields}
    return GroupSpec(fields["name"], kind, **given)


def _kind(word: Any, parameter: str | None, fields: Mapping[str, Any], label: str) -> Kind:
    if parameter is None:
        return _KINDS[word]()
    try:
        return _KINDS[word](fields[parameter])
    except ValueError as error:
        raise ValueError(f"{label}: {error}") from None


def _check_keys(fields: Mapping[str, Any], label: str, *, required: tuple[str, ...], optional: tuple[str, ...]) -> None:
    known = (*required, *optional)
    for key in fields:
        if key not in known:
            raise ValueError(f"{label} has the unknown key {key!r}; known are {', '.join(known)}")
    for key in required:
        if key not in fields:
            raise ValueError(f"{label} must have the key {key!r}")


def type_name(value: Any) -> str:
    """Names a JSON value without repeating all of it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    names = {dict: "an object", list: "a list", str: "a string", int: "an int", float: "a float"}
    return names.get(type(value), type(value).__name__)
