"""Writes kvjax/models/class_defaults.py from the config classes of the installed `transformers`.

python -m tests.models.make_class_defaults > kvjax/models/class_defaults.py
"""

import dataclasses
import re
import textwrap

FIELDS = frozenset(
    """
    attention_chunk_size attention_hidden_size attention_k_eq_v attention_window_size attn_layer_offset
    attn_layer_period block_types cca_time0 cca_time1 compress_rates conv1d_width conv_L_cache conv_kernel
    conv_kernel_size expand global_attn_every_n_layers global_head_dim head_dim hidden_size index_head_dim index_kpool
    kv_channels kv_lora_rank layer_group_size linear_conv_kernel_dim linear_head_dim linear_key_head_dim
    linear_num_heads linear_num_key_heads linear_num_value_heads linear_value_head_dim lru_width mamba_d_conv
    mamba_d_head mamba_d_ssm mamba_d_state mamba_expand mamba_head_dim mamba_headdim mamba_n_groups mamba_n_heads
    mamba_ngroups mamba_num_heads mamba_ssm_cache_dtype mamba_ssm_dtype inference_state_dtype max_window_layers
    multi_query n_groups n_mamba_heads new_decoder_architecture num_attention_heads num_heads num_hidden_layers
    num_key_value_heads num_kv_shared_layers num_nextn_predict_layers qk_dim_factor qk_rope_head_dim
    short_conv_kernel_size sliding_window sliding_window_size ssm_state_size state_size swa_head_dim
    swa_num_key_value_heads use_sliding_window v_dim_factor v_head_dim window_size attn_config
    """.split()  # noqa: SIM905  # a list of words
)


def defaults() -> dict[str, dict[str, object]]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from kvjax.models.families import NOT_UNDERSTOOD, WITHOUT_CACHE

    names = {name for name in CONFIG_MAPPING if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or name.endswith("_text")}
    names |= {name for name in CONFIG_MAPPING if re.search(r"^(step3p5|gemma3|gemma3n|llama4|mistral3|kimi_k2)$", name)}
    found = {}
    for name in sorted(names - WITHOUT_CACHE - set(NOT_UNDERSTOOD)):
        fields = {field.name: field.default for field in dataclasses.fields(CONFIG_MAPPING[name])}
        if fields.get("is_encoder_decoder") is True:
            continue
        kept = {
            field: list(value) if isinstance(value, tuple) else value
            for field, value in sorted(fields.items())
            if field in FIELDS
            and value is not dataclasses.MISSING
            and isinstance(value, (bool, int, float, str, tuple))
        }
        if kept:
            found[name] = kept
    return found


def transformers_version() -> str:
    import transformers

    return transformers.__version__


def text() -> str:
    lines = [
        '"""What the config classes of `transformers` take where a published config leaves a field out.',
        "",
        "Facts, not rules; written by tests/models/make_class_defaults.py. Only fields that shape a cache are here.",
        '"""',
        "",
        "from typing import Any",
        "",
        f'TRANSFORMERS = "{transformers_version()}"  # whose classes these are',
        "",
        "# fmt: off",
        "CLASS_DEFAULTS: dict[str, dict[str, Any]] = {",
    ]
    for name, kept in defaults().items():
        body = ", ".join(f'"{field}": {_literal(value)}' for field, value in kept.items())
        entry = f'"{name}": {{{body}}},'
        lines += textwrap.wrap(
            entry,
            120,
            initial_indent="    ",
            subsequent_indent="        ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join([*lines, "}", "# fmt: on", ""])


def _literal(value: object) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list):
        return "[" + ", ".join(_literal(one) for one in value) + "]"
    return repr(value)


if __name__ == "__main__":
    print(text(), end="")
