"""Which fields of a config are about its cache, by their names.

What no rule reads must be off: a mechanism that is not understood must never be planned as if it were not
there. The names are those in which configs speak of windows, sinks, memories, states, sharing and loops.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_ABOUT_THE_CACHE = re.compile(
    # windows, sinks, memories, what is kept of a prefix
    r"window|sink(?!horn)|start_size|recent_size|streaming|persistent|landmark|anchor_tok|meta_token|global_tok"
    r"|^num_memory|memory_(size|len|tok|layer)|^mem_|mem_(size|len|tok)|memoriz|xl_cache|prefix_tokens|register_tokens"
    r"|init_blocks|segment_len|infini|titans|ttt_"
    # sparse and chunked attention
    r"|blocksparse|block_sparse|sparse_(config|attn)|^nsa_|^moba_|lsh_|attention_chunk|chunk(ed)?_attention|global_attention"
    r"|local_attention|attention_type|attn_type|attention_pattern"
    # another sequence's keys
    r"|cross_(?!entropy)|cross_attn|crossattn|xattn|is_cross|hyper_layers|encoder_(hidden|layers|config|width|dim)|^encoder$"
    # sharing and looping
    r"|kv_shar|share(d)?_kv|kv_source|kv_reuse|reuse_kv|cache_mode|cla_share|yoco|num_self_decoder|recurs|recurren|loop"
    r"|_cycles|total_ut_steps|num_iterations|num_repeats|layer_repeats|unroll"
    # compressed caches and indexers
    r"|compress_rat|kv_compress|compressed_kv|index_kpool|indexer_(head|kv|n_heads)|index_head_dim|kv_lora_rank"
    # states
    r"|state_size|d_state|mamba|ssm|lstm|retention|delta_rule|lightning|linear_att|linear_num|conv_kernel|conv_L_cache"
    r"|short_conv|conv1d|conv_size|conv_window|lru_width|cca_time|rwkv"
    # which layer is what
    r"|layer_type|layers_block_type|block_type|layer_pattern|layers_pattern|mixer|block_layout|block_override|kda_layers"
    r"|(full|swa|sliding|global|local|linear)_?(attn|attention)?_layers|attention_idx|attn_(layers|idxs|layer_)|swa_(?!rope)"
    r"|every_n_layers|^skip$"
    # heads under other names
    r"|n_kv_heads|heads_kv|^kv_heads|key_value_groups|multi_query_attention|^(head_size|d_head|d_kv|size_per_head)$"
    r"|hidden_size_per_head|^(key|value)_head_dim$|^value_dim$|heads_per_layer"
)

# … but these shape none: they steer kernels, training, masks, or what is read of a whole cache.
_HARMLESS = re.compile(
    r"vision|image|video|visual|audio|speech|patch|expert|moe|mlp|rope|rotary|dropout|_drop$|loss|initializer|init_std|_init$"
    r"|^_|^mtp_|(attn|scal[a-z]*|mscale|dim|proj|width)_?[a-z]*_factor$|chunk_size_feed_forward|sink_bias|bias$|kernel(s)?$(?<!conv_kernel)|kernel_options|norm|time_step"
    r"|(mamba|ssd?)_?chunk|chunk_size$|dt_rank|_multiplier(s)?$|context_window|max_window_layers|use_sliding_window"
    r"|use_prefill_window|keep_window_size|sliding_window_pattern$|use_memory_efficient|dual_chunk_attention"
    r"|index_(topk|n_heads|block_size|local_blocks|skip_topk|kpool_always)|indexer_(compress|n_heads|budget)|^ple_"
    r"|num_attention_heads_per_layer|swa_num_attention_heads|kda_(safe|lower)|conv_bias|conv_dim|swiglu|states?_in_fp32|residual_in"
    r"|return_last_states|use_mamba_kernels|mamba_(proj|conv_bias|rms|act|hidden|norm)|hidden_mamba_act|ssm_(in|out|mult)"
    r"|linear_(a_log|dt_|allow|lower|scaling)|lightning_(bias|norm)|attention_type_ids|^layer_types_|mixer_rms"
)

# Objects that are about something else, whatever is in them.
_OPAQUE = re.compile(
    r"vision|image|video|audio|speech|talker|code2wav|rope|quantization|compression_config|tokenizer|generation|id2label"
    r"|label2id|task_specific|auto_map|ffn|moe|expert|projector|dual_chunk|draft|eagle|speculat"
)

_AROUND_A_DECODER = re.compile(r"sink(?!horn)|cross_attention|cross_attn|cross_layer")

_OFF = frozenset(
    (
        *("", "none", "None", "full", "full_attention", "causal", "default", "standard", "softmax", "original_full"),
        *("eager", "sdpa", "flash_attention_2", "multihead_attention", "auto"),
    )
)

_DEEPEST = 8


def is_on(name: Any, value: Any) -> bool:
    """True if a field is about the cache by its name, and set to anything but off."""
    if not isinstance(name, str) or value is None or value is False or (isinstance(value, str) and value in _OFF):
        return False
    if isinstance(value, (int, float)) and value in (0, -1):
        return False
    if isinstance(value, (list, tuple, Mapping)) and not value:
        return False
    return _ABOUT_THE_CACHE.search(name) is not None and _HARMLESS.search(name) is None


def around_a_decoder(own: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the fields beside a nested decoder's own that are on: sinks that are kept, attention to something else."""
    return ((name, value) for name, value in own.items() if is_on(name, value) and _AROUND_A_DECODER.search(name))


def on_fields(own: Mapping[Any, Any], label: str = "", depth: int = 0) -> Iterator[tuple[str, str, Any]]:
    """Yields every field that is on, in nested objects and in lists of them, too: its path, the path under which a
    rule reads it, and its value. The two differ in `per_layer_config`, whose fields are the config's own.
    """
    for name, value in own.items():
        if not isinstance(name, str) or _OPAQUE.search(name):
            continue
        path = label + name
        if name == "per_layer_config" and isinstance(value, Mapping):
            for key, fields in value.items() if depth < _DEEPEST else ():
                for inner, read_as, found in on_fields(fields, label, depth + 1) if isinstance(fields, Mapping) else ():
                    yield f"{path}.{key}.{inner.removeprefix(label)}", read_as, found
            continue
        if is_on(name, value):
            yield path, path, value
        inner = [(path + ".", value)] if isinstance(value, Mapping) else []
        if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            inner = [(path + "[].", item) for item in value[:1000] if isinstance(item, Mapping)]
        for prefix, fields in inner if depth < _DEEPEST else ():
            yield from on_fields(fields, prefix, depth + 1)
