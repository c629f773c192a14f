"""Which kind of cache each layer owns, from any of the ways in which configs say so."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvjax._checks import is_int, shown
from kvjax.models.families import FAMILIES, Family
from kvjax.models.fields import Fields


@dataclass(frozen=True, slots=True)
class Mixer:
    """What one layer mixes tokens with, and so what it must keep.

    Args:
        attention: `"full"`, `"sliding"`, `"chunked"`, or `None`.
        recurrent: it has a recurrent state.
        conv: it has the state of a short convolution.
        indexed: it has the keys of an indexer beside its attention.
        tokens_per_state: tokens that one state of a compressed cache stands for; `None` without one.
        reads_another: it reads the keys and values of another layer and owns none.
    """

    attention: str | None = None
    recurrent: bool = False
    conv: bool = False
    indexed: bool = False
    tokens_per_state: int | None = None
    reads_another: bool = False


FULL, SLIDING, CHUNKED, NOTHING = Mixer("full"), Mixer("sliding"), Mixer("chunked"), Mixer()
STATE, CONV, INDEXED = Mixer(recurrent=True), Mixer(conv=True), Mixer("full", indexed=True)

WORDS: dict[str, Mixer] = {
    "full_attention": FULL,
    "attention": FULL,
    "global": FULL,
    "global_attention": FULL,
    "full": FULL,
    "sliding_attention": SLIDING,
    "sliding_window": SLIDING,
    "sliding": SLIDING,
    "local": SLIDING,
    "local_attention": SLIDING,
    "chunked_attention": CHUNKED,
    "indexed_attention": INDEXED,
    "deepseek_sparse_attention": INDEXED,
    "qwen_sparse_attention": INDEXED,
    "minimax_m3_sparse": INDEXED,
    "compressed_sparse_attention": Mixer("sliding", indexed=True, tokens_per_state=4),
    "heavily_compressed_attention": Mixer("sliding", tokens_per_state=128),
    "linear_attention": STATE,
    "mamba": STATE,
    "mamba2": STATE,
    "recurrent": STATE,
    "conv": CONV,
    "hybrid": Mixer("full", recurrent=True),
    "hybrid_sliding": Mixer("sliding", recurrent=True),
    "moe": NOTHING,
    "mlp": NOTHING,
    "none": NOTHING,
}

_SOME_WORDS = "full_attention, sliding_attention, chunked_attention, linear_attention, mamba or conv"
_MOST_LAYERS = 100_000  # more is a slip, and would take for ever

# The letters of text patterns.
_LETTERS = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}
_WINDOW_LETTERS = {"L": "sliding_attention", "G": "full_attention", "F": "full_attention", "S": "sliding_attention"}


# Ways of saying which layer is what: where one has spoken, the others are read as well.
_LISTS = (
    *("layer_types", "layers_block_type", "attention_layers", "attention_types", "hybrid_override_pattern"),
    *("compress_ratios", "attn_type_list", "layer_attn_types", "hybrid_layer_pattern", "no_rope_layers", "block_types"),
    *("_block_types", "full_attn_idxs", "attn_layer_indices", "hybrid_layer_ids", "local_layer_ids"),
    *("attn_layer_period", "attn_layer_offset", "sliding_window_pattern", "global_attn_every_n_layers"),
    *("global_attn_every_n", "full_attention_interval", "layer_group_size", "no_rope_layer_interval"),
    *("sliding_window_layers", "linear_attn_config", "sparse_attention_config"),
)
_BLOCK_FIELDS = ("n_heads_in_group", "no_op", "replace_with_linear", "unshifted_sink")


@dataclass(frozen=True, slots=True)
class _Found:
    """Layer types that a config gives: one mixer a layer, the field, and whether the config lists every layer."""

    mixers: list[Mixer]
    field: str
    listed: bool = True


def mixers(fields: Fields, model_type: str) -> tuple[list[Mixer], list[Mixer], bool]:
    """Returns the mixers of the model's layers, those of its multi-token-prediction layers, and whether the config
    or its family tells each layer's kind (else all are taken for attention).

    Raises:
        ValueError: the fields contradict each other, or name what is not understood.
    """
    family = FAMILIES.get(model_type, Family())
    num_mtp = fields.optional("num_mtp_layers") or 0
    if num_mtp > _MOST_LAYERS:
        fields.refuse("num_mtp_layers", f"must be at most {_MOST_LAYERS}")
    found = _listed(fields)
    num_layers = _num_layers(fields, found)
    told = True
    if found is None:
        found = _from_rules(fields, num_layers, family)
    if found is None:
        found, told = _uniform(fields, num_layers), False
    if len(found.mixers) not in (num_layers, num_layers + num_mtp):
        count = len(found.mixers)
        raise ValueError(
            f"`{fields.name_of(found.field)}` must have an entry for each of {num_layers} layers, "
            f"got {count} {'entry' if count == 1 else 'entries'}"
        )
    layers, tail = found.mixers[:num_layers], found.mixers[num_layers:]
    if fields.get("sliding_window") is None and any(one.attention == "sliding" for one in layers):
        if found.listed:
            name = fields.name_of("sliding_window")
            raise ValueError(f"`{name}` must be set, as `{found.field}` names sliding layers, and is not")
        layers = [replace(one, attention="full") if one.attention == "sliding" else one for one in layers]
    return _indexed(fields, layers), tail or _mtp(fields, layers, num_mtp), told


def _num_layers(fields: Fields, found: _Found | None) -> int:
    value = fields.get("num_hidden_layers")
    if value is None and found is not None and found.field in ("layers_block_type", "hybrid_override_pattern"):
        return len(found.mixers)  # the list alone says how many
    if value is None:
        raise ValueError("the config must have `num_hidden_layers`, and has none")
    if not is_int(value) or not 1 <= value <= _MOST_LAYERS:
        fields.refuse("num_hidden_layers", f"must be a positive int of at most {_MOST_LAYERS}", value)
    return int(value)


def _mixer(fields: Fields, field: str, word: Any) -> Mixer:
    if not isinstance(word, str) or word not in WORDS:
        fields.refuse(field, f"must name layer types that kvjax understands, such as {_SOME_WORDS}", word)
    found = WORDS[word]
    rates = fields.table("compress_rates") if found.tokens_per_state is not None else None
    return replace(found, tokens_per_state=rates.integer(word)) if rates is not None and rates.has(word) else found


# --- lists ----------------------------------------------------------------------------------------------


def _listed(fields: Fields) -> _Found | None:
    for reader in (_from_words, _from_letters, _from_ratios, _from_flags, _from_indices, _from_blocks):
        found = reader(fields)
        if found is not None:
            fields.reads(*_LISTS)
            if fields.get("sliding_window") is not None:
                fields.reads("local_attention")
            return found
    return None


def _from_words(fields: Fields) -> _Found | None:
    for field in ("layer_types", "attention_layers"):
        words = fields.listed(field)
        if words:
            name = fields.name_of(field)
            return _Found([_mixer(fields, field, word) for word in words], name.rpartition(".")[2])
    blocks = fields.listed("attention_types")  # [[["global", "local"], 12]]
    if not blocks:
        return None
    words = []
    for block in blocks:
        if not isinstance(block, Sequence) or len(block) != 2 or not isinstance(block[0], Sequence):
            fields.refuse("attention_types", "must hold pairs of a list of layer types and a count", block)
        if not is_int(block[1]) or not 1 <= block[1] <= _MOST_LAYERS or len(words) > _MOST_LAYERS:
            fields.refuse("attention_types", f"must count from 1 to {_MOST_LAYERS} layers", block[1])
        words += list(block[0]) * int(block[1])
    return _Found([_mixer(fields, "attention_types", word) for word in words], "attention_types")


def _from_letters(fields: Fields) -> _Found | None:
    pattern = fields.get("hybrid_override_pattern")
    if pattern is None:
        return None
    if not isinstance(pattern, str) or not pattern or any(letter not in _LETTERS for letter in pattern):
        fields.refuse("hybrid_override_pattern", f"must be text of the letters {' '.join(_LETTERS)}")
    return _Found([WORDS[_LETTERS[letter]] for letter in pattern], "hybrid_override_pattern")


def _from_ratios(fields: Fields) -> _Found | None:
    """Tokens per state of each layer's compressed cache, beside a window; 0 for the window alone."""
    ratios = fields.listed("compress_ratios")
    if not ratios:
        return None
    found = []
    for ratio in ratios:
        if not is_int(ratio) or not 0 <= ratio <= 2**20:
            fields.refuse("compress_ratios", "must list ints of at least 0", ratio)
        found.append(Mixer("sliding", indexed=ratio == 4, tokens_per_state=int(ratio) or None))
    return _Found(found, "compress_ratios")


def _from_flags(fields: Fields) -> _Found | None:
    """One number a layer: which of two kinds it is."""
    sparse = fields.table("sparse_attention_config")
    for holder, field, kinds in (
        (fields, "attn_type_list", (STATE, FULL)),
        (fields, "layer_attn_types", (STATE, FULL)),
        (fields, "hybrid_layer_pattern", (FULL, SLIDING)),
        (sparse, "sparse_attention_freq", (FULL, INDEXED)),
    ):
        flags = holder.listed(field) if holder is not None else None
        if flags:
            return _Found([_flagged(fields, field, flag, kinds) for flag in flags], field)
    ropes = fields.listed("no_rope_layers")
    if ropes and fields.get("attention_chunk_size") is not None:
        return _Found([_flagged(fields, "no_rope_layers", rope, (FULL, CHUNKED)) for rope in ropes], "no_rope_layers")
    if ropes and fields.get("use_sliding_window") and fields.get("sliding_window") is not None:
        return _Found([_flagged(fields, "no_rope_layers", rope, (SLIDING, FULL)) for rope in ropes], "no_rope_layers")
    windows = fields.get("sliding_window")
    if isinstance(windows, (list, tuple)) and windows:
        repeats = max(1, _num_layers(fields, None) // len(windows))
        return _Found([FULL if window is None else SLIDING for window in windows] * repeats, "sliding_window")
    return None


def _flagged(fields: Fields, field: str, flag: Any, kinds: tuple[Mixer, Mixer]) -> Mixer:
    if flag not in (0, 1) or isinstance(flag, float):
        fields.refuse(field, "must list zeros and ones", flag)
    return kinds[int(flag)]


def _from_indices(fields: Fields) -> _Found | None:
    """Lists of the layers of one kind; all others are of another."""
    if fields.get("num_hidden_layers") is None:
        return None
    num_layers = _num_layers(fields, None)
    linear = fields.table("linear_attn_config")
    if linear is not None:
        full = linear.indices("full_attn_layers", num_layers, first=1)
        delta = linear.indices("kda_layers", num_layers, first=1)
        if full is not None and delta is not None and (full & delta or len(full | delta) != num_layers):
            fields.refuse(
                "linear_attn_config",
                f"must name each of {num_layers} layers once in `kda_layers` or `full_attn_layers`",
            )
        if full is None and delta is not None:
            full = set(range(num_layers)) - delta
        if full is not None:
            return _Found([FULL if n in full else STATE for n in range(num_layers)], "linear_attn_config")
    for field, kind, others in (
        ("full_attn_idxs", FULL, CONV),
        ("attn_layer_indices", FULL, STATE),
        ("hybrid_layer_ids", WORDS["hybrid"], STATE),
        ("local_layer_ids", WORDS["hybrid_sliding"], WORDS["hybrid"]),
        ("sliding_window_layers", SLIDING, FULL),
    ):
        found = fields.indices(field, num_layers)
        if found is not None:
            return _Found([kind if n in found else others for n in range(num_layers)], field)
    return None


def _from_blocks(fields: Fields) -> _Found | None:
    """One object a layer, which may have no attention at all."""
    blocks = fields.listed("block_configs")
    if not blocks:
        return None
    found = []
    for number, block in enumerate(blocks):
        attention = block.get("attention") if isinstance(block, Mapping) else None
        if not isinstance(attention, Mapping):
            fields.refuse("block_configs", "must hold objects with `attention`", block)
        for field, value in attention.items():
            if value and field not in _BLOCK_FIELDS:
                raise ValueError(
                    f"`block_configs[{number}].attention.{field}` must be off, as kvjax does not understand it, "
                    f"got {shown(value)}"
                )
        off = attention.get("no_op") or attention.get("replace_with_linear")
        found.append(NOTHING if off else FULL)
    return _Found(found, "block_configs")


# --- rules ----------------------------------------------------------------------------------------------


def _from_rules(fields: Fields, num_layers: int, family: Family) -> _Found | None:
    if family.pattern_first:
        fields.reads(*_LISTS)
        return _of_family(fields, num_layers, family)
    period = fields.optional("attn_layer_period")
    if period is not None:
        offset = fields.integer("attn_layer_offset", at_least=0, default=0)
        return _Found([FULL if n % period == offset else STATE for n in range(num_layers)], "attn_layer_period", False)
    repeated = fields.listed("block_types")
    if repeated:
        words = [repeated[n % len(repeated)] for n in range(num_layers)]
        attention = SLIDING if fields.get("sliding_window") is not None else FULL
        found = [_mixer(fields, "block_types", word) for word in words]
        return _Found([attention if one == FULL else one for one in found], "block_types", False)
    for field, other in (
        ("sliding_window_pattern", SLIDING),
        ("_sliding_window_pattern", SLIDING),
        ("global_attn_every_n_layers", SLIDING),
        ("full_attention_interval", STATE),
        ("layer_group_size", STATE),
        ("no_rope_layer_interval", CHUNKED),
    ):
        pattern = fields.get(field)
        if pattern is None or (other is CHUNKED and fields.get("attention_chunk_size") is None):
            continue
        return _Found(_periodic(fields, field, pattern, num_layers, other), field, False)
    return _of_family(fields, num_layers, family)


def _of_family(fields: Fields, num_layers: int, family: Family) -> _Found | None:
    if family.pattern is None:
        return None
    words = [family.pattern(n, num_layers) for n in range(num_layers)]
    found = [_mixer(fields, "model_type", word) for word in words]
    if fields.get("attention_chunk_size") is None:
        found = [FULL if one == CHUNKED else one for one in found]
    return _Found(found, "model_type", False)


def _periodic(fields: Fields, field: str, pattern: Any, num_layers: int, other: Mixer) -> list[Mixer]:
    if isinstance(pattern, str) and pattern and all(letter in _WINDOW_LETTERS for letter in pattern):
        return [WORDS[_WINDOW_LETTERS[pattern[n % len(pattern)]]] for n in range(num_layers)]
    if isinstance(pattern, str) or not is_int(pattern) or pattern < 1:
        fields.refuse(field, "must be a positive int, or text of the letters L and G", pattern)
    found = [FULL if n % pattern == pattern - 1 else other for n in range(num_layers)]
    prefix = fields.optional("prefix_dense_sliding_window_pattern")
    dense = fields.optional("first_k_dense_replace") or 0
    if prefix is not None:
        found[:dense] = [FULL if n % prefix == prefix - 1 else other for n in range(min(dense, num_layers))]
    return found


def _uniform(fields: Fields, num_layers: int) -> _Found:
    """All layers alike; the last ones have a window if the config has one and does not switch it off."""
    window = fields.optional("sliding_window")
    if window is None or (fields.get("use_sliding_window") is not None and not fields.flag("use_sliding_window")):
        return _Found([FULL] * num_layers, "num_hidden_layers", False)
    first = fields.optional("max_window_layers") or 0
    return _Found([SLIDING if n >= first else FULL for n in range(num_layers)], "sliding_window", False)


# --- what else the fields add to layers -----------------------------------------------------------------


def _indexed(fields: Fields, layers: list[Mixer]) -> list[Mixer]:
    """Marks the layers that own keys of an indexer: some layers use the choice that another one made."""
    has_keys = fields.has("index_head_dim", "kv_lora_rank") or fields.has("indexer_head_dim")
    if has_keys and not any(one.indexed for one in layers):
        layers = [replace(one, indexed=True) if one.attention == "full" else one for one in layers]
    own = _owns_index(fields, len(layers))
    return [replace(one, indexed=one.indexed and own(n)) for n, one in enumerate(layers)]


def _owns_index(fields: Fields, num_layers: int) -> Callable[[int], bool]:
    types = fields.listed("indexer_types")
    pattern = fields.get("index_topk_pattern")
    if types is None and pattern is not None:
        if not isinstance(pattern, (str, list)) or any(letter not in ("F", "S") for letter in pattern):
            fields.refuse("index_topk_pattern", "must be text of the letters F and S")
        types = ["full" if letter == "F" else "shared" for letter in pattern]
    if types is not None:
        if len(types) < num_layers or any(word not in ("full", "shared") for word in types):
            fields.refuse("indexer_types", f"must have 'full' or 'shared' for each of {num_layers} layers", types)
        return lambda layer: types[layer] == "full"
    frequency = fields.optional("index_topk_freq") or 1
    offset = fields.integer("index_skip_topk_offset", at_least=0, default=2)
    return lambda layer: max(layer - offset + 1, 0) % frequency == 0


def _mtp(fields: Fields, layers: list[Mixer], num_mtp: int) -> list[Mixer]:
    """What multi-token-prediction layers are, where no list has them: as listed of their own, else full attention."""
    for field in ("mtp_layer_types", "mtp_layers_block_type"):
        words = fields.listed(field)
        if words and num_mtp:
            one = [_mixer(fields, field, word) for word in words]
            caching = [mixer for mixer in one if mixer != NOTHING]
            return [caching[n % len(caching)] for n in range(num_mtp)] if caching else []
    full = next((one for one in reversed(layers) if one.attention == "full"), None)
    window = next((one for one in reversed(layers) if one.attention), FULL)
    one = replace(full or window, recurrent=False, tokens_per_state=None, indexed=bool(full and full.indexed))
    return [one] * num_mtp
