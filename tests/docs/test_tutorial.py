"""A reader who types the tutorial in sees what it says."""

from pathlib import Path

from tests.support.pages import run_page

FOLDER = "/tmp/kvjax-tutorial"


def test_every_step_prints_what_the_page_says(tmp_path: Path):
    names = run_page("tutorial.md", tmp_path, {FOLDER: str(tmp_path / "tier")})
    assert names["tokens"] == names["expected"]
