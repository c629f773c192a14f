"""The states of recurrent layers: one rule for each mechanism, chosen by the fields that are there."""

import re
from collections.abc import Callable

import numpy as np

from kvjax.groups import Recurrent
from kvjax.models.attention import head_dim, kv_heads
from kvjax.models.caches import Array, LayerCache, Options
from kvjax.models.fields import Fields

# Where a config says in which dtype recurrent states are kept.
DTYPE_FIELDS = ("mamba_ssm_dtype", "mamba_ssm_cache_dtype", "ssm_cache_dtype", "ssm_dtype", "inference_state_dtype")


def recurrent_cache(fields: Fields, layer: int, mechanism: str | None, options: Options) -> LayerCache:
    """Returns the state of one recurrent layer.

    Args:
        fields: of this layer.
        layer: its index.
        mechanism: the mechanism, or `None` for the one whose fields are there.
        options: the caller's choices.

    Raises:
        ValueError: no rule knows the fields, or one is missing, out of range or not divisible by the ranks.
    """
    name = mechanism or next((name for name, needs in _NEEDS.items() if _has(fields, needs)), None)
    if name is None:
        raise ValueError(
            f"layer {layer} is recurrent, and the config must have the fields of a mechanism that kvjax understands "
            f"({', '.join(_RULES)}), and has none of them"
        )
    return LayerCache(layer, "state", Recurrent(), _RULES[name](fields, options), distinct_ranks=_all(options))


def conv_cache(fields: Fields, layer: int, options: Options) -> LayerCache:
    """Returns the state of a short convolution: `conv_L_cache - 1` columns of the model's width."""
    channels = options.ranks.split(fields.integer("hidden_size"), "hidden_size")
    columns = fields.integer("conv_L_cache", at_least=2) - 1 + options.draft_tokens
    array = Array("conv", (columns, channels), options.model_dtype)
    return LayerCache(layer, "conv", Recurrent(), (array,), distinct_ranks=_all(options))


def _all(options: Options) -> int:
    return options.ranks.tensor_parallel


def _has(fields: Fields, needs: tuple[tuple[str, ...], ...]) -> bool:
    return all(any(fields.has(name) for name in names) for names in needs)


def _first(fields: Fields, *names: str) -> str:
    return next((name for name in names if fields.get(name) is not None), names[0])


def _conv(columns: int, channels: int, options: Options) -> tuple[Array, ...]:
    rows = columns - 1 + options.draft_tokens
    return (Array("conv", (rows, channels), options.model_dtype),) if rows else ()


def _delta_net(fields: Fields, options: Options) -> tuple[Array, ...]:
    """Gated delta net: a matrix for each value head, and a convolution over queries, keys and values."""
    heads = fields.get("num_attention_heads")
    key_name, value_name = "linear_num_key_heads", "linear_num_value_heads"
    width = fields.get("hidden_size")
    derived = int(0.75 * width / heads) if isinstance(width, int) and isinstance(heads, int) and heads else None
    key_dim = fields.integer("linear_key_head_dim", default=derived)
    value_dim = fields.integer("linear_value_head_dim", default=2 * key_dim)
    keys = options.ranks.split(fields.integer(key_name, default=heads), key_name)
    values = options.ranks.split(fields.integer(value_name, default=heads), value_name)
    columns = fields.integer("linear_conv_kernel_dim", default=4)
    state = Array("state", (values, key_dim, value_dim), options.state_dtype)
    return (*_conv(columns, 2 * keys * key_dim + values * value_dim, options), state)


def _kda(fields: Fields, options: Options) -> tuple[Array, ...]:
    """Kimi delta attention: a square matrix for each head, and convolutions over queries, keys and values."""
    inner = fields.table("linear_attn_config")
    if inner is not None and inner.has("num_heads", "head_dim"):
        count, width = inner.integer("num_heads"), inner.integer("head_dim")
        columns = inner.integer("short_conv_kernel_size", default=4)
    elif fields.get("linear_num_heads") is None:
        count, width = fields.integer("num_attention_heads"), fields.integer("head_dim")
        columns = fields.integer("short_conv_kernel_size", default=4)
    else:
        count, width = fields.integer("linear_num_heads"), fields.integer("linear_head_dim")
        columns = fields.integer(_first(fields, "linear_conv_kernel_dim", "short_conv_kernel_size"), default=4)
    heads = options.ranks.split(count, "linear_num_heads")
    state = Array("state", (heads, width, width), options.state_dtype)
    return (*_conv(columns, 3 * heads * width, options), state)


def _mamba2(fields: Fields, options: Options) -> tuple[Array, ...]:
    """Mamba-2: a matrix for each head, and a convolution over the heads and the groups' two projections."""
    head_names = ("mamba_num_heads", "mamba_n_heads", "n_mamba_heads", "num_heads")
    count_name = _first(fields, *head_names)
    count = fields.integer(count_name)
    width = _mamba_width(fields, count)
    states = fields.integer(_first(fields, "ssm_state_size", "mamba_d_state", "state_size"))
    group_name = _first(fields, "n_groups", "mamba_n_groups", "mamba_ngroups")
    groups, _ = options.ranks.heads(fields.integer(group_name, default=1), group_name)
    heads = options.ranks.split(count, count_name)
    columns = fields.integer(_first(fields, "conv_kernel", "mamba_d_conv"), default=4)
    state = Array("state", (heads, width, states), options.state_dtype)
    return (*_conv(columns, heads * width + 2 * groups * states, options), state)


def _mamba_width(fields: Fields, count: int) -> int:
    name = _first(fields, "mamba_head_dim", "mamba_d_head", "mamba_headdim")
    if fields.get(name) not in (None, "auto"):
        return fields.integer(name)
    if fields.get("num_heads") is not None and fields.get("head_dim") is not None:
        return fields.integer("head_dim")  # a model of Mamba-2 alone
    expand = fields.integer(_first(fields, "mamba_expand", "expand"), default=2)
    inner = fields.optional("mamba_d_ssm") or expand * fields.integer("hidden_size")
    if inner % count:
        fields.refuse(name, f"must be set, as {count} heads do not divide a width of {inner}")
    return inner // count


def _mamba1(fields: Fields, options: Options) -> tuple[Array, ...]:
    """Mamba-1: a vector of states for each channel, and a convolution over the channels."""
    inner = None
    if fields.get("state_size") is not None:  # a model of Mamba-1 alone: its width is the layer's
        inner = fields.optional("intermediate_size")
    expand = fields.integer(_first(fields, "mamba_expand", "expand"), default=2)
    inner = inner or expand * fields.integer("hidden_size")
    channels = options.ranks.split(inner, "mamba_expand * hidden_size")
    states = fields.integer(_first(fields, "mamba_d_state", "state_size"))
    columns = fields.integer(_first(fields, "mamba_d_conv", "conv_kernel"), default=4)
    return (*_conv(columns, channels, options), Array("state", (channels, states), options.state_dtype))


def _rg_lru(fields: Fields, options: Options) -> tuple[Array, ...]:
    """RG-LRU: one state for each channel, and a convolution over the channels."""
    width = fields.integer("lru_width", default=fields.get("hidden_size"))
    channels = options.ranks.split(width, "lru_width")
    columns = fields.integer("conv1d_width", default=4)
    return (*_conv(columns, channels, options), Array("state", (channels,), options.state_dtype))


def _lightning(fields: Fields, options: Options) -> tuple[Array, ...]:
    """Lightning attention: a square matrix for each query head."""
    width = head_dim(fields)
    heads = options.ranks.split(fields.integer("num_attention_heads"), "num_attention_heads")
    return (Array("state", (heads, width, width), options.state_dtype),)


def _xlstm(fields: Fields, options: Options) -> tuple[Array, ...]:
    """mLSTM: a matrix, a vector and a number for each head."""
    count = fields.integer("num_heads")
    hidden = fields.integer("hidden_size")
    widths = []
    for name, default in (("qk_dim_factor", 0.5), ("v_dim_factor", 1.0)):
        factor = fields.get(name, default)
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or factor <= 0:
            fields.refuse(name, "must be a positive number", factor)
        step = fields.integer("mlstm_round_up_to_multiple_of", default=64)
        widths.append(-int(-hidden * factor // step) * step // count)
    heads = options.ranks.split(count, "num_heads")
    keys, values = widths
    return (
        Array("state", (heads, keys, values), options.state_dtype),
        Array("normalizer", (heads, keys), options.state_dtype),
        Array("maximum", (heads,), options.state_dtype),
    )


def _rwkv(fields: Fields, options: Options) -> tuple[Array, ...]:
    """RWKV-4: two shifted inputs, and the sums and the maximum of its average."""
    hidden = fields.integer("hidden_size")
    inner = options.ranks.split(fields.integer("attention_hidden_size", default=hidden), "attention_hidden_size")
    return (Array("shift", (2, hidden), options.model_dtype), Array("state", (3, inner), np.dtype(np.float32)))


def _mixed_convs(fields: Fields, options: Options) -> tuple[Array, ...]:
    """Short convolutions over keys, over values, over the attention's and over the MLP's output."""
    columns = fields.integer("conv_kernel_size")
    heads, _ = options.ranks.heads(kv_heads(fields), "num_key_value_heads")
    hidden = fields.integer("hidden_size")
    return _conv(columns, 2 * heads * head_dim(fields) + 2 * hidden, options)


def _cca(fields: Fields, options: Options) -> tuple[Array, ...]:
    """Convolved attention in a compressed space: two convolutions over queries and keys, and a delayed value."""
    columns = sum(fields.integer(name) - 1 for name in ("cca_time0", "cca_time1"))
    heads = options.ranks.split(fields.integer("num_attention_heads"), "num_attention_heads")
    keys = options.ranks.split(kv_heads(fields), "num_key_value_heads")
    width = head_dim(fields)
    conv = _conv(columns + 1, (heads + keys) * width, options)
    return (*conv, Array("delayed", (keys * width // 2,), options.model_dtype))


_RULES: dict[str, Callable[[Fields, Options], tuple[Array, ...]]] = {
    "kda": _kda,
    "gated_delta_net": _delta_net,
    "mamba2": _mamba2,
    "mamba1": _mamba1,
    "rg_lru": _rg_lru,
    "mixed_convs": _mixed_convs,
    "cca": _cca,
    "lightning": _lightning,
    "xlstm": _xlstm,
    "rwkv": _rwkv,
}

# What the rules above may read, and more of the same. A model whose layers are all told to be of another kind may
# have such fields, too.
FIELDS = re.compile(
    r"mamba|ssm|state_size|d_state|state_dtype|lru_width|conv|cca_time|lightning|kda|rwkv|lstm"
    r"|linear_(num|key|value|head|attn_config|attention_config)"
)

# The fields that show a mechanism, in the order of trying; the last three are known by the model's type alone.
_NEEDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "gated_delta_net": (("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),),
    "kda": (("linear_num_heads", "linear_attn_config", "short_conv_kernel_size"),),
    "mamba2": (
        ("mamba_num_heads", "mamba_n_heads", "mamba_headdim"),
        ("ssm_state_size", "mamba_d_state", "state_size"),
    ),
    "mamba1": (("mamba_d_state", "state_size"),),
    "rg_lru": (("lru_width",),),
    "cca": (("cca_time0",), ("cca_time1",)),
    "mixed_convs": (("conv_kernel_size",),),
}
