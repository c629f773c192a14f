"""The picture of `kvjax hit --plot`: one row a group, tokens from left to right. Needs matplotlib when it draws."""

import importlib.util
import textwrap
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvjax._arguments import device_prefix, present_chunks
from kvjax._files import replacing
from kvjax._intervals import EMPTY, runs_of
from kvjax.chunking import Chunking
from kvjax.coverage import chunk_tokens_of, needed
from kvjax.explain import Explanation, GroupExplanation, Range, Ranges
from kvjax.groups import Recurrent

SUFFIXES = (".png", ".svg", ".pdf")
_ABSENT, _RESIDENT, _LOADED, _DEVICE, _MISSING = "#ececec", "#9ecae1", "#2171b5", "#74c476", "#d62728"
_BAR, _OUTLINE = 0.5, 0.72  # heights, in rows
_MOST_STATES = 1500  # drawn in a row
_MOST_SLOTS, _MOST_NUMBERED = 72, 40  # chunks up to which boundaries, and numbers, are drawn
_LEAST_SHARE, _LEAST_MISSING = 1 / 900, 1 / 400  # of the axis: what is drawn is at least so wide


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    """What is drawn of one cached group; all but the chunks in tokens."""

    part: GroupExplanation
    tokens: int  # per chunk
    state: bool  # a chunk is one state, at its end
    starts: np.ndarray  # of the runs of chunks on the host
    stops: np.ndarray
    device: Range


def check_target(path: str) -> None:
    """Checks that a picture can be drawn, and written to `path`.

    Raises:
        ValueError: the suffix is not supported, the folder does not exist, or matplotlib is not installed.
    """
    target = Path(path)
    if target.suffix.lower() not in SUFFIXES:
        raise ValueError(f"argument --plot: must end in {', '.join(SUFFIXES)}, got {path!r}")
    if not target.parent.is_dir():
        raise ValueError(f"argument --plot: the folder of {path!r} does not exist")
    if target.is_dir():
        raise ValueError(f"argument --plot: {path!r} is a folder")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError('--plot needs matplotlib, which is not installed: pip install "kvjax[plot]"')


def save(figure: Any, path: str) -> None:
    """Writes a figure to a file, as a whole or not at all.

    Raises:
        ValueError: it cannot be written.
    """
    try:
        with replacing(path) as file:
            figure.savefig(file, format=Path(path).suffix[1:].lower(), dpi=110)
    except ValueError as error:
        raise ValueError(f"argument --plot: {error}") from error


def draw(
    explanation: Explanation,
    chunking: Chunking,
    present: Mapping[str, Any],
    device_tokens: int | Mapping[str, int],
    path: str,
) -> None:
    """Draws an explained hit. The arguments are those that `explain_hit` took.

    Raises:
        ValueError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = _rows(explanation, chunking, present, device_tokens)
    whole, near = (0, explanation.num_tokens), _near(explanation, rows)
    views = [whole] if near is None else [whole, near]
    row_height = min(0.55, max(0.25, 8 / len(rows)))
    figure = Figure(figsize=(12, 1.9 + len(views) * (0.75 + row_height * len(rows))), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(views), 1, squeeze=False)[:, 0]
    for panel, view in zip(panels, views, strict=True):
        _draw_panel(panel, explanation, rows, view)
    headline = f"hit {explanation.hit.hit_tokens:,} of {explanation.num_tokens:,} tokens"
    told = textwrap.shorten(_plain(explanation.sentence), 330, placeholder=" …")
    figure.suptitle("\n".join([headline, *textwrap.wrap(told, 115)]), fontsize=11, parse_math=False)
    if near is not None:
        panels[1].set_title("near the hit", fontsize=9)
    panels[-1].set_xlabel("tokens")
    handles = _legend(explanation, rows)
    figure.legend(handles=handles, loc="outside lower center", ncols=min(5, len(handles)), fontsize=8, frameon=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a name in a script that the font lacks
        save(figure, path)


# --- what is drawn ------------------------------------------------------------------------------------


def _rows(explanation: Explanation, chunking: Chunking, present: Mapping[str, Any], device_tokens: Any) -> list[_Row]:
    device, _ = device_prefix(chunking, device_tokens, explanation.num_tokens)
    rows = []
    for g in chunking.layout.cached:
        group, tokens = chunking.layout.groups[g], chunk_tokens_of(chunking, g)
        listed = present.get(group.name)
        chunks = EMPTY if listed is None else present_chunks(chunking, g, listed, explanation.num_tokens)
        starts, stops = (bound * tokens for bound in runs_of(chunks))
        state = isinstance(group.kind, Recurrent)
        rows.append(_Row(explanation.groups[g], tokens, state, starts, stops, needed(group.kind, device[g])))
    return rows


def _near(explanation: Explanation, rows: list[_Row]) -> Range | None:
    """The tokens around the hit and the next candidate, where they would be too small in the whole."""
    if explanation.num_tokens <= _MOST_SLOTS * min(row.tokens for row in rows):
        return None
    ends = [explanation.hit.hit_tokens, explanation.next_tokens or explanation.hit.hit_tokens]
    marks = [end + side * row.tokens for row in rows for end in ends for side in (-1, 1)]
    readings = [reading for row in rows for reading in (row.part.at_hit, row.part.at_next) if reading is not None]
    marks += [reading.needed_tokens[0] for reading in readings if reading.needed_tokens[0]]
    margin = max(1, (max(marks) - min(marks)) // 8)
    low, high = max(0, min(marks) - margin), min(explanation.num_tokens, max(marks) + margin)
    return (low, high) if 0 < (high - low) * 3 < explanation.num_tokens else None


def _visible(
    starts: np.ndarray, stops: np.ndarray, view: Range, least: float = _LEAST_SHARE
) -> tuple[np.ndarray, np.ndarray]:
    """Ascending runs within the view, each at least the share `least` of it wide; what then overlaps is one."""
    starts, stops = np.maximum(starts, view[0]), np.minimum(stops, view[1])
    some = starts < stops
    starts, stops = starts[some], stops[some]
    wider = np.maximum(0, (view[1] - view[0]) * least - (stops - starts)) / 2
    starts, stops = starts - wider, stops + wider
    if not len(starts):
        return starts, stops
    gaps = starts[1:] > stops[:-1]
    return starts[np.concatenate([[True], gaps])], stops[np.concatenate([gaps, [True]])]


def _of_chunks(ranges: Ranges, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Closed ranges of chunks as runs of tokens."""
    bounds = np.array(ranges, np.int64).reshape(-1, 2)
    return bounds[:, 0] * tokens, (bounds[:, 1] + 1) * tokens


def _states(starts: np.ndarray, stops: np.ndarray, tokens: int, view: Range) -> np.ndarray:
    """Positions of the states of runs of chunks within the view, thinned where they are very many."""
    step = max(1, (view[1] - view[0]) // (_MOST_STATES * tokens)) * tokens
    firsts = np.maximum(starts + tokens, -(-view[0] // tokens) * tokens)
    lasts = np.minimum(stops, view[1])
    spans = [np.arange(a, b + 1, step) for a, b in zip(firsts.tolist(), lasts.tolist(), strict=True) if a <= b]
    states = np.concatenate([*spans, EMPTY])
    return states[:: max(1, len(states) // _MOST_STATES)]


# --- drawing ------------------------------------------------------------------------------------------


def _draw_panel(panel: Any, explanation: Explanation, rows: list[_Row], view: Range) -> None:
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    for y, row in enumerate(rows):
        (_draw_states if row.state else _draw_tokens)(panel, y, row, view)
    hit, total = explanation.hit.hit_tokens, explanation.num_tokens
    panel.axvline(hit, color="black", linewidth=1.6, zorder=6)
    if explanation.next_tokens is not None:
        panel.axvline(explanation.next_tokens, color=_MISSING, linewidth=1.4, linestyle="--", zorder=6)
    panel.axvline(total, color="#777777", linewidth=1.2, linestyle=":", zorder=6)
    margin = (view[1] - view[0]) * 0.01
    panel.set(xlim=(view[0] - margin, view[1] + margin), ylim=(len(rows) - 0.5, -0.5))
    labels = [textwrap.shorten(_plain(row.part.name), 28, placeholder="…") for row in rows]
    panel.set_yticks(range(len(rows)), labels=labels, parse_math=False)
    panel.tick_params(axis="y", length=0)
    panel.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    panel.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    panel.spines[["top", "right", "left"]].set_visible(False)


def _draw_tokens(panel: Any, y: int, row: _Row, view: Range) -> None:
    low, high = view
    panel.broken_barh([(low, high - low)], (y - _BAR / 2, _BAR), color=_ABSENT, linewidth=0, zorder=1)
    assert row.part.at_hit is not None, "only cached groups are drawn"
    for (starts, stops), color, zorder in (
        ((row.starts, row.stops), _RESIDENT, 2.0),
        (_of_chunks(row.part.at_hit.load_chunks, row.tokens), _LOADED, 2.1),
        ((np.array(row.device[:1]), np.array(row.device[1:])), _DEVICE, 2.2),
    ):
        _bars(panel, y, *_visible(starts, stops, view), color, zorder)
    missing = _of_chunks(row.part.missing_chunks, row.tokens)
    _bars(panel, y, *_visible(*missing, view, _LEAST_MISSING), _MISSING, 2.3)
    _outlines(panel, y, row, view)
    if (high - low) <= _MOST_SLOTS * row.tokens:
        _boundaries(panel, y, row, view)


def _bars(panel: Any, y: int, starts: np.ndarray, stops: np.ndarray, color: str, zorder: float) -> None:
    spans = list(zip(starts.tolist(), (stops - starts).tolist(), strict=True))
    if spans:
        panel.broken_barh(spans, (y - _BAR / 2, _BAR), color=color, linewidth=0, zorder=zorder)


def _outlines(panel: Any, y: int, row: _Row, view: Range) -> None:
    """Frames around the tokens required at the hit and at the next candidate."""
    for reading, color, height, style in (
        (row.part.at_hit, "black", _OUTLINE, "-"),
        (row.part.at_next, _MISSING, _OUTLINE + 0.1, "--"),
    ):
        if reading is None:
            continue
        start, stop = reading.required_tokens
        if start < stop and start < view[1] and stop > view[0]:
            panel.broken_barh(
                [(start, stop - start)], (y - height / 2, height),
                facecolor="none", edgecolor=color, linewidth=1.2, linestyle=style, zorder=5,
            )  # fmt: skip


def _boundaries(panel: Any, y: int, row: _Row, view: Range) -> None:
    """The edges of chunks, and their indices where there is room."""
    edges = np.arange(-(-view[0] // row.tokens) * row.tokens, view[1] + 1, row.tokens)
    panel.vlines(edges, y - _BAR / 2, y + _BAR / 2, color="white", linewidth=0.8, zorder=3)
    if len(edges) > _MOST_NUMBERED or row.part.at_hit is None:
        return
    dark = (*row.part.at_hit.load_chunks, *row.part.missing_chunks)
    for chunk_idx in range(view[0] // row.tokens, -(-view[1] // row.tokens)):
        start, stop = max(view[0], chunk_idx * row.tokens), min(view[1], (chunk_idx + 1) * row.tokens)
        if 3 * (stop - start) < row.tokens:
            continue
        color = "white" if any(first <= chunk_idx <= last for first, last in dark) else "#333333"
        panel.text((start + stop) / 2, y, f"{chunk_idx}", ha="center", va="center", fontsize=7, color=color, zorder=4)


def _draw_states(panel: Any, y: int, row: _Row, view: Range) -> None:
    panel.hlines(y, *view, color=_ABSENT, linewidth=2, zorder=1)
    assert row.part.at_hit is not None, "only cached groups are drawn"
    device = np.array([row.device[1]] if row.device[1] else [], np.int64)
    loaded = _of_chunks(row.part.at_hit.load_chunks, row.tokens)
    missing = _of_chunks(row.part.missing_chunks, row.tokens)
    for positions, color, zorder in (
        (_states(row.starts, row.stops, row.tokens, view), _RESIDENT, 2),
        (_states(*loaded, row.tokens, view), _LOADED, 2.1),
        (device[(device >= view[0]) & (device <= view[1])], _DEVICE, 2.2),
        (_states(*missing, row.tokens, view), _MISSING, 2.3),
    ):
        panel.plot(positions, np.full(len(positions), y), "D", color=color, markersize=6, zorder=7 + zorder)


def _legend(explanation: Explanation, rows: list[_Row]) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    hit, position = explanation.hit.hit_tokens, explanation.next_tokens
    handles: list[Any] = [Patch(color=_RESIDENT, label="chunks on the host"), Patch(color=_LOADED, label="to load")]
    if any(row.device[0] < row.device[1] for row in rows):
        handles.append(Patch(color=_DEVICE, label="held by the device"))
    handles.append(Patch(facecolor="none", edgecolor="black", label="required at the hit"))
    handles.append(Line2D([], [], color="black", linewidth=1.6, label=f"hit {hit:,}"))
    if position is not None:
        handles.append(Patch(color=_MISSING, label=f"missing for {position:,}"))
        label = f"required at {position:,}"
        handles.append(Patch(facecolor="none", edgecolor=_MISSING, linestyle="--", label=label))
        handles.append(Line2D([], [], color=_MISSING, linestyle="--", label=f"next candidate {position:,}"))
    handles.append(
        Line2D([], [], color="#777777", linestyle=":", label=f"request of {explanation.num_tokens:,} tokens")
    )
    if any(row.state for row in rows):
        handles.append(Line2D([], [], color=_RESIDENT, marker="D", linestyle="", label="a recurrent state"))
    return handles


def _plain(text: str) -> str:
    """Text that any font backend takes: on one line, without lone surrogates."""
    return " ".join(text.encode("utf-8", "backslashreplace").decode("utf-8").split())
