"""`kvjax bench tiers`: the shape of its document, what it leaves behind, and what it refuses."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvjax.cli.render_bench_tiers import print_tiers
from kvjax.tiers import open_tier
from tests.cli.command import document, kvjax, refusal
from tests.support.entries import entry, later

SMALL = ("bench", "tiers", "--bytes", "256KiB", "--rounds", 1, "--chunk-bytes", "16KiB,64KiB")
FIGURES = {"mib_per_s", "ms_per_chunk", "plain_mib_per_s", "plain_ms_per_chunk", "ratio", "unchecked_mib_per_s"}


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Temporary files go where they can be looked for."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_every_move_of_every_size_has_positive_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    found = document(*SMALL, "--no-model")
    assert (found["bench"], found["bytes"], found["rounds"], found["prompts"]) == ("tiers", 2**18, 1, [])
    rows = [(row["move"], row["chunk_bytes"], row["num_chunks"]) for row in found["rows"]]
    assert rows == [("write", 2**14, 16), ("read", 2**14, 16), ("write", 2**16, 4), ("read", 2**16, 4)]
    for row in found["rows"]:
        assert all(row[name] > 0 for name in FIGURES)
        assert 0 <= row["checksum_share"] < 1
    assert [(row["chunk_bytes"], row["num_chunks"]) for row in found["promotions"]] == [(2**14, 16), (2**16, 4)]
    assert all(row["mib_per_s"] > 0 and row["ms_per_chunk"] > 0 for row in found["promotions"])
    assert list((tmp_path / "temporary").iterdir()) == []
    found["prompts"] = [{"tier": None, "pays_from_tokens": None, "prompts": [], "problem": "no example"}]
    print_tiers(found)
    out = capsys.readouterr().out
    assert "promote" in out
    assert "a tier pays from: no example" in out


def test_tiers_of_others_keep_what_they_had(tmp_path: Path):
    urls = [f"file://{tmp_path}/{name}?max_bytes=1MiB" for name in ("one", "two")]
    theirs = entry(1)
    tier = open_tier(urls[0])
    assert tier.put([theirs.name], [memoryview(theirs.frame)], deadline=later())[0].result()
    tier.close()
    found = document(*SMALL, "--no-model", "--tier", urls[0], "--tier", urls[1])
    assert {row["tier"] for row in found["rows"]} == {f"file://{tmp_path}/{name}" for name in ("one", "two")}
    assert files(tmp_path) == [tmp_path / "one" / theirs.name.text]


def test_the_example_tells_from_which_prompt_on_a_tier_pays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2])]))
    found = document(*SMALL, "--tier", f"file://{tmp_path}/tier")
    (of_tier,) = found["prompts"]
    assert of_tier["problem"] is None
    assert of_tier["tier"] == f"file://{tmp_path}/tier"
    assert all(row["restore_ms"] > 0 and row["compute_ms"] > 0 for row in of_tier["prompts"])
    assert [row["restored_tokens"] for row in of_tier["prompts"]] == [row["tokens"] - 1 for row in of_tier["prompts"]]
    assert of_tier["pays_from_tokens"] in {None, *(row["tokens"] for row in of_tier["prompts"])}
    assert files(tmp_path) == []


def test_an_example_that_fails_is_a_problem_not_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvjax.cli.bench_tiers_prompts._SCRIPT", tmp_path / "none.py")
    assert "checkout" in document(*SMALL)["prompts"][0]["problem"]
    (tmp_path / "broken.py").write_text("raise SystemExit('it broke')")
    monkeypatch.setattr("kvjax.cli.bench_tiers_prompts._SCRIPT", tmp_path / "broken.py")
    assert document(*SMALL)["prompts"][0]["problem"] == "it broke"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--rounds", "0"), "`--rounds` must be a positive int"),
        (("--bytes", "1KiB"), "`--chunk-bytes` must be at most `--bytes`, 1024"),
        (("--chunk-bytes", "0"), "`--chunk-bytes` must be a positive int"),
        (("--chunk-bytes", "1001"), "multiples of 4"),
        (("--chunk-bytes", "x"), "must be digits"),
        (("--bytes", "1000TiB"), "`--bytes` must be below"),
        (("--bytes", "100TiB"), "`--bytes` takes 400 TiB of memory, more than is available"),
        (("--tier", "file:///x?max_bytes=0"), "`max_bytes` must be a positive int"),
        (("--tier", "{folder}?max_bytes=100KiB"), "must have room for"),
        (("--tier", "{folder}?write=never"), "must be a folder"),
        (("--tier", "s3://bucket/x/?endpoint=http://127.0.0.1:1&timeout_s=1"), "s3://bucket/x/"),
    ],
)
def test_bad_input_is_one_line(argv: tuple[str, ...], said: str, tmp_path: Path):
    line = refusal(*SMALL, "--no-model", *(part.format(folder=f"file://{tmp_path}/none") for part in argv))
    assert said in line
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_full_disk_is_refused_before_anything_is_written(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _path: SimpleNamespace(free=2**20))
    assert "must have 256.50 MiB free for `--bytes`, and has 1 MiB" in refusal(*SMALL, "--no-model")


def test_tables_name_every_tier():
    ran = kvjax(*SMALL, "--no-model")
    assert ran.code == 0
    assert "plain file MiB/s" in ran.out
    assert json.dumps(ran.err) == '""'
