"""`examples/gemma_decode.py` as a user runs it, on a tiny model."""

import doctest
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gemma_style.conversations
import gemma_style.options
import pytest
from gemma_decode import main
from gemma_style.conversations import SHIPPED_TEXT

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = [
    *("--width", "16", "--conversations", "3", "--turns", "2", "--first-tokens", "60"),
    *(
        "--turn-tokens",
        "40",
        "--opening-tokens",
        "20",
        "--new-tokens",
        "3",
        "--blocks-per-chunk",
        "1",
        "--host-bytes",
        "32MiB",
    ),
]
# Layers, KV heads, head, window and tokens per block. A block of either group of gemma-4-12B has the same
# bytes in every layer.
GEOMETRY = {
    "gemma-3-270m": {"full": (1, 1, 256, None, 16), "local": (5, 1, 256, 512, 16)},
    "gemma-3-4b": {"full": (1, 4, 256, None, 16), "local": (5, 4, 256, 1024, 16)},
    "gemma-4-12B": {"full": (1, 1, 512, None, 64), "local": (5, 8, 256, 1024, 16)},
}


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*TINY, "--json", *arguments]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1, "one document on one line"
    return json.loads(out)


@pytest.mark.parametrize(("preset", "dtype"), [("gemma-3-270m", "float32"), ("gemma-4-12B", "bfloat16")])
def test_fused_steps_move_the_same_blocks_and_change_no_token(
    preset: str, dtype: str, capsys: pytest.CaptureFixture[str]
):
    options = ("--preset", preset, "--cache-dtype", dtype)
    plain, fused = run_json(capsys, *options), run_json(capsys, *options, "--fused")
    assert (plain["fused"], fused["fused"]) == (False, True)
    assert fused["tokens_identical"] is True
    assert fused["tokens_digest"] == plain["tokens_digest"]
    assert fused["bytes_loaded"] == plain["bytes_loaded"] > 0
    assert fused["bytes_stored"] == plain["bytes_stored"] > 0
    assert fused["restored_tokens"] == plain["restored_tokens"] > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("preset", list(GEOMETRY))
def test_tokens_are_equal_in_all_modes(preset: str, dtype: str, capsys: pytest.CaptureFixture[str]):
    result = run_json(capsys, "--preset", preset, "--cache-dtype", dtype)
    assert result["tokens_identical"] is True
    assert result["max_abs_logit_diff"] == 0.0
    assert result["bytes_stored"] >= result["bytes_loaded"] > 0
    assert set(result["ttft_ms"]) >= {"offload", "recompute"}
    assert all(ms > 0 for ms in result["ttft_ms"].values())

    unlimited, recompute = result["modes"]["unlimited"], result["modes"]["recompute"]
    seen_before = unlimited["device_hits_tokens"]
    assert unlimited["recomputed_tokens"] == unlimited["restored_tokens"] == recompute["restored_tokens"] == 0
    assert recompute["recomputed_tokens"] + recompute["device_hits_tokens"] == seen_before
    assert result["restored_tokens"] > 0
    assert result["recomputed_tokens"] < recompute["recomputed_tokens"]
    # Conversations share an opening, which the host may hold before a conversation has seen it.
    assert result["device_hits_tokens"] + result["restored_tokens"] + result["recomputed_tokens"] >= seen_before
    assert result["generated_tokens"] == 3 * 2 * 3

    geometry = result["geometry"]
    names = ("num_layers", "kv_heads", "head_dim", "window_tokens", "tokens_per_block")
    assert {g["name"]: tuple(g[name] for name in names) for g in geometry["groups"]} == GEOMETRY[preset]
    assert (geometry["preset"], geometry["layers"], geometry["cache_dtype"]) == (preset, 6, dtype)


def test_two_runs_and_any_host_budget_give_the_same_tokens(capsys: pytest.CaptureFixture[str]):
    """The second run is a process of its own, and its host pool holds one chunk."""
    ample = run_json(capsys)
    command = [sys.executable, str(EXAMPLES / "gemma_decode.py"), *TINY, "--json", "--host-bytes", "chunk"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.count("\n") == 1
    one_chunk = json.loads(done.stdout)
    assert one_chunk["host_bytes"] == max(group["chunk_bytes"] for group in one_chunk["geometry"]["groups"])
    assert one_chunk["tokens_digest"] == ample["tokens_digest"]
    assert one_chunk["tokens_identical"] is True
    assert one_chunk["max_abs_logit_diff"] == 0.0
    assert one_chunk["recomputed_tokens"] > ample["recomputed_tokens"]
    assert "unlimited: turns" in done.stderr


def test_tables_and_plot(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    pytest.importorskip("matplotlib")
    plot, text = tmp_path / "run.png", tmp_path / "own.txt"
    text.write_bytes("Größe \xff".encode("latin-1") * 3)
    assert main([*TINY, "--plot", str(plot), "--text", str(text), "--vocabulary", "300"]) == 0
    out = capsys.readouterr().out
    assert "All tokens are equal in the three modes (digest " in out
    assert "largest difference of logits, offload against unlimited: 0.0" in out
    for word in ("restored", "recomputed", "device", "TTFT", "unlimited", "tokens/chunk"):
        assert word in out
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "no-such.txt"], r"cannot read the text file 'no-such.txt': No such file"),
        (["--text", "."], r"cannot read the text file '.': Is a directory"),
        (["--text", "/dev/null"], r"the text file '/dev/null' must hold some text, but it is empty"),
        (["--preset", "gemma-9"], r"--preset: invalid choice: 'gemma-9' \(choose from '?gemma-3-270m"),
        (["--cache-dtype", "float8"], r"--cache-dtype: invalid choice: 'float8'"),
        (["--turns", "0"], r"--turns: must be a whole number from 1 to 2147483647, got '0'"),
        (["--conversations", "-2"], r"--conversations: must be a whole number from 1 to 2147483647, got '-2'"),
        (["--new-tokens", "1.5"], r"--new-tokens: must be a whole number from 1 to 2147483647, got '1.5'"),
        (["--seed", "-1"], r"--seed: must be a whole number from 0 to 2147483647, got '-1'"),
        (["--seed", "99999999999"], r"--seed: must be a whole number from 0 to 2147483647"),
        (["--layers", "5"], r"--layers: must be at least 6, one full layer, got 5"),
        (["--vocabulary", "255"], r"--vocabulary: must be at least 256, the bytes, got 255"),
        (["--host-bytes", "64 megs"], r"--host-bytes: must be digits with an optional B, KiB, .*, got '64 megs'"),
        (["--host-bytes", "100KiB"], r"`host_bytes` must .*'local'.*102400"),
        (["--blocks-per-chunk", "0"], r"--blocks-per-chunk: must be a positive whole number.*got '0'"),
        (["--blocks-per-chunk", "global=2"], r"--blocks-per-chunk: must be a positive.*, or 'full=N,local=N'"),
        (["--device-blocks", "2"], r"--device-blocks of group 'full' must be at least \d+, .*, got 2"),
        (["--device-blocks", "local=1"], r"--device-blocks of group 'local' must be at least \d+, .*, got 1"),
        (["--plot", "run.jpeg"], r"--plot: must end in .png, .svg, .pdf, got 'run.jpeg'"),
        (["--plot", "no-such/run.png"], r"--plot: cannot write 'no-such/run.png': its folder must exist"),
        (["--rowz", "3"], r"unrecognized arguments: --rowz 3"),
        (["--rows"], r"--rows: expected one argument"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("matplotlib")
    assert main([*TINY, "--json", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("gemma_decode: error: ")
    assert re.search(message, captured.err), captured.err


def test_plot_without_matplotlib_is_refused_at_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["--plot", "run.png"]) == 2
    assert "--plot needs matplotlib, which is not installed" in capsys.readouterr().err


def test_the_shipped_text_is_long_enough_for_the_defaults():
    text = SHIPPED_TEXT.read_bytes()
    assert len(text) > 96 + 4 * (512 + 5 * 96)
    assert b"public domain" in text


@pytest.mark.parametrize("module", [gemma_style.conversations, gemma_style.options])
def test_doctests(module: Any):
    assert doctest.testmod(module).failed == 0


def test_minimal_loop_restores_every_byte():
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "minimal_loop.py")], capture_output=True, text=True, check=True
    )
    assert "tokens need no computing" in done.stdout
    assert "local: blocks" in done.stdout
