"""The picture of a run. The only part that needs matplotlib."""

from pathlib import Path

import numpy as np

from .presets import FULL, LOCAL
from .run import MODES, OFFLOAD, RECOMPUTE, UNLIMITED, Outcome

_COLORS = {UNLIMITED: "#777777", OFFLOAD: "#0072B2", RECOMPUTE: "#D55E00"}


def draw(outcome: Outcome, path: Path) -> None:
    """Draws pool use over the steps of each mode, and time to first token of every turn.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure  # needed here only
    from matplotlib.ticker import ScalarFormatter

    figure = Figure(figsize=(10, 7), layout="constrained")
    use, times = figure.subplots(2, 1)
    for mode in (OFFLOAD, RECOMPUTE):
        served = outcome.served[mode]
        for group, line in ((FULL, "-"), (LOCAL, ":")):
            share = np.array(served.pool_use[group]) * 100
            label = f"{mode}: {group}, {served.num_blocks[group]} blocks"
            use.plot(np.arange(1, len(share) + 1), share, line, color=_COLORS[mode], label=label, linewidth=1.2)
    use.set(xlabel="step", ylabel="pool in use, %", ylim=(0, 105), title="Use of the small device pool")
    use.legend(fontsize=8, loc="lower right")

    for mode in MODES:
        turns = outcome.served[mode].turns
        ttft = [turn.ttft_s * 1000 for turn in turns]
        times.plot(np.arange(1, len(turns) + 1), ttft, "o-", color=_COLORS[mode], label=mode, markersize=4)
    rounds = outcome.options.conversations
    for boundary in range(rounds, len(outcome.served[OFFLOAD].turns), rounds):
        times.axvline(boundary + 0.5, color="#dddddd", linewidth=0.8, zorder=0)
    times.set(xlabel="turn, in the order served", ylabel="time to first token, ms", yscale="log")
    times.yaxis.set_major_formatter(ScalarFormatter())
    times.yaxis.set_minor_formatter(ScalarFormatter())
    times.set_title("Time to first token; prompts grow from left to right")
    times.legend(fontsize=8)
    figure.suptitle(f"{outcome.options.preset} geometry, {outcome.options.conversations} conversations")
    figure.savefig(path, dpi=130)
