"""What pages show is what happens, and their links lead somewhere."""

import re
from pathlib import Path

import pytest

from tests.cli.command import kvjax
from tests.support.pages import ROOT, blocks, run_page

CONFIG = ROOT / "tests" / "models" / "hub" / "gemma-3-27b.json"


def test_a_loop_of_ones_own_keeps_its_tokens(tmp_path: Path):
    names = run_page("serving/own-loop.md", tmp_path)
    assert names["tokens"] == names["expected"]
    assert len(set(names["tokens"])) > 50


def test_the_first_page_shows_what_the_planner_prints():
    (shown,) = [block.body for block in blocks((ROOT / "docs" / "index.md").read_text()) if block.language == "text"]
    command, *lines = shown.splitlines()
    argv = command.removeprefix("$ kvjax ").replace("gemma-3-27b/config.json", str(CONFIG)).split()
    printed = [line.rstrip() for line in kvjax(*argv).out.splitlines()]
    places = [printed.index(line) for line in lines if line not in ("", "…")]
    assert places == sorted(places)


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_of_other_pages_lead_to_files_and_headings(name: str):
    """The links within `docs` are checked where they are built."""
    text = re.sub(r"^```.*?^```", "", (ROOT / name).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
        assert (ROOT / target).exists(), target
        if anchor:
            assert anchor in _headings(ROOT / (target or name)), f"{target}#{anchor}"


def _headings(path: Path) -> set[str]:
    """The anchors of a page's headings."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\s-]", "", title.lower()).strip().replace(" ", "-") for title in titles}
