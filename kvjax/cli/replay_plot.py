"""The picture of `kvjax replay --plot`: hit rates and bytes moved over budgets, one line a policy. Needs matplotlib."""

from collections.abc import Sequence
from typing import Any

from kvjax.cli.hit_plot import save
from kvjax.cli.render import human_bytes


def draw(runs: Sequence[dict[str, Any]], path: str) -> None:
    """Draws the runs of a replay.

    Args:
        runs: as `kvjax.cli.replay.describe_run` returns them.
        path: the file, see `kvjax.cli.hit_plot.check_target`.

    Raises:
        ValueError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    rates, moved = figure.subplots(1, 2)
    budgets = sorted({run["host_bytes"] for run in runs})
    for n, policy in enumerate(dict.fromkeys(run["policy"] for run in runs)):
        own = sorted((run for run in runs if run["policy"] == policy), key=lambda run: run["host_bytes"])
        places = [budgets.index(run["host_bytes"]) for run in own]
        color = f"C{n % 10}"
        rates.plot(places, [run["hit_rate"] for run in own], "o-", color=color, label=policy)
        for what, style in (("stored", "o-"), ("loaded", "s--")):
            gib = [run[f"bytes_{what}"] / 2**30 for run in own]
            moved.plot(places, gib, style, color=color, label=f"{policy}, {what}")
    for panel in (rates, moved):
        panel.set_xticks(range(len(budgets)), labels=[human_bytes(budget) for budget in budgets])
        panel.set_xlim(-0.5, len(budgets) - 0.5)
        panel.set_ylim(bottom=0)
        panel.set_xlabel("budget of the host pool")
        panel.grid(axis="y", alpha=0.3)
        panel.legend(frameon=False)
    rates.yaxis.set_major_formatter(PercentFormatter(1.0))
    rates.set_ylabel("hit tokens of tokens looked up")
    moved.set_ylabel("GiB moved")
    save(figure, path)
