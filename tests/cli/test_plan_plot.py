"""`kvjax plan --plot`: a picture, or one line that says why there is none."""

import importlib.util

import pytest

from kvjax import FullAttention, SlidingWindow
from kvjax.cli import plan_plot
from kvjax.cli.plan_costs import Costs
from kvjax.packing import cut_into_units
from tests.cli.command import DESIGN, full, kvjax, refusal, saved, sliding
from tests.oracles.layouts import cut, group

SIGNATURES = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


@pytest.mark.parametrize("suffix", SIGNATURES)
def test_a_picture_is_drawn_beside_the_plan(tmp_path, suffix):
    target = tmp_path / f"host{suffix}"
    path = saved(tmp_path, DESIGN)
    ran = kvjax("plan", path, "--plot", target)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == kvjax("plan", path).out
    assert target.read_bytes().startswith(SIGNATURES[suffix])


def test_the_picture_names_every_group_its_share_and_the_checkpoints(tmp_path):
    target = tmp_path / "host.svg"
    path = saved(tmp_path, {"groups": [full("global", 16, 1600), sliding("_lo$cal$_", 16, 64, 1600)]})
    assert kvjax("plan", path, "--plot", target, "--checkpoint-tokens", "1024").code == 0
    text = target.read_text(encoding="utf-8")
    for words in ("%  global", "%  _lo$cal$_", "checkpoints every 1,024 tokens", "MiB on the host"):
        assert words in text


def test_bands_are_the_costs_of_each_length(monkeypatch, tmp_path):
    chunking = cut(group("full", FullAttention(), 16), group("local", SlidingWindow(64), 16))
    costs = Costs(chunking, cut_into_units(chunking, 64), checkpoints=(100, 300), request_tokens=400)
    account = costs.accounts["listed"]
    assert account is not None
    from matplotlib.axes import Axes

    drawn = {}
    stackplot = Axes.stackplot

    def spy(self, lengths, *bands, **options):
        drawn["lengths"], drawn["bands"] = lengths, bands
        return stackplot(self, lengths, *bands, **options)

    monkeypatch.setattr(Axes, "stackplot", spy)
    plan_plot.draw(costs, str(tmp_path / "a.png"))
    assert drawn["lengths"] == list(range(401))
    for tokens in (0, 99, 100, 250, 400):
        cost = account.cost(tokens)
        in_kib = [(cost.growing[name] + cost.fixed[name]) / 1024 for name in ("full", "local")]
        assert [band[tokens] for band in drawn["bands"]] == in_kib


def test_a_request_of_which_nothing_is_stored_is_drawn(tmp_path):
    target = tmp_path / "host.png"
    ran = kvjax("plan", saved(tmp_path, {"groups": [full("a", 16)]}), "--request-tokens", "5", "--plot", target)
    assert (ran.code, ran.err) == (0, "")
    assert target.exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a.gif", "argument --plot: must end in .png, .svg, .pdf, got"),
        ("nowhere/a.png", "argument --plot: the folder of"),
        ("folder.png", "is a folder"),
    ],
)
def test_targets_that_cannot_be_are_refused(tmp_path, name, words):
    (tmp_path / "folder.png").mkdir()
    assert words in refusal("plan", saved(tmp_path, DESIGN), "--plot", tmp_path / name)


def test_without_matplotlib_the_way_to_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    error = refusal("plan", saved(tmp_path, DESIGN), "--plot", tmp_path / "a.png")
    assert error.endswith('--plot needs matplotlib, which is not installed: pip install "kvjax[plot]"')


def test_a_file_that_cannot_be_written_is_refused(tmp_path):
    target = tmp_path / "full.png"
    target.symlink_to("/dev/full")
    error = refusal("plan", saved(tmp_path, DESIGN), "--plot", target)
    assert error.endswith("full.png' cannot be written: No space left on device")


def test_what_is_not_counted_is_not_drawn(tmp_path):
    path = saved(tmp_path, {"groups": [full("a", 999_983), sliding("b", 999_979, 5)]})
    error = refusal("plan", path, "--plot", tmp_path / "a.png")
    assert "argument --plot: requests with checkpoints" in error
    assert "are not counted on the host" in error


def test_a_picture_that_is_not_written_to_its_end_leaves_what_was_there(tmp_path, monkeypatch):
    def interrupted(_figure, file, **_options):
        file.write(b"half a picture")
        raise KeyboardInterrupt

    target = tmp_path / "a.svg"
    argv = ("plan", saved(tmp_path, DESIGN), "--plot", target)
    assert kvjax(*argv).code == 0
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", interrupted)
    assert kvjax(*argv).code == 130
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
