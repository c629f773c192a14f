"""Configs of released models in the two forms they are met in: as published, and `to_dict()` of a class.

`hub(model)` is the `config.json` of the release, kept in `hub/` with the fields that decide the cache and a few that do
not; `to_dict(model)` builds the transformers 5 class with the released values and serialises it. The two differ in
names: see `notes.md`.
"""

import importlib
import json
from pathlib import Path

HUB = Path(__file__).parent / "hub"

# Files written from the class, its documentation and quoted parts, no whole copy of the released file being at hand.
DERIVED_FROM_THE_CLASS = frozenset((HUB / "derived.txt").read_text().split())


def hub(model: str) -> dict:
    """Returns the published form of `model`."""
    return json.loads((HUB / f"{model}.json").read_text())


def to_dict(model: str) -> dict:
    """Returns what the transformers class of `model` serialises to."""
    module, name, fields = CLASSES[model]
    found = importlib.import_module(f"transformers.models.{module}.configuration_{module}")
    return getattr(found, name)(**fields()).to_dict()


def _every(count, period, kind="full_attention", other="sliding_attention"):
    return [kind if (i + 1) % period == 0 else other for i in range(count)]


def _flat(layers, hidden, heads, kv_heads=None, **more):
    fields = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "dtype": "bfloat16"}
    return fields | ({} if kv_heads is None else {"num_key_value_heads": kv_heads}) | more


def _text(layers, hidden, heads, kv_heads, **more):
    return {"text_config": _flat(layers, hidden, heads, kv_heads, **more), "dtype": "bfloat16"}


def _gated_delta(layers, hidden, heads, kv_heads, value_heads):
    return _text(layers, hidden, heads, kv_heads, linear_num_value_heads=value_heads, mamba_ssm_dtype="float32")


def _nemotron_h(pattern, hidden, heads, kv_heads, mamba_heads, mamba_head_dim, **more):
    return {
        "hybrid_override_pattern": pattern,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "mamba_num_heads": mamba_heads,
        "mamba_head_dim": mamba_head_dim,
        "dtype": "bfloat16",
    } | more


_NEMOTRON_H_8B = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
_NEMOTRON_H_56B = "M-M-M-M*" + "-M-M-M-M-M*" * 9 + "-M-M-M-M-M-"
_NEMOTRON_3_NANO = "MEMEM*" + "EMEMEM*" * 4 + "EMEMEMEM*EMEMEMEME"
_NEMOTRON_3_ULTRA = (
    "MEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
)
_NEMOTRON_NANO_9B = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
_V4_FLASH = [0, 0, *[4, 128] * 20, 4, 0]
_V4_PRO = [128, 128, *[4, 128] * 29, 4, 0]
_GRANITE_H = ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)]
_ZAMBA_2_7B = {6, 12, 18, 24, 30, 36, 42, 47, 51}
_ZAMBA_7B = {6, 11, 17, 23, 29, 35, 41, 47, 53, 59, 65, 71, 77}


def _zamba(layers, hidden, hybrid, mamba_heads, groups):
    kinds = ["hybrid" if i in hybrid else "mamba" for i in range(layers)]
    more = {"layers_block_type": kinds, "n_mamba_heads": mamba_heads, "mamba_ngroups": groups, "num_mem_blocks": 2}
    return _flat(layers, hidden, 32, 32, **more)


def _granite(layers, hidden, heads, kv_heads, mamba_heads, mamba_head_dim, kinds, **more):
    mamba = {"mamba_n_heads": mamba_heads, "mamba_d_head": mamba_head_dim, "mamba_d_state": 128, "layer_types": kinds}
    return _flat(layers, hidden, heads, kv_heads, **(mamba | more))


def _falcon_h1(layers, hidden, heads, kv_heads, head_dim, width, mamba_heads, state, groups=1):
    mamba = {"mamba_d_ssm": width, "mamba_n_heads": mamba_heads, "mamba_d_state": state, "mamba_n_groups": groups}
    return _flat(layers, hidden, heads, kv_heads, head_dim=head_dim, **mamba)


_MIXED = ("sliding_attention", "sliding_attention", "sliding_attention", "full_attention")

CLASSES = {
    "gemma-2-2b": ("gemma2", "Gemma2Config", lambda: _flat(26, 2304, 8, 4)),
    "gemma-2-9b": ("gemma2", "Gemma2Config", lambda: _flat(42, 3584, 16, 8)),
    "gemma-3-270m": ("gemma3", "Gemma3TextConfig", lambda: _flat(18, 640, 4, 1, sliding_window=512)),
    "gemma-3-1b": ("gemma3", "Gemma3TextConfig", lambda: _flat(26, 1152, 4, 1, sliding_window=512)),
    "gemma-3-4b": ("gemma3", "Gemma3Config", lambda: _text(34, 2560, 8, 4, sliding_window=1024)),
    "gemma-3-12b": ("gemma3", "Gemma3Config", lambda: _text(48, 3840, 16, 8, sliding_window=1024)),
    "gemma-3-27b": ("gemma3", "Gemma3Config", lambda: _text(62, 5376, 32, 16, head_dim=128, sliding_window=1024)),
    "gemma-3n-E2B": ("gemma3n", "Gemma3nConfig", lambda: _text(30, 2048, 8, 2, num_kv_shared_layers=10)),
    "gemma-3n-E4B": ("gemma3n", "Gemma3nConfig", lambda: _text(35, 2048, 8, 2)),
    "gemma-4-E2B": (
        "gemma4",
        "Gemma4Config",
        lambda: _text(35, 1536, 8, 1, layer_types=_every(35, 5), num_kv_shared_layers=20),
    ),
    "gemma-4-E4B": ("gemma4", "Gemma4Config", lambda: _text(42, 2560, 8, 2, num_kv_shared_layers=18)),
    "gemma-4-12B": (
        "gemma4_unified",
        "Gemma4UnifiedConfig",
        lambda: _text(48, 3840, 16, 8, attention_k_eq_v=True, num_global_key_value_heads=1),
    ),
    "gemma-4-31B": (
        "gemma4",
        "Gemma4Config",
        lambda: _text(60, 5376, 32, 16, attention_k_eq_v=True, num_global_key_value_heads=4, sliding_window=1024),
    ),
    "gemma-4-26b-a4b": (
        "gemma4",
        "Gemma4Config",
        lambda: _text(30, 2816, 16, 8, attention_k_eq_v=True, num_global_key_value_heads=2, sliding_window=1024),
    ),
    "gpt-oss-20b": ("gpt_oss", "GptOssConfig", lambda: _flat(24, 2880, 64, 8, num_local_experts=32)),
    "llama-4-scout": ("llama4", "Llama4Config", lambda: _text(48, 5120, 40, 8)),
    "llama-4-maverick": ("llama4", "Llama4Config", lambda: _text(48, 5120, 40, 8, interleave_moe_layer_step=2)),
    "mistral-7b-v0.1": ("mistral", "MistralConfig", lambda: _flat(32, 4096, 32, 8, sliding_window=4096)),
    "ministral-8b-2410": (
        "ministral",
        "MinistralConfig",
        lambda: _flat(36, 4096, 32, 8, head_dim=128, sliding_window=32768, layer_types=[*_MIXED[3:], *_MIXED[:3]] * 9),
    ),
    "command-r7b-12-2024": ("cohere2", "Cohere2Config", lambda: _flat(32, 4096, 32, 8)),
    "command-a-03-2025": ("cohere2", "Cohere2Config", lambda: _flat(64, 12288, 96, 8)),
    "olmo-3-7b": ("olmo3", "Olmo3Config", lambda: _flat(32, 4096, 32)),
    "deepseek-v3": ("deepseek_v3", "DeepseekV3Config", lambda: {"dtype": "bfloat16"}),
    "deepseek-v4-flash": (
        "deepseek_v4",
        "DeepseekV4Config",
        lambda: {"compress_ratios": list(_V4_FLASH), "dtype": "bfloat16"},
    ),
    "deepseek-v4-pro": (
        "deepseek_v4",
        "DeepseekV4Config",
        lambda: _flat(61, 7168, 128, 1, compress_ratios=list(_V4_PRO), index_topk=1024),
    ),
    "qwen3-next-80b-a3b": ("qwen3_next", "Qwen3NextConfig", lambda: {"dtype": "bfloat16"}),
    "qwen3.5-9b": ("qwen3_5", "Qwen3_5Config", lambda: _gated_delta(32, 4096, 16, 4, 32)),
    "qwen3.5-27b": ("qwen3_5", "Qwen3_5Config", lambda: _gated_delta(64, 5120, 24, 4, 48)),
    "qwen3.5-35b-a3b": ("qwen3_5_moe", "Qwen3_5MoeConfig", lambda: _gated_delta(40, 2048, 16, 2, 32)),
    "qwen3.5-397b-a17b": ("qwen3_5_moe", "Qwen3_5MoeConfig", lambda: _gated_delta(60, 4096, 32, 2, 64)),
    "qwen3.6-27b": ("qwen3_5", "Qwen3_5Config", lambda: _gated_delta(64, 5120, 24, 4, 48)),
    "qwen3.6-35b-a3b": ("qwen3_5_moe", "Qwen3_5MoeConfig", lambda: _gated_delta(40, 2048, 16, 2, 32)),
    "qwen3.8-27b": ("qwen3_5", "Qwen3_5Config", lambda: _gated_delta(64, 5120, 24, 4, 48)),
    "jamba-v0.1": ("jamba", "JambaConfig", lambda: {"dtype": "bfloat16"}),
    "jamba-1.5-mini": ("jamba", "JambaConfig", lambda: {"dtype": "bfloat16"}),
    "jamba-1.5-large": ("jamba", "JambaConfig", lambda: _flat(72, 8192, 64, 8)),
    # The class says float32 states where the released files of the first generation say nothing.
    "nemotron-h-8b": (
        "nemotron_h",
        "NemotronHConfig",
        lambda: _nemotron_h(_NEMOTRON_H_8B, 4096, 32, 8, 128, 64, mamba_ssm_cache_dtype="bfloat16"),
    ),
    "nemotron-h-56b": (
        "nemotron_h",
        "NemotronHConfig",
        lambda: _nemotron_h(
            _NEMOTRON_H_56B, 8192, 64, 8, 256, 64, ssm_state_size=256, mamba_ssm_cache_dtype="bfloat16"
        ),
    ),
    "nemotron-3-nano-30b-a3b": (
        "nemotron_h",
        "NemotronHConfig",
        lambda: _nemotron_h(_NEMOTRON_3_NANO, 2688, 32, 2, 64, 64),
    ),
    "nemotron-3-ultra-550b-a55b": (
        "nemotron_h",
        "NemotronHConfig",
        lambda: _nemotron_h(_NEMOTRON_3_ULTRA, 8192, 64, 2, 256, 64),
    ),
    "nemotron-3.5-lightning-30b-a3b": (
        "nemotron_h",
        "NemotronHConfig",
        lambda: _nemotron_h(_NEMOTRON_3_NANO, 2688, 32, 2, 64, 64),
    ),
    "nemotron-nano-9b-v2": (
        "nemotron_h",
        "NemotronHConfig",
        lambda: _nemotron_h(_NEMOTRON_NANO_9B, 4480, 40, 8, 128, 80),
    ),
    "falcon-h1-0.5b": ("falcon_h1", "FalconH1Config", lambda: _falcon_h1(36, 1024, 8, 2, 64, 1536, 24, 128)),
    "falcon-h1-7b": ("falcon_h1", "FalconH1Config", lambda: _falcon_h1(44, 3072, 12, 2, 128, 3072, 24, 256)),
    "falcon-h1-34b": ("falcon_h1", "FalconH1Config", lambda: _falcon_h1(72, 5120, 20, 4, 128, 4096, 32, 256, 2)),
    "granite-4.0-h-small": (
        "granitemoehybrid",
        "GraniteMoeHybridConfig",
        lambda: _granite(40, 4096, 32, 8, 128, 64, list(_GRANITE_H)),
    ),
    "granite-4.0-h-350m": (
        "granitemoehybrid",
        "GraniteMoeHybridConfig",
        lambda: _granite(
            32,
            768,
            12,
            4,
            48,
            32,
            ["attention" if i in (10, 13, 17, 27) else "mamba" for i in range(32)],
            mamba_n_groups=8,
        ),
    ),
    "granite-4.0-h-tiny": (
        "granitemoehybrid",
        "GraniteMoeHybridConfig",
        lambda: _granite(40, 1536, 12, 4, 48, 64, list(_GRANITE_H)),
    ),
    "granite-4.0-h-micro": (
        "granitemoehybrid",
        "GraniteMoeHybridConfig",
        lambda: _granite(40, 2048, 32, 8, 64, 64, list(_GRANITE_H)),
    ),
    "granite-4.0-micro": (
        "granitemoehybrid",
        "GraniteMoeHybridConfig",
        lambda: _granite(40, 2560, 40, 8, 128, "auto", ["attention"] * 40),
    ),
    "kimi-linear-48b-a3b": (
        "kimi_linear",
        "KimiLinearConfig",
        lambda: {
            "dtype": "bfloat16",
            "layer_types": [
                "full_attention" if i in (4, 8, 12, 16, 20, 24, 27) else "linear_attention" for i in range(1, 28)
            ],
        },
    ),
    "minimax-m3": (
        "minimax_m3_vl",
        "MiniMaxM3VLConfig",
        lambda: _text(60, 6144, 64, 4, layer_types=["full_attention"] * 3 + ["minimax_m3_sparse"] * 57),
    ),
    "minimax-m2.5": ("minimax_m2", "MiniMaxM2Config", lambda: {"dtype": "bfloat16"}),
    "glm-5.3-flash": ("glm5_next", "Glm5NextConfig", lambda: _text(45, 4096, 64, 64, index_kpool=4)),
    "step-3.5-flash": (
        "step3p7",
        "Step3p7TextConfig",
        lambda: _flat(
            45,
            4096,
            64,
            8,
            layer_types=[*(["full_attention"] + ["sliding_attention"] * 3) * 11, "full_attention"],
            sliding_window=512,
            num_sliding_attention_heads=96,
        ),
    ),
    "step-3.7-flash": (
        "step3p7",
        "Step3p7Config",
        lambda: _text(
            45,
            4096,
            64,
            8,
            layer_types=[*(["full_attention"] + ["sliding_attention"] * 3) * 11, "full_attention"],
            sliding_window=512,
        ),
    ),
    "granite-swa": ("granite_swa", "GraniteSWAConfig", lambda: {"dtype": "bfloat16"}),
    "recurrentgemma-2b": ("recurrent_gemma", "RecurrentGemmaConfig", lambda: _flat(26, 2560, 10, 1)),
    "recurrentgemma-9b": ("recurrent_gemma", "RecurrentGemmaConfig", lambda: _flat(38, 4096, 16, 1)),
    # Beyond the reference geometries.
    "llama-3.1-8b": ("llama", "LlamaConfig", lambda: _flat(32, 4096, 32, 8)),
    "llama-3.2-1b": ("llama", "LlamaConfig", lambda: _flat(16, 2048, 32, 8, head_dim=64)),
    "qwen2.5-7b": ("qwen2", "Qwen2Config", lambda: _flat(28, 3584, 28, 4)),
    "qwen2.5-7b-sliding": (
        "qwen2",
        "Qwen2Config",
        lambda: _flat(28, 3584, 28, 4, use_sliding_window=True, sliding_window=32768, max_window_layers=20),
    ),
    "qwen3-8b": ("qwen3", "Qwen3Config", lambda: _flat(36, 4096, 32, 8, head_dim=128)),
    "qwen3-30b-a3b": ("qwen3_moe", "Qwen3MoeConfig", lambda: _flat(48, 2048, 32, 4, head_dim=128)),
    "mistral-nemo": ("mistral", "MistralConfig", lambda: _flat(40, 5120, 32, 8, head_dim=128, sliding_window=None)),
    "mixtral-8x7b": ("mixtral", "MixtralConfig", lambda: _flat(32, 4096, 32, 8)),
    "phi-3-mini-4k": ("phi3", "Phi3Config", lambda: _flat(32, 3072, 32, 32, sliding_window=2047)),
    "phi-4-mini": ("phi3", "Phi3Config", lambda: _flat(32, 3072, 24, 8, sliding_window=262144)),
    "exaone-4-32b": ("exaone4", "Exaone4Config", lambda: _flat(64, 5120, 40, 8)),
    "exaone-4-1.2b": (
        "exaone4",
        "Exaone4Config",
        lambda: _flat(30, 2048, 32, 8, sliding_window=None, layer_types=["full_attention"] * 30),
    ),
    "exaone-moe-236b": (
        "exaone_moe",
        "ExaoneMoeConfig",
        lambda: _flat(48, 6144, 64, 8, head_dim=128, sliding_window=128),
    ),
    "deepseek-v2-lite": ("deepseek_v2", "DeepseekV2Config", lambda: _flat(27, 2048, 16, 16, q_lora_rank=None)),
    "deepseek-v3.2": ("deepseek_v32", "DeepseekV32Config", lambda: {"dtype": "bfloat16"}),
    "glm-4.5": ("glm4_moe", "Glm4MoeConfig", lambda: _flat(92, 5120, 96, 8, head_dim=128)),
    "glm-4.7-flash": ("glm4_moe_lite", "Glm4MoeLiteConfig", lambda: {"dtype": "bfloat16"}),
    "glm-5": ("glm_moe_dsa", "GlmMoeDsaConfig", lambda: {"dtype": "bfloat16"}),
    "glm-5.2": (
        "glm_moe_dsa",
        "GlmMoeDsaConfig",
        lambda: {"dtype": "bfloat16", "index_topk_freq": 4, "index_skip_topk_offset": 3},
    ),
    "kimi-k2": ("deepseek_v3", "DeepseekV3Config", lambda: _flat(61, 7168, 64, 64)),
    "kimi-k2.5": ("kimi_k25", "Kimi_K25Config", lambda: _text(61, 7168, 64, 64, model_type="deepseek_v3")),
    "longcat-flash": ("longcat_flash", "LongcatFlashConfig", lambda: {"dtype": "bfloat16"}),
    "minimax-text-01": (
        "minimax",
        "MiniMaxConfig",
        lambda: _flat(80, 6144, 64, 8, head_dim=128, layer_types=_every(80, 8, other="linear_attention")),
    ),
    "minimax-m1": (
        "minimax",
        "MiniMaxConfig",
        lambda: _flat(80, 6144, 64, 8, head_dim=128, layer_types=_every(80, 8, other="linear_attention")),
    ),
    "mimo-v2-flash": ("mimo_v2_flash", "MiMoV2FlashConfig", lambda: {"dtype": "bfloat16", "sliding_window_size": 128}),
    "lfm2-1.2b": (
        "lfm2",
        "Lfm2Config",
        lambda: _flat(16, 2048, 32, 8, full_attn_idxs=[2, 5, 8, 10, 12, 14]),
    ),
    "lfm2-8b-a1b": (
        "lfm2_moe",
        "Lfm2MoeConfig",
        lambda: _flat(
            24,
            2048,
            32,
            8,
            layer_types=["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)],
        ),
    ),
    "lfm3": ("lfm3", "Lfm3Config", lambda: {"dtype": "bfloat16"}),
    "bamba-9b": (
        "bamba",
        "BambaConfig",
        lambda: _flat(32, 4096, 32, 8, attn_layer_indices=[9, 18, 27], mamba_d_state=128),
    ),
    "zamba2-2.7b": ("zamba2", "Zamba2Config", lambda: _zamba(54, 2560, _ZAMBA_2_7B, 80, 1)),
    "zamba2-7b": ("zamba2", "Zamba2Config", lambda: _zamba(81, 3584, _ZAMBA_7B, 112, 2)),
    "falcon-mamba-7b": (
        "falcon_mamba",
        "FalconMambaConfig",
        lambda: {"hidden_size": 4096, "num_hidden_layers": 64, "dtype": "bfloat16"},
    ),
    "mamba-2.8b": ("mamba", "MambaConfig", lambda: {"hidden_size": 2560, "num_hidden_layers": 64, "dtype": "bfloat16"}),
    "mamba-codestral-7b": ("mamba2", "Mamba2Config", lambda: {"dtype": "bfloat16"}),
    "olmo-hybrid-7b": ("olmo_hybrid", "OlmoHybridConfig", lambda: {"dtype": "bfloat16"}),
    "hunyuan-7b": ("hunyuan_v1_dense", "HunYuanDenseV1Config", lambda: _flat(32, 4096, 32, 8, head_dim=128)),
    "seed-oss-36b": ("seed_oss", "SeedOssConfig", lambda: _flat(64, 5120, 80, 8)),
    "smollm3-3b": ("smollm3", "SmolLM3Config", lambda: {"dtype": "bfloat16"}),
    "gemma-1-7b": ("gemma", "GemmaConfig", lambda: {"dtype": "bfloat16"}),
    "vaultgemma-1b": ("vaultgemma", "VaultGemmaConfig", lambda: _flat(26, 1152, 4, 4, sliding_window=512)),
    "ernie-4.5-0.3b": ("ernie4_5", "Ernie4_5Config", lambda: {"dtype": "bfloat16"}),
    "command-r-v01": ("cohere", "CohereConfig", lambda: {"dtype": "bfloat16"}),
    "ministral-3-8b-2512": (
        "mistral3",
        "Mistral3Config",
        lambda: _text(34, 4096, 32, 8, model_type="ministral3", head_dim=128),
    ),
    "mistral-small-3.1-24b": (
        "mistral3",
        "Mistral3Config",
        lambda: _text(40, 5120, 32, 8, model_type="mistral", head_dim=128, sliding_window=None),
    ),
    "pixtral-12b": (
        "llava",
        "LlavaConfig",
        lambda: _text(40, 5120, 32, 8, model_type="mistral", head_dim=128, sliding_window=None),
    ),
    "llava-1.5-7b": ("llava", "LlavaConfig", lambda: {"text_config": {"model_type": "llama"}, "dtype": "bfloat16"}),
    "qwen2.5-vl-7b": ("qwen2_5_vl", "Qwen2_5_VLConfig", lambda: _text(28, 3584, 28, 4)),
    "qwen3-vl-8b": ("qwen3_vl", "Qwen3VLConfig", lambda: _text(36, 4096, 32, 8, head_dim=128)),
    "qwen3-omni-30b-a3b": (
        "qwen3_omni_moe",
        "Qwen3OmniMoeConfig",
        lambda: {"thinker_config": _text(48, 2048, 32, 4, head_dim=128), "dtype": "bfloat16"},
    ),
    "internvl3-8b": ("internvl", "InternVLConfig", lambda: _text(28, 3584, 28, 4, model_type="qwen2")),
    "apertus-8b": ("apertus", "ApertusConfig", lambda: _flat(32, 4096, 32, 8)),
    "afm-4.5b": ("arcee", "ArceeConfig", lambda: _flat(36, 2560, 20, 4)),
    "minitron-8b": ("nemotron", "NemotronConfig", lambda: _flat(32, 4096, 48, 8, head_dim=128)),
    "gpt2": ("gpt2", "GPT2Config", lambda: {"dtype": "bfloat16"}),
    "gpt-neox-20b": ("gpt_neox", "GPTNeoXConfig", lambda: {"dtype": "bfloat16"}),
    "gpt-j-6b": ("gptj", "GPTJConfig", lambda: {"dtype": "bfloat16"}),
    "gpt-neo-2.7b": (
        "gpt_neo",
        "GPTNeoConfig",
        lambda: {
            "hidden_size": 2560,
            "num_layers": 32,
            "num_heads": 20,
            "attention_types": [[["global", "local"], 16]],
            "dtype": "bfloat16",
        },
    ),
    "bloom-7b1": (
        "bloom",
        "BloomConfig",
        lambda: {"hidden_size": 4096, "n_layer": 30, "n_head": 32, "dtype": "bfloat16"},
    ),
    "falcon-7b": ("falcon", "FalconConfig", lambda: {"dtype": "bfloat16"}),
    "falcon-40b": (
        "falcon",
        "FalconConfig",
        lambda: _flat(60, 8192, 128, num_kv_heads=8, new_decoder_architecture=True),
    ),
    "mpt-7b": ("mpt", "MptConfig", lambda: {"d_model": 4096, "n_heads": 32, "n_layers": 32, "dtype": "bfloat16"}),
    "opt-6.7b": ("opt", "OPTConfig", lambda: _flat(32, 4096, 32)),
    "starcoder2-7b": ("starcoder2", "Starcoder2Config", lambda: _flat(32, 4608, 36, 4, sliding_window=4096)),
    "starcoder": (
        "gpt_bigcode",
        "GPTBigCodeConfig",
        lambda: {"n_embd": 6144, "n_head": 48, "n_layer": 40, "dtype": "bfloat16"},
    ),
    "stablelm-2-1.6b": ("stablelm", "StableLmConfig", lambda: _flat(24, 2048, 32, 32)),
    "dbrx": (
        "dbrx",
        "DbrxConfig",
        lambda: {
            "d_model": 6144,
            "n_heads": 48,
            "n_layers": 40,
            "attn_config": {"kv_n_heads": 8, "clip_qkv": 8},
            "dtype": "bfloat16",
        },
    ),
    "persimmon-8b": ("persimmon", "PersimmonConfig", lambda: {"dtype": "bfloat16"}),
    "xlstm-7b": ("xlstm", "xLSTMConfig", lambda: {"dtype": "bfloat16"}),
    "rwkv-4-7b": ("rwkv", "RwkvConfig", lambda: {"dtype": "bfloat16"}),
    "minicpm3-4b": ("minicpm3", "MiniCPM3Config", lambda: {"dtype": "bfloat16"}),
    "dots1-llm": ("dots1", "Dots1Config", lambda: _flat(62, 4096, 32, 32, sliding_window=None)),
    "afmoe-trinity-mini": ("afmoe", "AfmoeConfig", lambda: _flat(32, 2048, 32, 4, sliding_window=2048)),
    "laguna": (
        "laguna",
        "LagunaConfig",
        lambda: {"dtype": "bfloat16", "layer_types": ["full_attention", *_MIXED[:3]] * 10},
    ),
    "hy-v3": ("hy_v3", "HYV3Config", lambda: {"dtype": "bfloat16"}),
    "hy-v4": ("hy_v4", "HYV4Config", lambda: {"dtype": "bfloat16"}),
    "inkling": ("inkling", "InklingTextConfig", lambda: {"dtype": "bfloat16"}),
    "bailing-hybrid": ("bailing_hybrid", "BailingHybridConfig", lambda: {"dtype": "bfloat16"}),
    "muse-spark": ("muse_spark", "MuseSparkTextConfig", lambda: {"dtype": "bfloat16"}),
    "qwen4-exp": (
        "qwen4_exp",
        "Qwen4ExpTextConfig",
        lambda: {
            "dtype": "bfloat16",
            "indexer_n_heads": 4,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 128,
            "indexer_budget": 2048,
            "indexer_compress_ratio": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
        },
    ),
    "mistral-large-4": ("mistral_large4", "MistralLarge4TextConfig", lambda: {"dtype": "bfloat16"}),
    "mistral-large-4-shared": (
        "mistral_large4",
        "MistralLarge4TextConfig",
        lambda: {
            "dtype": "bfloat16",
            "kv_source_layers": [i if i % 4 == 3 else i - i % 4 for i in range(72)],
            "index_topk_freq": 4,
            "index_skip_topk_offset": 3,
        },
    ),
    "mistral-4": ("mistral4", "Mistral4Config", lambda: {"dtype": "bfloat16"}),
    "dots3-note": ("dots3_note", "Dots3NoteTextConfig", lambda: {"dtype": "bfloat16"}),
    "zaya": ("zaya", "ZayaConfig", lambda: {"dtype": "bfloat16"}),
    "granitemoe-swa": ("granitemoe_swa", "GraniteMoeSWAConfig", lambda: _flat(32, 4096, 32, 8)),
    "sarvam-mla": ("sarvam_mla", "SarvamMLAConfig", lambda: {"dtype": "bfloat16"}),
    "solar-open": ("solar_open", "SolarOpenConfig", lambda: {"dtype": "bfloat16"}),
    "axk1": ("axk1", "AXK1Config", lambda: {"dtype": "bfloat16"}),
    "axk2": ("axk2", "AXK2Config", lambda: {"dtype": "bfloat16"}),
    "cohere2-moe": (
        "cohere2_moe",
        "Cohere2MoeConfig",
        lambda: _flat(40, 8192, 64, 8, head_dim=128, first_k_dense_replace=2),
    ),
    "mellum": ("mellum", "MellumConfig", lambda: {"dtype": "bfloat16", "layer_types": list(_MIXED) * 7}),
}

REFUSED_CLASSES = {
    "t5": ("t5", "T5Config", dict),
    "bart": ("bart", "BartConfig", dict),
    "whisper": ("whisper", "WhisperConfig", dict),
    "mllama": ("mllama", "MllamaConfig", lambda: {"text_config": {}, "vision_config": {}}),
    "longformer": ("longformer", "LongformerConfig", dict),
    "big_bird": ("big_bird", "BigBirdConfig", lambda: {"is_decoder": True}),
    "reformer": ("reformer", "ReformerConfig", lambda: {"is_decoder": True}),
    "xlnet": ("xlnet", "XLNetConfig", lambda: {"mem_len": 512}),
    "bert": ("bert", "BertConfig", dict),
    "gpt2-cross": ("gpt2", "GPT2Config", lambda: {"add_cross_attention": True}),
    "embedding-gemma": ("gemma3", "Gemma3TextConfig", lambda: {"use_bidirectional_attention": True}),
    "unlimited-ocr": ("unlimited_ocr", "UnlimitedOcrTextConfig", dict),
}


def refused(model: str) -> dict:
    """Returns the `to_dict()` of a config whose cache no group describes."""
    module, name, fields = REFUSED_CLASSES[model]
    found = importlib.import_module(f"transformers.models.{module}.configuration_{module}")
    return getattr(found, name)(**fields()).to_dict()
