"""The caches of attention layers: keys and values, MLA latents, compressed caches and keys of indexers."""

import numpy as np

from kvjax._checks import is_int
from kvjax.groups import ChunkedLocal, FullAttention, Kind, Scratch, SlidingWindow
from kvjax.models.caches import Array, LayerCache, Options
from kvjax.models.fields import Fields
from kvjax.models.layers import Mixer

# A key of an indexer as engines keep it: `index_head_dim` values of 8 bits and a float32 scale.
_SCALE_BYTES = 4
_FLOAT32 = np.dtype(np.float32)
_BYTE = np.dtype(np.uint8)


def attention_caches(fields: Fields, layer: int, mixer: Mixer, options: Options, *, lookahead: int) -> list[LayerCache]:
    """Returns what the attention of one layer keeps.

    Args:
        fields: of this layer.
        layer: its index.
        mixer: what it is.
        options: the caller's choices.
        lookahead: tokens past a resume position that its groups need.

    Raises:
        ValueError: a field is missing, out of range or not divisible by the ranks.
    """
    kind = _kind(fields, mixer)
    if fields.states("compress_ratios") or fields.has("compress_rates"):
        return _compressed(fields, layer, mixer, kind, options, lookahead)
    if mixer.reads_another:
        return _index(fields, layer, options, lookahead) if mixer.indexed else []
    if fields.get("kv_lora_rank") is not None:
        width = fields.integer("kv_lora_rank") + fields.integer("qk_rope_head_dim", at_least=0)
        role = "latent" if mixer.attention == "full" else f"{mixer.attention}_latent"
        caches = [_latent(layer, role, kind, width, options, lookahead)]
    else:
        caches = [_keys_and_values(fields, layer, mixer, kind, options, lookahead)]
    if mixer.indexed:
        caches += _index(fields, layer, options, lookahead)
    return caches


def _kind(fields: Fields, mixer: Mixer) -> Kind:
    match mixer.attention:
        case "sliding":
            return SlidingWindow(fields.integer("sliding_window"))
        case "chunked":
            return ChunkedLocal(fields.integer("attention_chunk_size"))
    return FullAttention()


def _keys_and_values(
    fields: Fields, layer: int, mixer: Mixer, kind: Kind, options: Options, lookahead: int
) -> LayerCache:
    key_dim = head_dim(fields)
    value_dim = fields.optional("v_head_dim") or key_dim
    heads, distinct = options.ranks.heads(kv_heads(fields), fields.name_of("num_key_value_heads"))
    arrays = (Array("k", (heads, key_dim), options.dtype), Array("v", (heads, value_dim), options.dtype))
    return LayerCache(
        layer, mixer.attention or "full", kind, arrays, distinct_ranks=distinct, lookahead_tokens=lookahead
    )


def kv_heads(fields: Fields) -> int:
    """Returns the heads of keys and values of one layer, over all ranks."""
    if fields.get("multi_query") is not None and fields.flag("multi_query"):
        grouped = fields.get("new_decoder_architecture") is not None and fields.flag("new_decoder_architecture")
        if not grouped:
            fields.get("num_key_value_heads")
            return 1
    several = fields.get("multi_query_attention")
    if several is not None and not fields.flag("multi_query_attention"):
        fields.get("num_key_value_heads")
        return fields.integer("num_attention_heads")
    if several is not None:
        return fields.integer("num_key_value_heads", default=1)
    inner = fields.table("attn_config")
    if inner is not None and inner.get("attn_type") == "multiquery_attention":
        return 1
    if inner is not None and inner.get("kv_n_heads") is not None:
        return inner.integer("kv_n_heads")
    if fields.get("num_key_value_heads") is None:
        return fields.integer("num_attention_heads")
    found = fields.integer("num_key_value_heads")
    queries = fields.get("num_attention_heads")
    if is_int(queries) and queries % found and fields.states("num_key_value_heads"):
        fields.refuse("num_key_value_heads", f"must divide `{fields.name_of('num_attention_heads')}`, {queries}", found)
    return found


def head_dim(fields: Fields) -> int:
    """Returns the width of one head: as given, or the model's width over its query heads."""
    given = fields.optional("head_dim")
    if given is not None:
        return given
    width, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    width *= fields.integer("attention_width_factor", default=1)
    if width % heads:
        raise ValueError(
            f"the config must have `head_dim`, as `{fields.name_of('hidden_size')}`, {width}, is no multiple of "
            f"`{fields.name_of('num_attention_heads')}`, {heads}"
        )
    return width // heads


def _latent(
    layer: int, role: str, kind: Kind, width: int, options: Options, lookahead: int, tokens_per_state: int = 1
) -> LayerCache:
    """One vector for all heads, the same on every rank."""
    if options.latent_bytes is not None:
        array = Array("latent", (options.latent_bytes,), _BYTE)
    else:
        padding = -width % options.latent_multiple
        array = Array("latent", (width + padding,), options.dtype, padding)
    return LayerCache(layer, role, kind, (array,), tokens_per_state, lookahead_tokens=lookahead)


def _index(
    fields: Fields, layer: int, options: Options, lookahead: int, tokens_per_state: int | None = None
) -> list[LayerCache]:
    """Keys of an indexer, one for `index_kpool` tokens; the pool's unfinished tail is scratch."""
    table = fields.table("sparse_attention_config")
    given = "index_head_dim" if fields.get("index_head_dim") is not None else "indexer_head_dim"
    if fields.get(given) is None and table is not None and table.has("sparse_index_dim"):
        width = table.integer("sparse_index_dim")
    else:
        heads = fields.optional("indexer_kv_heads") or 1
        width = fields.integer(given) * heads
    pool = tokens_per_state or fields.optional("index_kpool") or 1
    num_bytes = options.index_bytes or width + _SCALE_BYTES
    array = Array("index", (num_bytes,), _BYTE)
    found = [LayerCache(layer, "index", FullAttention(), (array,), pool, lookahead_tokens=lookahead)]
    if tokens_per_state is None and pool > 1:
        ring = pool
        while ring < pool + options.draft_tokens:
            ring *= 2
        tail = Array("index_tail", (2, width), options.model_dtype)
        found.append(LayerCache(layer, "index_tail", Scratch(), (tail,), block_tokens=ring))
    return found


def _compressed(
    fields: Fields, layer: int, mixer: Mixer, window: Kind, options: Options, lookahead: int
) -> list[LayerCache]:
    """A window of latents; beside it, on most layers, one further latent for every `tokens_per_state` tokens.

    A compressor makes those from the tokens of a window of its own. Where it looks back one state (such
    layers have an indexer), its states are twice as wide. Where layers share compressed caches, the
    compressor keeps its tokens in a ring that is never worth storing.
    """
    width = fields.integer("head_dim")
    caches = [_latent(layer, "window", window, width, options, lookahead)]
    ratio = mixer.tokens_per_state
    sources = fields.listed("kv_source_layer_ids")
    if ratio is None or (sources is not None and layer not in sources):
        return caches
    caches.append(_latent(layer, f"compressed_{ratio}", FullAttention(), width, options, 0, ratio))
    if mixer.indexed or sources is not None:
        caches += _index(fields, layer, options, 0, ratio)
    if sources is not None:
        if ratio > 1:
            ring = Array("compressor", (4 * width,), _FLOAT32)
            caches.append(LayerCache(layer, "compressor_ring", Scratch(), (ring,), block_tokens=4 * ratio))
        return caches
    overlap = 2 if mixer.indexed else 1
    span = SlidingWindow(overlap * ratio)
    state = Array("compressor", (2 * overlap * width,), _FLOAT32)
    caches.append(LayerCache(layer, f"compressor_{ratio}", span, (state,)))
    if mixer.indexed:
        index_state = Array("index_compressor", (2 * overlap * fields.integer("index_head_dim"),), _FLOAT32)
        caches.append(LayerCache(layer, f"index_compressor_{ratio}", span, (index_state,)))
    return caches
