"""`kvjax bench`: what it prints, and that its plain loops are compared with kvjax."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.chunking import resolve_chunking
from kvjax.cli import bench_hit
from kvjax.coverage import longest_hit
from kvjax.groups import SlidingWindow
from tests.cli.command import document, kvjax, refusal

FIGURES = [
    "hit_resident",
    "hit_5_percent_missing",
    "hit_half_missing",
    "hit_5_percent_of_windows_missing",
    "hit_half_of_windows_missing",
    "store_plan",
    "load_plan",
    "keys",
    "hashes_of_131072_tokens_by_16",
]


def bench(*argv) -> tuple:
    return ("bench", "hit", "--repeats", 1, *argv)


@pytest.mark.parametrize("tokens", [1, 5, 1000, 4096])
def test_one_document_holds_every_figure(tokens):
    found = document(*bench("--tokens", tokens))
    assert (found["bench"], found["tokens"], found["tokens_per_hash"], found["repeats"]) == ("hit", tokens, 4, 1)
    assert found["chunks"]["compressor_4"] == tokens // 4
    assert [figure["name"] for figure in found["figures"]] == FIGURES
    for figure in found["figures"]:
        assert 0 <= figure["min_ms"] <= figure["median_ms"]
        if figure["name"].endswith("_plan"):
            assert (figure["plain_ms"], figure["plain_ratio"]) == (None, None)
        else:
            assert figure["plain_ms"] >= 0
            assert figure["plain_ratio"] >= 0


def test_people_get_a_row_per_figure():
    ran = kvjax(*bench("--tokens", 2048))
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert lines[0] == "DeepSeek-V4-Flash, 2,048 tokens, 1,168 chunks"
    assert lines[2].split() == ["figure", "min", "ms", "median", "ms", "plain", "loop", "ms", "ratio"]
    assert [line.split("  ")[0] for line in lines[3:]] == [name.replace("_", " ") for name in FIGURES]


def test_a_million_tokens_are_the_default():
    args = bench_hit.add_parser(_Commands()).parse_args([])  # pyright: ignore
    assert (args.tokens, args.repeats) == (1_048_576, 9)


class _Commands:
    def add_parser(self, name, **kwargs):
        import argparse

        return argparse.ArgumentParser(name)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("bench", "hit", "--tokens", 0), "kvjax bench: error: `--tokens` must be a positive int, got 0"),
        (("bench", "hit", "--repeats", -1), "kvjax bench: error: `--repeats` must be a positive int, got -1"),
        (("bench", "hit", "--tokens", "1k"), "kvjax bench hit: error: argument --tokens: must be an int, got '1k'"),
        (("bench",), "kvjax bench: error: the following arguments are required: BENCH"),
        (("bench", "poll"), "kvjax bench: error: argument BENCH: invalid choice: 'poll'"),
    ],
)
def test_bad_input_is_refused_in_one_line(argv, words):
    assert refusal(*argv).startswith(words)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 400) | st.integers(4_000, 40_000), st.integers(0, 2**32), st.sampled_from([0.0, 0.05, 0.3, 0.9]))
def test_the_plain_lookup_equals_a_lookup(num_tokens, seed, missing):
    """Windows are read in one span of positions or in several; in half of the cases nothing else is missing."""
    rng = np.random.default_rng(seed)
    chunking = resolve_chunking(bench_hit.DEEPSEEK_V4_FLASH)
    windows = {group.name for group in chunking.layout.groups if isinstance(group.kind, SlidingWindow)}
    present = {
        name: rng.random(num_tokens // (tokens or 1)) >= missing * (seed % 2 or name in windows)
        for name, tokens in zip(chunking.layout.names, chunking.tokens_per_chunk, strict=True)
    }
    listed = {name: mask.tolist() for name, mask in present.items()}
    found = bench_hit._hit_as_lists(longest_hit(chunking, num_tokens, present))
    assert bench_hit._plain_hit(chunking, num_tokens, listed) == found


def test_a_result_that_a_plain_loop_does_not_have_stops_the_benchmark():
    with pytest.raises(RuntimeError, match="sum: kvjax and a plain loop over the chunks return different results"):
        bench_hit.timed(bench_hit.Figure("sum", lambda: 3, lambda: 4), 1)


def test_a_figure_takes_the_least_and_the_median_of_its_calls(monkeypatch):
    clock = iter([0.0, 0.005, 1.0, 1.001, 2.0, 2.002, 5.0, 5.004, 6.0, 6.008, 7.0, 7.006])
    monkeypatch.setattr(bench_hit.time, "perf_counter", lambda: next(clock))
    found = bench_hit.timed(bench_hit.Figure("f", lambda: 3, lambda: "3", str), 3)
    assert found == {"name": "f", "min_ms": 1.0, "median_ms": 2.0, "plain_ms": 6.0, "plain_ratio": 3.0}
