"""The picture of `kvjax bench moves --plot`: rates over memcpy's, by block bytes. Needs matplotlib."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvjax.cli.hit_plot import save
from kvjax.cli.render import human_bytes

_DIRECTIONS = ("store", "load")
_STYLES = {"direct": "-", "staged": "--", "naive": ":"}
_MARKERS = "osD^vP*X"


def draw(document: Mapping[str, Any], path: str) -> None:
    """Draws the rows of the document, one panel a direction: a color a dtype, a line style a transfer.

    Args:
        document: what `kvjax bench moves` measured.
        path: the file, see `kvjax.cli.hit_plot.check_target`.

    Raises:
        ValueError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = document["rows"]
    figure = Figure(figsize=(12, 5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(_DIRECTIONS), sharey=True)
    for panel, direction in zip(panels, _DIRECTIONS, strict=True):
        for label, style, points in series(rows, direction, by_count=document["bytes"] is None):
            panel.plot(*zip(*points, strict=True), label=label, markersize=5, **style)
        panel.axhline(1.0, color="black", linewidth=0.8)
        panel.set_title(direction)
        panel.set_xscale("log", base=2)
        panel.set_xlabel("bytes of one block, over all leaves")
        panel.xaxis.set_major_formatter(lambda num_bytes, _: human_bytes(round(num_bytes)))
        panel.grid(alpha=0.3)
    if any(row["transfer"] == "naive" for row in rows):
        panels[0].set_yscale("log")
    else:
        panels[0].set_ylim(bottom=0)
    panels[0].set_ylabel("GB/s over memcpy's GB/s")
    panels[1].legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.suptitle(_headline(document), fontsize=11, parse_math=False)
    save(figure, path)


def series(
    rows: Sequence[Mapping[str, Any]], direction: str, *, by_count: bool
) -> Iterator[tuple[str, dict[str, Any], list[tuple[int, float]]]]:
    """Yields the lines of one panel: a label, how it is drawn, and its `(block_bytes, ratio)` in order.

    Args:
        rows: of the document.
        direction: store or load.
        by_count: blocks were chosen by their number, so that each number is a line of its own.
    """
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    leaves = list(dict.fromkeys(row["num_leaves"] for row in rows))
    lines: dict[tuple[str, str, int, int | None], list[tuple[int, float]]] = {}
    for row in rows:
        if row["direction"] == direction:
            count = row["num_blocks"] if by_count else None
            line = lines.setdefault((row["dtype"], row["transfer"], row["num_leaves"], count), [])
            line.append((row["block_bytes"], row["ratio"]))
    for (dtype, transfer, num_leaves, count), points in lines.items():
        label = f"{dtype}, {transfer}"
        label += f", {num_leaves} {'leaf' if num_leaves == 1 else 'leaves'}" if len(leaves) > 1 else ""
        label += f", {count:,} blocks" if count is not None else ""
        style = {
            "color": f"C{dtypes.index(dtype) % 10}",
            "linestyle": _STYLES[transfer],
            "marker": _MARKERS[leaves.index(num_leaves) % len(_MARKERS)],
        }
        yield label, style, sorted(points)


def _headline(document: Mapping[str, Any]) -> str:
    row = document["rows"][0]
    moved = "" if document["bytes"] is None else f", {human_bytes(document['bytes'])} a move"
    return f"Moves between caches and host pool over memcpy: {row['device']}, jax {row['jax']}{moved}"
