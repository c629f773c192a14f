"""Reads a model's config field by field, and remembers which fields were read.

A config that holds a field about the cache that no rule has read is refused: a mechanism that is not
understood must never be planned as if it were not there.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from kvjax._checks import is_int
from kvjax.geometry import type_name

# What other names a field goes by, the usual one first.
ALIASES: dict[str, tuple[str, ...]] = {
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "n_embed", "embedding_dim", "model_dim"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
    "num_key_value_heads": (
        "num_key_value_heads",
        "num_kv_heads",
        "n_head_kv",
        "num_attention_groups",
        "multi_query_group_num",
    ),
    "head_dim": ("head_dim", "attention_head_dim", "kv_channels", "dim_head"),
    "sliding_window": ("sliding_window", "sliding_window_size", "attention_window_size", "window_size"),
    "layer_types": ("layer_types", "layers_block_type"),
    "num_mtp_layers": ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "num_mtp_modules"),
}

# Fields with such names shape a cache, or may. What none of the rules has read must be off.
_ABOUT_THE_CACHE = re.compile(
    r"sink(?!horn)|cross_attention|cross_attn|window|compress|mem_len|memory_|num_mem_tok"
    r"|meta_token|recurren|lstm|_loop|loop_|_cycles|kv_source|kv_share|shared_kv|kv_cache_mode|kv_reuse|yoco|num_self_decoder"
    r"|cla_share|attention_chunk|chunk_attention|local_attention|global_attention|global_token|block_sparse|retention"
    r"|index_kpool|linear_attention|linear_attn|lightning|delta_rule|ssm_state|mamba_d_state|state_size|conv_kernel"
    r"|conv_L_cache|short_conv|conv1d|lru_width|layer_types|layers_block_type|block_types|layer_pattern|attn_type"
    r"|kda_layers|kv_lora_rank|lsh_|landmark|infini|titans|ttt_|segment_len|anchor_tok"
)

# … but these shape none: they steer kernels, masks of other parts, training, or what is read of a whole cache.
_HARMLESS = re.compile(
    r"vision|expert|audio|image|video|visual|speech|patch|^_|_factor$|^mlp_layer_types$|^mtp_(mlp_)?layer_types$|^mtp_layers_block_type$"
    r"|^mtp_|block_sparse_moe|sink_init|sink_bias|^unshifted_sink$"
    r"|^max_window_layers$|^use_sliding_window$|^use_prefill_window|^compress_rope|mamba_chunk_size|^keep_window_size$"
    r"|^index_(topk|n_heads|block_size|local_blocks|skip_topk|head_dim|kpool_always)|^num_attention_heads_per_layer$|^position_embedding"
    r"|^ple_|^indexer_compress_ratio$|^prefix_dense_sliding_window_pattern$|^sliding_window_pattern$|^conv_bias$|^use_conv_bias$"
)

_AROUND_A_DECODER = re.compile(r"sink(?!horn)|cross_attention|cross_attn")

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
            self._read.add(name)
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
        shown = type_name(found) if isinstance(found, Mapping) else _shorten(found)
        raise ValueError(f"`{self.name_of(field)}` {rule}, got {shown}")

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
        nested = Fields(value, {}, f"{self.name_of(field)}.")
        nested._read = self._read
        return nested

    def with_layer(self, overrides: Mapping[str, Any], layer: int) -> "Fields":
        """Returns the fields of one layer: these, with its own in front."""
        if not overrides:
            return self
        merged = Fields({**self._own, **overrides}, self._defaults, self._label)
        merged._read = self._read
        for name in overrides:
            if _suspicious(name, overrides[name]) and name not in self._read:
                raise ValueError(
                    f"`per_layer_config` of layer {layer}: `{name}` must be a field that is understood, "
                    f"got {_shorten(overrides[name])}"
                )
        return merged

    def reads(self, *names: str) -> None:
        """Notes that these fields are understood."""
        self._read.update(names)

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
        """Raises:
        ValueError: a field about the cache is set and no rule has read it.
        """
        for name, value in self._own.items():
            if name not in self._read and _suspicious(name, value):
                raise ValueError(
                    f"`{self._label}{name}` must be a mechanism that kvjax understands or be off, got {_shorten(value)}"
                )


def refuse_outer(own: Mapping[str, Any], label: str) -> None:
    """Raises:
    ValueError: fields around a decoder's own name sinks that are kept, or attention to something else.
    """
    for name, value in own.items():
        if _suspicious(name, value) and _AROUND_A_DECODER.search(name):
            raise ValueError(
                f"`{label}{name}` must be a mechanism that kvjax understands or be off, got {_shorten(value)}"
            )


def _suspicious(name: Any, value: Any) -> bool:
    off = value is None or value is False or value == 0 or value in ("", "none", "None")
    empty = isinstance(value, (list, tuple, Mapping)) and not value
    return (
        not off
        and not empty
        and isinstance(name, str)
        and _ABOUT_THE_CACHE.search(name) is not None
        and _HARMLESS.search(name) is None
    )


def _shorten(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 120 else shown[:100] + " …"
