"""What `docs/tiers.md` shows is what happens."""

import re
from pathlib import Path

import pytest

from kvjax.tiers.urls import open_tier
from tests.cli.command import kvjax

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "tiers.md").read_text(encoding="utf-8")
FOLDER = "/tmp/kvjax-tier"


def test_the_first_example_prints_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0].replace(FOLDER, str(tmp_path))
    (promised,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(code, "tiers.md", "exec"), {})
    assert capsys.readouterr().out == promised.replace(FOLDER, str(tmp_path))
    _run_commands(tmp_path)


def _run_commands(folder: Path) -> None:
    """Runs every command of the page, on what the example stored."""
    (file,) = sorted(folder.glob("kvjax-1/*/*/*/*"))[:1]
    name = str(file.relative_to(folder))
    (commands,) = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    lines = commands.replace(FOLDER, str(folder)).replace("/some/where/FILE", str(file)).replace("NAME", name)
    for line in lines.replace("HEX", name.split("/")[1]).splitlines():
        argv = line.removeprefix("$ kvjax ").partition("  #")[0].partition(" # ")[0].split()
        ran = kvjax(*argv)
        assert (ran.code, ran.err) == (0, ""), line
        assert ran.out
    assert not list(folder.glob("kvjax-1/*/*/*/*"))


@pytest.mark.parametrize("option", ["write=back", "timeout_s=1.5", "max_pending_bytes=1MiB", "max_bytes=1GiB"])
def test_options_are_as_the_page_lists_them(option: str, tmp_path: Path):
    assert f"`{option.partition('=')[0]}`" in PAGE
    open_tier(f"file://{tmp_path}?{option}").close()


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#:]+)\)", PAGE):
        assert (DOCS / target).exists(), target
