"""What the cache of each released model holds: kinds, layers, bytes. `notes.md` has the reasons.

A row is `(kind, window, layers, bytes)`: bytes per token and layer for attention, of the whole state of one layer for
recurrent layers, of one block of one layer for scratch. Index keys and compressor states are rows like any other. Bytes
are those of bfloat16 caches at tensor-parallel size 1. A tuple of bytes lists what is acceptable, `None` accepts all.

The 44 reference geometries are in `geometries.json`; the others are worked out here from heads and widths.
"""

import json
from pathlib import Path

GEOMETRIES = json.loads((Path(__file__).parent / "geometries.json").read_text())

BF16, F32 = 2, 4
INDEX = 132  # 128 keys of 8 bits and a float32 scale


def full(layers, heads, width, value_width=None):
    return ("full", None, layers, heads * (width + (width if value_width is None else value_width)) * BF16)


def sliding(window, layers, heads, width, value_width=None):
    return ("sliding", window, *full(layers, heads, width, value_width)[2:])


def chunked(chunk, layers, heads, width):
    return ("chunked", chunk, *full(layers, heads, width)[2:])


def latent(layers, lora=512, rope=64):
    return ("full", None, layers, (lora + rope) * BF16)


def index(layers, tokens_per_state=1):
    return ("full", None, layers, INDEX // tokens_per_state)


def state(layers, conv, recurrent, dtype_bytes):
    """`conv` columns times channels in bfloat16, `recurrent` elements of `dtype_bytes`."""
    return ("recurrent", None, layers, conv * BF16 + recurrent * dtype_bytes)


def mamba1(layers, width, states=16, taps=4):
    return state(layers, (taps - 1) * width, width * states, F32)


def mamba2(layers, heads, head_dim, states, groups):
    return state(layers, 3 * (heads * head_dim + 2 * groups * states), heads * head_dim * states, F32)


def delta(layers, key_heads, key_dim, value_heads, value_dim, dtype_bytes):
    conv = 3 * (2 * key_heads * key_dim + value_heads * value_dim)
    return state(layers, conv, value_heads * key_dim * value_dim, dtype_bytes)


def kda(layers, heads, width=128):
    return delta(layers, heads, width, heads, width, F32)


_EIGHT = (8, 128)

DERIVED = {
    "gemma-3-12b": [sliding(1024, 40, 8, 256), full(8, 8, 256)],
    "gemma-3n-E4B": [sliding(512, 16, 2, 256), full(4, 2, 256)],
    "gemma-4-26b-a4b": [sliding(1024, 25, 8, 256), full(5, 2, 512)],
    "llama-4-maverick": [chunked(8192, 36, *_EIGHT), full(12, *_EIGHT)],
    "llama-4-rope-layers": [chunked(8192, 36, *_EIGHT), full(12, *_EIGHT)],
    "ministral-8b-2410-list": [full(9, *_EIGHT), sliding(32768, 27, *_EIGHT)],
    "deepseek-v4-pro": [
        ("sliding", 128, 61, 512 * BF16),
        ("full", None, 30, 512 * BF16 // 4),
        ("full", None, 31, 512 * BF16 // 128),
        index(30, tokens_per_state=4),
        ("sliding", 8, 30, 4 * 512 * F32),
        ("sliding", 8, 30, 4 * 128 * F32),
        ("sliding", 128, 31, 2 * 512 * F32),
    ],
    "qwen3.5-397b-a17b": [full(15, 2, 256), delta(45, 16, 128, 64, 128, F32)],
    "jamba-1.5-mini": [full(4, *_EIGHT), mamba1(28, 8192)],
    "jamba-1.5-large": [full(9, *_EIGHT), mamba1(63, 16384)],
    "nemotron-3-super-120b-a12b": [full(8, 2, 128), mamba2(40, 128, 64, 128, 8)],
    "falcon-h1-7b": [full(44, 2, 128), mamba2(44, 24, 128, 256, 1)],
    "falcon-h1-34b": [full(72, 4, 128), mamba2(72, 32, 128, 256, 2)],
    "granite-4.0-h-tiny": [full(4, 4, 128), mamba2(36, 48, 64, 128, 1)],
    "granite-4.0-h-micro": [full(4, 8, 64), mamba2(36, 64, 64, 128, 1)],
    "granite-4.0-micro": [full(40, 8, 64)],
    "kimi-k3": [latent(24), kda(69, 96)],
    "minimax-m2.5": [full(62, *_EIGHT)],
    "step-3.7-flash": [full(12, *_EIGHT), sliding(512, 33, *_EIGHT)],
    "recurrentgemma-9b": [sliding(2048, 12, 1, 256), state(26, 3 * 4096, 4096, F32)],
    "llama-3.1-8b": [full(32, *_EIGHT)],
    "llama-3.2-1b": [full(16, 8, 64)],
    "qwen2.5-7b": [full(28, 4, 128)],
    "qwen2.5-7b-sliding": [full(20, 4, 128), sliding(32768, 8, 4, 128)],
    "qwen3-8b": [full(36, *_EIGHT)],
    "qwen3-30b-a3b": [full(48, 4, 128)],
    "mistral-nemo": [full(40, *_EIGHT)],
    "mixtral-8x7b": [full(32, *_EIGHT)],
    "phi-3-mini-4k": [sliding(2047, 32, 32, 96)],
    "phi-4-mini": [sliding(262144, 32, *_EIGHT)],
    # Layers 0, 2 … 16 are Mamba, 1, 3 … 15 slide, 17 is full; 18 … 31 read what 16 and 17 left.
    "phi-4-mini-flash": [mamba1(9, 5120), sliding(512, 8, 20, 64), full(1, 20, 64)],
    "exaone-4-32b": [sliding(4096, 48, *_EIGHT), full(16, *_EIGHT)],
    "exaone-4-32b-pattern": [sliding(4096, 48, *_EIGHT), full(16, *_EIGHT)],
    "exaone-4-1.2b": [full(30, 8, 64)],
    "exaone-moe-236b": [sliding(128, 36, *_EIGHT), full(12, *_EIGHT)],
    "deepseek-v2-lite": [latent(27)],
    "deepseek-v3.2": [latent(61), index(61)],
    "glm-4.5": [full(92, *_EIGHT)],
    "glm-4.7-flash": [latent(47)],
    "glm-5": [latent(78), index(78)],
    "glm-5.2": [latent(78), index(21)],
    "kimi-k2": [latent(61)],
    "kimi-k2.5": [latent(61)],
    "longcat-flash": [latent(2 * 28)],
    "minimax-text-01": [full(10, *_EIGHT), state(70, 0, 64 * 128 * 128, BF16)],
    "minimax-m1": [full(10, *_EIGHT), state(70, 0, 64 * 128 * 128, BF16)],
    "mimo-v2-flash": [full(9, 4, 192, 128), sliding(128, 39, 8, 192, 128)],
    "mimo-7b": [full(36, *_EIGHT)],
    "nemotron-super-49b": [full(49, *_EIGHT)],
    "lfm2-1.2b": [full(6, 8, 64), state(10, 2 * 2048, 0, F32)],
    "lfm2-8b-a1b": [full(6, 8, 64), state(18, 2 * 2048, 0, F32)],
    "lfm3": [full(6, 4, 128), sliding(256, 5, 4, 128), state(13, 6 * 2048, 0, F32)],
    "bamba-9b": [full(3, *_EIGHT), mamba2(29, 128, 64, 128, 1)],
    "zamba2-2.7b": [full(9, 32, 160), mamba2(54, 80, 64, 64, 1)],
    "zamba2-7b": [full(13, 32, 224), mamba2(81, 112, 64, 64, 2)],
    "falcon-mamba-7b": [mamba1(64, 8192)],
    # Published in float32, convolution states included.
    "mamba-2.8b": [state(64, 0, 3 * 5120 + 5120 * 16, F32)],
    "mamba-codestral-7b": [mamba2(64, 128, 64, 128, 8)],
    "olmo-hybrid-7b": [full(8, 30, 128), delta(24, 30, 96, 30, 192, BF16)],
    "hunyuan-7b": [full(32, *_EIGHT)],
    "seed-oss-36b": [full(64, *_EIGHT)],
    "smollm3-3b": [full(36, 4, 128)],
    "gemma-1-7b": [full(28, 16, 256)],
    "vaultgemma-1b": [sliding(512, 13, 4, 256), full(13, 4, 256)],
    "ernie-4.5-0.3b": [full(18, 2, 128)],
    "command-r-v01": [full(40, 64, 128)],
    "ministral-3-8b-2512": [full(34, *_EIGHT)],
    "mistral-small-3.1-24b": [full(40, *_EIGHT)],
    "pixtral-12b": [full(40, *_EIGHT)],
    "llava-1.5-7b": [full(32, 32, 128)],
    "qwen2.5-vl-7b": [full(28, 4, 128)],
    "qwen3-vl-8b": [full(36, *_EIGHT)],
    "qwen3-omni-30b-a3b": [full(48, 4, 128)],
    "internvl3-8b": [full(28, 4, 128)],
    "internvl3-8b-llm_config": [full(28, 4, 128)],
    "apertus-8b": [full(32, *_EIGHT)],
    "afm-4.5b": [full(36, 4, 128)],
    "minitron-8b": [full(32, *_EIGHT)],
    "gpt2": [full(12, 12, 64)],
    "gpt-neox-20b": [full(44, 64, 96)],
    "gpt-j-6b": [full(28, 16, 256)],
    "gpt-neo-2.7b": [full(16, 20, 128), sliding(256, 16, 20, 128)],
    "bloom-7b1": [full(30, 32, 128)],
    "falcon-7b": [full(32, 1, 64)],
    "falcon-40b": [full(60, 8, 64)],
    "mpt-7b": [full(32, 32, 128)],
    "opt-6.7b": [full(32, 32, 128)],
    "starcoder2-7b": [sliding(4096, 32, 4, 128)],
    "starcoder": [full(40, 1, 128)],
    "stablelm-2-1.6b": [full(24, 32, 64)],
    "dbrx": [full(40, *_EIGHT)],
    "persimmon-8b": [full(36, 64, 64)],
    "openelm-1.1b": [full(8, 4, 64), full(8, 5, 64), full(6, 6, 64), full(6, 8, 64)],
    "xlstm-7b": [state(32, 0, 8 * 256 * 512 + 8 * 256 + 8, F32)],
    "rwkv-4-7b": [state(32, 2 * 4096, 3 * 4096, F32)],
    "minicpm3-4b": [latent(62, 256, 32)],
    "dots1-llm": [full(62, 32, 128)],
    "afmoe-trinity-mini": [sliding(2048, 24, 4, 128), full(8, 4, 128)],
    "laguna": [sliding(512, 30, *_EIGHT), full(10, *_EIGHT)],
    "hy-v3": [full(80, *_EIGHT)],
    "hy-v4": [latent(34), index(10)],
    # Four short convolutions of 3 columns per layer: K, V, attention output, MLP output.
    "inkling": [
        full(11, *_EIGHT),
        sliding(512, 55, 16, 128),
        state(11, 3 * (2 * 8 * 128 + 2 * 6144), 0, F32),
        state(55, 3 * (2 * 16 * 128 + 2 * 6144), 0, F32),
    ],
    "bailing-hybrid": [latent(7), kda(35, 32)],
    "muse-spark": [sliding(2048, 46, 16, 64), full(16, 16, 64)],
    "qwen4-exp": [full(10, 2, 256), index(10), delta(30, 16, 128, 32, 128, BF16)],
    "mistral-large-4": [latent(72), index(72)],
    "mistral-large-4-shared": [latent(36), index(20)],
    "mistral-4": [latent(36, 256, 64)],
    "dots3-note": [latent(13), index(13), ("sliding", 512, 33, (1024 + 64) * BF16)],
    # Two columns of queries and keys, and half a value, of the last token.
    "zaya": [full(40, 2, 128), state(40, 2 * (8 + 2) * 128 + 128, 0, F32)],
    "granitemoe-swa": [full(8, *_EIGHT), sliding(128, 24, *_EIGHT)],
    "sarvam-mla": [latent(32)],
    "solar-open": [full(48, *_EIGHT)],
    "axk1": [latent(61)],
    "axk2": [latent(48, 128, 32), index(48)],
    "cohere2-moe": [full(11, *_EIGHT), sliding(4096, 29, *_EIGHT)],
    "mellum": [full(7, 4, 128), sliding(1024, 21, 4, 128)],
}

# The class counts the token itself beside the 128 before it.
DERIVED_TO_DICT = {
    "mimo-v2-flash": [full(9, 4, 192, 128), sliding(129, 39, 8, 192, 128)],
    "mamba-2.8b": [mamba1(64, 5120)],
}


# Models whose figures assume recurrent states in bfloat16, which their configs do not say.
NARROW_STATES = frozenset(
    (
        *("minimax-m1", "minimax-text-01", "nemotron-h-56b", "nemotron-h-8b", "olmo-hybrid-7b"),
        *("qwen3-next-80b-a3b", "qwen4-exp"),
    )
)


def rows(model: str, form: str) -> list[tuple]:
    """Returns the rows of `model` in the form "hub" or "to_dict"."""
    if model in GEOMETRIES:
        known = GEOMETRIES[model]
        return [
            (row["kind"], row.get("window"), row["layers"], tuple(b) if isinstance(b := row["bytes"], list) else b)
            for row in (*known["caches"], *known["side_caches"])
        ]
    return DERIVED_TO_DICT[model] if form == "to_dict" and model in DERIVED_TO_DICT else DERIVED[model]
