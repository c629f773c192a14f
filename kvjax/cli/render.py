"""What the commands print for people."""

from typing import Any

from rich.table import Table

from kvjax.cli.tables import literal, new_console, plain_table

_NAMES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def human_bytes(num_bytes: float) -> str:
    """Returns a byte count in the largest unit it reaches.

    >>> human_bytes(65536), human_bytes(2146304)
    ('64 KiB', '2.05 MiB')
    """
    power = min((max(int(num_bytes), 1).bit_length() - 1) // 10, len(_NAMES) - 1)
    scaled = num_bytes / 1024**power
    return f"{int(scaled)} {_NAMES[power]}" if scaled == int(scaled) else f"{scaled:.2f} {_NAMES[power]}"


def both_bytes(num_bytes: int) -> str:
    """Returns a byte count exactly, and in a larger unit where it reaches one."""
    return f"{num_bytes:,} B" + (f" ({human_bytes(num_bytes)})" if num_bytes >= 1024 else "")


def print_plan(document: dict[str, Any], checkpoints: str) -> None:
    """Prints a plan: how groups are cut, what they cost, the sums, and what a budget holds.

    Args:
        document: see `kvjax.cli.plan.describe`.
        checkpoints: the chosen ones, in words.
    """
    console = new_console()
    console.print(_cut_table(document))
    console.print()
    console.print(_cost_table(document))
    console.print()
    for line in [*_sums(document, checkpoints), *_of_model(document)]:
        console.print(literal(line))
    if document["host"] or document["request"]:
        console.print()
        console.print(_capacity_table(document))


def _cut_table(document: dict[str, Any]) -> Table:
    headings = (
        "layers",
        "tokens\nper block",
        "block",
        "blocks\nper chunk",
        "tokens\nper chunk",
        "chunk",
        "units",
        "padding",
    )
    table = plain_table("group", "kind", right=headings)
    for group in document["groups"]:
        chunk_bytes = group["chunk_bytes"]
        table.add_row(
            literal(group["name"]),
            _kind(group),
            f"{group['num_layers']}",
            f"{group['tokens_per_block']:,}",
            f"{group['block_bytes']:,} B",
            _number(group["blocks_per_chunk"]),
            _number(group["tokens_per_chunk"]),
            "-" if chunk_bytes is None else both_bytes(chunk_bytes),
            _number(group["units_per_chunk"]),
            "-" if chunk_bytes is None else f"{100 * group['padding_bytes'] / chunk_bytes:.2f} %",
        )
    return table


def _cost_table(document: dict[str, Any]) -> Table:
    ranks = document["per_host"]["ranks"]
    host = f"host bytes of\n{document['share_tokens']:,} tokens"
    headings = ("bytes\nper token", "and layer", "window cap", "state", "one\ncheckpoint", host, "share")
    table = plain_table("group", right=headings if ranks == 1 else ("shards", *headings))
    for group in document["groups"]:
        if group["kind"] == "scratch":
            continue
        share = group["share"]
        cells = [
            _exact(group["bytes_per_token"]),
            _exact(group["bytes_per_token_per_layer"]),
            *(_human(group[key]) for key in ("window_cap_bytes", "state_bytes", "checkpoint_bytes", "host_bytes")),
            "-" if share is None else f"{100 * share:.1f} %",
        ]
        if ranks > 1:
            cells.insert(0, f"{group['distinct_shards']} of {ranks}")
        table.add_row(literal(group["name"]), *cells)
    return table


def _sums(document: dict[str, Any], checkpoints: str) -> list[str]:
    one, every, chosen = document["per_rank"], document["per_host"], document["checkpoints"]
    per_token = chosen["bytes_per_token"][chosen["rule"]]
    default = " (the default)" if chosen["source"] == "default" else ""
    lines = [
        f"hash unit         {document['tokens_per_hash']:,} tokens",
        f"pool unit         {both_bytes(document['unit_bytes'])}",
        f"growing cache     {_both(one['bytes_per_token_growing'])} per token",
        f"window caps       {_both(one['window_cap_bytes'])} per sequence",
        f"states            {_both(one['state_bytes_per_sequence'])} per sequence",
    ]
    if every["ranks"] > 1:
        lines[2:] = [f"{line} on each of {every['ranks']:,} ranks" for line in lines[2:]]
        lines += [
            f"all ranks         {_both(every['bytes_per_token_growing'])} per token, "
            f"{_human(every['window_cap_bytes'])} of windows and {_human(every['state_bytes_per_sequence'])} of states "
            f"per sequence"
        ]
    lines.append(f"checkpoints       {checkpoints}{default}")
    if chosen["bytes_per_checkpoint"] is not None:
        cost = _both(chosen["bytes_per_checkpoint"])
        lines.append(f"one checkpoint    {cost} of windows and states on the host, or less where they overlap")
    if per_token is not None:
        lines.append(f"host per token    {_both(per_token)} in the long run, with these checkpoints")
    if document["request"]:
        request = document["request"]
        lines.append(
            f"one request       of {request['num_tokens']:,} tokens takes {_both(request['device_bytes_per_host'])} on "
            f"{'the device' if every['ranks'] == 1 else 'the devices'}"
        )
    if document["host"]:
        lines.append(
            f"host memory       {both_bytes(document['host']['budget_bytes'])} holds a prefix of "
            f"{document['host_by_checkpoints']['dense']['tokens']:,} tokens with every chunk of every group"
            + ("" if every["ranks"] == 1 else f", of {every['ranks']:,} ranks")
        )
    return lines


def _of_model(document: dict[str, Any]) -> list[str]:
    """What is known of the model, where the groups come from its config."""
    model = document.get("model")
    if model is None:
        return []
    lines = []
    pool = model["pool"]
    if pool is not None:
        lines.append(
            f"shared pool       blocks of {both_bytes(pool['block_bytes'])}: {pool['layers_per_group']} layers of "
            f"{both_bytes(pool['page_bytes'])}"
        )
    for name, padding in model["padding_bytes"].items():
        if padding:
            lines.append(f"empty             {both_bytes(padding)} of each block of group {name!r}")
    if model["shared_layers"]:
        lines.append(f"shared layers     {model['shared_layers']} layers read another layer's cache and own none")
    lines += [f"assumed           {sentence}" for sentence in model["assumed"]]
    return lines + [f"note              {sentence}" for sentence in model["notes"]]


def _capacity_table(document: dict[str, Any]) -> Table:
    """One row per choice of checkpoints: the bytes of one request in both parts, and what the budget holds."""
    host, request = document["host"], document["request"]
    chosen = document["checkpoints"]
    length = f"{request['num_tokens']:,}" if request else ""
    headings = [
        "in the long run\nper token",
        f"{f'of {length}' if request else 'longest'}:\ngrowing part",
        "fixed part",
        "total",
    ]
    headings += ["longest\nrequest"] if host else []
    headings += [f"requests of\n{length}"] if host and request else []
    table = plain_table("checkpoints", right=headings)
    names = {"dense": "every chunk", "end": "at the end only", "listed": "as listed"}
    every = chosen["checkpoint_tokens"] or chosen["default_checkpoint_tokens"]
    names |= {"every": f"every {every:,} tokens"} if every else {}
    for rule in [rule for rule in chosen["bytes_per_token"] if rule in names]:
        held = host and document["host_by_checkpoints"][rule]
        part = (request["by_checkpoints"][rule] if request else held) or {}
        growing, fixed = part.get("growing_bytes"), part.get("fixed_bytes")
        cells = [
            _human(chosen["bytes_per_token"][rule]),
            *(_human(value) for value in (growing, fixed, None if growing is None else growing + fixed)),
        ]
        if host:
            cells.append("-" if held is None or rule == "listed" else _number(held["tokens"], "no longest"))
        if host and request:
            cells.append("-" if held is None else _number(held["requests"], "any number"))
        mark = " (chosen)" if rule == chosen["rule"] else ""
        table.add_row(names[rule] + mark, *cells)
    return table


def print_hit(document: dict[str, Any], num_tokens: int) -> None:
    """Prints a hit: its length, the chunks to load as ranges, and what keeps it from being longer."""
    limits = ", ".join(map(repr, document["limited_by"])) or "nothing"
    table = Table("group", "chunks to load", box=None, header_style="bold", pad_edge=False)
    for name, chunks in document["load"].items():
        table.add_row(literal(name), f"{len(chunks):,}: {_ranges(chunks)}" if chunks else "-")
    console = new_console()
    console.print(literal(f"hit         {document['hit_tokens']:,} of {num_tokens:,} tokens"))
    console.print(literal(f"limited by  {limits}"))
    console.print()
    console.print(table)


def _kind(group: dict[str, Any]) -> str:
    parts = [group["kind"], *(f"{group[key]:,}" for key in ("window_tokens", "chunk_tokens") if key in group)]
    if group["lookahead_tokens"]:
        parts.append(f"+{group['lookahead_tokens']:,}")
    return " ".join(parts)


def _number(value: int | None, nothing: str = "-") -> str:
    return nothing if value is None else f"{value:,}"


def _exact(num_bytes: float | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes:,} B" if isinstance(num_bytes, int) else f"{num_bytes:,.2f} B"


def _human(num_bytes: float | None) -> str:
    return "-" if num_bytes is None else human_bytes(num_bytes)


def _both(num_bytes: float) -> str:
    return both_bytes(num_bytes) if isinstance(num_bytes, int) else _exact(num_bytes)


def _ranges(chunks: list[int]) -> str:
    """Ascending indices as `0-3, 7`."""
    starts = [i for i, chunk in enumerate(chunks) if i == 0 or chunk != chunks[i - 1] + 1]
    stops = [*starts[1:], len(chunks)]
    return ", ".join(
        f"{chunks[a]}" if b - a == 1 else f"{chunks[a]}-{chunks[b - 1]}" for a, b in zip(starts, stops, strict=True)
    )
