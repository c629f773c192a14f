"""`kvjax hit --explain` and `--plot`: why a hit is not longer, in words, as JSON and as a picture."""

import importlib.util
import re
from pathlib import Path

import pytest

from kvjax.geometry import geometry_of
from tests.cli.command import DESIGN, document, full, kvjax, refusal, saved, sliding
from tests.oracles.layouts import random_instance, seeded

GEMMA = {"groups": [full("global", 16), sliding("local", 16, 1024)]}
HELD = [chunk for chunk in range(192, 256) if chunk not in (200, 201, 202, 203, 207)]
GEMMA_PRESENT = {"global": list(range(400)), "local": [*range(64, 128), *HELD]}
SIGNATURES = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


@pytest.fixture
def ask(tmp_path):
    """The arguments of the command on a geometry and a presence given as data."""

    def arguments(geometry, present, *options):
        files = saved(tmp_path, geometry), "--present", saved(tmp_path, present, "present.json")
        return ("hit", *files, *options)

    return arguments


@pytest.fixture
def gemma(ask):
    return ask(GEMMA, GEMMA_PRESENT, "--num-tokens", 8192, "--resume-multiple", 1024, "--device-tokens", 3072)


def folded(text):
    return [" ".join(line.split()) for line in text.splitlines()]


def test_each_group_says_what_it_can_what_it_needs_and_what_is_missing(gemma):
    ran = kvjax(*gemma, "--explain")
    assert (ran.code, ran.err) == (0, "")
    assert folded(ran.out)[6:] == [
        "",
        "'global': full attention",
        "restorable 0-6,400",
        "alone would allow a hit of 6,144",
        "at 3,072 needs tokens 0-3,071 = chunks 0-191; the device holds tokens 0-3,071; loads nothing",
        "at 4,096 needs tokens 0-4,095 = chunks 0-255; the device holds tokens 0-3,071; nothing is missing",
        "",
        "'local': sliding window of 1,024 tokens",
        "restorable 3,072-3,200",
        "alone would allow a hit of 3,072",
        "at 3,072 needs tokens 2,049-3,071 = chunks 128-191; the device holds tokens 2,049-3,071; loads nothing",
        "at 4,096 needs tokens 3,073-4,095 = chunks 192-255; missing 200-203, 207 (5 chunks): "
        "tokens 3,200-3,263; 3,312-3,327",
        "",
        "The hit would be 4,096 if group 'local' had chunks 200-203, 207.",
    ]


def test_what_comes_before_the_explanation_is_the_answer_without_it(gemma):
    plain, explained = kvjax(*gemma), kvjax(*gemma, "--explain")
    assert explained.out.startswith(plain.out)


def test_states_lookaheads_attention_chunks_and_scratch_have_words_of_their_own(ask):
    """Of the other kinds: 13 tokens, a state at 8, nothing missing at the hit but all at the next."""
    groups = [
        full("draft", 4, lookahead_tokens=4),
        full("state", 4) | {"kind": "recurrent"},
        full("scout", 4) | {"kind": "chunked", "chunk_tokens": 8},
        full("ring", 4) | {"kind": "scratch"},
    ]
    present = {"draft": [0, 1, 2, 3], "state": [1], "scout": []}
    lines = folded(kvjax(*ask({"groups": groups}, present, "--num-tokens", 14), "--explain").out)
    for line in (
        "'draft': full attention, looks 4 tokens ahead",
        "at 8 needs tokens 0-7 and, to look ahead, tokens 8-11 = chunks 0-2; loads chunks 0-1",
        "'state': recurrent",
        "restorable 8",
        "at 8 needs the state at 8, the end of chunk 1; loads chunk 1",
        "at 12 needs the state at 12, the end of chunk 2; missing 2 (1 chunk)",
        "'scout': attention chunks of 8 tokens",
        "at 8 needs nothing: an attention chunk starts here; loads nothing",
        "at 12 needs tokens 8-11 (its attention chunk starts at 8) = chunk 2; missing 2 (1 chunk): tokens 8-11",
        "'ring': scratch, never stored and never in the way",
    ):
        assert line in lines
    assert (
        lines[-1] == "The hit would be 12 if group 'state' had chunk 2 (the state at 12) and group 'scout' had chunk 2."
    )


def test_a_state_on_the_device_and_a_hit_of_nothing_are_told(ask):
    groups = [full("full", 4), full("state", 4) | {"kind": "recurrent"}]
    on_device = folded(kvjax(*ask({"groups": groups}, {}, "--num-tokens", 9, "--device-tokens", 6), "--explain").out)
    assert "at 6 needs the state at 6, which the device holds; loads nothing" in on_device
    nothing = folded(kvjax(*ask({"groups": groups}, {}, "--num-tokens", 9), "--explain").out)
    assert nothing.count("at 0 needs nothing at the start; loads nothing") == 2


def test_where_no_larger_hit_is_possible_the_reason_stands_alone(ask):
    ran = kvjax(*ask({"groups": [full("a", 4)]}, {"a": [0, 1]}, "--num-tokens", 8), "--explain")
    assert folded(ran.out)[-4:] == [
        "alone would allow a hit of 7",
        "at 7 needs tokens 0-6 = chunks 0-1; loads chunks 0-1",
        "",
        "No larger hit is possible: the last token is always recomputed, so a request of 8 tokens resumes at 7 at "
        "most.",
    ]


def test_the_document_gains_one_key_and_stays_as_it_was_otherwise(gemma):
    plain, explained = document(*gemma), document(*gemma, "--explain")
    assert list(plain) == ["hit_tokens", "load", "limited_by"]
    assert list(explained) == [*plain, "explain"]
    assert {key: explained[key] for key in plain} == plain


def test_the_documented_structure_of_the_explanation(gemma):
    explained = document(*gemma, "--explain")["explain"]
    assert list(explained) == ["next", "would_hit", "reason", "sentence", "groups"]
    assert (explained["next"], explained["would_hit"], explained["reason"]) == (4096, 4096, "missing")
    assert explained["sentence"] == "The hit would be 4,096 if group 'local' had chunks 200-203, 207."
    assert explained["groups"][1] == {
        "name": "local",
        "alone": 3072,
        "restorable": [[3072, 3200]],
        "at_hit": {
            "position": 3072,
            "needed_tokens": [2049, 3072],
            "required_tokens": [2049, 3072],
            "chunks": [[128, 191]],
            "device_tokens": [2049, 3072],
            "load_chunks": [],
        },
        "at_next": {
            "position": 4096,
            "needed_tokens": [3073, 4096],
            "required_tokens": [3073, 4096],
            "chunks": [[192, 255]],
            "device_tokens": [3073, 3073],
            "load_chunks": [[192, 255]],
        },
        "missing_chunks": [[200, 203], [207, 207]],
        "missing_tokens": [[3200, 3264], [3312, 3328]],
    }


def test_the_document_tells_the_next_candidate_from_what_the_hit_would_be(ask):
    found = document(*ask({"groups": [full("a", 16)]}, {"a": [0, 2, 3]}, "--num-tokens", 97), "--explain")["explain"]
    assert (found["next"], found["would_hit"]) == (17, 64)


def test_a_scratch_group_has_nulls_in_its_place(ask):
    groups = [full("ring", 4) | {"kind": "scratch"}, full("a", 4)]
    explained = document(*ask({"groups": groups}, {}, "--num-tokens", 3), "--explain")["explain"]
    empty = {"restorable": [], "at_hit": None, "at_next": None, "missing_chunks": [], "missing_tokens": []}
    assert explained["groups"][0] == {"name": "ring", "alone": None} | empty
    assert (explained["next"], explained["would_hit"], explained["reason"]) == (None, None, "incomplete")


@pytest.mark.parametrize("options", [["--explain"], ["--plot", "hit.png"]])
def test_bad_input_is_refused_on_the_same_line_as_without(tmp_path, monkeypatch, options):
    monkeypatch.chdir(tmp_path)
    geometry, present = saved(tmp_path, DESIGN), saved(tmp_path, {"other": [0]}, "present.json")
    for tokens in (0, 9):
        argv = ("hit", geometry, "--num-tokens", tokens, "--present", present)
        assert refusal(*argv, *options) == refusal(*argv)
    assert not (tmp_path / "hit.png").exists()


# --- pictures -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", sorted(SIGNATURES))
def test_a_picture_is_written_in_the_format_that_its_name_says(gemma, tmp_path, suffix):
    pytest.importorskip("matplotlib")
    target = tmp_path / f"hit{suffix}"
    assert kvjax(*gemma, "--plot", target) == kvjax(*gemma)
    assert target.read_bytes().startswith(SIGNATURES[suffix])


def test_the_case_of_a_suffix_does_not_matter(gemma, tmp_path):
    pytest.importorskip("matplotlib")
    assert kvjax(*gemma, "--plot", tmp_path / "HIT.PNG").code == 0


def test_a_picture_and_a_document_go_together(gemma, tmp_path):
    matplotlib = pytest.importorskip("matplotlib.image")
    assert document(*gemma, "--plot", tmp_path / "hit.png") == document(*gemma)
    image = matplotlib.imread(tmp_path / "hit.png")
    assert len({tuple(pixel) for pixel in image.reshape(-1, 4)[::7].round(2).tolist()}) > 10


def test_the_legend_and_the_title_say_what_is_there(gemma, tmp_path):
    """An svg keeps its words as text where it is told to; here they are paths with the words in comments."""
    pytest.importorskip("matplotlib")
    kvjax(*gemma, "--plot", tmp_path / "hit.svg")
    words = re.findall(r"<!-- (.*?) -->", (tmp_path / "hit.svg").read_text(encoding="utf-8"))
    for told in (
        "hit 3,072 of 8,192 tokens",
        "The hit would be 4,096 if group 'local' had chunks 200-203, 207.",
        "hit 3,072",
        "next candidate 4,096",
        "missing for 4,096",
        "held by the device",
        "request of 8,192 tokens",
        "near the hit",
        "global",
    ):
        assert told in words
    assert words.count("local") == 2


def test_random_lookups_can_all_be_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    for seed in range(24):
        instance = random_instance(seeded(seed))
        tokens = instance.device_tokens if isinstance(instance.device_tokens, int) else 0
        target = tmp_path / f"{seed}.svg"
        ran = kvjax(
            *("hit", saved(tmp_path, geometry_of(instance.chunking.layout)), "--num-tokens", instance.num_tokens),
            *("--present", saved(tmp_path, instance.present, "present.json"), "--device-tokens", tokens),
            *("--resume-multiple", instance.resume_multiple, "--explain", "--plot", target),
        )
        assert (ran.code, ran.err) == (0, ""), (seed, ran)
        assert target.exists()


def test_a_million_tokens_make_a_small_picture(ask, tmp_path):
    """250,000 chunks of 4 tokens, every other one there, and as many states: not one shape for each."""
    pytest.importorskip("matplotlib")
    groups = [full("full", 64), sliding("fine", 4, 8), full("state", 4) | {"kind": "recurrent"}]
    present = {"full": list(range(15_000)), "fine": list(range(0, 250_000, 2)), "state": list(range(0, 250_000, 2))}
    ran = kvjax(*ask({"groups": groups}, present, "--num-tokens", 1_000_000, "--plot", tmp_path / "hit.svg"))
    assert ran.code == 0
    assert (tmp_path / "hit.svg").stat().st_size < 2_000_000


def test_an_index_past_every_integer_type_is_only_useless(ask, tmp_path):
    pytest.importorskip("matplotlib")
    argv = ask({"groups": [full("a", 4)]}, {"a": [0, 10**30]}, "--num-tokens", 9, "--explain")
    assert (
        folded(kvjax(*argv, "--plot", tmp_path / "hit.png").out)[-1] == "The hit would be 8 if group 'a' had chunk 1."
    )


def test_names_are_drawn_as_they_are(ask, tmp_path):
    """Names that look like formulas, that no font has, that are long, and that no file can hold."""
    pytest.importorskip("matplotlib")
    names = ["$x_1$", "$\\nothing{$", "a$b", "層\n", "n" * 300, "\ud800", "_hidden"]
    groups = {"groups": [full(name, 4) for name in names]}
    ran = kvjax(*ask(groups, {}, "--num-tokens", 9, "--explain", "--plot", tmp_path / "hit.pdf"))
    assert (ran.code, ran.err) == (0, "")


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("hit.jpg", "argument --plot: must end in .png, .svg, .pdf, got 'hit.jpg'"),
        ("hit", "argument --plot: must end in .png, .svg, .pdf, got 'hit'"),
        (".png", "argument --plot: must end in .png, .svg, .pdf, got '.png'"),
        ("none/hit.png", "argument --plot: the folder of 'none/hit.png' does not exist"),
        ("folder.png", "argument --plot: 'folder.png' is a folder"),
    ],
)
def test_a_target_that_cannot_be_drawn_to_is_refused_before_any_work(tmp_path, monkeypatch, target, words):
    """Before the files are read: they do not exist."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    error = refusal("hit", "none.json", "--num-tokens", 9, "--present", "none.json", "--plot", target)
    assert error == f"kvjax hit: error: {words}"


def test_a_target_that_cannot_be_written_is_refused_with_nothing_printed(gemma, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "link.png").symlink_to(tmp_path / "gone" / "hit.png")
    error = refusal(*gemma, "--plot", tmp_path / "link.png")
    assert re.search(r"argument --plot: '.*link.png' cannot be written: No such file or directory", error)


def test_without_matplotlib_a_picture_is_refused_before_any_work(tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "matplotlib" else found(name))
    target = tmp_path / "hit.png"
    error = refusal("hit", "none.json", "--num-tokens", 9, "--present", "none.json", "--plot", target)
    assert error == 'kvjax hit: error: --plot needs matplotlib, which is not installed: pip install "kvjax[plot]"'


def test_without_matplotlib_an_explanation_needs_none(gemma, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    assert kvjax(*gemma, "--explain").code == 0


# --- the page -----------------------------------------------------------------------------------------


def test_the_page_shows_what_the_command_prints(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "explain.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    geometry, present = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    saved(tmp_path, geometry)
    saved(tmp_path, present, "present.json")
    command, _, promised = re.findall(r"```console\n\$ kvjax (.*?)```", page, re.DOTALL)[0].partition("\n")
    printed = kvjax(*command.split()).out
    assert [line.rstrip() for line in printed.splitlines()] == promised.splitlines()
    for shown in re.findall(r"^kvjax (.*)$", page, re.MULTILINE):
        pytest.importorskip("matplotlib")
        assert kvjax(*shown.split()).code == 0
