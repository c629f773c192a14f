"""What only the name of a model tells: which layers are of which kind where the config does not list them,
and which documents hold no decoder.

Everything else about a cache follows from fields, whatever the family (see `layers`, `attention`, `states`).
"""

from collections.abc import Callable
from dataclasses import dataclass

Pattern = Callable[[int, int], str]  # (layer, num_layers) -> the word of a layer type


@dataclass(frozen=True, slots=True)
class Family:
    """What a model type adds to the fields.

    Args:
        pattern: layer types where the config lists none.
        state: the recurrent mechanism where no field names it.
        swa_kv_factor: key and value heads of a sliding layer over those of a full one, where the config
            has no number of its own for them.
        attentions_per_layer: caches that one layer owns.
        pattern_first: the pattern holds although the config has periods of layers.
    """

    pattern: Pattern | None = None
    state: str | None = None
    swa_kv_factor: int = 1
    attentions_per_layer: int = 1
    pattern_first: bool = False


def every(period: int, at: int, else_: str, word: str = "full_attention") -> Pattern:
    """`word` where `layer % period == at`, `else_` elsewhere."""
    return lambda layer, _num_layers: word if layer % period == at else else_


def _gemma4(layer: int, num_layers: int) -> str:
    return "full_attention" if layer % 6 == 5 or layer == num_layers - 1 else "sliding_attention"


def _all(word: str) -> Pattern:
    return lambda _layer, _num_layers: word


def _phi4flash(layer: int, num_layers: int) -> str:
    """The second half reads what two layers in the middle leave: one its keys and values, one its output."""
    half = num_layers // 2
    if layer >= half + 2:
        return "none"
    if layer % 2 == 0:
        return "linear_attention"
    return "full_attention" if layer == half + 1 else "sliding_attention"


def _lfm3(layer: int, _num_layers: int) -> str:
    if layer % 4 == 2:
        return "full_attention"
    return "sliding_attention" if layer % 4 == 0 and layer else "conv"


def _mimo(layer: int, _num_layers: int) -> str:
    return "full_attention" if layer == 0 or layer % 6 == 5 else "sliding_attention"


def _kimi(layer: int, _num_layers: int) -> str:
    return "full_attention" if layer and layer % 4 == 0 else "linear_attention"


def _from_the_end(layer: int, num_layers: int) -> str:
    return "full_attention" if (num_layers - 1 - layer) % 4 == 0 else "sliding_attention"


def _dots3(layer: int, _num_layers: int) -> str:
    return "indexed_attention" if layer in (0, 1) or layer % 4 == 1 else "sliding_attention"


def _zamba(layer: int, _num_layers: int) -> str:
    return "hybrid" if layer == 2 or (layer > 2 and (layer - 3) % 6 == 4) else "linear_attention"


def _deepseek_v4(layer: int, _num_layers: int) -> str:
    csa = layer > 1 and layer % 2 == 1
    return "compressed_sparse_attention" if csa else "heavily_compressed_attention"


_sliding_but = "sliding_attention"
_ALTERNATING = Family(every(2, 1, _sliding_but))
_SLIDING_THREE_FULL = Family(every(4, 3, _sliding_but))
_FULL_SLIDING_THREE = Family(every(4, 0, _sliding_but))
_DELTA_THREE_FULL = Family(every(4, 3, "linear_attention"))
_GEMMA3 = Family(every(6, 5, _sliding_but))
_GEMMA4 = Family(_gemma4)
_RECURRENT = Family(_all("linear_attention"))
_HYBRID = Family(_all("hybrid"))
_LLAMA4 = Family(every(4, 3, "chunked_attention"))

FAMILIES: dict[str, Family] = {
    "gemma2": _ALTERNATING,
    "vaultgemma": _ALTERNATING,
    "gpt_oss": _ALTERNATING,
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gemma3n": Family(every(5, 4, _sliding_but)),
    "gemma3n_text": Family(every(5, 4, _sliding_but)),
    "gemma4": _GEMMA4,
    "gemma4_text": _GEMMA4,
    "gemma4_unified": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "cohere2": _SLIDING_THREE_FULL,
    "cohere2_moe": _SLIDING_THREE_FULL,
    "olmo3": _SLIDING_THREE_FULL,
    "exaone4": _SLIDING_THREE_FULL,
    "exaone_moe": _SLIDING_THREE_FULL,
    "afmoe": _SLIDING_THREE_FULL,
    "muse_spark_text": Family(_from_the_end),
    "granite_swa": _FULL_SLIDING_THREE,
    "granitemoe_swa": _FULL_SLIDING_THREE,
    "cwm": _FULL_SLIDING_THREE,
    "mimo_v2_flash": Family(_mimo, swa_kv_factor=2),
    "llama4": _LLAMA4,
    "llama4_text": _LLAMA4,
    "qwen3_next": _DELTA_THREE_FULL,
    "qwen3_5_text": _DELTA_THREE_FULL,
    "qwen3_5_moe_text": _DELTA_THREE_FULL,
    "olmo_hybrid": _DELTA_THREE_FULL,
    "glm5_next_text": Family(every(4, 3, "linear_attention", "indexed_attention")),
    "kimi_linear": Family(_kimi),
    "bailing_hybrid": Family(every(6, 5, "linear_attention")),
    "minimax": Family(every(2, 0, "linear_attention"), state="lightning"),
    "minimax_m1": Family(every(8, 7, "linear_attention"), state="lightning"),
    "minimax_text_01": Family(every(8, 7, "linear_attention"), state="lightning"),
    "dots3_note_text": Family(_dots3),
    "deepseek_v4": Family(_deepseek_v4),
    "lfm3": Family(_lfm3),
    "phi4flash": Family(_phi4flash),
    "mamba": _RECURRENT,
    "falcon_mamba": _RECURRENT,
    "mamba2": Family(_all("linear_attention"), state="mamba2"),
    "rwkv": Family(_all("linear_attention"), state="rwkv"),
    "xlstm": Family(_all("linear_attention"), state="xlstm"),
    "recurrent_gemma": Family(every(3, 2, "linear_attention", "sliding_attention"), state="rg_lru"),
    "falcon_h1": _HYBRID,
    "bamba": _RECURRENT,
    "granitemoehybrid": _RECURRENT,
    "zamba": Family(_zamba, pattern_first=True),
    "bailing_moe_linear": Family(state="lightning"),
    "bailing_moe_v2_linear": Family(state="lightning"),
    "longcat_flash": Family(attentions_per_layer=2),
}

# Fields that go by a name which means something else in other families.
FIELD_NAMES: dict[str, dict[str, str]] = {
    "gpt_neo": {"num_attention_heads": "num_heads"},
    "gpt-neo": {"num_attention_heads": "num_heads"},
}

# What classes fill in without a field of their own; see also `class_defaults`.
FIELD_DEFAULTS: dict[str, dict[str, int]] = {
    "gemma4": {"global_head_dim": 512},
    "gemma4_text": {"global_head_dim": 512},
    "gemma4_unified": {"global_head_dim": 512},
    "gemma4_unified_text": {"global_head_dim": 512},
    "zamba": {"attention_width_factor": 2},
    "zamba2": {"attention_width_factor": 2},
}

# Encoders and others that keep no cache while they generate.
WITHOUT_CACHE = frozenset(
    """
    albert align altclip bert bert-generation bert_generation bros camembert canine clip clip_text_model
    convbert data2vec-text data2vec_text deberta deberta-v2 deberta_v2 dinov2 distilbert electra
    embedding_gemma2 embedding_gemma2_text ernie ernie_m esm eurobert flaubert fnet funnel gte ibert
    jina_embeddings_v3 layoutlm layoutlmv2 layoutlmv3 lilt luke markuplm mega megatron-bert
    megatron_bert mobilebert modernbert mpnet mra nezha nomic_bert nystromformer openai_privacy_filter
    perceiver qdqbert rembert roberta roberta-prelayernorm roberta_prelayernorm roc_bert roformer siglip
    siglip_text_model splinter squeezebert tapas ultrabert vit xlm xlm-roberta xlm-roberta-xl
    xlm_roberta xlm_roberta_xl xmod yoso
    """.split()  # noqa: SIM905  # a list of words
)

# Model types whose cache follows another rule altogether, and why.
NOT_UNDERSTOOD = {
    "big_bird": "block-sparse attention with global tokens",
    "bigbird_pegasus": "block-sparse attention with global tokens",
    "longformer": "windows on both sides with global tokens",
    "led": "windows on both sides with global tokens",
    "reformer": "hashed attention",
    "xlnet": "a memory of hidden states",
    "transfo-xl": "a memory of hidden states",
    "transfo_xl": "a memory of hidden states",
    "diffusion_gemma": "a canvas that is not causal",
    "diffusion_gemma_text": "a canvas that is not causal",
    "gemma4_assistant": "a draft that reads another model's cache",
    "gemma4_unified_assistant": "a draft that reads another model's cache",
    "muse_glimmer_assistant": "a draft that reads another model's cache",
    **dict.fromkeys(
        (
            *("rwkv5", "rwkv6", "rwkv7", "gla", "retnet", "delta_net", "gated_deltanet", "gated_deltaproduct", "hgrn"),
            *("hgrn2", "linear_attn", "lightnet", "samba", "comba", "mom", "gsa", "abc", "rodimus", "path_attn"),
            *("log_linear_mamba2", "deltaformer", "stripedhyena", "evo2"),
        ),
        "linear attention whose states have no rule here",
    ),
    "ouro": "layers that run in loops",
    "idefics": "attention to an encoder",
    "blip_text_model": "attention to an encoder",
    "blip": "attention to an encoder",
    "blip_2_qformer": "attention to an encoder",
    "evolla": "attention to an encoder",
    "encoder_decoder": "attention to an encoder",
    "vision_encoder_decoder": "attention to an encoder",
    "speech_encoder_decoder": "attention to an encoder",
    "hrm_text": "layers that run in nested loops",
    "blt": "bytes grouped into patches",
}
