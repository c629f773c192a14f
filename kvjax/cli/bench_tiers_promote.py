"""Chunks that an offloader brings from a tier to its host pool."""

import os
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax

_TOKENS_PER_BLOCK = 16


def promote_row(url: str, chunk_bytes: int, num_chunks: int, rounds: int) -> dict[str, Any]:
    """Returns the figures of a prefetch of all chunks of a prompt into an empty host pool.

    Args:
        url: of the tier.
        chunk_bytes: bytes of a chunk.
        num_chunks: chunks.
        rounds: which count; one before them warms up.

    Raises:
        ValueError: the tier cannot be used, or did not keep or return all chunks.
    """
    leaf = kvjax.LeafSpec("kv", (chunk_bytes,), "uint8")
    layout = kvjax.CacheLayout([kvjax.GroupSpec("full", kvjax.FullAttention(), _TOKENS_PER_BLOCK, [leaf])])
    caches = {"kv": jnp.zeros((num_chunks, chunk_bytes), "uint8", device=jax.devices()[0])}
    tokens = np.random.default_rng().integers(0, 2**31, num_chunks * _TOKENS_PER_BLOCK + 1)
    model = f"bench {os.urandom(16).hex()}"

    def new_offloader() -> kvjax.Offloader:
        return kvjax.Offloader(
            layout,
            caches,
            host_bytes=2 * num_chunks * chunk_bytes,
            model=model,
            tiers=[url],
            show_progress=False,
        )

    try:
        with new_offloader() as offloader:
            offloader.lookup("r", tokens)
            caches, job = offloader.store(caches, "r", {"full": range(num_chunks)}, num_chunks * _TOKENS_PER_BLOCK)
            offloader.wait(job)
            offloader.flush()
            tier = offloader.stats().tiers[0]
            if tier.chunks_written != num_chunks:
                raise ValueError(f"{tier.name} must keep {num_chunks} chunks, and took {tier.chunks_written}")
        seconds = [_prefetch_s(new_offloader(), tokens, num_chunks) for _ in range(1 + rounds)][1:]
    finally:
        with new_offloader() as offloader:
            offloader.invalidate(offloader.namespace())
    took = min(seconds)
    return {
        "tier": tier.name,
        "chunk_bytes": chunk_bytes,
        "num_chunks": num_chunks,
        "mib_per_s": round(num_chunks * chunk_bytes / 2**20 / took, 2),
        "ms_per_chunk": round(took / num_chunks * 1e3, 4),
    }


def _prefetch_s(offloader: kvjax.Offloader, tokens: np.ndarray, num_chunks: int) -> float:
    with offloader:
        begun = time.perf_counter()
        job = offloader.prefetch(tokens)
        if job is not None:
            offloader.wait(job)
        took = time.perf_counter() - begun
        stats = offloader.stats()
    if stats.chunks_promoted != num_chunks:
        raise ValueError(f"{stats.tiers[0].name} must return {num_chunks} chunks, and {stats.chunks_promoted} came")
    return took
