"""`kvjax plan`: what a sequence costs and what a budget holds, by choice of checkpoints."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.chunking import Chunking
from kvjax.cli.plan import describe
from tests.cli.command import DESIGN, document, full, kvjax, refusal, saved, sliding
from tests.oracles import accounting_model as model
from tests.oracles.layouts import chunkings

GEMMA = {
    "groups": [
        full("full", 16, 16 * 5 * 4096, num_layers=5),
        sliding("local", 16, 1024, 16 * 29 * 4096) | {"num_layers": 29},
    ]
}
ONLY_FULL = {"groups": [full("a", 3, 64)]}
BUDGET = ("--host-bytes", "64GiB")


@pytest.fixture
def gemma(tmp_path):
    return saved(tmp_path, GEMMA)


def test_groups_tell_their_bytes(gemma):
    by_name = {group["name"]: group for group in document("plan", gemma)["groups"]}
    keys = ("bytes_per_token", "bytes_per_token_per_layer", "window_cap_bytes", "state_bytes", "checkpoint_bytes")
    assert [by_name["full"][key] for key in keys] == [20480, 4096, None, None, 0]
    assert [by_name["local"][key] for key in keys] == [118784, 4096, 121_634_816, None, 121_634_816]


def test_sums_of_a_mixed_geometry(tmp_path):
    plan = document("plan", saved(tmp_path, DESIGN))
    caps = 1024 * 4096 + 8192 * 4096
    assert (plan["window_cap_bytes"], plan["state_bytes_per_sequence"]) == (caps, 2_146_304)
    of_one = {"bytes_per_token_growing": 4352, "window_cap_bytes": caps, "state_bytes_per_sequence": 2_146_304}
    assert plan["per_rank"] == of_one
    assert plan["per_host"] == {"ranks": 1} | of_one
    assert (plan["share_tokens"], plan["request"]) == (32768, None)
    ring = plan["groups"][4]
    assert {key for key, value in ring.items() if value is None} >= {"bytes_per_token", "host_bytes", "share"}


def test_shares_are_of_the_host_bytes_of_one_request_and_sum_to_one(gemma):
    for options in ([], ["--request-tokens", "5000"], ["--checkpoint-tokens", "dense"]):
        plan = document("plan", gemma, *options)
        total = sum(group["host_bytes"] for group in plan["groups"])
        assert [group["share"] for group in plan["groups"]] == [g["host_bytes"] / total for g in plan["groups"]]
        assert sum(group["share"] for group in plan["groups"]) == pytest.approx(1)
    assert document("plan", gemma, "--request-tokens", "5")["groups"][0]["share"] is None


def test_the_default_checkpoints_are_shown_with_their_cost(gemma):
    checkpoints = document("plan", gemma)["checkpoints"]
    per_token = checkpoints.pop("bytes_per_token")
    assert checkpoints == {
        "rule": "every",
        "source": "default",
        "checkpoint_tokens": 23760,
        "positions": None,
        "default_checkpoint_tokens": 23760,
        "bytes_per_checkpoint": 121_634_816,
    }
    assert (per_token["dense"], per_token["end"]) == (20480 + 118784, 20480)
    assert per_token["every"] == pytest.approx(20480 + 121_634_816 / 23760, rel=1e-12)
    assert document("plan", gemma, "--checkpoint-tokens", "auto")["checkpoints"]["source"] == "default"


@pytest.mark.parametrize(
    ("choice", "rule", "tokens"), [("4096", "every", 4096), ("dense", "dense", None), ("end", "end", None)]
)
def test_checkpoints_are_as_given(gemma, choice, rule, tokens):
    plan = document("plan", gemma, "--checkpoint-tokens", choice, *BUDGET)
    given = plan["checkpoints"]
    assert (given["rule"], given["source"], given["checkpoint_tokens"]) == (rule, "given", tokens)
    assert given["default_checkpoint_tokens"] == 23760
    assert list(plan["host_by_checkpoints"]) == ["dense", "every", "end"]


def test_without_windows_no_checkpoint_but_the_end_is_worth_having(tmp_path):
    plan = document("plan", saved(tmp_path, ONLY_FULL), *BUDGET)
    assert (plan["checkpoints"]["rule"], plan["checkpoints"]["default_checkpoint_tokens"]) == ("end", None)
    held = plan["host_by_checkpoints"]
    assert held["every"] is None
    assert held["end"]["tokens"] == held["dense"]["tokens"] == plan["host"]["tokens"]


def test_what_a_budget_holds_by_checkpoints(gemma):
    plan = document("plan", gemma, *BUDGET, "--request-tokens", "32768")
    assert plan["host"] == {"budget_bytes": 64 * 2**30, "tokens": 493_455}
    held = plan["host_by_checkpoints"]
    assert {rule: part["tokens"] for rule, part in held.items()} == {
        "dense": 493_455,
        "every": 2_684_319,
        "end": 3_349_519,
    }
    assert {rule: part["requests"] for rule, part in held.items()} == {"dense": 15, "every": 75, "end": 86}
    for part in held.values():
        assert part["growing_bytes"] + part["fixed_bytes"] <= 64 * 2**30
    assert [held[rule]["fixed_bytes"] for rule in held] == [0, 121_634_816, 121_634_816]


def test_one_request_in_both_its_parts(gemma):
    request = document("plan", gemma, "--request-tokens", "32768")["request"]
    assert request["device_bytes_per_rank"] == 32768 * 20480 + 121_634_816
    assert request["by_checkpoints"]["end"] == {
        "bytes": 32768 * 20480 + 121_634_816,
        "growing_bytes": 32768 * 20480,
        "fixed_bytes": 121_634_816,
    }
    assert request["by_checkpoints"]["dense"]["fixed_bytes"] == 0


def test_listed_checkpoints(gemma):
    plan = document("plan", gemma, "--checkpoints", "1000,5000,1000", "--request-tokens", "8000", *BUDGET)
    assert plan["checkpoints"]["positions"] == [1000, 5000, 1000]
    listed = plan["request"]["by_checkpoints"]["listed"]
    windows = 62 + 64 + 65  # chunks; at 8,000 the same prompt sent again reads one more
    assert listed["fixed_bytes"] == plan["groups"][1]["host_bytes"]
    assert listed["fixed_bytes"] in range((windows - 2) * 29 * 65536, (windows + 1) * 29 * 65536)
    assert plan["host_by_checkpoints"]["listed"]["tokens"] is None
    assert plan["host_by_checkpoints"]["listed"]["requests"] == 64 * 2**30 // 65536 // (listed["bytes"] // 65536)


def test_ranks_share_the_budget_and_each_holds_its_part(gemma):
    one = document("plan", gemma, "--host-bytes", "16GiB", "--request-tokens", "32768")
    four = document("plan", gemma, *BUDGET, "--request-tokens", "32768", "--ranks-per-host", "4")
    assert four["host"]["tokens"] == document("plan", gemma, *BUDGET)["host"]["tokens"]  # of one rank's chunks
    assert four["per_rank"] == one["per_rank"]
    assert four["bytes_per_token_growing"] == one["bytes_per_token_growing"] == 20480
    assert four["per_host"] == {"ranks": 4} | {key: 4 * value for key, value in one["per_rank"].items()}
    assert four["request"]["device_bytes_per_host"] == 4 * one["request"]["device_bytes_per_rank"]
    for rule, part in four["host_by_checkpoints"].items():
        assert part["tokens"] == one["host_by_checkpoints"][rule]["tokens"]
        assert part["requests"] == one["host_by_checkpoints"][rule]["requests"]


@settings(max_examples=40, deadline=None)
@given(chunkings(), st.integers(1, 20), st.integers(1, 40), st.integers(0, 400), st.integers(1, 3), st.data())
def test_requests_held_equal_a_count_of_their_chunks(cut: Chunking, every, tokens, budget, ranks, data):
    names = [cut.layout.names[g] for g in cut.layout.cached]
    distinct = {name: data.draw(st.integers(1, ranks), label=name) for name in names if data.draw(st.booleans())}
    plan = describe(cut, 4, budget, ranks=ranks, distinct=distinct, checkpoints=every, request_tokens=tokens)
    shards = {name: distinct.get(name, ranks) for name in names}
    units = {group["name"]: group["units_per_chunk"] for group in plan["groups"]}
    chunks = model.stored_chunks(cut, model.checkpoints_of(tokens, every))
    of_one = sum(len(chunks[name]) * units[name] * shards[name] for name in names)
    held = plan["host_by_checkpoints"]["every"]["requests"]
    assert held == (budget // plan["unit_bytes"] // of_one if of_one else None)
    assert plan["request"]["by_checkpoints"]["every"]["bytes"] == of_one * plan["unit_bytes"]
    assert {group["name"]: group["distinct_shards"] for group in plan["groups"] if group["name"] in shards} == shards


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--checkpoint-tokens", "0"], ["`checkpoint_tokens` must be a positive int, got 0"]),
        (["--checkpoint-tokens", "-16"], ["`checkpoint_tokens` must be a positive int, got -16"]),
        (["--checkpoint-tokens", "1.5"], ["--checkpoint-tokens: must be N, auto, dense or end, got '1.5'"]),
        (["--checkpoint-tokens", "often"], ["--checkpoint-tokens: must be N, auto, dense or end, got 'often'"]),
        (["--checkpoint-tokens", "9" * 20], ["`checkpoint_tokens` must be below"]),
        (["--request-tokens", "0"], ["`request_tokens` must be a positive int, got 0"]),
        (["--request-tokens", "-1"], ["`request_tokens` must be a positive int, got -1"]),
        (["--ranks-per-host", "0"], ["`--ranks-per-host` must be a positive int below 1048576, got 0"]),
        (["--checkpoints", "10,20"], ["--checkpoints are positions of a request: give its length with"]),
        (["--checkpoints", "10,x", "--request-tokens", "99"], ["--checkpoints: must be P,P,…, ints, got '10,x'"]),
        (["--checkpoints", "", "--request-tokens", "99"], ["--checkpoints: must be P,P,…, ints, got ''"]),
        (["--checkpoints", "10,0", "--request-tokens", "99"], ["`checkpoints` must be a positive int, got 0"]),
        (["--checkpoints", "10,-5", "--request-tokens", "99"], ["`checkpoints` must be a positive int, got -5"]),
        (["--checkpoints=-5", "--request-tokens", "99"], ["`checkpoints` must be a positive int, got -5"]),
        (["--checkpoints", "99,100", "--request-tokens", "99"], ["request of 99 tokens, got 100, past its end"]),
        (["--checkpoints", "5", "--checkpoint-tokens", "end", "--request-tokens", "9"], ["only one of"]),
    ],
)
def test_bad_choices_are_refused_on_one_line(gemma, options, words):
    error = refusal("plan", gemma, *options)
    for word in words:
        assert word in error


def test_a_spacing_beyond_the_request_is_warned_of(gemma):
    ran = kvjax("plan", gemma, "--checkpoint-tokens", "8192", "--request-tokens", "8191")
    assert ran.code == 0
    assert "no checkpoint every 8192 tokens lies within a request of 8191 tokens" in ran.err
    assert kvjax("plan", gemma, "--checkpoint-tokens", "8192", "--request-tokens", "8192").err == ""
    assert kvjax("plan", gemma, "--request-tokens", "100").err == ""


def test_what_cannot_be_counted_is_null_and_said(tmp_path):
    """Chunks of two large primes of tokens fall together once in 10^12 tokens; the dense rule needs no table."""
    path = saved(tmp_path, {"groups": [full("a", 999_983), sliding("b", 999_979, 5)]})
    ran = kvjax("plan", path, "--json", *BUDGET, "--request-tokens", "5000")
    assert ran.code == 0
    assert "requests with checkpoints at the end only are not counted on the host: what" in ran.err
    plan = document("plan", path, *BUDGET, "--request-tokens", "5000")
    assert plan["host_by_checkpoints"]["end"] is None
    assert plan["host_by_checkpoints"]["dense"]["tokens"] == plan["host"]["tokens"]
    assert kvjax("plan", path, *BUDGET, "--request-tokens", "5000").code == 0


def test_the_tables_show_costs_shares_and_what_is_held(gemma):
    ran = kvjax("plan", gemma, *BUDGET, "--request-tokens", "32768")
    assert (ran.code, ran.err) == (0, "")
    for words in (
        "growing cache     20,480 B (20 KiB) per token",
        "window caps       121,634,816 B (116 MiB) per sequence",
        "checkpoints       every 23,760 tokens and at the end (the default)",
        "one checkpoint    121,634,816 B (116 MiB) of windows and states",
        "one request       of 32,768 tokens takes 792,723,456 B (756 MiB) on the device",
        "73.4 %",
        "every 23,760 tokens (chosen)",
        "2,684,319",
        "at the end only",
    ):
        assert words in ran.out
    assert max(map(len, ran.out.splitlines())) <= 120


@pytest.mark.parametrize(
    ("groups", "options", "words"),
    [
        (DESIGN["groups"], ["--ranks-per-host", "4"], ["on each of 4 ranks", "all ranks         17,408 B", "4 of 4"]),
        (ONLY_FULL["groups"], [*BUDGET], ["21.33 B", "at the end only (chosen)"]),
        ([sliding("w", 4, 8)], [*BUDGET], ["no longest"]),
        ([full("a", 16)], [*BUDGET, "--request-tokens", "5"], ["any number"]),
        (GEMMA["groups"], ["--checkpoints", "7,9", "--request-tokens", "10"], ["at 7, 9 and at the end", "as listed"]),
        (GEMMA["groups"], ["--checkpoint-tokens", "dense"], ["checkpoints       at every chunk"]),
    ],
)
def test_other_plans_are_printed_too(tmp_path, groups, options, words):
    ran = kvjax("plan", saved(tmp_path, {"groups": groups}), *options)
    assert ran.code == 0, ran
    for word in words:
        assert word in ran.out
