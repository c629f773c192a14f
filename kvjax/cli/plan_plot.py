"""The picture of `kvjax plan --plot`: bytes on the host over the length of one request. Needs matplotlib."""

import warnings

from kvjax.accounting import HostCost
from kvjax.cli.hit_plot import save
from kvjax.cli.plan_costs import Costs, words

_POINTS = 400
_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


def draw(costs: Costs, path: str) -> None:
    """Draws what one request leaves on the host, by its length and up to that of `costs`, one band a group.

    Args:
        costs: the accounts and the chosen checkpoints.
        path: the file, see `kvjax.cli.hit_plot.check_target`.

    Raises:
        ValueError: there is nothing to draw, as the groups' chunks cannot be counted, or the file cannot be written.
    """
    account, num_tokens = costs.accounts[costs.chosen.rule], costs.share_tokens
    if account is None:
        raise ValueError(f"argument --plot: {costs.warnings[0]}")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lengths = [num_tokens * point // _POINTS for point in range(_POINTS + 1)]
    left = [account.cost(length) for length in lengths]
    most = max(cost.num_bytes for cost in left)
    scale, unit = next((scale, unit) for scale, unit in _UNITS if most >= scale or scale == 1)
    names = list(left[-1].growing)
    bands = [[(cost.growing[name] + cost.fixed[name]) / scale for cost in left] for name in names]
    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    colors = [f"C{n % 10}" for n in range(len(names))]
    polygons = panel.stackplot(lengths, *bands, colors=colors, alpha=0.85)
    panel.set_xlim(0, num_tokens)
    panel.set_ylim(bottom=0)
    panel.set_xlabel("tokens of the request")
    panel.set_ylabel(f"{unit} on the host")
    panel.xaxis.set_major_formatter(lambda tokens, _: f"{tokens:,.0f}")
    panel.set_title(f"One request on the host, checkpoints {words(costs.chosen)}", fontsize=11, parse_math=False)
    labels = [_label(name, left[-1]) for name in names]
    for text in panel.legend(polygons[::-1], labels[::-1], loc="upper left", frameon=False).get_texts():
        text.set_parse_math(False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a name in a script that the font lacks
        save(figure, path)


def _label(name: str, cost: HostCost) -> str:
    """The share at the end, and the name. A label that began with a name might begin with `_`, and be left out."""
    share = cost.shares().get(name, 0.0)
    return f"{100 * share:.1f} %  {name}".encode("utf-8", "backslashreplace").decode("utf-8")
