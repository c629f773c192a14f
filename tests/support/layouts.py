"""Small layouts, each of a different mix, whose caches a test can fill byte by byte."""

import numpy as np

from kvjax import CacheLayout, ChunkedLocal, FullAttention, GroupSpec, LeafSpec, Recurrent, Scratch, SlidingWindow


def kv(prefix: str, tokens: int, *shape: int, dtype: object = np.float32) -> tuple[LeafSpec, LeafSpec]:
    return LeafSpec(f"{prefix}.k", (tokens, *shape), dtype), LeafSpec(f"{prefix}.v", (tokens, *shape), dtype)


GEMMA = CacheLayout(
    [
        GroupSpec("full", FullAttention(), 8, kv("full", 8, 1, 4)),
        GroupSpec("local", SlidingWindow(10), 4, (*kv("l0", 4, 2, 2), *kv("l1", 4, 2, 2))),
    ]
)

UNIFORM = CacheLayout([GroupSpec("full", FullAttention(), 4, kv("full", 4, 3, dtype="bfloat16"))])

HYBRID = CacheLayout(
    [
        GroupSpec("full", FullAttention(), 4, kv("full", 4, 5, dtype="bfloat16")),
        GroupSpec("ring", Scratch(), 2, block_bytes=8),
        GroupSpec(
            "state",
            Recurrent(),
            8,
            (LeafSpec("ssm", (3, 5), np.float32), LeafSpec("conv", (7,), "float8_e4m3fn")),
        ),
    ]
)

LLAMA4 = CacheLayout(
    [
        GroupSpec("nope", FullAttention(), 4, (LeafSpec("nope.kv", (4, 2, 3), np.float16, layers=2),)),
        GroupSpec("chunked", ChunkedLocal(12), 4, (LeafSpec("chunked.kv", (4, 6), np.int8, layers=3),)),
    ]
)

EVERYTHING = CacheLayout(
    [
        GroupSpec("mla", FullAttention(), 8, (LeafSpec("latent", (8, 9), "bfloat16"),), lookahead_tokens=3),
        GroupSpec("local", SlidingWindow(7), 4, (LeafSpec("shared", (4, 3), np.uint8),)),
        GroupSpec(
            "state8", SlidingWindow(8), 4, (LeafSpec("shared", (4, 3), np.uint8), LeafSpec("own", (4, 1), np.uint32))
        ),
        GroupSpec("chunked", ChunkedLocal(16), 8, (LeafSpec("chunked", (8, 2), "float8_e5m2", layers=2),)),
        GroupSpec("mamba", Recurrent(), 4, (LeafSpec("mamba", (6,), np.float32),)),
    ]
)

ALL = {"gemma": GEMMA, "uniform": UNIFORM, "hybrid": HYBRID, "llama4": LLAMA4, "everything": EVERYTHING}
