"""What a run prints: tables, or one line of JSON."""

import json
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

import kvjax

from .conversations import spell
from .run import MODES, OFFLOAD, RECOMPUTE, UNLIMITED, Outcome, Served

_SAMPLE_TURNS = 4


def as_json(outcome: Outcome) -> str:
    """Returns the outcome as one line; the counts of tokens are those of the offload mode."""
    offload = outcome.served[OFFLOAD]
    stats = outcome.offload_stats
    document = {
        "tokens_identical": outcome.tokens_identical(),
        "max_abs_logit_diff": outcome.max_abs_logit_diff(),
        "tokens_digest": outcome.served[UNLIMITED].digest(),
        "prompt_tokens": offload.total("prompt_tokens"),
        "device_hits_tokens": offload.total("device_tokens"),
        "restored_tokens": offload.total("restored_tokens"),
        "recomputed_tokens": offload.total("recomputed_tokens"),
        "generated_tokens": sum(len(turn.tokens) for turn in offload.turns),
        "ttft_ms": {mode: outcome.served[mode].ttft_ms() for mode in (OFFLOAD, RECOMPUTE, UNLIMITED)},
        "restored_from": restored_from(outcome),
        "tiers": [_tier(tier) for tier in stats.tiers],
        "fused": outcome.options.fused,
        "bytes_stored": stats.bytes_stored,
        "bytes_loaded": stats.bytes_loaded,
        "host_bytes": outcome.host_bytes,
        "seconds": round(outcome.seconds, 3),
        "modes": {mode: _mode(served) for mode, served in outcome.served.items()},
        "geometry": geometry(outcome),
    }
    return json.dumps(document, allow_nan=False)


def restored_from(outcome: Outcome) -> dict[str, int]:
    """Returns the restored tokens by the lowest level that those of their turn came from."""
    tokens: dict[str, int] = {}
    for turn in outcome.served[OFFLOAD].turns:
        if turn.restored_tokens:
            source = outcome.sources[turn.request_id]
            tokens[source] = tokens.get(source, 0) + turn.restored_tokens
    return tokens


def geometry(outcome: Outcome) -> dict[str, Any]:
    """Returns the model and its groups as plain data."""
    options, chunking = outcome.options, outcome.chunking
    groups = []
    for g, group in enumerate(chunking.layout.groups):
        attention = outcome.shape.preset.attention(group.name)
        groups.append(
            {
                "name": group.name,
                "kind": "sliding" if isinstance(group.kind, kvjax.SlidingWindow) else "full",
                "window_tokens": attention.window_tokens,
                "num_layers": group.num_layers,
                "kv_heads": attention.kv_heads,
                "head_dim": attention.head_dim,
                "tokens_per_block": group.tokens_per_block,
                "block_bytes": group.block_bytes,
                "blocks_per_chunk": chunking.blocks_per_chunk[g],
                "tokens_per_chunk": chunking.tokens_per_chunk[g],
                "chunk_bytes": chunking.chunk_bytes[g],
            }
        )
    return {
        "preset": options.preset,
        "layers": options.layers,
        "width": options.width,
        "vocabulary": options.vocabulary,
        "query_heads": outcome.shape.preset.query_heads,
        "rows": options.rows,
        "cache_dtype": options.cache_dtype,
        "seed": options.seed,
        "groups": groups,
    }


def print_tables(outcome: Outcome, console: Console) -> None:
    """Prints a line for every turn, totals, samples of the text, and whether all tokens are equal."""
    for table in (_groups(outcome), _turns(outcome), _totals(outcome), _samples(outcome)):
        console.print(table)
    stats = outcome.offload_stats
    if stats.tiers:
        console.print(_tiers(outcome))
    console.print(
        f"Stored {_mib(stats.bytes_stored)} and loaded {_mib(stats.bytes_loaded)} of a host budget of "
        f"{_mib(outcome.host_bytes)}; {stats.evicted_chunks} chunks evicted. "
        f"{outcome.seconds:.1f} s in all, compiling included.",
        soft_wrap=True,
    )
    equal = "equal" if outcome.tokens_identical() else "NOT EQUAL"
    console.print(
        f"All tokens are {equal} in the three modes (digest {outcome.served[UNLIMITED].digest()}); "
        f"largest difference of logits, offload against unlimited: {outcome.max_abs_logit_diff()}.",
        soft_wrap=True,
    )
    times = {mode: outcome.served[mode].ttft_ms() for mode in MODES}
    restored, recomputed = times[OFFLOAD], times[RECOMPUTE]
    if restored and recomputed:
        console.print(
            f"Time to first token of a resumed turn, median: {restored:.1f} ms restored, {recomputed:.1f} ms "
            f"recomputed, {recomputed / restored:.1f} times as long.",
            soft_wrap=True,
        )


def _mode(served: Served) -> dict[str, Any]:
    return {
        "device_hits_tokens": served.total("device_tokens"),
        "restored_tokens": served.total("restored_tokens"),
        "recomputed_tokens": served.total("recomputed_tokens"),
        "device_blocks": served.num_blocks,
        "tokens_digest": served.digest(),
        "seconds": round(served.seconds, 3),
    }


def _tier(tier: kvjax.TierStats) -> dict[str, Any]:
    names = (
        *("name", "chunks_written", "bytes_written", "chunks_known", "chunks_read", "bytes_read"),
        *("missing_chunks", "bad_chunks", "dropped_chunks", "full_chunks", "errors"),
    )
    return {name: getattr(tier, name) for name in names}


def _tiers(outcome: Outcome) -> Table:
    table = Table(title="Levels below the device", caption="tokens restored: by the lowest level that a turn needed")
    for name in ("level", "tokens restored", "chunks read", "read", "written", "there before", "bad or lost"):
        table.add_column(name, justify="left" if name == "level" else "right")
    stats, tokens = outcome.offload_stats, restored_from(outcome)
    chunks, read, written = stats.chunks_loaded, _mib(stats.bytes_loaded), _mib(stats.bytes_stored)
    table.add_row("host", f"{tokens.get('host', 0):,}", f"{chunks:,}", read, written, "–", "–")
    for tier in stats.tiers:
        table.add_row(
            Text(tier.name),
            f"{tokens.get(tier.name, 0):,}",
            f"{tier.chunks_read:,}",
            _mib(tier.bytes_read),
            _mib(tier.bytes_written),
            f"{tier.chunks_known:,} chunks",
            f"{tier.bad_chunks + tier.missing_chunks:,}",
        )
    return table


def _groups(outcome: Outcome) -> Table:
    options = outcome.options
    table = Table(
        title=f"{options.preset} geometry: {options.layers} layers of width {options.width}, {options.cache_dtype}"
    )
    for name in (
        "group",
        "layers",
        "KV heads",
        "head",
        "window",
        "tokens/block",
        "tokens/chunk",
        "chunk",
        "pool blocks",
    ):
        table.add_column(name, justify="left" if name == "group" else "right")
    for group in geometry(outcome)["groups"]:
        pools = (outcome.served[mode].num_blocks[group["name"]] for mode in (UNLIMITED, OFFLOAD))
        table.add_row(
            group["name"],
            *(str(group[key]) for key in ("num_layers", "kv_heads", "head_dim")),
            str(group["window_tokens"] or "all"),
            *(str(group[key]) for key in ("tokens_per_block", "tokens_per_chunk")),
            f"{group['chunk_bytes'] / 1024:.0f} KiB",
            " / ".join(map(str, pools)),
        )
    return table


def _turns(outcome: Outcome) -> Table:
    table = Table(title="Prompt tokens of each turn, and time to first token", caption="TTFT in ms; compiled before")
    for name in ("turn", "prompt"):
        table.add_column(name, justify="right")
    for name in ("device", "restored", "recomputed", "TTFT"):
        table.add_column(f"offload\n{name}", justify="right", style="green")
    for name in ("device", "recomputed", "TTFT"):
        table.add_column(f"recompute\n{name}", justify="right", style="yellow")
    table.add_column("unlimited\nTTFT", justify="right")
    modes = (outcome.served[mode].turns for mode in (OFFLOAD, RECOMPUTE, UNLIMITED))
    for offload, recompute, unlimited in zip(*modes, strict=True):
        counts = (offload.device_tokens, offload.restored_tokens, offload.recomputed_tokens)
        table.add_row(
            offload.request_id,
            str(offload.prompt_tokens),
            *map(str, counts),
            f"{offload.ttft_s * 1000:.1f}",
            str(recompute.device_tokens),
            str(recompute.recomputed_tokens),
            f"{recompute.ttft_s * 1000:.1f}",
            f"{unlimited.ttft_s * 1000:.1f}",
        )
    return table


def _totals(outcome: Outcome) -> Table:
    table = Table(title="Totals")
    names = ("mode", "prompt tokens", "on device", "restored", "recomputed", "median TTFT, resumed", "all turns")
    for name in names:
        table.add_column(name, justify="left" if name == "mode" else "right")
    for mode, served in outcome.served.items():
        counts = ("prompt_tokens", "device_tokens", "restored_tokens", "recomputed_tokens")
        median = served.ttft_ms()
        table.add_row(
            mode,
            *(f"{served.total(name):,}" for name in counts),
            "–" if median is None else f"{median:.1f} ms",
            f"{served.seconds:.2f} s",
        )
    return table


def _samples(outcome: Outcome) -> Table:
    table = Table("turn", "answer", title="Answers of the random model")
    for turn in outcome.served[OFFLOAD].turns[-_SAMPLE_TURNS:]:
        table.add_row(f"{turn.conversation}.{turn.turn}", Text(spell(turn.tokens)))
    return table


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.2f} MiB"
