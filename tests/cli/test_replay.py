"""`kvjax replay` and `kvjax workload`: figures side by side, and one line for whatever is wrong."""

import json
import subprocess
import sys

import pytest

from kvjax import resolve_chunking
from kvjax.geometry import layout_from_geometry
from kvjax.observe.calls import FinishCall, LookupCall
from kvjax.observe.trace import TraceWriter, read_trace
from kvjax.observe.workloads import KINDS
from kvjax.pool import LRU, POLICIES
from tests.cli.command import document, full, kvjax, refusal, saved, sliding

GEOMETRY = {"groups": [full("global", 16, 4096), sliding("local", 16, 64, 8192)]}
SMALL = ("--requests", 60, "--document-tokens", 1024, "--system-tokens", 512, "--turn-tokens", 64, "--reply-tokens", 64)


class Newest(LRU):
    """Evicts what was touched last first."""

    def victims(self):
        return iter(list(super().victims())[::-1])


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    assert kvjax("workload", "mixed", "--out", path, *SMALL).code == 0
    return path


@pytest.fixture
def geometry(tmp_path):
    return saved(tmp_path, GEOMETRY)


# --- workload -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_workload_is_written_and_told(tmp_path, kind):
    path = tmp_path / "trace.jsonl"
    told = document("workload", kind, "--out", path, *SMALL)
    found = read_trace(path)
    prompts = [call.num_tokens for call in found.calls if isinstance(call, LookupCall)]
    assert (told["requests"], told["lookup_tokens"]) == (60, sum(prompts))
    assert len(prompts) == 60
    assert (told["calls"], told["bytes"]) == (len(found.calls), path.stat().st_size)


def test_a_workload_of_the_same_seed_is_the_same_file(tmp_path):
    paths = [tmp_path / name for name in ("a", "b", "c")]
    for path, seed in zip(paths, (1, 1, 2), strict=True):
        kvjax("workload", "scan", "--out", path, *SMALL, "--seed", seed)
    assert paths[0].read_bytes() == paths[1].read_bytes() != paths[2].read_bytes()


def test_a_workload_for_people_is_one_line(tmp_path):
    ran = kvjax("workload", "multi-turn", "--out", tmp_path / "t", *SMALL, "--zipf", 0.5, "--scan-share", 0)
    assert (ran.code, ran.err, ran.out.count("\n")) == (0, "", 1)
    assert ran.out.startswith("60 requests of ")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("random", "--out", "t"), "argument KIND: invalid choice: 'random'"),
        (("scan",), "the following arguments are required: --out"),
        (("scan", "--out", "missing/t"), "argument --out: 'missing/t' cannot be written: No such file or directory"),
        (("scan", "--out", "t", "--requests", 0), "`--requests` must be a positive int, got 0"),
        (("scan", "--out", "t", "--scan-share", 2), "`--scan-share` must be a number from 0 to 1, got 2.0"),
        (("scan", "--out", "t", "--zipf", "nan"), "argument --zipf: must be a number, got 'nan'"),
        (("scan", "--out", "/dev/full", *SMALL), "argument --out: '/dev/full' cannot be written: No space left"),
    ],
)
def test_a_wrong_workload_is_refused(tmp_path, monkeypatch, options, text):
    monkeypatch.chdir(tmp_path)
    assert text in refusal("workload", *options)


def test_a_full_device_is_one_line(tmp_path):
    words = ["workload", "scan", "--out", "/dev/full", *map(str, SMALL)]
    done = subprocess.run([sys.executable, "-m", "kvjax", *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    text = "argument --out: '/dev/full' cannot be written: No space left on device"
    assert done.stderr == f"kvjax workload: error: {text}\n"


def test_a_workload_goes_into_a_pipe(tmp_path):
    told = document("workload", "scan", "--out", tmp_path / "t", *SMALL)
    script = f'"$0" -m kvjax workload scan --out /dev/stdout {" ".join(map(str, SMALL))} | cat'
    piped = subprocess.run(["sh", "-c", script, sys.executable], capture_output=True, check=True).stdout
    assert piped[: told["bytes"]] == (tmp_path / "t").read_bytes()
    assert piped[told["bytes"] :].startswith(b"60 requests of ")


@pytest.mark.parametrize("before", [None, b"of before"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError("no more")])
def test_a_workload_that_is_not_written_to_its_end_leaves_what_was_there(tmp_path, monkeypatch, before, error):
    def calls(_workload):
        yield from [FinishCall("1")] * 100_000
        raise error

    path = tmp_path / "t"
    if before is not None:
        path.write_bytes(before)
    monkeypatch.setattr("kvjax.cli.workload.workload_calls", calls)
    assert kvjax("workload", "scan", "--out", path).code == (130 if error is KeyboardInterrupt else 2)
    assert [one.read_bytes() for one in tmp_path.iterdir()] == ([] if before is None else [before])


# --- replay ---------------------------------------------------------------------------------------------


def test_policies_and_budgets_are_compared_side_by_side(trace, geometry, monkeypatch):
    monkeypatch.setitem(POLICIES, "newest", Newest)
    found = document("replay", trace, geometry, "--host-bytes", "1MiB,4MiB,1GiB", "--policy", "lru,newest")
    runs = {(run["policy"], run["host_bytes"]): run for run in found["runs"]}
    assert list(runs) == [(policy, size) for policy in ("lru", "newest") for size in (2**20, 2**22, 2**30)]
    rates = {key: run["hit_rate"] for key, run in runs.items()}
    assert rates["lru", 2**20] < rates["lru", 2**22] < rates["lru", 2**30] == rates["newest", 2**30]
    assert rates["lru", 2**22] != rates["newest", 2**22]
    for (_, budget), run in runs.items():
        assert run["hit_rate"] == run["hit_tokens"] / run["lookup_tokens"]
        assert run["peak_bytes_held"] <= budget
        assert run["mean_bytes_held"] <= run["peak_bytes_held"]
        assert [group["name"] for group in run["groups"]] == ["global", "local"]
        for what in ("bytes_stored", "bytes_loaded", "bytes_evicted"):
            assert run[what] == sum(group[what] for group in run["groups"])
        assert (run["bytes_evicted"] > 0) == (budget < 2**30)
    assert found["trace"] | {"created_by": ""} == {
        "requests": 60,
        "calls": 360,
        "tokens_per_hash": 16,
        "created_by": "",
        "cut_off": False,
    }
    assert (found["tokens_per_hash"], found["unit_bytes"]) == (16, 4096)


def test_chunking_and_checkpoints_apply(trace, geometry):
    def stored(*options):
        (run,) = document("replay", trace, geometry, "--host-bytes", "1GiB", *options)["runs"]
        return [(group["chunks_stored"], group["bytes_stored"]) for group in run["groups"]]

    one, four = stored(), stored("--blocks-per-chunk", "global=4,local=4")
    assert four[0][0] < one[0][0]
    assert all(size % (4 * 4096) == 0 for _, size in four)
    dense, ends = stored("--checkpoint-tokens", 16), stored("--checkpoint-tokens", "end")
    assert dense[0] == ends[0], "full groups store all of it anyway"
    assert dense[1][0] > ends[1][0]


def test_a_trace_that_names_its_cache_needs_no_geometry(tmp_path):
    path = tmp_path / "trace.jsonl"
    chunking = resolve_chunking(layout_from_geometry(GEOMETRY), blocks_per_chunk={"local": 2})
    with TraceWriter(path, tokens_per_hash=16, chunking=chunking) as writer:
        writer.lookup("a", namespace=bytes(16), num_tokens=64, hashes=[bytes([n]) * 16 for n in range(4)])
        writer.store("a", num_tokens=64, checkpoint=True)
    (run,) = document("replay", path, "--host-bytes", "1GiB")["runs"]
    assert [group["chunks_stored"] for group in run["groups"]] == [4, 2]
    (run,) = document("replay", path, "--host-bytes", "1GiB", "--blocks-per-chunk", 1)["runs"]
    assert run["groups"][1]["chunks_stored"] == 4


def test_people_see_a_table_of_runs_and_one_of_groups(trace, geometry):
    ran = kvjax("replay", trace, geometry, "--host-bytes", "1MiB,1GiB")
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert lines[0].startswith("60 requests of ")
    assert sum(line.startswith("lru") for line in lines) == 2
    assert sum(line.startswith(("global", "local")) for line in lines) == 4
    assert "hit rate" in ran.out


def test_a_picture_is_drawn(trace, geometry, tmp_path):
    for name in ("p.png", "p.svg"):
        ran = kvjax("replay", trace, geometry, "--host-bytes", "1MiB,1GiB", "--plot", tmp_path / name)
        assert ran.code == 0, ran
        assert (tmp_path / name).stat().st_size > 1000


def test_a_line_cut_off_is_warned_of_and_left_out(trace, geometry):
    content = trace.read_bytes()
    trace.write_bytes(content[:-5])
    ran = kvjax("replay", trace, geometry, "--host-bytes", "1GiB", "--json")
    assert ran.err == "kvjax replay: warning: the last line of the trace was cut off, and is left out\n"
    assert json.loads(ran.out)["trace"] | {"created_by": 0} == {
        "requests": 60,
        "calls": 359,
        "tokens_per_hash": 16,
        "created_by": 0,
        "cut_off": True,
    }


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--host-bytes", "1GiB"), "GEOMETRY must be given, as 'trace.jsonl' has none"),
        (("geometry.json",), "the following arguments are required: --host-bytes"),
        (("geometry.json", "--host-bytes", "1GiB,"), "argument --host-bytes: a size must be digits"),
        (("geometry.json", "--host-bytes", "1GiB,1024MiB"), "argument --host-bytes: must name each value once"),
        (("geometry.json", "--host-bytes", "1KiB"), "`host_bytes` must hold at least one chunk of the largest group"),
        (("geometry.json", "--host-bytes", "1GiB", "--policy", "best"), "a policy must be one of lru"),
        (("geometry.json", "--host-bytes", "1GiB", "--policy", "lru,lru"), "must name each value once, got 'lru'"),
        (("geometry.json", "--host-bytes", "1GiB", "--checkpoint-tokens", "dense"), "must be an int, got 'dense'"),
        (("geometry.json", "--host-bytes", "1GiB", "--checkpoint-tokens", "0"), "`checkpoint_tokens` must be"),
        (("geometry.json", "--host-bytes", "1GiB", "--plot", "p.txt"), "argument --plot: must end in"),
        (("geometry.json", "--host-bytes", "1GiB", "--block-size", "24"), "got 24"),
        (
            ("geometry.json", "--host-bytes", ",".join(str(2**30 + n) for n in range(257))),
            "--policy and --host-bytes must ask for at most 256 runs",
        ),
        (("odd.json", "--host-bytes", "1GiB"), "must be a multiple of the trace's or divide it"),
    ],
)
def test_bad_input_is_one_line(trace, geometry, tmp_path, monkeypatch, options, text):
    saved(tmp_path, {"groups": [full("a", 24)]}, "odd.json")
    monkeypatch.chdir(tmp_path)
    assert text in refusal("replay", trace.name, *options)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "'t.jsonl' cannot be read: "),
        ("", "'t.jsonl' is empty"),
        ("{}\n", "'t.jsonl', line 1: the first line of a trace must be an object with `format` 'kvjax-trace'"),
    ],
)
def test_a_file_that_is_no_trace_is_one_line(geometry, tmp_path, monkeypatch, content, text):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        saved(tmp_path, content, "t.jsonl")
    assert text in refusal("replay", "t.jsonl", geometry.name, "--host-bytes", "1GiB")


def test_a_header_whose_geometry_is_none_is_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    header = {"format": "kvjax-trace", "version": 1, "tokens_per_hash": 16, "created_by": ""}
    saved(tmp_path, header | {"geometry": {"groups": 3}, "blocks_per_chunk": None}, "t.jsonl")
    text = "'t.jsonl', line 1: `groups` must be a list of groups, got an int"
    assert text in refusal("replay", "t.jsonl", "--host-bytes", "1GiB")
