"""`kvjax plan`: the document, the worked numbers, and one line for whatever is wrong."""

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvjax
from kvjax.chunking import Chunking
from kvjax.cli.plan import describe
from tests.cli.command import DESIGN, document, full, refusal, saved, sliding
from tests.cli.command import kvjax as kvjax_command
from tests.oracles import law
from tests.oracles.layouts import chunkings

CHUNK_KEYS = (
    *("blocks_per_chunk", "tokens_per_chunk", "hashes_per_chunk", "chunk_bytes"),
    *("units_per_chunk", "padding_bytes", "longer_than_window"),
)
SCRATCH_NULLS = dict.fromkeys(CHUNK_KEYS)
# The keys that every version has; costs follow them, see test_plan_costs.py.
FIXED_KEYS = ("tokens_per_hash", "unit_bytes", "groups", "bytes_per_token_growing", "host")
COST_KEYS = (
    *("bytes_per_token", "bytes_per_token_per_layer", "window_cap_bytes", "state_bytes", "distinct_shards"),
    *("checkpoint_bytes", "host_bytes", "share"),
)


def chunk_fields(blocks, tokens, hashes, chunk_bytes, units, padding=0, longer=False):
    return dict(zip(CHUNK_KEYS, (blocks, tokens, hashes, chunk_bytes, units, padding, longer), strict=True))


def row(group: dict, **chunk) -> dict:
    return {"num_layers": 1, "lookahead_tokens": 0} | group | chunk


def test_document_of_a_mixed_geometry(tmp_path):
    """One group of every kind, each block a chunk: gcd 4096 B is under 64 KiB, and no larger unit pads by 2 %."""
    groups = DESIGN["groups"]
    plan = document("plan", saved(tmp_path, DESIGN))
    for group in plan["groups"]:
        assert tuple(group)[-len(COST_KEYS) :] == COST_KEYS
        for key in COST_KEYS:
            del group[key]
    assert {key: plan[key] for key in FIXED_KEYS} == {
        "tokens_per_hash": 16,
        "unit_bytes": 4096,
        "groups": [
            row(groups[0], **chunk_fields(1, 16, 1, 65536, 16)),
            row(groups[1], **chunk_fields(1, 16, 1, 65536, 16)),
            row(groups[2], **chunk_fields(1, 16, 1, 65536, 16)),
            row(groups[3], **chunk_fields(1, 528, 33, 2146304, 524)),
            row(groups[4], **SCRATCH_NULLS),
            row(groups[5], **chunk_fields(1, 16, 1, 4096, 1)),
        ],
        "bytes_per_token_growing": 4352,  # (65536 + 4096) / 16: only full attention grows
        "host": None,
    }


def test_host_holds_the_longest_prefix_whose_chunks_fit(tmp_path):
    """262,144 units of 4 KiB; 49 of them per 16 tokens and 524 more per 528 tokens."""
    host = document("plan", saved(tmp_path, DESIGN), "--host-bytes", "1GiB")["host"]

    def taken(tokens):
        return tokens // 16 * 49 + tokens // 528 * 524

    assert (host["budget_bytes"], host["tokens"]) == (2**30, 64735)
    assert taken(64735) <= 262144 < taken(64736)


@settings(max_examples=300, deadline=None)
@given(chunkings(), st.integers(0, 400), st.sampled_from([1, 4, 256]))
def test_host_tokens_equal_a_count_token_by_token(cut: Chunking, budget: int, granule: int):
    plan = describe(cut, granule, budget)
    units = [group["units_per_chunk"] for group in plan["groups"]]
    assert plan["host"]["tokens"] == law.tokens_that_fit(cut, units, budget // plan["unit_bytes"])
    for group in plan["groups"]:
        if group["chunk_bytes"] is not None:
            assert group["units_per_chunk"] * plan["unit_bytes"] - group["padding_bytes"] == group["chunk_bytes"]
            assert 0 <= group["padding_bytes"] < plan["unit_bytes"]


def test_keys_come_in_the_order_of_the_contract(tmp_path):
    plan = document("plan", saved(tmp_path, DESIGN))
    assert tuple(plan)[: len(FIXED_KEYS)] == FIXED_KEYS
    assert list(plan["groups"][1])[:6] == [
        "name",
        "kind",
        "window_tokens",
        "num_layers",
        "tokens_per_block",
        "block_bytes",
    ]


@pytest.mark.parametrize(("blocks", "tokens", "hashes"), [(1, [12, 16], [3, 4]), (2, [24, 32], [6, 8])])
def test_groups_of_12_and_16_tokens_share_a_hash_unit_of_4(tmp_path, blocks, tokens, hashes):
    plan = document("plan", saved(tmp_path, {"groups": [full("a", 12), full("b", 16)]}), "--blocks-per-chunk", blocks)
    assert plan["tokens_per_hash"] == 4
    assert [group["tokens_per_chunk"] for group in plan["groups"]] == tokens
    assert [group["hashes_per_chunk"] for group in plan["groups"]] == hashes


@pytest.mark.parametrize(
    ("blocks", "tokens"),
    [
        (1, [256, 64, 64, 4, 8]),
        (2, [512, 128, 128, 8, 16]),
        (4, [1024, 256, 256, 16, 32]),
        (8, [2048, 512, 512, 32, 64]),
    ],
)
def test_one_number_multiplies_every_group_of_a_five_group_model(tmp_path, blocks, tokens):
    windows = [sliding("w1", 64, 128), sliding("w2", 64, 128), sliding("w3", 4, 8), sliding("w4", 8, 128)]
    path = saved(tmp_path, {"groups": [full("kv", 256), *windows]})
    plan = document("plan", path, "--blocks-per-chunk", blocks)
    assert plan["tokens_per_hash"] == 4
    assert [group["tokens_per_chunk"] for group in plan["groups"]] == tokens


def test_blocks_per_chunk_by_group_name_leaves_the_others_at_one(tmp_path):
    plan = document("plan", saved(tmp_path, DESIGN), "--blocks-per-chunk", "local=64,global=4")
    assert [group["blocks_per_chunk"] for group in plan["groups"]] == [4, 64, 1, 1, None, 1]
    assert [group["longer_than_window"] for group in plan["groups"]] == [False, False, False, False, None, False]


def test_a_group_name_may_hold_an_equals_sign(tmp_path):
    path = saved(tmp_path, {"groups": [full("a=b", 4)]})
    assert document("plan", path, "--blocks-per-chunk", "a=b=3")["groups"][0]["blocks_per_chunk"] == 3


def test_auto_aims_for_min_chunk_bytes(tmp_path):
    path = saved(tmp_path, {"groups": [full("a", 4, 100), full("b", 4, 5000)]})
    plan = document("plan", path, "--blocks-per-chunk", "auto", "--min-chunk-bytes", "4KiB")
    assert [group["blocks_per_chunk"] for group in plan["groups"]] == [41, 1]


def test_block_size_is_tokens_per_chunk_of_a_uniform_model(tmp_path):
    path = saved(tmp_path, {"groups": [full("a", 16)]})
    assert document("plan", path, "--block-size", 64)["groups"][0]["blocks_per_chunk"] == 4


def test_a_chunk_longer_than_the_window_is_marked_and_warned_of(tmp_path):
    path = saved(tmp_path, DESIGN)
    argv = ("plan", path, "--blocks-per-chunk", "local=65")
    assert [group["longer_than_window"] for group in document(*argv)["groups"]] == [
        False,
        True,
        False,
        False,
        None,
        False,
    ]
    for ran in (kvjax_command(*argv), kvjax_command(*argv, "--json")):
        assert ran.err == (
            "kvjax plan: warning: group 'local': a chunk of 1040 tokens is longer than the 1024 tokens that are read; "
            "an engine that frees blocks as they leave the window never completes one\n"
        )


def test_lookahead_is_printed_for_every_group(tmp_path):
    plan = document("plan", saved(tmp_path, DESIGN))
    assert [group["lookahead_tokens"] for group in plan["groups"]] == [0, 0, 0, 0, 0, 16]


def test_bytes_per_token_may_be_a_fraction(tmp_path):
    path = saved(tmp_path, {"groups": [full("a", 3, 64), full("b", 4, 6)]})
    assert document("plan", path)["bytes_per_token_growing"] == pytest.approx(64 / 3 + 1.5, rel=1e-15)


def test_a_model_without_full_attention_does_not_grow(tmp_path):
    path = saved(tmp_path, {"groups": [sliding("w", 4, 8)]})
    assert document("plan", path)["bytes_per_token_growing"] == 0


@pytest.mark.parametrize(("platform", "unit"), [("cpu", 4096), ("gpu", 4096), ("tpu", 8192)])
def test_the_unit_suits_the_platform(tmp_path, platform, unit):
    assert document("plan", saved(tmp_path, DESIGN), "--platform", platform)["unit_bytes"] == unit


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4096B", 4096),
        ("3KiB", 3072),
        ("2MiB", 2**21),
        ("1GiB", 2**30),
        ("07TiB", 7 * 2**40),
    ],
)
def test_sizes_are_digits_with_an_optional_unit(tmp_path, text, num_bytes):
    plan = document("plan", saved(tmp_path, DESIGN), "--host-bytes", text)
    assert plan["host"]["budget_bytes"] == num_bytes


@pytest.mark.parametrize("text", ["", "1GB", "1gib", "1.5GiB", "-1", "1 GiB", "GiB", "1e9", "0x10", "१", "1_000"])
def test_other_sizes_are_refused(tmp_path, text):
    error = refusal("plan", saved(tmp_path, DESIGN), f"--host-bytes={text}")
    assert "argument --host-bytes: a size must be digits with an optional B, KiB, MiB, GiB or TiB, got" in error


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--blocks-per-chunk", "0"], ["`blocks_per_chunk` must be a positive int, got 0"]),
        (["--blocks-per-chunk", "-2"], ["`blocks_per_chunk` must be a positive int, got -2"]),
        (["--blocks-per-chunk", "1.5"], ["--blocks-per-chunk: must be N, name=N,… or auto, got '1.5'"]),
        (["--blocks-per-chunk", ""], ["must be N, name=N,… or auto, got ''"]),
        (["--blocks-per-chunk", "local=2,"], ["must be N, name=N,… or auto"]),
        (["--blocks-per-chunk", "=2"], ["must be N, name=N,… or auto"]),
        (["--blocks-per-chunk", "local=x"], ["must be N, name=N,… or auto"]),
        (["--blocks-per-chunk", "local=2,local=2"], ["must name each group once, got 'local' twice"]),
        (["--blocks-per-chunk", "local=0"], ["`blocks_per_chunk` of group 'local' must be a positive int, got 0"]),
        (["--blocks-per-chunk", "other=2"], ["`blocks_per_chunk` must name groups", "'global'", "got 'other'"]),
        (["--blocks-per-chunk", "ring=2"], ["`blocks_per_chunk`", "the scratch group 'ring'"]),
        (["--block-size", "64"], ["global=16", "state=528", "draft=16", "`blocks_per_chunk`"]),
        (["--block-size", "64", "--blocks-per-chunk", "2"], ["only one of `blocks_per_chunk` and `block_size`"]),
        (["--block-size", "6x"], ["argument --block-size: must be an int, got '6x'"]),
        (["--min-chunk-bytes", "0"], ["`min_chunk_bytes` must be a positive int, got 0"]),
        (["--host-bytes", "8388608TiB"], ["`budget_bytes` must be below"]),
        (["--platform", "npu"], ["--platform", "npu", "cpu", "gpu", "tpu"]),
        (["--tp", "2"], ["--tp is for a model's config.json", "is a geometry file"]),
        (["--dtype", "bfloat16"], ["--dtype is for a model's config.json"]),
        (["--tokens-per-block", "16"], ["--tokens-per-block is for a model's config.json"]),
        (["--jsn"], ["unrecognized arguments: --jsn"]),
        (["--host", "1GiB"], ["unrecognized arguments: --host 1GiB"]),
        (["more.json"], ["unrecognized arguments: more.json"]),
        (["--host-bytes"], ["argument --host-bytes: expected one argument"]),
    ],
)
def test_bad_options_are_refused_on_one_line(tmp_path, options, words):
    error = refusal("plan", saved(tmp_path, DESIGN), *options)
    assert error.startswith("kvjax")
    for word in words:
        assert word in error


@pytest.mark.parametrize(("tokens", "valid"), [(24, 32), (8, 16), (65, 80)])
def test_a_block_size_that_is_no_multiple_names_the_next_valid_value(tmp_path, tokens, valid):
    error = refusal("plan", saved(tmp_path, {"groups": [full("a", 16)]}), "--block-size", tokens)
    assert f"`block_size` must be a multiple of tokens_per_block, 16, got {tokens}" in error
    assert f"the next valid value is {valid}" in error


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is empty"),
        (" \n", "is empty"),
        ("{", "is not JSON as kvjax reads it"),
        ("{'groups': []}", "is not JSON as kvjax reads it"),
        (b'{"groups": "\xff"}', "is not UTF-8 text"),
        ('{"groups": [NaN]}', "NaN is not a JSON number"),
        ('{"groups": -Infinity}', "-Infinity is not a JSON number"),
        ('{"groups": [], "groups": []}', "the key 'groups' is there twice"),
        ('{"groups": [{"name": "a", "name": "b"}]}', "the key 'name' is there twice"),
        ("[" * 100_000 + "]" * 100_000, "is nested too deeply"),
        ('{"groups": ' + "9" * 5000 + "}", "is not JSON as kvjax reads it"),
        ("[]", "a geometry must be an object with the key `groups`, got a list"),
        ("null", "got null"),
        ("true", "got true"),
        ("3", "got an int"),
        ("3.5", "got a float"),
        ('"text"', "got a string"),
        ("{}", "the geometry must have the key 'groups'"),
        ('{"groups": []}', "`groups` must hold at least one group"),
        ('{"groups": {}}', "`groups` must be a list of groups, got an object"),
        ('{"groups": ' + "[" * 900 + "]" * 900 + "}", "`groups` must hold objects, got a list at place 0"),
    ],
)
def test_a_bad_file_is_refused_in_one_sentence(tmp_path, content, words):
    path = saved(tmp_path, content)
    error = refusal("plan", path)
    assert error.startswith(f"kvjax plan: error: '{path}'")
    assert words in error


def test_a_missing_file_and_a_directory_are_told_apart(tmp_path):
    assert refusal("plan", tmp_path / "none.json").endswith("none.json' does not exist")
    assert refusal("plan", tmp_path).endswith("config.json' does not exist")  # a folder stands for its config.json
    (tmp_path / "config.json").mkdir()
    assert refusal("plan", tmp_path).endswith("is a directory, not a JSON file")
    assert "cannot be read" in refusal("plan", f"{saved(tmp_path, DESIGN)}/below")
    assert "cannot be read" in refusal("plan", "no\0file")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "gemma3", "num_hidden_layers": 26}, "must have `hidden_size`"),
        ({"architectures": ["GptOssForCausalLM"]}, "must have `num_hidden_layers`"),
        ({"text_config": {"num_hidden_layers": 2}}, "must have `text_config.hidden_size`"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "`is_encoder_decoder` must be off"),
    ],
)
def test_a_config_that_is_not_understood_is_refused_by_field(tmp_path, config, words):
    path = saved(tmp_path, config, "config.json")
    for command in (["plan", path], ["plan", path, "--tp", "2"]):
        error = refusal(*command)
        assert error.startswith(f"kvjax plan: error: '{path}': ")
        assert words in error


def test_chunks_that_straddle_attention_chunks_are_warned_of(tmp_path):
    group = {"name": "local", "kind": "chunked", "chunk_tokens": 8192, "tokens_per_block": 16, "block_bytes": 24576}
    path = saved(tmp_path, {"groups": [group]})
    assert kvjax_command("plan", path).err == ""
    assert (
        "chunks of 48 tokens do not divide the attention chunk of 8192"
        in kvjax_command("plan", path, "--blocks-per-chunk", "3").err
    )


def test_a_config_may_hold_infinities(tmp_path):
    config = {
        "model_type": "mamba2",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_heads": 2,
        "head_dim": 64,
        "state_size": 16,
        "n_groups": 1,
        "time_step_limit": [0.0, float("inf")],
    }
    path = saved(tmp_path, config, "config.json")
    assert "Infinity" in path.read_text()
    plan = document("plan", path)
    assert [(group["kind"], group["num_layers"]) for group in plan["groups"]] == [("recurrent", 2)]
    assert document("plan", tmp_path) == plan


def test_the_table_shows_bytes_exactly_and_in_human_units(tmp_path):
    ran = kvjax_command("plan", saved(tmp_path, DESIGN), "--host-bytes", "1GiB")
    assert (ran.code, ran.err) == (0, "")
    for words in (
        "2,146,304 B (2.05 MiB)",
        "sliding 1,024",
        "full +16",
        "16 tokens",
        "4,096 B (4 KiB)",
        "64,735 tokens",
    ):
        assert words in ran.out
    (ring,) = [line for line in ran.out.splitlines() if line.startswith("ring")]
    assert ring.split()[-5:] == ["-"] * 5


def test_group_names_are_printed_as_they_are(tmp_path):
    """Square brackets are markup to the table's library, and half a surrogate pair cannot be encoded."""
    path = saved(tmp_path, {"groups": [full("[red]a[/red]", 4), full("half\ud800", 4)]})
    ran = kvjax_command("plan", path)
    assert ran.code == 0
    assert "[red]a[/red]" in ran.out
    assert "half\\ud800" in ran.out
    assert document("plan", path)["groups"][1]["name"] == "half\ud800"


def test_no_command_and_an_unknown_command_are_refused():
    for argv, words in (([], "the following arguments are required: COMMAND"), (["plam"], "'plam'")):
        ran = kvjax_command(*argv)
        assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
        assert words in ran.err


def test_version_and_help_succeed():
    assert kvjax_command("--version") == (0, f"kvjax {kvjax.__version__}\n", "")
    ran = kvjax_command("plan", "--help")
    assert (ran.code, ran.err) == (0, "")
    assert "--host-bytes" in ran.out


def test_the_command_runs_as_a_module_without_importing_jax(tmp_path):
    path = saved(tmp_path, DESIGN)
    ran = subprocess.run(
        [sys.executable, "-m", "kvjax", "plan", str(path), "--json"], capture_output=True, text=True, check=True
    )
    assert json.loads(ran.stdout)["unit_bytes"] == 4096
    assert ran.stderr == ""
    code = "import sys, kvjax.__main__; sys.exit(int('jax' in sys.modules or 'jaxlib' in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("options", [[], ["--json"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_gone_is_no_traceback(tmp_path, options, unbuffered):
    """A buffered line fails when it is flushed, and what is left of it would fail once more when Python exits."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "kvjax", "plan", str(saved(tmp_path, DESIGN)), *options],
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
            stdout=write_end,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(write_end)
    assert (ran.returncode, ran.stderr) == (1, "")
