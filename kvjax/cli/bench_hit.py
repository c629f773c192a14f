"""`kvjax bench hit`: lookups, plans and keys of one long request of DeepSeek-V4-Flash.

Beside each lookup and each set of keys stands a plain loop over chunks in Python. What the two return is
compared: a difference is an error.
"""

import argparse
import hashlib
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from kvjax._checks import integer
from kvjax.chunking import Chunking, resolve_chunking
from kvjax.cli.options import integer as integer_text
from kvjax.coverage import Hit, longest_hit, store_set
from kvjax.groups import CacheLayout, FullAttention, GroupSpec, SlidingWindow
from kvjax.keys import HASH_BYTES, NAMESPACE_BYTES, chunk_keys, namespace_of, prefix_hashes
from kvjax.law import needed
from kvjax.packing import GRANULE_BYTES, Units, cut_into_units, unit_bytes
from kvjax.plan import plan_load, plan_store

Masks = dict[str, np.ndarray]

_SHORT_TOKENS, _SHORT_UNIT = 131_072, 16
_VOCABULARY = 129_280
# A plain loop is slow, and its times vary little.
_PLAIN_REPEATS = 3

# DeepSeek-V4-Flash: a window of 128 in 43 layers, 21 layers with one compressed state every 4 tokens and keys of an
# index over them, 20 with one every 128, and the compressors' own states. A block's bytes are over all layers.
DEEPSEEK_V4_FLASH = CacheLayout(
    [
        GroupSpec("window", SlidingWindow(128), 16, block_bytes=16 * 43 * 1024, num_layers=43),
        GroupSpec("compressed_4", FullAttention(), 16, block_bytes=16 * 21 * 256, num_layers=21),
        GroupSpec("compressed_128", FullAttention(), 128, block_bytes=128 * 20 * 8, num_layers=20),
        GroupSpec("index", FullAttention(), 16, block_bytes=16 * 21 * 33, num_layers=21),
        GroupSpec("compressor_4", SlidingWindow(8), 4, block_bytes=4 * 21 * 2048, num_layers=21),
        GroupSpec("compressor_128", SlidingWindow(128), 8, block_bytes=8 * 20 * 1024, num_layers=20),
    ]
)


class Figure(NamedTuple):
    """One thing to time: `call`, and a loop over chunks whose result says the same, if there is one.

    `as_plain` turns what `call` returned into what `plain` returns.
    """

    name: str
    call: Callable[[], Any]
    plain: Callable[[], Any] | None = None
    as_plain: Callable[[Any], Any] = lambda result: result


def add_parser(benches: Any) -> argparse.ArgumentParser:
    """Adds the benchmark and returns its parser."""
    parser = benches.add_parser(
        "hit", help="lookups, plans and keys of one long request", description=__doc__, allow_abbrev=False
    )
    parser.add_argument(
        "--tokens", type=integer_text, default=1_048_576, metavar="N", help="tokens of the request (default 1048576)"
    )
    parser.add_argument(
        "--repeats", type=integer_text, default=9, metavar="R", help="calls that a figure is taken from (default 9)"
    )
    return parser


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures as the JSON document that the command prints: times in milliseconds.

    Raises:
        ValueError: `--tokens` or `--repeats` is not positive.
        RuntimeError: a plain loop returned something else.
    """
    from kvjax.observe.progress import progress_bar

    num_tokens = integer(args.tokens, "--tokens", at_least=1)
    repeats = integer(args.repeats, "--repeats", at_least=1)
    chunking = resolve_chunking(DEEPSEEK_V4_FLASH)
    units = cut_into_units(chunking, unit_bytes(chunking, GRANULE_BYTES["tpu"]))
    figures = list(figures_of(chunking, units, num_tokens))
    found = []
    with progress_bar("bench hit", len(figures)) as advance:
        for figure in figures:
            found.append(timed(figure, repeats))
            advance(1)
    return {
        "bench": "hit",
        "model": "DeepSeek-V4-Flash",
        "tokens": num_tokens,
        "tokens_per_hash": chunking.tokens_per_hash,
        "unit_bytes": units.unit_bytes,
        "chunks": _counts(chunking, num_tokens),
        "repeats": repeats,
        "machine": platform.machine(),
        "num_cpus": os.cpu_count(),
        "figures": found,
    }


def figures_of(chunking: Chunking, units: Units, num_tokens: int) -> Iterator[Figure]:
    """Yields what is timed, on a request of `num_tokens` tokens that is the same in every run."""
    rng = np.random.default_rng(0)
    layout = chunking.layout
    counts = _counts(chunking, num_tokens)
    windows = {group.name for group in layout.groups if isinstance(group.kind, SlidingWindow)}

    def masks(missing: float, names: set[str]) -> Masks:
        return {n: rng.random(count) >= missing * (n in names) for n, count in counts.items()}

    resident = masks(0, set())
    for name, present in (
        ("hit_resident", resident),
        ("hit_5_percent_missing", masks(0.05, set(layout.names))),
        ("hit_half_missing", masks(0.5, set(layout.names))),
        ("hit_5_percent_of_windows_missing", masks(0.05, windows)),
        ("hit_half_of_windows_missing", masks(0.5, windows)),
    ):
        yield _lookup(name, chunking, num_tokens, present)

    tables = {name: rng.permutation(count + 1) for name, count in counts.items()}
    hit = longest_hit(chunking, num_tokens, resident)
    stored = store_set(chunking, num_tokens)
    into, out_of = (_unit_ids(units, layout, chunks, rng) for chunks in (stored, hit.load))
    yield Figure("store_plan", lambda: plan_store(chunking, store_set(chunking, num_tokens), tables, into))
    yield Figure("load_plan", lambda: plan_load(chunking, hit, tables, out_of))

    tokens = rng.integers(0, _VOCABULARY, max(num_tokens, _SHORT_TOKENS))
    namespace = namespace_of(chunking, model="DeepSeek-V4-Flash")
    yield Figure(
        "keys",
        lambda: _keys(chunking, namespace, tokens[:num_tokens]),
        lambda: _plain_keys(chunking, namespace, tokens[:num_tokens]),
    )
    short = tokens[:_SHORT_TOKENS]
    yield Figure(
        f"hashes_of_{_SHORT_TOKENS}_tokens_by_{_SHORT_UNIT}",
        lambda: prefix_hashes(namespace, short, _SHORT_UNIT),
        lambda: _plain_hashes(namespace, short, _SHORT_UNIT),
    )


def timed(figure: Figure, repeats: int) -> dict[str, Any]:
    """Returns the least and the median time of the figure and of its plain loop.

    Raises:
        RuntimeError: the plain loop returned something else.
    """
    result, times = _times(figure.call, repeats)
    found = {"name": figure.name, "min_ms": round(min(times), 4), "median_ms": round(statistics.median(times), 4)}
    if figure.plain is None:
        return found | {"plain_ms": None, "plain_ratio": None}
    expected, plain_times = _times(figure.plain, min(repeats, _PLAIN_REPEATS))
    if figure.as_plain(result) != expected:
        raise RuntimeError(f"{figure.name}: kvjax and a plain loop over the chunks return different results")
    plain, own = statistics.median(plain_times), statistics.median(times)
    return found | {"plain_ms": round(plain, 4), "plain_ratio": round(plain / own, 2)}


def _times(call: Callable[[], Any], repeats: int) -> tuple[Any, list[float]]:
    """What the last call returned, and the milliseconds of each; one more warms up."""
    result, times = call(), []
    for _ in range(repeats):
        start = time.perf_counter()
        again = call()
        times.append((time.perf_counter() - start) * 1e3)
        result = again  # freeing what came before is not counted
    return result, times


# --- what is timed ------------------------------------------------------------------------------------


def _lookup(name: str, chunking: Chunking, num_tokens: int, present: Masks) -> Figure:
    listed = {group: mask.tolist() for group, mask in present.items()}
    return Figure(
        name,
        lambda: longest_hit(chunking, num_tokens, present),
        lambda: _plain_hit(chunking, num_tokens, listed),
        _hit_as_lists,
    )


def _hit_as_lists(hit: Hit) -> tuple[int, dict[str, list[int]]]:
    return hit.hit_tokens, {name: chunks.tolist() for name, chunks in hit.load.items()}


def _keys(chunking: Chunking, namespace: bytes, tokens: np.ndarray) -> list[list[bytes]]:
    hashes = prefix_hashes(namespace, tokens, chunking.tokens_per_hash)
    return [chunk_keys(chunking, g, hashes, namespace) for g in chunking.layout.cached]


def _counts(chunking: Chunking, num_tokens: int) -> dict[str, int]:
    """Complete chunks, by group."""
    per_chunk = zip(chunking.layout.names, chunking.tokens_per_chunk, strict=True)
    return {name: num_tokens // (tokens or 1) for name, tokens in per_chunk}


def _unit_ids(
    units: Units, layout: CacheLayout, chunks: dict[str, np.ndarray], rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Units for chunks, at random places of a pool that they fill."""
    widths = dict(zip(layout.names, units.units_per_chunk, strict=True))
    shapes = {name: (len(chunks[name]), width or 0) for name, width in widths.items()}
    ends = np.cumsum([rows * width for rows, width in shapes.values()])
    parts = np.split(rng.permutation(ends[-1]).astype(np.int32), ends[:-1])
    return {name: part.reshape(shapes[name]) for name, part in zip(shapes, parts, strict=True)}


# --- the same, chunk by chunk -------------------------------------------------------------------------


def _plain_hit(chunking: Chunking, num_tokens: int, present: dict[str, list[bool]]) -> tuple[int, dict[str, list[int]]]:
    """Full and sliding attention only: a chunk that is missing rules out every position from its start on that
    needs it, up to the one that was tried."""
    position, before = num_tokens - 1, -1
    while position != before:
        first, before = before < 0, position
        for group, tokens in zip(chunking.layout.groups, chunking.tokens_per_chunk, strict=True):
            if first or isinstance(group.kind, SlidingWindow):  # a lower position needs less of full attention
                start, stop = needed(group.kind, position)
                position = _plain_lowered(present[group.name], position, tokens or 1, start, stop)
    load = {}
    for group, tokens in zip(chunking.layout.groups, chunking.tokens_per_chunk, strict=True):
        start, stop = needed(group.kind, position)
        load[group.name] = []
        for chunk_idx in range(start // (tokens or 1), -(-stop // (tokens or 1)) if start < stop else 0):
            load[group.name].append(chunk_idx)
    return position, load


def _plain_lowered(present: list[bool], position: int, tokens: int, start: int, stop: int) -> int:
    for chunk_idx in range(start // tokens, -(-stop // tokens)):
        if chunk_idx >= len(present) or not present[chunk_idx]:
            return min(position, chunk_idx * tokens)
    return position


def _plain_hashes(namespace: bytes, tokens: np.ndarray, tokens_per_hash: int) -> list[bytes]:
    hashes, chain = [], namespace
    for start in range(0, len(tokens) - tokens_per_hash + 1, tokens_per_hash):
        data = tokens[start : start + tokens_per_hash].astype("<i8").tobytes()
        chain = hashlib.blake2b(data, digest_size=HASH_BYTES, key=chain).digest()
        hashes.append(chain)
    return hashes


def _plain_keys(chunking: Chunking, namespace: bytes, tokens: np.ndarray) -> list[list[bytes]]:
    hashes = _plain_hashes(namespace, tokens, chunking.tokens_per_hash)
    keys = []
    for g, tokens_per_chunk in enumerate(chunking.tokens_per_chunk):
        of_group = []
        for chunk_idx in range(len(tokens) // (tokens_per_chunk or 1)):
            last_hash = (chunk_idx + 1) * (chunking.hashes_per_chunk[g] or 1) - 1
            of_group.append(hashes[last_hash] + g.to_bytes(4, "little") + namespace[:NAMESPACE_BYTES])
        keys.append(of_group)
    return keys
