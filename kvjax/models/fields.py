"""Reads a model's config field by field, and remembers which fields were read.

A config that holds a field about the cache (see `vocabulary`) that no rule has read is refused.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from kvjax._checks import is_int, shown
from kvjax.geometry import type_name
from kvjax.models.vocabulary import on_fields

# What other names a field goes by, the usual one first.
ALIASES: dict[str, tuple[str, ...]] = {
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "n_embed", "embedding_dim", "model_dim"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "attention_heads"),
    "num_key_value_heads": (
        "num_key_value_heads",
        "num_kv_heads",
        "n_head_kv",
        "num_attention_groups",
        "multi_query_group_num",
        "n_kv_heads",
        "num_query_groups",
    ),
    "head_dim": ("head_dim", "attention_head_dim", "kv_channels", "dim_head"),
    "sliding_window": (
        "sliding_window",
        "sliding_window_size",
        "interleaved_sliding_window",
        "attention_window_size",
        "window_size",
    ),
    "layer_types": ("layer_types", "layers_block_type"),
    "global_attn_every_n_layers": ("global_attn_every_n_layers", "global_attn_every_n"),
    "num_mtp_layers": ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "num_mtp_modules"),
}

_MISSING = object()


class Fields:
    """The fields of one config, or of one layer of it.

    Args:
        own: the fields as published.
        defaults: what the model's class takes where a field is absent.
        label: where the fields are in the document, for messages.
    """

    def __init__(self, own: Mapping[str, Any], defaults: Mapping[str, Any], label: str = ""):
        self._own = own
        self._defaults = defaults
        self._label = label
        self._read: set[str] = set()

    def get(self, field: str, default: Any = None) -> Any:
        """Returns a field's value under any of its names; null counts as absent, but keeps the class's default out."""
        for name in ALIASES.get(field, (field,)):
            self._read.add(self._label + name)
        names = ALIASES.get(field, (field,))
        present = [name for name in names if name in self._own]
        for name in present:
            if self._own[name] is not None:
                return self._own[name]
        if not present:
            for name in names:
                if self._defaults.get(name) is not None:
                    return self._defaults[name]
        return default

    def name_of(self, field: str) -> str:
        """The name under which a field is there, for messages."""
        names = ALIASES.get(field, (field,))
        return self._label + next((name for name in names if self._own.get(name) is not None), names[0])

    def refuse(self, field: str, rule: str, value: Any = _MISSING) -> NoReturn:
        """Raises the `ValueError` for a field: its name, the rule, and what it is."""
        found = self.get(field) if value is _MISSING else value
        told = type_name(found) if isinstance(found, Mapping) else shown(found)
        raise ValueError(f"`{self.name_of(field)}` {rule}, got {told}")

    def integer(self, field: str, *, at_least: int = 1, default: int | None = None) -> int:
        """Returns an int.

        Raises:
            ValueError: the field is absent and has no default, or is no int of at least `at_least`.
        """
        value = self.get(field, default)
        if value is None:
            raise ValueError(f"the config must have `{self._label}{field}`, and has none")
        if not is_int(value) or not at_least <= value < 2**40:
            self.refuse(field, f"must be an int of at least {at_least}", value)
        return int(value)

    def optional(self, field: str, *, at_least: int = 1) -> int | None:
        """Returns an int, or `None` if the field is absent, null or (where 0 means off) 0."""
        value = self.get(field)
        if value is None or (at_least == 1 and value == 0 and is_int(value)):
            return None
        return self.integer(field, at_least=at_least)

    def flag(self, field: str, default: bool = False) -> bool:
        """Returns a bool; 0 and 1 are taken for one."""
        value = self.get(field, default)
        if not isinstance(value, bool) and not (is_int(value) and value in (0, 1)):
            self.refuse(field, "must be true or false", value)
        return bool(value)

    def listed(self, field: str) -> list[Any] | None:
        """Returns a list, or `None` if the field is absent or null."""
        value = self.get(field)
        if value is None:
            return None
        if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
            self.refuse(field, "must be a list", value)
        return list(value)

    def indices(self, field: str, num_layers: int, *, first: int = 0) -> set[int] | None:
        """Returns layer indices counted from 0 (`first` is what the config counts from)."""
        found = self.listed(field)
        if found is None:
            return None
        for n in found:
            if not is_int(n) or not first <= n < num_layers + first:
                self.refuse(field, f"must list layers from {first} to {num_layers + first - 1}", n)
        return {n - first for n in found}

    def table(self, field: str) -> "Fields | None":
        """Returns the fields of a nested object, or `None` if it is absent or null."""
        value = self.get(field)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            self.refuse(field, "must be an object", value)
        nested = Fields(value, {}, f"{self.name_of(field)}.")  # a path of its own
        nested._read = self._read
        return nested

    def with_layer(self, overrides: Mapping[str, Any]) -> "Fields":
        """Returns the fields of one layer: these, with its own in front."""
        if not overrides:
            return self
        merged = Fields({**self._own, **overrides}, self._defaults, self._label)
        merged._read = self._read
        return merged

    def reads(self, *names: str) -> None:
        """Notes that these fields are understood."""
        self._read.update(self._label + name for name in names)

    def reads_like(self, pattern: re.Pattern[str]) -> None:
        """Notes that the fields with such names are understood."""
        self.reads(*(name for name in self._own if isinstance(name, str) and pattern.search(name)))

    def has(self, *fields: str) -> bool:
        """True if every field is there with a value, the class's defaults included."""
        return all(self.get(field) is not None for field in fields)

    def states(self, field: str) -> bool:
        """True if the config itself has the field, with a value."""
        return any(self._own.get(name) is not None for name in ALIASES.get(field, (field,)))

    def class_default(self, field: str) -> Any:
        """What the model's class takes where the field is absent."""
        return self._defaults.get(field)

    def refuse_unread(self) -> None:
        """Refuses what no rule has read.

        Raises:
            ValueError: a field about the cache is on, wherever it is nested, and no rule has read it.
        """
        for path, read_as, value in on_fields(self._own, self._label):
            if read_as not in self._read:
                raise ValueError(f"`{path}` must be a mechanism that kvjax understands or be off, got {shown(value)}")
