"""`kvjax bench moves`: its rows, that only right bytes score, and what it refuses."""

import argparse

import jax
import ml_dtypes
import numpy as np
import pytest

from kvjax.cli import bench_moves, bench_moves_naive, bench_moves_plot, bench_moves_run, timing
from kvjax.cli.bench_moves import Case
from kvjax.cli.bench_moves_blocks import Blocks
from kvjax.cli.bench_moves_naive import NaiveLoop
from kvjax.cli.bench_moves_run import MoverLoop
from kvjax.mover import Mover
from kvjax.plan import StorePlan
from tests.cli.command import document, kvjax, refusal

KEYS = [
    *("bench", "direction", "transfer", "backend", "device", "jax", "dtype", "block_bytes", "num_blocks"),
    *("num_leaves", "gb_per_s", "memcpy_gb_per_s", "ratio"),
]
FURTHER_KEYS = ["one_copy_gb_per_s", "num_bytes", "timed_blocks", "exact"]
SMALL = ("bench", "moves", "--repeats", 1, "--bytes", "64KiB", "--block-bytes", "4KiB", "--leaves", 1)
U8 = np.dtype(np.uint8)


def case(dtype=U8, block_bytes=4096, num_leaves=2, num_blocks=6, transfer="auto") -> Case:
    return Case(np.dtype(dtype), block_bytes, num_leaves, num_blocks, transfer)


def test_there_is_a_row_for_every_configuration_and_direction():
    found = document(*SMALL, "--dtypes", "bfloat16,uint8", "--leaves", "1,2", "--block-bytes", "4KiB,16KiB")
    rows = found.pop("rows")
    assert (found["bench"], found["bytes"], found["repeats"]) == ("moves", 65536, 1)
    assert [(r["dtype"], r["num_leaves"], r["block_bytes"], r["num_blocks"], r["direction"]) for r in rows] == [
        (dtype, leaves, block_bytes, 65536 // block_bytes, direction)
        for dtype in ("bfloat16", "uint8")
        for leaves in (1, 2)
        for block_bytes in (4096, 16384)
        for direction in ("store", "load")
    ]
    for row in rows:
        assert list(row) == KEYS + FURTHER_KEYS
        assert (row["bench"], row["backend"], row["jax"]) == ("moves", "cpu", jax.__version__)
        assert row["device"] == jax.devices()[0].device_kind
        assert row["transfer"] in ("direct", "staged")
        assert (row["num_bytes"], row["timed_blocks"], row["exact"]) == (65536, row["num_blocks"], True)
        assert row["ratio"] == pytest.approx(row["gb_per_s"] / row["memcpy_gb_per_s"], rel=2e-3)
        assert row["one_copy_gb_per_s"] > 0


def test_each_transport_asked_for_is_measured():
    found = document(*SMALL, "--dtypes", "float32", "--transfer", "staged,auto")
    assert [row["transfer"] for row in found["rows"][:2]] == ["staged", "staged"]
    assert len(found["rows"]) == 4


def test_blocks_may_be_counted_instead_of_bytes():
    argv = ("bench", "moves", "--repeats", 1, "--dtypes", "uint8", "--block-bytes", "4KiB", "--leaves", 1)
    found = document(*argv, "--num-blocks", "3,1")
    assert found["bytes"] is None
    assert [(row["num_blocks"], row["num_bytes"]) for row in found["rows"][::2]] == [(3, 12288), (1, 4096)]


def test_bytes_that_are_no_multiple_of_a_block_move_whole_blocks():
    found = document(*SMALL, "--dtypes", "uint8", "--bytes", "10KiB")
    assert {(row["num_blocks"], row["num_bytes"]) for row in found["rows"]} == {(2, 8192)}


def test_naive_rows_follow_those_of_their_configuration():
    found = document(*SMALL, "--dtypes", "uint8,float32", "--vs", "naive")
    assert [(row["dtype"], row["transfer"] == "naive", row["direction"]) for row in found["rows"]] == [
        (dtype, naive, direction)
        for dtype in ("uint8", "float32")
        for naive in (False, True)
        for direction in ("store", "load")
    ]
    for row in found["rows"]:
        assert list(row) == KEYS + FURTHER_KEYS
        assert row["exact"] is True
        assert 1 <= row["timed_blocks"] <= row["num_blocks"] == 16


def test_people_get_a_row_per_move():
    ran = kvjax(*SMALL, "--dtypes", "uint8", "--vs", "naive")
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert lines[0] == f"cpu (cpu), jax {jax.__version__}, medians of 1 moves"
    assert lines[2].split() == [
        *("move", "transfer", "dtype", "block", "blocks", "leaves", "GB/s", "memcpy", "GB/s", "ratio", "exact")
    ]
    assert [line.split()[0] for line in lines[3:]] == ["store", "load", "store", "load"]
    assert [line.split()[-1] for line in lines[3:]] == ["yes"] * 4


def test_the_default_grid():
    args = bench_moves.add_parser(argparse.ArgumentParser().add_subparsers()).parse_args([])
    assert args.dtypes == ("bfloat16", "float32", "float8_e4m3fn", "uint8")
    assert (args.block_bytes[0], args.block_bytes[-1], args.leaves) == (4096, 4 * 2**20, (1, 4))
    cases = list(bench_moves.cases_of(args))
    assert len(cases) == 4 * 6 * 2
    assert {case.num_bytes for case in cases} == {128 * 2**20}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--repeats", 0), "kvjax bench: error: `--repeats` must be a positive int, got 0"),
        (("--leaves", "1,0"), "kvjax bench: error: `--leaves` must be a positive int, got 0"),
        (("--leaves", "two"), "kvjax bench moves: error: argument --leaves: must be an int, got 'two'"),
        (("--num-blocks", "8,-1"), "kvjax bench: error: `--num-blocks` must be a positive int, got -1"),
        (
            ("--num-blocks", 8, "--bytes", "1MiB"),
            "kvjax bench moves: error: argument --bytes: not allowed with argument --num-blocks",
        ),
        (
            ("--block-bytes", "64kb"),
            "kvjax bench moves: error: argument --block-bytes: a size must be digits with an optional B, KiB, MiB, GiB "
            "or TiB, got '64kb'",
        ),
        (
            ("--dtypes", "uint8,float32", "--leaves", 3),
            "kvjax bench: error: `--block-bytes` must be multiples of 48 bytes, 16 elements of uint8 times 3 leaves, "
            "got 4096",
        ),
        (
            ("--block-bytes", 0),
            "kvjax bench: error: `--block-bytes` must be multiples of 16 bytes, 16 elements of uint8 times 1 leaves, "
            "got 0",
        ),
        (
            ("--bytes", "4095"),
            "kvjax bench: error: `--bytes` must be at least one block, 4096 bytes, got 4095",
        ),
        (
            ("--dtypes", "float64"),
            "kvjax bench: error: argument --dtypes: `dtype` must have elements that are numbers of 8, 16 or 32 bits",
        ),
        (("--dtypes", "uint8,"), "kvjax bench: error: argument --dtypes: `dtype` must name the element type"),
        (
            ("--transfer", "direct,dma"),
            "kvjax bench moves: error: argument --transfer: must be among auto, direct, staged, got 'dma'",
        ),
        (("--vs", "torch"), "kvjax bench moves: error: argument --vs: invalid choice: 'torch'"),
        (
            ("--bytes", "64TiB"),
            "kvjax bench: error: `--bytes`, or `--num-blocks` blocks, must be at most a 10th of the memory that this "
            "machine has available, got 70368744177664 bytes",
        ),
        (("--plot", "moves.jpg"), "kvjax bench: error: argument --plot: must end in .png, .svg, .pdf, got 'moves.jpg'"),
        (("--plot", "nowhere/moves.png"), "kvjax bench: error: argument --plot: the folder of 'nowhere/moves.png'"),
    ],
)
def test_bad_input_is_refused_in_one_line(argv, words):
    leaves = () if "--leaves" in argv else ("--leaves", 1)
    dtypes = () if "--dtypes" in argv else ("--dtypes", "uint8")
    blocks = () if "--block-bytes" in argv else ("--block-bytes", "4KiB")
    assert refusal("bench", "moves", *leaves, *dtypes, *blocks, *argv).startswith(words)


def test_a_transport_that_this_machine_cannot_take_is_refused(monkeypatch):
    def refuse(*_, transfer, **__):
        raise ValueError(f"`transfer` must not be {transfer!r} here: no such memory")

    monkeypatch.setattr(bench_moves_run, "Mover", refuse)
    line = refusal(*SMALL, "--dtypes", "uint8", "--transfer", "direct")
    assert line == "kvjax bench: error: `transfer` must not be 'direct' here: no such memory"


@pytest.mark.parametrize("dtype", ["uint8", "float32", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_a_store_and_a_load_move_random_blocks_and_nothing_else(dtype):
    blocks = Blocks(case(dtype))
    assert sorted([*blocks.source, *blocks.target]) == list(range(12))
    assert sorted(blocks.places) == list(range(6))
    loop = MoverLoop(blocks, jax.devices()[0])
    assert not blocks.moved(loop._caches, 6)
    assert loop.is_exact()
    assert not blocks.moved(loop._caches, 5)
    loop.close()


@pytest.mark.parametrize("block", ["source", "target"])
def test_one_wrong_bit_is_noticed(block):
    blocks = Blocks(case())
    bytes_of = {name: rows.copy() for name, rows in blocks.leaves.items()}
    for rows in bytes_of.values():
        rows[blocks.target] = rows[blocks.source]
    caches = {name: jax.device_put(rows) for name, rows in bytes_of.items()}
    assert blocks.moved(caches, 6)
    bytes_of["leaf1"][getattr(blocks, block)[3], -1] ^= 1
    assert not blocks.moved({name: jax.device_put(rows) for name, rows in bytes_of.items()}, 6)


def test_moves_that_bring_other_bytes_stop_the_benchmark(monkeypatch):
    """The mover's load leaves the caches as they are."""
    monkeypatch.setattr(Mover, "load", lambda self, caches, _plan: self.store(caches, StorePlan((), 0)))
    with pytest.raises(RuntimeError, match="transfer brought other bytes than those stored: Case"):
        list(bench_moves_run.rows_of(case(), repeats=1, naive=False))


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_the_naive_loop_moves_as_many_blocks_as_it_has_time_for(dtype, monkeypatch):
    monkeypatch.setattr(bench_moves_naive, "_SECONDS", 0.0)
    blocks = Blocks(case(dtype))
    loop = NaiveLoop(blocks, jax.devices()[0])
    assert loop.timed_blocks == {"store": 1, "load": 1}
    assert loop.is_exact()
    assert blocks.moved(loop._caches, 1)
    monkeypatch.setattr(bench_moves_naive, "_SECONDS", 3600.0)
    loop = NaiveLoop(blocks, jax.devices()[0])
    assert loop.timed_blocks == {"store": 6, "load": 6}
    assert loop.is_exact()
    assert blocks.moved(loop._caches, 6)


def test_the_naive_loop_is_checked_on_the_blocks_that_both_directions_move():
    blocks = Blocks(case())
    loop = NaiveLoop(blocks, jax.devices()[0])
    loop.store()
    loop.load()
    loop.timed_blocks = {"store": 5, "load": 2}
    assert loop.is_exact()
    assert blocks.moved(loop._caches, 2)


def test_the_naive_loop_says_if_bytes_changed():
    blocks = Blocks(case())
    loop = NaiveLoop(blocks, jax.devices()[0])
    loop._read = jax.jit(lambda cache, block: cache[block] + 1)
    assert not loop.is_exact()


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_picture_is_drawn(tmp_path, suffix):
    path = tmp_path / f"moves.{suffix}"
    ran = kvjax(*SMALL, "--dtypes", "uint8,float32", "--leaves", "1,2", "--vs", "naive", "--plot", path)
    assert (ran.code, ran.err) == (0, "")
    assert path.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")


def test_a_picture_that_cannot_be_written_is_refused(tmp_path):
    target = tmp_path / "full.png"
    target.symlink_to(tmp_path / "nowhere" / "moves.png")
    assert "full.png' cannot be written: No such file or directory" in refusal(
        *SMALL, "--dtypes", "uint8", "--plot", target
    )


def test_a_line_of_the_picture_is_one_dtype_transfer_and_number_of_leaves():
    def row(direction, dtype, transfer, leaves, block_bytes, num_blocks, ratio):
        return {
            "direction": direction,
            "dtype": dtype,
            "transfer": transfer,
            "num_leaves": leaves,
            "block_bytes": block_bytes,
            "num_blocks": num_blocks,
            "ratio": ratio,
        }

    rows = [
        row("store", "uint8", "direct", 1, 65536, 2, 0.9),
        row("store", "uint8", "direct", 1, 4096, 32, 0.5),
        row("load", "uint8", "direct", 1, 4096, 32, 0.7),
        row("store", "uint8", "naive", 1, 4096, 32, 0.1),
        row("store", "int8", "direct", 2, 4096, 32, 0.4),
    ]
    lines = {label: (style, points) for label, style, points in bench_moves_plot.series(rows, "store", by_count=False)}
    assert {label: points for label, (_, points) in lines.items()} == {
        "uint8, direct, 1 leaf": [(4096, 0.5), (65536, 0.9)],
        "uint8, naive, 1 leaf": [(4096, 0.1)],
        "int8, direct, 2 leaves": [(4096, 0.4)],
    }
    styles = [style for style, _ in lines.values()]
    assert [style["color"] for style in styles] == ["C0", "C0", "C1"]
    assert [style["linestyle"] for style in styles] == ["-", ":", "-"]
    assert [style["marker"] for style in styles] == ["o", "o", "s"]
    labels = [label for label, _, _ in bench_moves_plot.series(rows[:2], "store", by_count=True)]
    assert labels == ["uint8, direct, 2 blocks", "uint8, direct, 32 blocks"]


def test_calls_take_turns_and_each_has_its_median(monkeypatch):
    called = []
    clock = iter([0.0, 0.1, 1.0, 1.5, 2.0, 2.8, 3.0, 3.9, 4.0, 4.2, 5.0, 5.7])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    found = timing.alternating([lambda: called.append("a"), lambda: called.append("b")], 3)
    assert called == ["a", "b"] * 4
    assert found == pytest.approx([0.2, 0.7])


@pytest.mark.parametrize("num_bytes", [1, 2**20, 2**20 + 3, 3 * 2**20])
def test_memory_is_copied_whole(num_bytes):
    copy = timing.MemoryCopy(num_bytes)
    copy._source[:] = np.random.default_rng(0).integers(0, 255, num_bytes)
    copy.in_pieces()
    assert np.array_equal(copy._target, copy._source)
    copy._target[:] = 0
    copy.at_once()
    assert np.array_equal(copy._target, copy._source)


def test_a_rate_is_of_the_blocks_that_were_timed(monkeypatch):
    """memcpy of all 6 blocks takes 2 µs, one copy 3 µs, and the move of 3 blocks, or of 1, 4 µs."""

    class Loop:
        transfer = "naive"
        store = load = None

        def __init__(self):
            self.case = case()
            self.timed_blocks = {"store": 3, "load": 1}

    monkeypatch.setattr(bench_moves_run, "alternating", lambda calls, repeats: [2e-6, 3e-6, 4e-6])
    copy = timing.MemoryCopy(6 * 4096)
    rows = list(bench_moves_run._timed(Loop(), True, copy, jax.devices()[0], 1))  # pyright: ignore
    assert [(row["direction"], row["gb_per_s"], row["ratio"], row["timed_blocks"]) for row in rows] == [
        ("store", 3.072, 0.25, 3),
        ("load", 1.024, 0.08333, 1),
    ]
    assert {(row["memcpy_gb_per_s"], row["one_copy_gb_per_s"]) for row in rows} == {(12.29, 8.192)}
