"""A model's config → the caches of its layers, and what had to be assumed."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvjax._checks import integer, is_int, shown
from kvjax.geometry import type_name
from kvjax.groups import CacheLayout, cache_dtype
from kvjax.models import attention, states
from kvjax.models.caches import LayerCache, Options, Ranks
from kvjax.models.class_defaults import CLASS_DEFAULTS
from kvjax.models.equalize import Pages, equal_pages
from kvjax.models.families import FAMILIES, FIELD_DEFAULTS, FIELD_NAMES, NOT_UNDERSTOOD, WITHOUT_CACHE, Family
from kvjax.models.fields import ALIASES, Fields
from kvjax.models.grouping import Bucket, buckets, group, layout, tokens_of_blocks
from kvjax.models.layers import Mixer, mixers
from kvjax.models.per_layer import LayerFields
from kvjax.models.vocabulary import around_a_decoder

# Where a multimodal config keeps the fields of its decoder.
_NESTED = ("text_config", "llm_config", "language_config", "thinker_config", "language_model_config", "talker_config")
# Sizes that a nested config may leave to its class; at the top level they must be there.
_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads")
_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "float8_e4m3": "float8_e4m3fn",
}


@dataclass(frozen=True, slots=True)
class ModelCache:
    """The cache of a model on one rank, and what is worth knowing about it.

    Args:
        model_type: as the config names it.
        tensor_parallel: ranks that share the model.
        layout: the groups, as `layout_from_config` returns them.
        distinct_ranks: of each group, how many of the ranks differ; the others hold copies. On a host with
            all ranks a group takes its bytes so often.
        padding_bytes: of each group, bytes of one block over all layers that hold nothing: the padding of
            latents is inside `block_bytes`, that of pages is not.
        page_bytes: bytes of one block of one layer in a pool that all groups share; `None` unless asked for.
        page_width: layers of one block of that pool; `None` unless asked for.
        shared_layers: layers that read another layer's cache and own none.
        assumed: one sentence for each thing that the config does not say.
        notes: one sentence for each thing that may surprise.
    """

    model_type: str
    tensor_parallel: int
    layout: CacheLayout
    distinct_ranks: dict[str, int]
    padding_bytes: dict[str, int]
    page_bytes: int | None
    page_width: int | None
    shared_layers: int
    assumed: tuple[str, ...]
    notes: tuple[str, ...]


def model_cache(
    config: Any,
    *,
    tokens_per_block: int | Mapping[str, int] = 16,
    dtype: Any = None,
    tensor_parallel: int = 1,
    state_dtype: Any = None,
    draft_layers: int = 0,
    draft_tokens: int = 0,
    latent_multiple: int = 1,
    latent_bytes: int | None = None,
    index_bytes: int | None = None,
    equalize: str | None = None,
    align_tokens: int | None = None,
) -> ModelCache:
    """Returns the cache that a model's config describes. For the arguments see `kvjax.layout_from_config`.

    Args:
        config: the content of a `config.json`, as published or as `transformers` writes it back.

    Raises:
        ValueError: see `kvjax.layout_from_config`.
    """
    if equalize is not None and not (isinstance(equalize, str) and equalize == "bytes"):
        raise ValueError(f"`equalize` must be None or 'bytes', got {shown(equalize)}")
    if align_tokens is not None and equalize is None:
        raise ValueError(f"`align_tokens` goes with `equalize='bytes'` only, got {shown(align_tokens)}")
    fields, model_type = decoder_fields(config)
    assumed: list[str] = []
    options = Options(
        dtype=_dtype(dtype, "dtype") or _model_dtype(fields, assumed, "the cache is counted in it"),
        model_dtype=_model_dtype(fields, assumed if dtype is not None else [], "convolution states are counted in it"),
        state_dtype=np.dtype(np.float32),
        ranks=Ranks(integer(tensor_parallel, "tensor_parallel", at_least=1, below=2**20)),
        draft_tokens=integer(draft_tokens, "draft_tokens", at_least=0, below=2**20),
        latent_multiple=integer(latent_multiple, "latent_multiple", at_least=1, below=2**20),
        latent_bytes=None if latent_bytes is None else integer(latent_bytes, "latent_bytes", at_least=1, below=2**30),
        index_bytes=None if index_bytes is None else integer(index_bytes, "index_bytes", at_least=1, below=2**30),
    )
    family = FAMILIES.get(model_type, Family())
    layers, mtp, told = mixers(fields, model_type)
    if told:  # each layer's kind is known: fields of kinds that none is of mean nothing
        fields.reads_like(states.FIELDS)
    recurrent = any(one.recurrent for one in layers + mtp)
    options = _with_state_dtype(fields, options, state_dtype, assumed if recurrent else [])
    draft = _draft_layers(mtp, draft_layers)
    tables = LayerFields(fields, len(layers), family)
    layers = tables.with_readers(layers)
    caches = [
        cache
        for n, mixer in enumerate(layers)
        for cache in _caches(tables.of_layer(n, mixer), n, mixer, family, options, 0)
    ]
    extra = [
        cache
        for n, mixer in enumerate(draft, len(layers))
        for cache in _caches(tables.of_layer(n, mixer), n, mixer, family, options, len(draft))
    ]
    fields.refuse_unread()
    found = buckets(caches) + buckets(extra, "draft_")
    per_block = tokens_of_blocks(found, tokens_per_block)
    pages = None
    if equalize and any(bucket.one.block_tokens is None for bucket in found):
        if isinstance(tokens_per_block, Mapping):
            raise ValueError(f"`tokens_per_block` must be an int with `equalize`, got {shown(tokens_per_block)}")
        pages = equal_pages(found, per_block, tokens_per_block if align_tokens is None else align_tokens)
    return _grouped(
        model_type,
        options.ranks.tensor_parallel,
        found,
        per_block,
        pages,
        sum(one.reads_another for one in layers),
        assumed,
        _notes(fields, found, options.index_bytes),
    )


def decoder_fields(config: Any) -> tuple[Fields, str]:
    """Returns the fields of a config's decoder, nested or not, and its model type.

    Raises:
        ValueError: the config is no object, or describes no decoder whose cache is understood.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"`config` must be a config.json's object, got {type_name(config)}")
    own, label, outer = config, "", {}
    while True:
        _check_decoder(own, label)
        inner = next((name for name in _NESTED if own.get(name)), None)
        if inner is not None and not isinstance(own[inner], Mapping):
            raise ValueError(f"`{label}{inner}` must be an object, got {type_name(own[inner])}")
        if inner is None:
            break
        if label.count(".") >= 8:
            raise ValueError(f"the decoder's fields must be nested at most 8 deep, and `{label}{inner}` is deeper")
        for name, value in around_a_decoder(own):
            raise ValueError(
                f"`{label}{name}` must be a mechanism that kvjax understands or be off, got {shown(value)}"
            )
        outer = {**outer, **{key: own[key] for key in ("dtype", "torch_dtype") if own.get(key) is not None}}
        outer.setdefault("model_type", own.get("model_type"))
        own, label = own[inner], f"{label}{inner}."
    model_type = own.get("model_type") or outer.get("model_type") or ""
    if not isinstance(model_type, str):
        raise ValueError(f"`{label}model_type` must be a string, got {type_name(model_type)}")
    defaults = CLASS_DEFAULTS.get(model_type, {})
    if not label:
        defaults = {name: value for name, value in defaults.items() if name not in _SIZES}
    merged = {**{key: value for key, value in outer.items() if own.get(key) is None}, **own}
    for field, name in FIELD_NAMES.get(model_type, {}).items():
        if merged.get(name) is not None:
            merged.setdefault(field, merged[name])
    for name in ALIASES["sliding_window"]:
        if merged.get(name) is False or (is_int(merged.get(name)) and merged[name] == -1):
            merged[name] = None
    if "per_layer_config" not in merged:  # what a class writes there stands for fields that it does not write back
        defaults = {**FIELD_DEFAULTS.get(model_type, {}), **defaults}
    return Fields(merged, defaults, label), model_type


def _check_decoder(own: Mapping[str, Any], label: str) -> None:
    model_type = own.get("model_type")
    if isinstance(model_type, str) and model_type in NOT_UNDERSTOOD:
        raise ValueError(
            f"`{label}model_type` must be a decoder whose cache kvjax understands, got {shown(model_type)}: "
            f"{NOT_UNDERSTOOD[model_type]}"
        )
    if isinstance(model_type, str) and model_type in WITHOUT_CACHE and not own.get("is_decoder"):
        raise ValueError(f"`{label}model_type` must be a decoder, got {shown(model_type)}, which keeps no cache")
    for field, why in (
        ("is_encoder_decoder", "attention to an encoder"),
        ("add_cross_attention", "attention to an encoder"),
        ("cross_attention_layers", "attention to an encoder"),
    ):
        if own.get(field):
            raise ValueError(
                f"`{label}{field}` must be off, as kvjax does not understand {why}, got {shown(own[field])}"
            )
    if own.get("use_bidirectional_attention") is True:
        raise ValueError(
            f"`{label}use_bidirectional_attention` must be off: a cache holds what later tokens do not change, got True"
        )


# --- dtypes ---------------------------------------------------------------------------------------------


def _dtype(given: Any, argument: str) -> np.dtype | None:
    if given is None or (isinstance(given, str) and given == "auto"):
        return None
    name = given.removeprefix("torch.") if isinstance(given, str) else given
    try:
        return cache_dtype(_DTYPES.get(name, name) if isinstance(name, str) else name)
    except ValueError as error:
        raise ValueError(str(error).replace("`dtype`", f"`{argument}`", 1)) from None


def _model_dtype(fields: Fields, assumed: list[str], use: str) -> np.dtype:
    for name in ("dtype", "torch_dtype"):
        value = fields.get(name)
        if value is not None and (not isinstance(value, str) or len(value) > 40):
            fields.refuse(name, "must name an element type such as 'bfloat16'", value)
        found = _dtype(value, name)
        if found is not None:
            return found
    sentence = f"the config names no dtype: bfloat16 is assumed, and {use}"
    if not any(one.startswith("the config names no dtype") for one in assumed):
        assumed.append(sentence)
    return cache_dtype("bfloat16")


def _with_state_dtype(fields: Fields, options: Options, given: Any, assumed: list[str]) -> Options:
    """The config's own word, else the caller's, else float32. What a config says only because its class fills
    it in is no word of its own, and gives way to the caller's."""
    asked = _dtype(given, "state_dtype")
    own = [name for name in states.DTYPE_FIELDS if fields.states(name) and fields.get(name) != "auto"]
    field = own[0] if own else None
    if field is not None and not isinstance(fields.get(field), str):
        fields.refuse(field, "must name an element type such as 'float32'")
    if field is not None and not (asked is not None and fields.get(field) == fields.class_default(field)):
        chosen = _dtype(fields.get(field), field)
    else:
        chosen = asked
        if chosen is None:
            assumed.append("the config names no dtype for recurrent states: float32 is assumed")
    found = chosen or np.dtype(np.float32)
    return replace(options, state_dtype=found)


# --- layers ---------------------------------------------------------------------------------------------


def _caches(
    fields: Fields, layer: int, mixer: Mixer, family: Family, options: Options, lookahead: int
) -> list[LayerCache]:
    found = []
    if mixer.attention is not None:
        for _ in range(family.attentions_per_layer):
            found += attention.attention_caches(fields, layer, mixer, options, lookahead=lookahead)
    if mixer.recurrent:
        found.append(states.recurrent_cache(fields, layer, family.state, options))
    if mixer.conv:
        found.append(states.conv_cache(fields, layer, options))
    return found


def _draft_layers(mtp: list[Mixer], asked: Any) -> list[Mixer]:
    count = integer(asked, "draft_layers", at_least=0, below=2**20)
    if count > len(mtp):
        raise ValueError(
            f"`draft_layers` must be at most the config's multi-token-prediction layers, {len(mtp)}, got {count}"
        )
    return mtp[:count]


# --- the answer -----------------------------------------------------------------------------------------


def _notes(fields: Fields, found: list[Bucket], index_bytes: int | None) -> list[str]:
    notes = []
    longest = fields.get("max_position_embeddings")
    for bucket in found:
        window = getattr(bucket.one.kind, "window_tokens", None)
        if window is not None and isinstance(longest, int) and window >= longest:
            notes.append(
                f"group {bucket.name!r}: its window of {window} tokens is no smaller than the model's "
                f"{longest} positions, so it behaves as full attention"
            )
    if any(bucket.one.role == "index" for bucket in found) and index_bytes is None:
        notes.append(
            "keys of indexers are counted as engines keep them, in 8 bits with a float32 scale, unless `index_bytes` "
            "is given"
        )
    quantized = fields.get("quantization_config")
    if isinstance(quantized, Mapping) and quantized.get("kv_cache_scheme"):
        notes.append("the config quantizes the KV cache (`quantization_config.kv_cache_scheme`): say its `dtype`")
    if any(bucket.one.role == "compressor_ring" for bucket in found):
        notes.append("the width of the compressor's ring is not published: it is scratch and never stored or counted")
    return notes


def _grouped(
    model_type: str,
    tensor_parallel: int,
    found: list[Bucket],
    per_block: list[int],
    pages: Pages | None,
    shared_layers: int,
    assumed: list[str],
    notes: list[str],
) -> ModelCache:
    groups, distinct, padding, pooled = [], {}, {}, 0
    for n, bucket in enumerate(found):
        tokens = per_block[n] if pages is None else pages.tokens_per_block[n]
        widths = (bucket.num_layers,) if pages is None else pages.widths[n]
        empty = (pages.padding_bytes[n] or 0) if pages is not None else 0
        start = 0
        for place, width in enumerate(widths):
            part = Bucket(bucket.name, bucket.caches[start : start + width])
            start += width
            made = group(part, tokens, bucket.name if len(widths) == 1 else f"{bucket.name}.{place}")
            groups.append(made)
            distinct[made.name] = bucket.one.distinct_ranks
            inside = sum(array.padding_bytes for array in bucket.one.arrays) * (tokens // bucket.one.tokens_per_state)
            missing = (pages.width - width) * pages.page_bytes if pages and pages.padding_bytes[n] is not None else 0
            padding[made.name] = (inside + empty) * width + missing
            pooled += pages is not None and pages.padding_bytes[n] is not None
    if pages is not None and 2 * sum(padding.values()) > pooled * pages.width * pages.page_bytes:
        notes = [*notes, "more than half of the shared pool stays empty: the groups are too unlike for one pool"]
    return ModelCache(
        model_type,
        tensor_parallel,
        layout(groups),
        distinct,
        padding,
        None if pages is None else pages.page_bytes,
        None if pages is None else pages.width,
        shared_layers,
        tuple(assumed),
        tuple(notes),
    )
